"""The programs on segmentation networks, as users start them: a small one with random weights, and the demo model."""

import json

import pytest
import torch
from known_images import SQUARE
from known_masks import write_outlined_set
from random_networks import save_float, tiny_with

from models.quantize.recipe import Recipe
from utils import upstream
from utils.reports.schema import Report

WORDS = ("--force", "--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0")  # --force: AP 0


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with data.yaml of 16 images with outlines, and seg.pt, whose masks are whole boxes."""
    folder = tmp_path_factory.mktemp("given")
    names = [f"class {index}" for index in range(10)]
    write_outlined_set(folder, 16, SQUARE, names, splits=("train", "val"))
    torch.manual_seed(0)
    model = upstream.build_model(tiny_with("DSegment"))
    head = model.model[-1]
    with torch.no_grad():
        head.proto.bn.bias.fill_(2.0)
        for branch in head.cv4:
            branch[-1].bias.fill_(0.5)
    model.names = dict(enumerate(names))
    save_float(folder / "seg.pt", model)
    return folder


def test_quantize_names_its_files_after_both_and_is_resumed(run, given, tmp_path):
    words = ["--weights", given / "seg.pt", "--data", given / "data.yaml", *WORDS, "--project", tmp_path]
    training = ("--epochs", 1, "--iters", 1, "--eval-epochs", "--keep-epochs")
    run("qat.py", "quantize", *words, "--calib-images", 4, *training)
    report = Report.load(tmp_path / "exp/report.json")
    assert [row.stage for row in report.rows] in (["float", "PTQ", "QAT"], ["float", "PTQ", "best (PTQ)"])
    assert len(report.samples) == 4
    assert all(box.outline for sample in report.samples for box in sample.truth)
    ptq = report.rows[1]
    weights = tmp_path / "exp/weights"
    assert (weights / f"ptq_ap_{ptq.ap:.4f}_mask_{ptq.mask_ap:.4f}_seg.pt").is_file()
    (entry,) = report.history
    name = f"qat_ep_0_ap_{entry.ap:.4f}_mask_{entry.mask_ap:.4f}_seg.pt"
    assert (weights / name).is_file()
    assert "the run is finished" in run("qat.py", "quantize", "--resume", tmp_path / "exp")
    words = ["--weights", weights / name, *words[2:-1], tmp_path / "eval", "--save-json"]
    assert "Mask(P" in run("qat.py", "eval", *words)
    assert Report.load(tmp_path / "eval/exp/report.json").rows[0].mask_ap == pytest.approx(entry.mask_ap, abs=1e-6)
    (file,) = (tmp_path / "eval/exp").glob("*_predictions.json")
    assert all("segmentation" in one for one in json.loads(file.read_text()))


def test_sensitive_goes_by_the_mean_of_both(run, given, tmp_path):
    words = ["--weights", given / "seg.pt", "--data", given / "data.yaml", *WORDS, "--project", tmp_path]
    run("qat.py", "sensitive", *words, "--calib-images", 4, "--num-image", 8)
    summary = json.loads((tmp_path / "exp/summary-sensitive-analysis.json").read_text())
    assert "every AP here is the mean of box and mask AP" in summary["notes"]
    assert summary["rows"]


@pytest.fixture(scope="module")
def outlined(run, tmp_path_factory):
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
    assert found["agreement"].keys() == found["methods"].keys()
    assert found["chosen_ap"] == found["methods"][found["name"]]
    assert found["errors"].keys() == found["methods"].keys() - {found["auto"]}
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
