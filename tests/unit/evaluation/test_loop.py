"""The evaluation loop on a network whose answers are known, in PyTorch and in ONNX Runtime, against pycocotools.

And what a network takes, and is given: sizes, batches, profiles, forms of images, names of classes.
"""

import json
import logging
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from known_images import SQUARE, KnowingModel, damaged_png, export_answers, numbers
from known_sets import CONFIG, NAMES, Known, Shell
from torch import nn

from utils.core.errors import DataError, InputError
from utils.core.tasks import DETECT, Prediction
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.detector import BatchDetections
from utils.evaluation.input_plan import InputPlan, batch_range
from utils.evaluation.loop import Evaluation, evaluate
from utils.evaluation.nms import non_max_suppression
from utils.evaluation.results import Measurement, result_table
from utils.jobs.evaluate import Measurer
from utils.jobs.open import open_runner
from utils.reports.schema import Report
from utils.reports.tables import terminal_table
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner


@pytest.mark.parametrize("rect", [False, True])
def test_ap_agrees_with_pycocotools_and_does_not_depend_on_the_batch(mixed, tmp_path, rect):
    results = [
        mixed.evaluate(replace(CONFIG, rect=rect, batch_size=size, save_json=True), out_dir=tmp_path)
        for size in (1, 7, 64)
    ]
    for result in results:
        assert 0.3 < result.ap < 0.8
        assert (result.ap, result.ap50) == pytest.approx((result.coco["ap"], result.coco["ap50"]), abs=0.005)
        assert (result.ap_coco, result.ap50_coco) == pytest.approx((result.coco["ap"], result.coco["ap50"]), abs=5e-4)
        assert numbers(result) == pytest.approx(numbers(results[0]), abs=1e-6)
    assert results[0].images == 40
    assert results[0].instances == sum(len(sample.labels) for sample in mixed.samples)
    assert numbers(results[0]) == pytest.approx(numbers(mixed.evaluate()), abs=0.002)  # square
    assert ("rectangular" in results[0].measured_on) == rect
    wrong = Shell(mixed, change=lambda found: {"output0": found["output0"] + torch.eye(7)[:1].T * 3})  # moved 3 pixels
    shifted = mixed.evaluate(replace(CONFIG, rect=rect), wrong)
    assert min(results[0].coco["ap"] - found for found in (shifted.ap, shifted.ap_coco)) > 0.05


def test_result_rows_and_table_of_each_class_and_of_a_single_one(mixed, tmp_path):
    result = mixed.evaluate()
    assert [row.name for row in result.per_class] == list(NAMES)
    assert sum(row.instances for row in result.per_class) == result.instances
    assert np.mean([row.ap for row in result.per_class]) == pytest.approx(result.ap)
    lines = result_table(result, per_class=True)
    assert lines[0].split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert lines[1].split()[:3] == ["all", "40", str(result.instances)]
    assert float(lines[1].split()[-1]) == pytest.approx(result.ap, abs=1e-3)
    assert [line.split()[0] for line in lines[2:5]] == list(NAMES)
    assert "PyTorch" in result.measured_on
    assert "8, 64x64" in lines[-1]
    assert set(result.ms) == {"preprocess", "inference", "nms"}
    assert all(value > 0 for value in result.ms.values())
    assert mixed.evaluate(replace(CONFIG, limit=10)).images == 10
    single = mixed.evaluate(replace(CONFIG, single_cls=True, save_json=True), out_dir=tmp_path)
    assert [row.name for row in single.per_class] == ["object"]
    assert single.ap > result.ap  # wrong classes no longer count
    assert single.ap == pytest.approx(single.coco["ap"], abs=0.005)


# ONNX Runtime: fixed and variable batches and sizes


@pytest.mark.parametrize(
    ("batch", "size", "half"),
    [(None, None, False), (None, None, True), (None, 64, False), (7, 64, False), (64, 64, False)],
)
def test_onnx_gives_the_same_as_pytorch(square, tmp_path, batch, size, half):
    """40 images in batches of 7: the last one is filled up; in one of 64, there is nothing but filling for 24."""
    path = export_answers(square.model, tmp_path / "a.onnx", batch, size, half)
    with open_runner(path) as runner:
        result = evaluate(runner, square.data, replace(CONFIG, imgsz=64), progress=False)
    assert result.images == 40
    assert numbers(result) == pytest.approx(numbers(square.evaluate()), abs=0.01 if half else 1e-6)
    assert f"batch {batch or 8}" in result.measured_on


