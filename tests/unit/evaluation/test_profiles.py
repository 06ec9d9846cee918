"""Evaluating what engines have and other networks do not: a profile of shapes."""

from dataclasses import replace

import pytest
import torch
from known_images import MIXED, SQUARE, KnowingModel, numbers, write_set

from utils.core.errors import InputError
from utils.core.tasks import DETECT
from utils.evaluation.data_yaml import load_data
from utils.evaluation.input_plan import InputPlan, check_shapes
from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.evaluate_file import make_configs
from utils.jobs.options import ValOptions
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")
CONFIG = EvalConfig(imgsz=64, batch_size=8, workers=0)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    model = KnowingModel(write_set(folder, 20, SQUARE), NAMES, 64)
    return model, load_data(folder / "data.yaml")


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
    ],
)
def test_batches_follow_the_profile(known, least, most, batch, expected):
    model, data = known
    runner = Profiled(model, (least, 32, 32), (most, 96, 96))
    result = evaluate(runner, data, replace(CONFIG, batch_size=batch), progress=False)
    assert runner.batches == expected
    plain = evaluate(TorchRunner(model, "cpu"), data, CONFIG, progress=False)
    assert numbers(result) == pytest.approx(numbers(plain), abs=1e-9)


def test_a_profile_of_one_size_is_a_fixed_size(known):
    runner = Profiled(known[0], (1, 64, 96), (8, 64, 96))
    assert InputPlan.of(runner, None, 8) == InputPlan((64, 96), 8)
    with pytest.raises(InputError, match="rectangular inference needs a network of dynamic size"):
        InputPlan.of(runner, None, 8, rect=True)


def test_sizes_outside_the_profile_are_refused_at_once(known):
    runner = Profiled(known[0], (1, 64, 64), (8, 128, 96))
    assert InputPlan.of(runner, 96, 8).imgsz == (96, 96)
    assert InputPlan.of(runner, (128, 65), 8).imgsz == (128, 96)
    for size, text in ((32, "32"), (128, "128"), ((96, 128), "96x128")):
        with pytest.raises(InputError, match=f"--imgsz {text} was asked for, and the engine takes 64x64 to 128x96"):
            InputPlan.of(runner, size, 8)


def test_a_rectangle_finds_what_a_square_does(known):
    model, data = known
    square, wide = (evaluate(TorchRunner(model, "cpu"), data, replace(CONFIG, imgsz=size)) for size in (64, (64, 96)))
    assert numbers(wide) == pytest.approx(numbers(square), abs=1e-6)
    assert wide.input_size == "64x96"


def test_a_study_covers_the_sizes_of_the_profile(known):
    def sizes(runner, asked=None):
        options = ValOptions(engine_file="a.engine", task="study", imgsz=asked)
        return [config.imgsz for config in make_configs(options, runner)]

    assert sizes(Profiled(known[0], (1, 320, 320), (8, 768, 896))) == [384, 512, 640, 768]
    assert sizes(Profiled(known[0], (1, 320, 320), (8, 768, 896)), [320, 352]) == [320, 352]
    for profile in (((1, 640, 640), (8, 640, 640)), ((1, 32, 32), (8, 64, 64))):
        with pytest.raises(InputError, match="needs a dynamic image size"):
            sizes(Profiled(known[0], *profile))


def test_rectangular_inference_needs_room_in_the_profile(tmp_path):
    data = tmp_path / "data.yaml"
    model = KnowingModel(write_set(tmp_path, 16, MIXED), NAMES, 64)
    wide, narrow = Profiled(model, (1, 32, 32), (8, 128, 128)), Profiled(model, (1, 32, 32), (8, 64, 64))
    rect = replace(CONFIG, rect=True)
    found = evaluate(wide, load_data(data), rect, progress=False)
    expected = evaluate(TorchRunner(model, "cpu"), load_data(data), rect, progress=False)
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-9)
    with pytest.raises(InputError, match=r"rectangular inference needs \d+x\d+, and the engine takes 32x32 to 64x64"):
        evaluate(narrow, load_data(data), rect, progress=False)
    assert narrow.batches == []
    check_shapes(TorchRunner(model, "cpu"), [(640, 640)])  # no profile, no limit


def test_where_the_time_goes(known):
    model, data = known
    result = evaluate(TorchRunner(model, "cpu"), data, CONFIG, progress=False)
    assert set(result.parts) == {"images", "preprocess", "inference", "nms", "metrics"}
    assert all(value > 0 for value in result.parts.values())
    assert sum(result.parts.values()) <= result.seconds
