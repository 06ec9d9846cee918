"""The programs on a segmentation network: qat.py as users start it, on a small network with random weights."""

import json

import pytest
import torch
from known_images import SQUARE
from known_masks import write_outlined_set
from random_networks import save_float, tiny_with

from utils import upstream
from utils.reports.schema import Report

WORDS = ("--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with data.yaml of 16 images with outlines, and seg.pt, whose masks are whole boxes."""
    folder = tmp_path_factory.mktemp("given")
    names = [f"class {index}" for index in range(10)]
    write_outlined_set(folder, 16, SQUARE, names)
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


def test_eval_measures_boxes_and_masks(run, given, tmp_path):
    words = ["qat.py", "eval", "--weights", given / "seg.pt", "--data", given / "data.yaml", *WORDS]
    out = run(*words, "--project", tmp_path, "--save-json")
    (row,) = Report.load(tmp_path / "exp/report.json").rows
    assert row.mask_ap is not None
    assert "Mask(P" in out
    results = json.loads((tmp_path / "exp/seg_predictions.json").read_text())
    assert all("segmentation" in one for one in results)


def test_quantize_names_its_files_after_both_and_is_resumed(run, given, tmp_path):
    words = ["--weights", given / "seg.pt", "--data", given / "data.yaml", *WORDS, "--project", tmp_path]
    run("qat.py", "quantize", *words, "--calib-images", 4, "--epochs", 1, "--iters", 1, "--eval-epochs")
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
    run("qat.py", "eval", "--weights", weights / name, "--data", given / "data.yaml", *WORDS,
        "--project", tmp_path / "eval")  # fmt: skip
    assert Report.load(tmp_path / "eval/exp/report.json").rows[0].mask_ap == pytest.approx(entry.mask_ap, abs=1e-6)


def test_sensitive_goes_by_the_mean_of_both(run, given, tmp_path):
    words = ["--weights", given / "seg.pt", "--data", given / "data.yaml", *WORDS, "--project", tmp_path]
    run("qat.py", "sensitive", *words, "--calib-images", 4, "--num-image", 8)
    summary = json.loads((tmp_path / "exp/summary-sensitive-analysis.json").read_text())
    assert "every AP here is the mean of box and mask AP" in summary["notes"]
    assert summary["rows"]
