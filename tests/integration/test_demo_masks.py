"""The demo model with masks: its size, the network that its training starts from, and its AP on the way to a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from utils import upstream
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
def run(start) -> Callable[..., None]:
    def call(*words: object) -> None:
        done = start(*words)
        assert done.returncode == 0, done.stderr

    return call


@pytest.fixture(scope="module")
def outlined(run: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data.yaml of a set of 24 images for validation, with outlines."""
    folder = tmp_path_factory.mktemp("outlined")
    run("data/demo/make_digits.py", "--segments", folder / "set", "--train", 20, "--val", 24)
    return folder / "set/data.yaml"


def test_from_the_float_model_to_a_file_with_masks(
    run: Callable[..., None], checkout: Path, outlined: Path, tmp_path: Path
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
