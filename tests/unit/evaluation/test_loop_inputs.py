"""What a network takes, and what it is given: sizes, batches, profiles, forms of images, names of classes."""

import json
import time
from dataclasses import replace

import pytest
import torch
import yaml
from known_images import KnowingModel, export_answers, numbers
from known_sets import CONFIG, Known, Shell

from utils.core.errors import InputError
from utils.core.tasks import DETECT, Prediction
from utils.evaluation.data_yaml import load_data
from utils.evaluation.input_plan import InputPlan, batch_range
from utils.evaluation.loop import evaluate
from utils.evaluation.nms import non_max_suppression
from utils.jobs.open import open_runner
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner


def images_spec(*shape, name="images", dtype="float32"):
    return TensorSpec(name, shape, dtype)


def test_input_plan(square, caplog):
    def plan(imgsz, side=None, batch=None, rect=False):
        return InputPlan.of(Shell(square, (images_spec(batch, 3, side, side),)), imgsz, 8, rect=rect)

    assert plan(None, 96) == InputPlan((96, 96), 8, 8)
    assert plan(96, 96, batch=5) == InputPlan((96, 96), 5, 5)
    assert plan(None) == InputPlan((640, 640), 8, 8)
    assert plan(50) == InputPlan((64, 64), 8, 8)
    assert "50 is no multiple of the stride 32; using 64" in caplog.text
    with pytest.raises(InputError, match=r"--imgsz 64 was .*, and the network takes images float32 \[any, 3, 96, 96\]"):
        plan(64, 96)
    with pytest.raises(InputError, match="rectangular inference needs a network of dynamic size"):
        plan(96, 96, rect=True)


@pytest.mark.parametrize(("batch", "asked", "loaded"), [(8, 32, 32), (3, 32, 30), (48, 32, 48), (None, 7, 7)])
def test_the_loader_gives_several_static_batches_at_once(square, batch, asked, loaded):
    runner = Shell(square, (images_spec(batch, 3, 64, 64),))
    assert InputPlan.of(runner, None, asked) == InputPlan((64, 64), batch or asked, loaded)
    assert batch_range(runner) == (batch or 1, batch)
    runner.metadata["task"] = "segment"
    assert InputPlan.of(runner, None, asked).loaded == (batch or asked)


# an engine's profile of shapes


class Profiled(TorchRunner):
    """As an engine: refuses what is outside its profile, and keeps its outputs in one place."""

    def __init__(self, model, least, most):
        super().__init__(model, "cpu")
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
    assert numbers(result) == pytest.approx(numbers(square.evaluate(replace(CONFIG, limit=20))), abs=1e-9)


def test_sizes_and_the_profile(square, mixed):
    runner = Profiled(square.model, (1, 64, 96), (8, 64, 96))  # one size is a fixed size
    assert InputPlan.of(runner, None, 8) == InputPlan((64, 96), 8, 8)
    with pytest.raises(InputError, match="rectangular inference needs a network of dynamic size"):
        InputPlan.of(runner, None, 8, rect=True)
    runner = Profiled(square.model, (1, 64, 64), (8, 128, 96))
    assert InputPlan.of(runner, 96, 8).imgsz == (96, 96)
    assert InputPlan.of(runner, (128, 65), 8).imgsz == (128, 96)
    for size, text in ((32, "32"), (128, "128"), ((96, 128), "96x128")):
        with pytest.raises(InputError, match=f"--imgsz {text} was asked for, and the engine takes 64x64 to 128x96"):
            InputPlan.of(runner, size, 8)
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


# forms of inputs and outputs


