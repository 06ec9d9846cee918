"""The evaluation loop on a network whose answers are known, in PyTorch and in ONNX Runtime, against pycocotools."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from known_images import SQUARE, damaged_png, export_answers, numbers
from known_sets import CONFIG, NAMES, Known
from torch import nn

from utils.core.errors import DataError
from utils.evaluation.loop import evaluate
from utils.evaluation.results import result_table
from utils.jobs.evaluate import Measurer
from utils.jobs.open import open_runner
from utils.reports.schema import Report
from utils.reports.tables import terminal_table


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


def test_result_rows_and_table(mixed):
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


def test_single_class_ignores_classes(mixed, tmp_path):
    result = mixed.evaluate(replace(CONFIG, single_cls=True, save_json=True), out_dir=tmp_path)
    assert [row.name for row in result.per_class] == ["object"]
    assert result.ap > mixed.evaluate().ap  # wrong classes no longer count
    assert result.ap == pytest.approx(result.coco["ap"], abs=0.005)


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
    assert f"the network PTQ gives {mark}" in caplog.text
    assert any(mark in line for line in result_table(result, per_class=False))
    assert [row.ap_with for row in report.rows] == ["", mark]
    lines = terminal_table(report).splitlines()
    assert " - " in next(line for line in lines if line.startswith("PTQ"))
    assert any(mark in line for line in lines if line.startswith("["))
