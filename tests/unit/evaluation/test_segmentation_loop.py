"""The evaluation loop on a segmentation network whose answers are known; what it writes, and what it refuses.

That AP is upstream's is tested in tests/integration/test_segmentation_evaluation.py.
"""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from known_images import SQUARE, KnowingModel
from known_masks import KnowingMasks, export_masks, write_outlined_set
from pycocotools import mask as coco_mask

from utils.core.errors import DataError, InputError
from utils.core.score import Score
from utils.core.tasks import SEGMENT, Prediction, task_of_outputs
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.loop import EvalConfig, add_detections, detections_of, evaluate
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.results import result_table
from utils.jobs.evaluate import evaluate_file, make_row
from utils.jobs.open import open_runner
from utils.jobs.options import ValOptions
from utils.onnx_graph import output_formats
from utils.onnx_graph.output_formats import NmsSettings
from utils.reports.schema import Report
from utils.reports.tables import terminal_table
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")
CONFIG = EvalConfig(imgsz=192, batch_size=8, workers=0)


class Known:
    """A set with outlines, its data configuration, and the network that knows it."""

    def __init__(self, folder, count=24):
        self.folder = folder
        self.samples = write_outlined_set(folder, count, SQUARE)
        self.data = load_data(folder / "data.yaml")
        self.model = KnowingMasks(self.samples, NAMES, 192)

    def evaluate(self, config=CONFIG, runner=None, **more):
        return evaluate(runner or TorchRunner(self.model, "cpu"), self.data, config, progress=False, **more)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("known"))


def of_masks(result):
    return [result.masks.ap, result.masks.ap50, result.masks.precision, result.masks.recall]


def test_boxes_score_as_those_of_a_detector(known):
    """The detector is evaluated with NMS at the same IoU."""
    result = known.evaluate()
    detector = TorchRunner(KnowingModel(known.samples, NAMES, 192), "cpu")
    plain = known.evaluate(replace(CONFIG, iou_thres=0.6), detector)
    assert (result.ap, result.ap50, result.precision, result.recall) == pytest.approx(
        (plain.ap, plain.ap50, plain.precision, plain.recall), abs=1e-9
    )
    assert plain.masks is plain.statistics.correct_masks is None
    assert result.task is SEGMENT
    assert 0.2 < result.masks.ap < 0.9
    assert result.score == Score(result.ap, result.masks.ap)
    assert known.evaluate(replace(CONFIG, iou_thres=0.7)).ap != result.ap


def test_the_batch_does_not_matter(known):
    expected = of_masks(known.evaluate())
    for size in (1, 24):
        assert of_masks(known.evaluate(replace(CONFIG, batch_size=size))) == pytest.approx(expected, abs=1e-9)


def test_the_table_has_boxes_and_masks_of_each_class(known):
    result = known.evaluate()
    lines = [line.split() for line in result_table(result, per_class=True)]
    assert lines[0][3:] == ["Box(P", "R", "mAP50", "mAP50-95)", "Mask(P", "R", "mAP50", "mAP50-95)"]
    assert [line[0] for line in lines[1:5]] == ["all", *NAMES]
    scores = [getattr(part, name) for part in (result, result.masks) for name in ("precision", "recall", "ap50", "ap")]
    assert [float(word) for word in lines[1][3:]] == pytest.approx(scores, abs=1e-3)
    assert np.mean([row.masks.ap for row in result.per_class]) == pytest.approx(result.masks.ap)


def test_coco_json_holds_the_masks_and_pycocotools_agrees(known, tmp_path):
    """Masks on the grid are nearly those in the images' pixels; pycocotools compares the latter."""
    result = known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    assert result.coco["ap50"] == pytest.approx(result.ap50_coco, abs=1e-3)
    assert result.mask_coco["ap50"] == pytest.approx(result.masks.ap50, abs=0.05)
    rows = json.loads((tmp_path / "model_predictions.json").read_text())
    best = max(rows, key=lambda row: row["score"])
    assert best["segmentation"]["size"] == [64, 64]
    mask = coco_mask.decode(best["segmentation"])
    x, y, w, _ = best["bbox"]
    assert mask.any()
    assert not mask[: int(y)].any()
    assert not mask[:, int(x + w) + 1 :].any()
    assert {len(row) for row in rows} == {5}


