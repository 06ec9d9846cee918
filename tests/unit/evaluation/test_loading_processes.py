"""Loading processes and the shared memory that their batches take, which containers are often short of."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from utils.evaluation import dataset
from utils.evaluation.dataset import loading_processes

MB = 1_000_000
BATCH = 32 * 3 * 640 * 640  # bytes


@pytest.fixture
def free(monkeypatch):
    """Says how many bytes are free."""

    def set_to(count):
        monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=count // 4096, f_frsize=4096))

    return set_to


@pytest.mark.parametrize(
    ("megabytes", "workers", "batch", "sharing", "expected"),
    [(24_000, 8, BATCH, 1, (8, 2)), (64, 8, BATCH, 1, (0, 0)), (64, 8, BATCH // 32, 1, (8, 2)),
     (1000, 8, BATCH, 1, (8, 2)), (500, 8, BATCH, 1, (8, 1)), (200, 8, BATCH, 1, (2, 1)), (1000, 8, BATCH, 4, (3, 1)),
     (0, 8, BATCH, 1, (0, 0)), (0, 0, BATCH, 1, (0, 0)), (64, 4, 0, 1, (4, 2))],
)  # fmt: skip
def test_so_many_processes_read_as_their_batches_have_room(free, caplog, megabytes, workers, batch, sharing, expected):
    free(megabytes * MB)
    with caplog.at_level(logging.WARNING):
        assert loading_processes(workers, batch, sharing) == expected
    assert len(caplog.records) == (expected[0] < workers)
    held = expected[0] * expected[1] + dataset.IN_USE
    assert not expected[0] or held * batch * sharing < 0.8 * megabytes * MB


def test_a_system_without_the_folder_has_no_limit(monkeypatch):
    monkeypatch.setattr(dataset, "SHARED_MEMORY", "/no/such/folder")
    assert loading_processes(8, 10**15) == (8, 2)
