"""Times of a batch's stages; on a GPU see tests/gpu."""

import time

import pytest
import torch

from utils.evaluation.stage_clock import StageClock


def test_stages_are_timed_batch_by_batch():
    clock = StageClock(torch.device("cpu"))
    for pause in (0.02, 0.05):
        clock.start()
        clock.stop("fast")
        time.sleep(pause)
        clock.stop("slow")
    seconds = clock.seconds()
    assert list(seconds) == ["fast", "slow"]
    assert max(seconds["fast"]) < 0.01
    assert seconds["slow"] == pytest.approx([0.02, 0.05], abs=0.015)
    clock.clear()
    assert not clock.seconds()


def test_a_batch_that_was_interrupted_counts_only_the_stages_that_ended():
    clock = StageClock(torch.device("cpu"))
    clock.start()
    clock.stop("first")
    for _ in range(2):  # Ctrl-C, and the next batch
        clock.start()
        clock.stop("first")
        clock.stop("second")
    assert [len(times) for times in clock.seconds().values()] == [3, 2]
