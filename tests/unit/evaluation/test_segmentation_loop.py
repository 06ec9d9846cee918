"""The evaluation loop on a segmentation network whose answers are known; what it writes, and what it refuses.

That AP is upstream's is tested in tests/integration/test_evaluation.py.
"""

import json
from dataclasses import replace

import known_sets
import numpy as np
import onnx
import pytest
import torch
from known_images import KnowingModel, numbers
from known_masks import export_masks
from known_sets import NAMES, Known, Shell
from pycocotools import mask as coco_mask

from utils.core.errors import DataError, InputError
from utils.core.score import Score
from utils.core.tasks import SEGMENT, task_of_outputs
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

CONFIG = replace(known_sets.CONFIG, imgsz=192)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("known"), count=24, masks=True, imgsz=192)


@pytest.fixture(scope="module")
def expected(known):
    return known.evaluate(CONFIG)


def test_boxes_score_as_those_of_a_detector_and_the_batch_does_not_matter(known, expected):
    """The detector is evaluated with NMS at the same IoU."""
    detector = TorchRunner(KnowingModel(known.samples, NAMES, 192), "cpu")
    plain = known.evaluate(replace(CONFIG, iou_thres=0.6), detector)
    assert numbers(expected) == pytest.approx(numbers(plain), abs=1e-9)
    assert (plain.masks, plain.statistics.has_masks) == (None, False)
    assert expected.task is SEGMENT
    assert 0.2 < expected.masks.ap < 0.9
    assert expected.score == Score(expected.ap, expected.masks.ap)
    assert known.evaluate(replace(CONFIG, iou_thres=0.7)).ap != expected.ap
    for size in (1, 24):
        found = known.evaluate(replace(CONFIG, batch_size=size)).masks
        assert numbers(found) == pytest.approx(numbers(expected.masks), abs=1e-9)


def test_the_table_has_boxes_and_masks_of_each_class(expected):
    lines = [line.split() for line in result_table(expected, per_class=True)]
    assert lines[0][3:] == ["Box(P", "R", "mAP50", "mAP50-95)", "Mask(P", "R", "mAP50", "mAP50-95)"]
    assert [line[0] for line in lines[1:5]] == ["all", *NAMES]
    names = ("precision", "recall", "ap50", "ap")
    scores = [getattr(part, name) for part in (expected, expected.masks) for name in names]
    assert [float(word) for word in lines[1][3:]] == pytest.approx(scores, abs=1e-3)
    assert np.mean([row.masks.ap for row in expected.per_class]) == pytest.approx(expected.masks.ap)


def test_coco_json_holds_the_masks_and_pycocotools_agrees(known, tmp_path, monkeypatch):
    """Masks on the grid are nearly those in the images' pixels; pycocotools compares the latter."""
    from pycocotools.coco import COCO

    load, seen = COCO.loadRes, []
    monkeypatch.setattr(COCO, "loadRes", lambda self, rows: (seen.append(load(self, rows)), seen[-1])[1])
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
    # areas of masks are not those of boxes, from which pycocotools takes them where results have some
    boxes, masks = (one.dataset["annotations"] for one in seen)
    assert all(row["area"] == pytest.approx(row["bbox"][2] * row["bbox"][3]) for row in boxes)
    assert all(row["area"] == coco_mask.area(row["segmentation"]) for row in masks)


def test_a_row_of_a_report_has_masks_with_a_standard_error(known, expected):
    data = known.folder / "data.yaml"
    row = make_row("float", data, expected, CONFIG, torch.device("cpu"), 1.0)
    assert (row.mask_ap, row.mask_ap50) == (expected.masks.ap, expected.masks.ap50)
    assert (row.mask_precision, row.mask_recall) == (expected.masks.precision, expected.masks.recall)
    assert row.ap_with == ""
    assert row.mask_ap_resampled.error > 0
    assert row.mask_ap_resampled != row.ap_resampled
    both = expected.statistics.score_resampled()
    assert both.ap[0] == pytest.approx((row.ap_resampled.ap[0] + row.mask_ap_resampled.ap[0]) / 2, abs=1e-6)
    other = replace(CONFIG, iou_thres=0.7)
    assert make_row("float", data, expected, other, torch.device("cpu"), 1.0).ap_with == "NMS IoU 0.7"


def test_images_without_labels_and_detections(known, tmp_path):
    assert numbers(known.evaluate(replace(CONFIG, conf_thres=1.0)).masks) == (0, 0, 0, 0)
    empty = Known(tmp_path, count=4, masks=True)
    for file in (tmp_path / "labels/val").iterdir():
        file.write_text("")
    result = empty.evaluate()
    assert (result.masks.ap, result.instances) == (0, 0)


# ONNX Runtime


