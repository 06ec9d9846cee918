"""What QAT keeps for a run to go on: it continues exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from small_finetuners import constant, images, make, moved, parts
from small_networks import Network, detector


@pytest.fixture
def teacher() -> Network:
    return detector()


@pytest.mark.parametrize("settings", [{}, {"ranges": "fixed"}, {"train": "ranges"}])
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
