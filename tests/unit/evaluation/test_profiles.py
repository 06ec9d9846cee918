"""Evaluating what engines have and other networks do not: a profile of shapes."""

import time
from dataclasses import replace

import pytest
import torch
from known_images import numbers
from known_sets import CONFIG

from utils.core.errors import InputError
from utils.core.tasks import DETECT
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import evaluate
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner


class Profiled(TorchRunner):
    """As an engine: refuses what is outside its profile, and keeps its outputs in one place."""

    def __init__(self, model, least, most, shape=(None, 3, None, None)):
        super().__init__(model, "cpu")
        self.inputs = (TensorSpec("images", shape, "float32"),)
        self.limits = {"images": ((least[0], 3, *least[1:]), (most[0], 3, *most[1:]))}
        self.batches, self.memory = [], None

    def _infer(self, feeds):
        (images,) = feeds.values()
        low, high = self.limits["images"]
        assert all(a <= b <= c for a, b, c in zip(low, images.shape, high, strict=True))
        self.batches.append(len(images))
        result = super()._infer(feeds)[DETECT.prediction]
        if self.memory is None or self.memory.shape != result.shape:
            self.memory = torch.empty_like(result)
        return {DETECT.prediction: self.memory.copy_(result)}


@pytest.mark.parametrize(
    ("least", "most", "batch", "expected"),
    [
        (1, 8, 8, [8, 8, 4]),
        (1, 3, 8, [3] * 6 + [2]),  # the profile's largest batch
        (4, 4, 8, [4] * 5),  # a profile of one batch
        (6, 8, 8, [8, 8, 6]),  # filled up to the least
        (1, 8, 16, [8, 8, 4]),  # of batches of 16 that the loader gives
        (1, 32, 32, [1, 20]),  # one image warms up where there is one batch only
    ],
)
def test_batches_follow_the_profile(square, least, most, batch, expected):
    runner = Profiled(square.model, (least, 32, 32), (most, 96, 96))
    result = evaluate(runner, square.data, replace(CONFIG, batch_size=batch, limit=20), progress=False)
    assert runner.batches == expected
    plain = square.evaluate(replace(CONFIG, limit=20))
    assert numbers(result) == pytest.approx(numbers(plain), abs=1e-9)


def test_a_profile_of_one_size_is_a_fixed_size(square):
    runner = Profiled(square.model, (1, 64, 96), (8, 64, 96))
    assert InputPlan.of(runner, None, 8) == InputPlan((64, 96), 8, 8)
    with pytest.raises(InputError, match="rectangular inference needs a network of dynamic size"):
        InputPlan.of(runner, None, 8, rect=True)


def test_sizes_outside_the_profile_are_refused_at_once(square):
    runner = Profiled(square.model, (1, 64, 64), (8, 128, 96))
    assert InputPlan.of(runner, 96, 8).imgsz == (96, 96)
    assert InputPlan.of(runner, (128, 65), 8).imgsz == (128, 96)
    for size, text in ((32, "32"), (128, "128"), ((96, 128), "96x128")):
        with pytest.raises(InputError, match=f"--imgsz {text} was asked for, and the engine takes 64x64 to 128x96"):
            InputPlan.of(runner, size, 8)


def test_a_rectangle_finds_what_a_square_does(square):
    wide = square.evaluate(replace(CONFIG, imgsz=(64, 96)))
    assert numbers(wide) == pytest.approx(numbers(square.evaluate()), abs=1e-6)
    assert wide.input_size == "64x96"


def test_rectangular_inference_in_a_profile(mixed):
    wide, rect = Profiled(mixed.model, (1, 32, 32), (8, 128, 128)), replace(CONFIG, rect=True)
    found = evaluate(wide, mixed.data, rect, progress=False)
    assert numbers(found) == pytest.approx(numbers(mixed.evaluate(rect)), abs=1e-9)


def test_the_first_of_several_batches_does_not_count_in_the_times(square):
    class SlowAtFirst(TorchRunner):
        calls = 0

        def _infer(self, feeds):
            self.calls += 1
            time.sleep(self.calls == 1)
            return super()._infer(feeds)

    result = evaluate(SlowAtFirst(square.model, "cpu"), square.data, CONFIG, progress=False)
    assert 0 < result.ms["inference"] < 15  # of 40 images
