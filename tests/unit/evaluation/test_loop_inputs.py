"""What a network takes, and what it is given: sizes, batches, forms of images, names of classes."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from known_images import KnowingModel, export_answers, numbers
from known_sets import CONFIG, Known

from utils.core.errors import InputError
from utils.core.tasks import DETECT, Prediction
from utils.evaluation.data_yaml import load_data
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import evaluate
from utils.evaluation.nms import non_max_suppression
from utils.jobs.open import open_runner
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner


def plan(square, tmp_path, imgsz, rect=False, **export):
    runner = open_runner(export_answers(square.model, tmp_path / "a.onnx", **export))
    return InputPlan.of(runner, imgsz, 8, rect=rect)


def test_input_plan(square, tmp_path, caplog):
    assert plan(square, tmp_path, None, size=96) == InputPlan((96, 96), 8, 8)
    assert plan(square, tmp_path, 96, size=96, batch=5) == InputPlan((96, 96), 5, 5)
    assert plan(square, tmp_path, None) == InputPlan((640, 640), 8, 8)
    assert plan(square, tmp_path, 50) == InputPlan((64, 64), 8, 8)
    assert "50 is no multiple of the stride 32; using 64" in caplog.text
    with pytest.raises(
        InputError, match=r"--imgsz 64 was asked for, and the network takes images float32 \[any, 3, 96, 96\]"
    ):
        plan(square, tmp_path, 64, size=96)
    with pytest.raises(InputError, match="rectangular inference needs a network of dynamic size"):
        plan(square, tmp_path, 96, rect=True, size=96)


@pytest.mark.parametrize(("batch", "asked", "loaded"), [(8, 32, 32), (3, 32, 30), (48, 32, 48), (None, 7, 7)])
def test_the_loader_gives_several_static_batches_at_once(square, batch, asked, loaded):
    runner = Shell(square, (TensorSpec("images", (batch, 3, 64, 64), "float32"),))
    assert InputPlan.of(runner, None, asked) == InputPlan((64, 64), batch or asked, loaded)
    runner.metadata["task"] = "segment"
    assert InputPlan.of(runner, None, asked).loaded == (batch or asked)


class Shell(TorchRunner):
    """The knowing network behind other inputs or outputs than it has."""

    def __init__(self, known, inputs=None, outputs=None):
        super().__init__(known.model, "cpu")
        self.inputs = inputs or self.inputs
        self.outputs = outputs or self.outputs

    def _infer(self, feeds):
        (images,) = feeds.values()
        result = super()._infer({"images": images.float() / (255 if images.dtype == torch.uint8 else 1)})
        return {self.outputs[0].name: result["output0"]}


class Suppressed(TorchRunner):
    """The knowing network with NMS inside, in fixed batches; behind the last detection lies anything."""

    def __init__(self, known, topk=300):
        super().__init__(known.model, "cpu")
        self._topk = topk
        self.metadata["nms"] = json.dumps({"topk": topk, "conf_thres": 0.001})
        self.inputs = (TensorSpec("images", (6, 3, 64, 64), "float32"),)
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


def test_a_network_with_nms_inside_scores_the_same(square, caplog):
    usual = square.evaluate()
    result = evaluate(Suppressed(square), square.data, CONFIG, progress=False)
    assert numbers(result) == pytest.approx(numbers(usual), abs=1e-6)
    assert "top-k without NMS is inside the network (conf_thres 0.001); the loop has conf_thres 0.001" in caplog.text
    few = evaluate(Suppressed(square), square.data, replace(CONFIG, max_det=1), progress=False)
    assert numbers(few) == pytest.approx(numbers(square.evaluate(replace(CONFIG, max_det=1))), abs=1e-6)
    high = evaluate(Suppressed(square), square.data, replace(CONFIG, conf_thres=0.5), progress=False)
    assert numbers(high) == pytest.approx(numbers(square.evaluate(replace(CONFIG, conf_thres=0.5))), abs=1e-6)


def test_other_names_and_bytes_as_input(square):
    """Some exports take bytes, and call their tensors otherwise; half a static size is read as the whole."""
    spec = TensorSpec("pixels", (None, 3, 64, None), "uint8")
    runner = Shell(square, (spec,), (TensorSpec("boxes", (None, None, None), "float32"),))
    result = evaluate(runner, square.data, replace(CONFIG, imgsz=None), progress=False)
    assert numbers(result) == pytest.approx(numbers(square.evaluate()), abs=1e-6)
    assert "64x64" in result.measured_on


@pytest.mark.parametrize(
    "inputs",
    [
        [TensorSpec("pixels", (1, 3, 64, 64), "float32")] * 2,
        [TensorSpec("pixels", (1, 4, 64, 64), "float32")],
        [TensorSpec("pixels", (1, 3, 64, 64), "int64")],
    ],
)
def test_a_network_that_takes_no_images(square, inputs):
    with pytest.raises(InputError, match="pixels"):
        evaluate(Shell(square, inputs), square.data, CONFIG, progress=False)


def test_a_rectangular_fixed_input(tmp_path):
    """A network exported for 32×64: every image is fitted into it, and its boxes come back."""
    known = Known(tmp_path, ((64, 32), (60, 20)), 16)
    plain = known.evaluate()

    runner = Shell(known, (TensorSpec("images", (None, 3, 32, 64), "float32"),))
    result = evaluate(runner, known.data, CONFIG, progress=False)
    assert "32x64" in result.measured_on
    assert numbers(result) == pytest.approx(numbers(plain), abs=0.002)


def test_a_wrong_class_count_names_both(square, tmp_path):
    content = yaml.safe_load((square.folder / "data.yaml").read_text()) | {"names": ["a", "b", "c", "d"]}
    file = tmp_path / "four.yaml"
    file.write_text(yaml.safe_dump(content))
    message = r"the network has 3 classes .*cat.*, and .*four.yaml has 4 .*d"
    for runner in (TorchRunner(square.model, "cpu"), open_runner(export_answers(square.model, tmp_path / "a.onnx"))):
        with pytest.raises(InputError, match=message) as caught:
            evaluate(runner, load_data(file), CONFIG, progress=False)
        assert "\n" not in str(caught.value)


def test_a_wrong_class_count_is_found_without_names(square, tmp_path):
    """Nothing but the output itself tells."""
    model = KnowingModel(square.samples, ("cat", "dog", "owl", "bat"), 64)
    del model.names
    model.names_hidden = None
    runner = TorchRunner(model, "cpu")
    model.names = dict(enumerate("abcd"))  # the network itself still needs them
    with pytest.raises(InputError, match=r"output0 \[8, 8, \d+\]; expected"):
        evaluate(runner, square.data, CONFIG, progress=False)


def test_other_class_names_are_a_warning(square, tmp_path, caplog):
    path = export_answers(square.model, tmp_path / "a.onnx", names=dict(enumerate("abc")))
    evaluate(open_runner(path), square.data, replace(CONFIG, limit=2), progress=False)
    evaluate(open_runner(path), square.data, replace(CONFIG, limit=2), progress=False)
    assert caplog.text.count("class names") == 1
