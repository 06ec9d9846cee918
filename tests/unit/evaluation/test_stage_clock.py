"""Times of a batch's stages; on a GPU see tests/gpu."""

import time

import torch

from utils.evaluation.stage_clock import StageClock


def test_stages_are_timed_batch_by_batch(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", iter([1.0, 1.25, 3.25, 10.0, 10.5, 14.5]).__next__)
    clock = StageClock(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        clock.stop("fast")
        clock.stop("slow")
    assert clock.seconds() == {"fast": [0.25, 0.5], "slow": [2.0, 4.0]}
    clock.clear()
    assert clock.seconds() == {}


def test_a_batch_that_was_interrupted_counts_only_the_stages_that_ended():
    clock = StageClock(torch.device("cpu"))
    clock.start()
    clock.stop("first")
    for _ in range(2):  # Ctrl-C, and the next batch
        clock.start()
        clock.stop("first")
        clock.stop("second")
    assert [len(times) for times in clock.seconds().values()] == [3, 2]