def test_areas_of_masks_are_not_those_of_boxes(known, tmp_path, monkeypatch):
    """pycocotools takes them from the boxes of results that have some."""
    from pycocotools.coco import COCO

    load, seen = COCO.loadRes, []
    monkeypatch.setattr(COCO, "loadRes", lambda self, rows: (seen.append(load(self, rows)), seen[-1])[1])
    known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    boxes, masks = (one.dataset["annotations"] for one in seen)
    assert all(row["area"] == pytest.approx(row["bbox"][2] * row["bbox"][3]) for row in boxes)
    assert all(row["area"] == coco_mask.area(row["segmentation"]) for row in masks)


def test_a_row_of_a_report_has_masks_with_a_standard_error(known):
    result = known.evaluate()
    row = make_row("float", known.folder / "data.yaml", result, CONFIG, torch.device("cpu"), 1.0)
    assert (row.mask_ap, row.mask_ap50) == (result.masks.ap, result.masks.ap50)
    assert (row.mask_precision, row.mask_recall) == (result.masks.precision, result.masks.recall)
    assert row.ap_with == ""
    assert row.mask_ap_resampled.error > 0
    assert row.mask_ap_resampled != row.ap_resampled
    both = result.statistics.score_resampled()
    assert both.ap[0] == pytest.approx((row.ap_resampled.ap[0] + row.mask_ap_resampled.ap[0]) / 2, abs=1e-6)
    other = replace(CONFIG, iou_thres=0.7)
    row = make_row("float", known.folder / "data.yaml", known.evaluate(other), other, torch.device("cpu"), 1.0)
    assert row.ap_with == "NMS IoU 0.7"


def test_predictions_of_a_network_add_up_to_the_same(known):
    """What sensitivity analysis does: no runner, and batches of its own."""
    statistics = EvalStatistics()
    loader = make_loader(known.data, "val", imgsz=192, batch_size=5, workers=0, masks=True)
    with TorchRunner(known.model, "cpu") as runner, torch.inference_mode():
        for batch in loader:
            found = runner.infer({"images": batch.images / 255})
            add_detections(statistics, detections_of(Prediction.of(found, runner.task), batch), batch)
    expected = known.evaluate()
    assert statistics.score().box == pytest.approx(expected.ap)
    assert statistics.score().mask == pytest.approx(expected.masks.ap)
    copy = EvalStatistics()
    copy.extend(statistics.to_plain())
    assert copy.score() == statistics.score()
    assert copy.score_resampled() == statistics.score_resampled()


def test_images_without_labels_and_detections(known, tmp_path):
    found = known.evaluate(replace(CONFIG, conf_thres=1.0))
    assert of_masks(found) == [0, 0, 0, 0]
    empty = Known(tmp_path, 4)
    for file in (tmp_path / "labels/val").iterdir():
        file.write_text("")
    result = empty.evaluate()
    assert (result.masks.ap, result.instances) == (0, 0)


# ONNX Runtime


@pytest.mark.parametrize(("batch", "task"), [(None, "segment"), (5, "segment"), (None, "")])
def test_onnx_gives_the_same_as_pytorch(known, tmp_path, batch, task):
    """24 images in batches of 5: the last one is filled up. Without metadata the second output tells the task."""
    expected = known.evaluate()
    with open_runner(export_masks(known.model, tmp_path / "a.onnx", batch, task)) as runner:
        result = known.evaluate(runner=runner)
    assert of_masks(result) == pytest.approx(of_masks(expected), abs=1e-6)
    assert result.ap == pytest.approx(expected.ap, abs=1e-6)


def test_val_trt_reports_masks(known, tmp_path):
    file = export_masks(known.model, tmp_path / "a.onnx", 8)
    options = ValOptions(engine_file=str(file), data=str(known.folder / "data.yaml"), workers=0, device="cpu",
                         save_json=True, project=str(tmp_path))  # fmt: skip
    report = evaluate_file(options, tmp_path)
    (row,) = report.rows
    assert row.mask_ap == pytest.approx(known.evaluate().masks.ap, abs=1e-6)
    assert row.ap_with == ""
    assert [note.split(":")[0] for note in report.notes] == ["pycocotools", "pycocotools on masks"]
    assert "mask AP" in terminal_table(report)
    assert Report.load(tmp_path / "report.json").rows == [row]


# what is refused


class Shell(TorchRunner):
    """The knowing network behind other outputs than it has."""

    def __init__(self, known, outputs=None, change=None):
        super().__init__(known.model, "cpu")
        self.outputs = outputs or self.outputs
        self._change = change or (lambda found: found)

    def _infer(self, feeds):
        return self._change(super()._infer(feeds))