@pytest.mark.parametrize(("batch", "task"), [(None, "segment"), (5, "segment"), (None, "")])
def test_onnx_gives_the_same_as_pytorch(known, expected, tmp_path, batch, task):
    """24 images in batches of 5: the last one is filled up. Without metadata the second output tells the task."""
    with open_runner(export_masks(known.model, tmp_path / "a.onnx", batch, task)) as runner:
        result = known.evaluate(CONFIG, runner)
    assert numbers(result.masks) == pytest.approx(numbers(expected.masks), abs=1e-6)
    assert result.ap == pytest.approx(expected.ap, abs=1e-6)


def test_val_trt_reports_masks(known, expected, plain_file, tmp_path):
    options = ValOptions(engine_file=str(plain_file), data=str(known.folder / "data.yaml"), workers=0, device="cpu",
                         save_json=True, project=str(tmp_path))  # fmt: skip
    report = evaluate_file(options)
    (row,) = report.rows
    assert row.mask_ap == pytest.approx(expected.masks.ap, abs=1e-6)
    assert row.ap_with == ""
    assert [note.split(":")[0] for note in report.notes] == ["pycocotools", "pycocotools on masks"]
    assert "mask AP" in terminal_table(report)
    assert Report.load(tmp_path / "exp/report.json").rows == [row]


# outputs of other names and shapes


REFUSED = {  # change of the outputs → what the message names
    "fewer prototypes than coefficients": (lambda found: found[:, :30], "output0"),
    "prototypes of one image": (lambda found: found[:1], "output0"),
    "more prototypes than rows": (lambda found: found.repeat(1, 2, 1, 1), "output0"),
    "another grid": (lambda found: torch.nn.functional.avg_pool2d(found, 2), "prototypes of 24x24 .* input of 192x192"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_outputs_that_do_not_fit_each_other(known, kind):
    specs = tuple(replace(spec, shape=(None,) * len(spec.shape)) for spec in TorchRunner(known.model, "cpu").outputs)
    change, named = REFUSED[kind]
    with pytest.raises(InputError, match=named):
        known.evaluate(CONFIG, Shell(known, None, specs, lambda found: {**found, "output1": change(found["output1"])}))


def test_outputs_in_another_order_without_metadata_and_without_prototypes(known, expected):
    """As engines may list them: prototypes first, and names of their own."""
    first, second = TorchRunner(known.model, "cpu").outputs
    outputs = (replace(second, name="protos"), replace(first, name="rows"))
    runner = Shell(known, None, outputs, lambda found: {"protos": found["output1"], "rows": found["output0"]})
    assert task_of_outputs({}, {spec.name: len(spec.shape) for spec in outputs}) is SEGMENT
    assert numbers(known.evaluate(CONFIG, runner).masks) == pytest.approx(numbers(expected.masks), abs=1e-9)
    with pytest.raises(InputError, match="output1"):
        known.evaluate(CONFIG, Shell(known, None, (TensorSpec("output0", (None, 39, None), "float32"),)))


@pytest.mark.parametrize("wrong", [None, [["a"] * 6], {"counts": [1]}])
def test_annotations_without_a_segmentation(tmp_path, wrong):
    known = Known(tmp_path, count=4, masks=True)
    file = tmp_path / "annotations/instances_val.json"
    content = json.loads(file.read_text())
    content["annotations"][1]["segmentation"] = wrong
    content["annotations"].append({**content["annotations"][0], "image_id": 99})  # of an image that is not listed
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="instances_val"):
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    assert not (tmp_path / "model_predictions.json").exists()


# NMS inside the network


@pytest.fixture(scope="module")
def plain_file(known):
    return export_masks(known.model, known.folder / "plain.onnx", 8)


@pytest.mark.parametrize(("side", "mask_loss"), [(0, 1e-9), (80, 0.02), (12, 0.15)])
def test_masks_in_boxes_lose_a_little_and_those_on_the_grid_nothing(known, plain_file, tmp_path, side, mask_loss):
    """NMS inside, at the thresholds of the loop, and masks of `side` rows."""
    config, model = replace(CONFIG, save_json=True), onnx.load(plain_file)
    for value in (model.graph.input[0], *model.graph.output):  # torch's exporter does not see all shapes
        assert all(dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim)
    onnx.save(output_formats.end2end(NmsSettings("onnx", 300, 0.6, 0.001), side).attach(model), tmp_path / "a.onnx")
    expected = known.evaluate(config, out_dir=tmp_path)
    with open_runner(tmp_path / "a.onnx") as runner:
        found = known.evaluate(config, runner, out_dir=tmp_path, name="given")
        row = make_row("ONNX", tmp_path / "a.onnx", found, config, runner.device, 1.0, runner)
    assert (found.task, found.ap) == (SEGMENT, pytest.approx(expected.ap, abs=1e-9))
    assert found.masks.ap == pytest.approx(expected.masks.ap, abs=mask_loss)
    assert found.mask_coco["ap50"] == pytest.approx(expected.mask_coco["ap50"], abs=max(mask_loss, 0.01))
    assert row.ap_with == "NMS in the file" + (f", masks {side}×{side}" if side else "")
    assert "segmentation" in json.loads((tmp_path / "given_predictions.json").read_text())[0]
