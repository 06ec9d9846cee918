"""The demo model with masks: its size, the network that its training starts from, and its AP on the way to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import val_trt
from models.quantize.recipe import Recipe
from utils import upstream
from utils.jobs.open import load_network
from utils.onnx_graph import output_formats
from utils.onnx_graph.export import ExportConfig, export_forms
from utils.onnx_graph.output_formats import NmsSettings
from utils.reports.schema import Report


@pytest.fixture
def train_masks(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    """data/demo/train_masks.py, which is no package member."""
    monkeypatch.setattr(sys, "path", [str(checkout / "data" / "demo"), *sys.path])
    sys.modules.pop("train_masks", None)
    import train_masks

    return train_masks


def test_training_starts_with_the_boxes_and_classes_of_the_detector(train_masks, checkout: Path, tmp_path: Path):
    demo = checkout / "data" / "demo"
    train_masks.write_start(demo / "gelan-digits.pt", demo / "gelan-digits-seg.yaml", tmp_path / "start.pt")
    found, detector = (upstream.load_float(path) for path in (tmp_path / "start.pt", demo / "gelan-digits.pt"))
    assert sum(parameter.numel() for parameter in found.model.parameters()) == 900_494
    assert found.names == detector.names
    images = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows, (_, coefficients, prototypes) = found.model(images)
        torch.testing.assert_close(rows[:, : 4 + found.nc], detector.model(images)[0], rtol=0, atol=0)
    assert coefficients.shape[1] == prototypes.shape[1] == 32
    assert prototypes.shape[2:] == (24, 16)
    assert (tmp_path / "start.pt").stat().st_size <= 2_300_000


@pytest.fixture(scope="module")
def outlined(run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data.yaml of a set of 24 images for validation, with outlines."""
    folder = tmp_path_factory.mktemp("outlined")
    run("data/demo/make_digits.py", "--segments", folder / "set", "--train", 20, "--val", 24)
    return folder / "set/data.yaml"


def test_methods_of_calibration_are_compared_by_both(
    run: Callable[..., str], checkout: Path, outlined: Path, tmp_path: Path
):
    words = ("--weights", checkout / "data/demo/gelan-digits-seg.pt", "--imgsz", 160, "--batch-size", 4)
    where = ("--data", outlined, "--device", "cpu", "--workers", 0, "--project", tmp_path)
    run("qat.py", "calibrate", *words, *where, "--calib-images", 4, "--num-image", 4)
    found = json.loads((tmp_path / "exp/calibration.json").read_text())
    assert found["measure"] == "the mean of box and mask AP"
    assert len(found["methods"]) == 5
    ap, agreement, equal = found["methods"], found["agreement"], found["equal"]
    assert max(ap, key=ap.get) == equal[0]  # AP does not tell the others from it, so that agreement decides
    assert (found["name"], found["chosen_ap"]) == (max(equal, key=agreement.get), ap[found["name"]])
    assert min(found["methods"].values()) > 0.3
    assert Recipe.from_file(tmp_path / "exp/recipe.yaml").calibration.method == found["chosen"]["method"]


def test_from_the_float_model_to_a_file_with_masks(
    run: Callable[..., str], checkout: Path, outlined: Path, tmp_path: Path
):
    """24 images: AP is that of a few digits, and INT8 loses little of it on the same ones."""
    where = ("--data", outlined, "--device", "cpu", "--workers", 0)
    words = ("--weights", checkout / "data/demo/gelan-digits-seg.pt", "--imgsz", 320, "--batch-size", 8)
    run("qat.py", "quantize", *words, *where, "--calib-images", 16, "--ptq-only", "--project", tmp_path)
    before, row = Report.load(tmp_path / "exp/report.json").rows
    assert before.ap > 0.7
    assert before.mask_ap > 0.45
    assert (row.ap, row.mask_ap) == pytest.approx((before.ap, before.mask_ap), abs=0.04)
    (quantized,) = (tmp_path / "exp/weights").glob("ptq_ap_*.pt")
    file = tmp_path / "seg.onnx"
    run("export_qat.py", "--weights", quantized, "--imgsz", 320, "--dynamic", "batch", "--device", "cpu",
        "--output", file)  # fmt: skip
    run("val_trt.py", "--engine-file", file, *where, "--project", tmp_path / "val")
    (report,) = (tmp_path / "val").glob("*/report.json")
    found = Report.load(report).rows[-1]
    assert (found.ap, found.mask_ap) == pytest.approx((row.ap, row.mask_ap), abs=0.01)


def test_nms_in_the_file_scores_as_outside_of_it(checkout: Path, outlined: Path, tmp_path: Path):
    """At the loop's thresholds and with masks on the grid; in the boxes' frames they lose a little."""
    network = load_network(checkout / "data/demo/gelan-digits-seg.pt", torch.device("cpu"))
    nms = NmsSettings("onnx", 300, 0.6, 0.001)
    forms = {"plain": output_formats.plain(), "grid": output_formats.end2end(nms, 0),
             "boxes": output_formats.end2end(nms)}  # fmt: skip
    files = {tmp_path / f"{name}.onnx": form for name, form in forms.items()}
    export_forms(network.model, ExportConfig((320, 320), 4), files, network.metadata())
    rows = []
    for file in files:
        words = ["--engine-file", file, "--data", outlined, "--device", "cpu", "--workers", 0, "--project", tmp_path]
        assert val_trt.main([str(word) for word in words]) == 0
        rows.append(Report.load(max(tmp_path.glob("exp*/report.json"), key=lambda path: path.stat().st_mtime)).rows[0])
    plain, grid, boxes = rows
    assert plain.mask_ap > 0.45
    assert (grid.ap, grid.mask_ap) == pytest.approx((plain.ap, plain.mask_ap), abs=1e-6)
    assert boxes.ap == pytest.approx(plain.ap, abs=1e-6)
    assert boxes.mask_ap == pytest.approx(plain.mask_ap, abs=0.03)
    assert boxes.mask_ap != plain.mask_ap
    assert [row.ap_with for row in rows] == ["", "NMS in the file", "NMS in the file, masks 160×160"]