# data that is not as it should be


def test_images_that_cannot_be_read_are_counted(tmp_path, caplog):
    known = Known(tmp_path, SQUARE, 12)
    paths = [sample.path for sample in known.samples]
    paths[0].write_bytes(b"no image")
    for path in paths[4:9]:  # one whole batch, and more
        path.write_bytes(damaged_png())
    with caplog.at_level(logging.INFO):
        result = known.evaluate(replace(CONFIG, batch_size=4))
    assert result.images == 6
    assert result.instances == sum(len(known.samples[i].labels) for i in (1, 2, 3, 9, 10, 11))
    assert len(result.left_out) == 6
    assert "6 images left out" in caplog.text
    (counts,) = known.data.counts()
    assert (counts.images, counts.objects, counts.left_out) == (6, result.instances, 6)
    for path in paths:
        path.write_bytes(damaged_png())
    with pytest.raises(DataError, match="no image could be decoded"):
        known.evaluate()


def test_no_label_files_and_no_detections(tmp_path, square):
    known = Known(tmp_path, SQUARE, 3)
    for file in (tmp_path / "labels/val").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"no image of 'val' has a label file; expected.*labels/val/000000000001\.txt"):
        known.evaluate()
    (tmp_path / "labels/val/000000000001.txt").write_text("")
    known.data.parts.clear()  # as a new run reads it
    result = known.evaluate()
    assert (result.ap, result.instances, result.per_class) == (0, 0, ())
    result = square.evaluate(replace(CONFIG, conf_thres=1.0))
    assert numbers(result) == (0, 0, 0, 0)
    assert result.instances > 0


# NaN and infinity: said in the log and the table, and AP is compared with nothing


class Answers(nn.Module):
    """One certain box for each image, and in images brighter than half a value that is no number."""

    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad, self.names, self.stride = bad, dict(enumerate(NAMES)), torch.tensor([32.0])

    def forward(self, x):
        rows = torch.tensor([16.0, 16, 8, 8, 0.9, 0.1, 0.1]).view(1, 7, 1).repeat(len(x), 1, 3)
        rows[x.mean((1, 2, 3)) > 0.5, :, 2] = self.bad
        return rows


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_no_numbers_are_counted_and_marked(tmp_path, caplog, bad):
    """The last two of five images are white, the others are dark."""
    from PIL import Image

    known = Known(tmp_path, SQUARE, 5)
    for sample in known.samples[3:]:
        Image.new("RGB", (64, 64), (255,) * 3).save(sample.path)
    mark = "NaN or infinity for 2 of 5 images"
    measurer, report = Measurer(known.data, torch.device("cpu"), replace(CONFIG, batch_size=2)), Report(command="")
    for stage, value in (("float", 0.0), ("PTQ", bad)):
        result = measurer.measure(Answers(value), stage)
        report.rows.append(measurer.row(stage, known.samples[0].path, result, 1.0))
    assert (result.not_finite, result.mark) == (2, mark)
    assert f"PTQ gives {mark}" in caplog.text
    assert any(mark in line for line in result_table(result, per_class=False))
    assert [row.ap_with for row in report.rows] == ["", mark]
    lines = terminal_table(report).splitlines()
    assert " - " in next(line for line in lines if line.startswith("PTQ"))
    assert any(mark in line for line in lines if line.startswith("["))


# what a network takes


def images_spec(*shape, name="images", dtype="float32"):
    return TensorSpec(name, shape, dtype)


