"""Loading processes and the shared memory that their batches take, which containers are often short of."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from utils.core import shared_memory
from utils.core.shared_memory import explained, loading_processes

MB = 1_000_000
BATCH = 32 * 3 * 640 * 640  # bytes


@pytest.fixture
def free(monkeypatch):
    """Says how many bytes are free."""
    shared_memory._tell.cache_clear()

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
        for _ in range(2):
            assert loading_processes(workers, batch, sharing) == expected
    assert len(caplog.records) == (expected[0] < workers)  # once, not for every loader
    held = expected[0] * expected[1] + shared_memory.IN_USE
    assert not expected[0] or held * batch * sharing < 0.8 * megabytes * MB


def test_the_line_says_what_is_there_what_is_needed_and_what_to_do(free, caplog):
    free(64 * MB)
    loading_processes(8, BATCH)
    (record,) = caplog.records
    assert record.getMessage() == (
        "shared memory (/dev/shm) has 64 MB free, and 8 loading processes need 885 MB: none will read images, which "
        "takes longer; give the container more (docker run --shm-size=8g)"
    )


def test_a_system_without_the_folder_has_no_limit(monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", "/no/such/folder")
    assert loading_processes(8, 10**15) == (8, 2)


class Unpicklable:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Things:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Unpicklable(self.error)


FULL = RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: Resource temporarily unavailable")
SCRIPT = """
import sys
from torch.utils.data import DataLoader
from tests.unit.test_shared_memory import FULL, Things
from utils.core.shared_memory import explained
from utils.evaluation.dataset import _start_worker
error = FULL if sys.argv[1] == "full" else KeyError("another")
loader = DataLoader(Things(error), batch_size=None, num_workers=1, worker_init_fn=_start_worker)
try:
    next(iter(loader))
except RuntimeError as error:
    print(explained(error))
"""


@pytest.mark.parametrize(
    ("kind", "out", "err"),
    [("full", "a loading process ended, since shared memory (/dev/shm) was full; give the container more "
      "(docker run --shm-size=8g), or take fewer --workers", ""), ("other", "None", "KeyError: 'another'")],
)  # fmt: skip
def test_a_batch_that_cannot_be_handed_over_ends_the_program(kind, out, err):
    """It waited for ever."""
    found = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == out
    assert found.stderr.strip().splitlines()[-1:] == ([err] if err else [])


def test_other_errors_are_not_explained_so():
    assert explained(RuntimeError("CUDA error")) is None
    assert explained(OSError("Bus error")) is None
