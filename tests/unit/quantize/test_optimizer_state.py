"""What QAT keeps for a run to go on: it continues exactly, and what does not fit is refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_finetuners import constant, images, make, moved, parts
from small_networks import Network, detector

from utils.core.errors import CheckpointError


@pytest.fixture
def teacher() -> Network:
    return detector()


@pytest.mark.parametrize("settings", [{}, {"weight_ranges": "learned"}, {"ranges": "fixed"}, {"train": "ranges"}])
def test_state_continues_exactly(teacher, settings):
    whole = make(teacher, **settings)
    whole.run_epoch(images(4, seed=1), constant(1e-5))
    state, student = copy.deepcopy(whole.state_dict()), copy.deepcopy(whole.student.state_dict())
    whole.run_epoch(images(4, seed=2), constant(1e-5))

    resumed = make(teacher, factor=2.0, **settings)
    resumed.student.load_state_dict(student)
    resumed.load_state_dict(state)
    resumed.run_epoch(images(4, seed=2), constant(1e-5))
    assert not any(moved(one, other) for one, other in zip(parts(whole), parts(resumed), strict=True))
    if whole.ranges.log_amax is not None:
        assert torch.equal(whole.ranges.log_amax, resumed.ranges.log_amax), "what lies between float16 scales"


def changed_group(name: str, value: object) -> Callable:
    def change(state: dict) -> None:
        state["optimizer"]["param_groups"][0][name] = value

    return change


def changed_moment(name: str, value: object) -> Callable:
    def change(state: dict) -> None:
        state["optimizer"]["state"][0][name] = value

    return change


def another_parameter(state: dict) -> None:
    state["optimizer"]["state"][99] = state["optimizer"]["state"].pop(0)


def one_group_less(state: dict) -> None:
    state["optimizer"]["param_groups"].pop()


def ranges_are(value: object) -> Callable:
    return lambda state: state.update(log_amax=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_group_less, r"it has 2 groups of parameters, expected 3"),
        (changed_group("factor", 2.0), r"factor is 2\.0, expected 1\.0"),
        (changed_group("betas", (0.5, 0.9)), r"betas is \(0\.5, 0\.9\), expected \(0\.9, 0\.999\)"),
        (another_parameter, r"parameter 99 is none of \d+"),
        (changed_moment("exp_avg", torch.zeros(3)), r"exp_avg of parameter 0 is .*, expected finite values \["),
        (changed_moment("exp_avg", None), r"exp_avg of parameter 0 is None"),
        (changed_moment("step", torch.tensor(float("nan"))), r"step of parameter 0 is .*, expected finite values \[\]"),
        (changed_moment("step", torch.tensor(-1.0)), r"step of parameter 0 holds a negative value"),
        (ranges_are(None), r"log_amax is None, expected finite values \[\d+\]"),
        (ranges_are(torch.zeros(2)), r"log_amax is Tensor float32 \[2\], expected finite values \[\d+\]"),
        (ranges_are([1.0]), r"log_amax is \[1\.0\], expected finite values"),
        (ranges_are("nothing"), r"log_amax is 'nothing', expected finite values"),
    ],
)
def test_a_damaged_state_is_refused_in_words_and_changes_nothing(teacher, change, message):
    tuner = make(teacher)
    tuner.run_epoch(images(1), constant(1e-4))
    state = copy.deepcopy(tuner.state_dict())
    before, ranges = parts(tuner), tuner.ranges.log_amax.detach().clone()
    change(state)
    with pytest.raises(CheckpointError, match=f"does not fit the network: {message}.*; start a new run"):
        tuner.load_state_dict(state)
    assert not any(moved(one, other) for one, other in zip(before, parts(tuner), strict=True))
    assert torch.equal(tuner.ranges.log_amax, ranges)


def test_ranges_that_are_not_finite_are_refused(teacher):
    tuner = make(teacher)
    state = tuner.state_dict()
    state["log_amax"][3] = float("nan")
    with pytest.raises(CheckpointError, match="log_amax is"):
        tuner.load_state_dict(state)


def test_ranges_of_a_run_that_trained_none_are_refused(teacher):
    tuner = make(teacher, ranges="fixed")
    state = {**tuner.state_dict(), "log_amax": torch.zeros(4)}
    with pytest.raises(CheckpointError, match="expected nothing"):
        tuner.load_state_dict(state)
