"""The demo model with masks: its AP on the way to a file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from models.quantize.recipe import Recipe
from utils.reports.schema import Report


@pytest.fixture(scope="module")
def outlined(run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data.yaml of a set of 24 images for validation, with outlines."""
    folder = tmp_path_factory.mktemp("outlined")
    run("data/demo/make_digits.py", "--segments", folder / "set", "--train", 20, "--val", 24)
    return folder / "set/data.yaml"


def test_methods_of_calibration_are_compared_by_both(run, checkout, outlined, tmp_path):
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


def test_from_the_float_model_to_a_file_with_masks(run, checkout, outlined, tmp_path):
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