def test_a_file_without_prototypes(known):
    outputs = (TensorSpec("output0", (None, 39, None), "float32"),)
    with pytest.raises(InputError, match="output1") as caught:
        known.evaluate(runner=Shell(known, outputs))
    assert "\n" not in str(caught.value)


CHANGES = {
    "fewer prototypes than coefficients": lambda found: {**found, "output1": found["output1"][:, :30]},
    "prototypes of one image": lambda found: {**found, "output1": found["output1"][:1]},
    "more prototypes than rows": lambda found: {**found, "output1": found["output1"].repeat(1, 2, 1, 1)},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_outputs_that_do_not_fit_each_other(known, kind):
    specs = tuple(replace(spec, shape=(None,) * len(spec.shape)) for spec in TorchRunner(known.model, "cpu").outputs)
    with pytest.raises(InputError, match="output0"):
        known.evaluate(runner=Shell(known, specs, CHANGES[kind]))


def test_outputs_in_another_order_and_without_metadata(known):
    """As engines may list them: prototypes first, and names of their own."""

    class Turned(Shell):
        def _infer(self, feeds):
            found = super()._infer(feeds)
            return {"protos": found["output1"], "rows": found["output0"]}

    first, second = TorchRunner(known.model, "cpu").outputs
    outputs = (replace(second, name="protos"), replace(first, name="rows"))
    runner = Turned(known, outputs)
    assert task_of_outputs({}, {spec.name: len(spec.shape) for spec in outputs}) is SEGMENT
    assert of_masks(known.evaluate(runner=runner)) == pytest.approx(of_masks(known.evaluate()), abs=1e-9)


def test_prototypes_on_another_grid(known):
    def coarser(found):
        return {**found, "output1": torch.nn.functional.avg_pool2d(found["output1"], 2)}

    with pytest.raises(InputError, match="prototypes of 24x24 do not fit an input of 192x192"):
        known.evaluate(runner=Shell(known, change=coarser))


@pytest.mark.parametrize("wrong", [None, [["a"] * 6], {"counts": [1]}])
def test_annotations_without_a_segmentation(tmp_path, wrong):
    known = Known(tmp_path, 4)
    file = tmp_path / "annotations/instances_val.json"
    content = json.loads(file.read_text())
    content["annotations"][1]["segmentation"] = wrong
    content["annotations"].append({**content["annotations"][0], "image_id": 99})  # of an image that is not listed
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="instances_val") as caught:
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model_predictions.json").exists()


# NMS inside the network


@pytest.fixture(scope="module")
def plain_file(known):
    return export_masks(known.model, known.folder / "plain.onnx", 8)


def with_nms(plain_file, side, path):
    """The same network with NMS inside, at the thresholds of the loop, and masks of `side` rows."""
    model = onnx.load(plain_file)
    for value in (model.graph.input[0], *model.graph.output):  # torch's exporter does not see all shapes
        for dim in value.type.tensor_type.shape.dim:
            assert dim.dim_value or dim.dim_param
    onnx.save(output_formats.end2end(NmsSettings("onnx", 300, 0.6, 0.001), side).attach(model), path)
    return path


@pytest.mark.parametrize(("side", "mask_loss"), [(0, 1e-9), (80, 0.02), (12, 0.15)])
def test_masks_in_boxes_lose_a_little_and_those_on_the_grid_nothing(known, plain_file, tmp_path, side, mask_loss):
    config = replace(CONFIG, save_json=True)
    expected = known.evaluate(config, out_dir=tmp_path)
    with open_runner(with_nms(plain_file, side, tmp_path / "a.onnx")) as runner:
        found = known.evaluate(config, runner, out_dir=tmp_path, name="given")
        row = make_row("ONNX", tmp_path / "a.onnx", found, config, runner.device, 1.0, runner)
    assert (found.task, found.ap) == (SEGMENT, pytest.approx(expected.ap, abs=1e-9))
    assert found.masks.ap == pytest.approx(expected.masks.ap, abs=mask_loss)
    assert found.mask_coco["ap50"] == pytest.approx(expected.mask_coco["ap50"], abs=max(mask_loss, 0.01))
    assert row.ap_with == "NMS in the file" + (f", masks {side}×{side}" if side else "")
    assert "segmentation" in json.loads((tmp_path / "given_predictions.json").read_text())[0]
    Report(command="", title="", data="", rows=[row]).save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").rows == [row]