def test_input_plan(square, caplog):
    def plan(imgsz, side=None, batch=None, rect=False):
        return InputPlan.of(Shell(square, (images_spec(batch, 3, side, side),)), imgsz, 8, rect=rect)

    assert plan(None, 96) == InputPlan((96, 96), 8, 8)
    assert plan(96, 96, batch=5) == InputPlan((96, 96), 5, 5)
    assert plan(None) == InputPlan((640, 640), 8, 8)
    assert plan(50) == InputPlan((64, 64), 8, 8)
    assert "50 is not a multiple of the stride 32; using 64" in caplog.text
    with pytest.raises(InputError, match=r"--imgsz 64 was .*, and the model takes images float32 \[any, 3, 96, 96\]"):
        plan(64, 96)
    with pytest.raises(InputError, match="rectangular inference needs a model of dynamic size"):
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
    with pytest.raises(InputError, match="rectangular inference needs a model of dynamic size"):
        InputPlan.of(runner, None, 8, rect=True)
    runner = Profiled(square.model, (1, 64, 64), (8, 128, 96))
    assert InputPlan.of(runner, 96, 8).imgsz == (96, 96)
    assert InputPlan.of(runner, (128, 65), 8).imgsz == (128, 96)
    for size, text in ((32, "32"), (128, "128"), ((96, 128), "96x128")):
        with pytest.raises(InputError, match=f"--imgsz {text} .* 64x64 to 128x96"):
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


# the evaluation without a network


@pytest.mark.parametrize("wrong_images", [0, 10, 40])
def test_an_evaluation_takes_in_detections_from_anywhere(square, wrong_images):
    """The labels serve as detections, and lie far outside the image in the first images."""
    loader = make_loader(square.data, "val", imgsz=64, batch_size=8, workers=0)
    evaluation = Evaluation(loader, square.data, CONFIG, as_reference=True)
    for number, batch in enumerate(loader):
        images = []
        for place, labels in enumerate(batch.labels):
            boxes = labels[:, 1:] + (1000 if 8 * number + place < wrong_images else 0)
            images.append(torch.cat([boxes, torch.full((len(labels), 1), 0.9), labels[:, :1]], 1))
        evaluation.update(batch, BatchDetections(RaggedBatch.of(images)))
    evaluation.gather()
    how = Measurement(task=DETECT, input_size="64x64", measured_on="paper", ms={"inference": 1.0}, not_finite=2)
    result = evaluation.result(how)
    counts = [len(sample.labels) for sample in square.samples]
    assert (result.images, result.instances) == (40, sum(counts))
    assert (result.at.found, result.at.objects) == (sum(counts[wrong_images:]), sum(counts))
    assert (result.ap > 0.99) == (wrong_images == 0)
    assert (result.ap == 0) == (wrong_images == 40)
    assert {name: getattr(result, name) for name in vars(how)} == vars(how)
    assert list(result.reference.detections) == [str(sample.path) for sample in square.samples]
    assert result.reference.detections[str(square.samples[0].path)].shape == (counts[0], 5)


# forms of inputs and outputs


def suppressed(known, topk=300):
    """The knowing network with NMS inside, in fixed batches; behind the last detection lies anything."""
    shapes = {"num_dets": (6, 1), "det_boxes": (6, topk, 4), "det_scores": (6, topk), "det_classes": (6, topk)}

    def change(result):
        found = non_max_suppression(Prediction(result["output0"]), CONFIG.conf_thres, DETECT.nms_iou, max_det=topk)
        rows = torch.full((6, topk, 6), 0.9)
        for row, one in zip(rows, found, strict=True):
            row[: len(one)] = one.flip(0)  # not sorted
        counts = torch.tensor([[len(one)] for one in found], dtype=torch.int32)
        return dict(zip(shapes, (counts, rows[..., :4], rows[..., 4], rows[..., 5].int()), strict=True))

    outputs = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items())
    runner = Shell(known, (images_spec(6, 3, 64, 64),), outputs, change)
    runner.metadata["nms"] = json.dumps({"topk": topk, "conf_thres": 0.001})
    return runner


@pytest.mark.parametrize("change", [{}, {"max_det": 1}, {"conf_thres": 0.5}])
def test_a_network_with_nms_inside_scores_the_same(square, caplog, change):
    config = replace(CONFIG, **change)
    result = square.evaluate(config, suppressed(square))
    assert numbers(result) == pytest.approx(numbers(square.evaluate(config)), abs=1e-6)
    text = f"NMS is inside the model (conf_thres 0.001); the loop has conf_thres {config.conf_thres}"
    assert any(message.startswith(text) for message in caplog.messages)


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
    with pytest.raises(InputError, match=r"the model detects 3 classes .*cat.*, and .*four.yaml has 4 .*d"):
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