class Suppressed(TorchRunner):
    """The knowing network with NMS inside, in fixed batches; behind the last detection lies anything."""

    def __init__(self, known, topk=300):
        super().__init__(known.model, "cpu")
        self._topk = topk
        self.metadata["nms"] = json.dumps({"topk": topk, "conf_thres": 0.001})
        self.inputs = (images_spec(6, 3, 64, 64),)
        shapes = {"num_dets": (6, 1), "det_boxes": (6, topk, 4), "det_scores": (6, topk), "det_classes": (6, topk)}
        self.outputs = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items())

    def _infer(self, feeds):
        prediction = Prediction(super()._infer(feeds)["output0"])
        found = non_max_suppression(prediction, CONFIG.conf_thres, DETECT.nms_iou, max_det=self._topk)
        rows = torch.full((6, self._topk, 6), 0.9)
        for row, one in zip(rows, found, strict=True):
            row[: len(one)] = one.flip(0)  # not sorted
        counts = torch.tensor([[len(one)] for one in found], dtype=torch.int32)
        parts = counts, rows[..., :4], rows[..., 4], rows[..., 5].int()
        return dict(zip((spec.name for spec in self.outputs), parts, strict=True))


@pytest.mark.parametrize("change", [{}, {"max_det": 1}, {"conf_thres": 0.5}])
def test_a_network_with_nms_inside_scores_the_same(square, caplog, change):
    config = replace(CONFIG, **change)
    result = evaluate(Suppressed(square), square.data, config, progress=False)
    assert numbers(result) == pytest.approx(numbers(square.evaluate(config)), abs=1e-6)
    said = f"NMS is inside the network (conf_thres 0.001); the loop has conf_thres {config.conf_thres}"
    assert said in caplog.text


def test_other_names_and_bytes_as_input(square):
    """Some exports take bytes, and call their tensors otherwise; half a static size is read as the whole."""
    spec = images_spec(None, 3, 64, None, name="pixels", dtype="uint8")
    boxes = (TensorSpec("boxes", (None, None, None), "float32"),)
    runner = Shell(square, (spec,), boxes, lambda found: {"boxes": found["output0"]})
    result = square.evaluate(replace(CONFIG, imgsz=None), runner)
    assert numbers(result) == pytest.approx(numbers(square.evaluate()), abs=1e-6)
    assert "64x64" in result.measured_on


@pytest.mark.parametrize(
    "inputs", [[images_spec(1, 3, 64, 64)] * 2, [images_spec(1, 4, 64, 64)], [images_spec(1, 3, 64, 64, dtype="int64")]]
)
def test_a_network_that_takes_no_images(square, inputs):
    with pytest.raises(InputError, match="images"):
        square.evaluate(CONFIG, Shell(square, inputs))


def test_a_rectangular_fixed_input(square, tmp_path):
    """A network exported for 32×64: every image is fitted into it, and its boxes come back."""
    known = Known(tmp_path, ((64, 32), (60, 20)), 16)
    runner = Shell(known, (images_spec(None, 3, 32, 64),))
    result = evaluate(runner, known.data, CONFIG, progress=False)
    assert "32x64" in result.measured_on
    assert numbers(result) == pytest.approx(numbers(known.evaluate()), abs=0.002)
    wide = square.evaluate(replace(CONFIG, imgsz=(64, 96)))
    assert numbers(wide) == pytest.approx(numbers(square.evaluate()), abs=1e-6)
    assert wide.input_size == "64x96"


def test_a_wrong_class_count_names_both(square, tmp_path):
    content = yaml.safe_load((square.folder / "data.yaml").read_text()) | {"names": ["a", "b", "c", "d"]}
    file = tmp_path / "four.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match=r"the network has 3 classes .*cat.*, and .*four.yaml has 4 .*d"):
        evaluate(TorchRunner(square.model, "cpu"), load_data(file), CONFIG, progress=False)
    model = KnowingModel(square.samples, ("cat", "dog", "owl", "bat"), 64)
    runner = TorchRunner(model, "cpu")
    del runner.metadata["names"]  # nothing but the output itself tells
    with pytest.raises(InputError, match=r"output0 \[8, 8, \d+\]; expected"):
        evaluate(runner, square.data, CONFIG, progress=False)


def test_other_class_names_are_a_warning(square, tmp_path, caplog):
    path = export_answers(square.model, tmp_path / "a.onnx", names=dict(enumerate("abc")))
    for _ in range(2):
        evaluate(open_runner(path), square.data, replace(CONFIG, limit=2), progress=False)
    assert caplog.text.count("class names") == 1
