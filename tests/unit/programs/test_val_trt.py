"""val_trt.py on ONNX files whose answers are known."""

import json
import re
from pathlib import Path

import pytest
from known_images import SQUARE, KnowingModel, export_answers, write_set

import val_trt
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import EvalConfig, evaluate
from utils.jobs.open import open_runner
from utils.reports.schema import Report
from utils.runners.pytorch import TorchRunner

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(folder with data.yaml, a.onnx for any size, fixed.onnx for 64×64 in batches of 16; the network)."""
    folder = tmp_path_factory.mktemp("known")
    model = KnowingModel(write_set(folder, 20, SQUARE), NAMES, 64)
    export_answers(model, folder / "a.onnx")
    export_answers(model, folder / "fixed.onnx", 16, 64)
    return folder, model


@pytest.fixture
def program(known, tmp_path, capsys):
    """Run the program on a file; returns (exit code, standard output, standard error)."""

    def run(*words, file="a.onnx", data="data.yaml"):
        folder, _ = known
        paths = ["--engine-file", str(folder / file), "--data", str(folder / data), "--project", str(tmp_path)]
        argv = [*paths, "--workers", "0", "--device", "cpu", *map(str, words)]
        code = val_trt.main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_report_and_a_table(known, program, tmp_path):
    folder, model = known
    (folder / "a.onnx.json").write_text("somebody's own, and no note of an engine")
    code, out, _ = program("--imgsz", 64, "--batch-size", 6)
    assert code == 0
    config = EvalConfig(imgsz=64, workers=0)
    expected = evaluate(TorchRunner(model, "cpu"), load_data(folder / "data.yaml"), config, progress=False)
    report = Report.load(tmp_path / "exp/report.json")
    row = report.rows[0]
    assert (row.stage, row.file, row.device) == ("float", str(folder / "a.onnx"), "CPU")
    scores = (expected.ap, expected.ap50, expected.precision, expected.recall)
    assert (row.ap, row.ap50, row.precision, row.recall) == pytest.approx(scores, abs=1e-6)
    assert row.size_bytes == (folder / "a.onnx").stat().st_size
    assert "ONNX Runtime" in row.measured_on
    assert "batch 6, 64x64" in row.measured_on
    assert row.ms_per_image > 0
    assert f"{expected.ap:.3g}" in out
    assert "cat" in out  # a row for each class when there are few
    assert out.splitlines()[-1] == f"next: scripts/generate_trt_engine.sh {folder / 'a.onnx'}"


def test_a_fixed_file_decides_size_and_batch(program, tmp_path):
    code, out, _ = program(file="fixed.onnx")
    assert code == 0
    assert "batch 16, 64x64" in out
    assert Report.load(tmp_path / "exp/report.json").rows[0].ap > 0.3


def test_files_that_are_asked_for(program, tmp_path):
    code, out, _ = program("--imgsz", 64, "--save-txt", "--save-conf", "--save-json", "--max-det", 5, "--verbose")
    assert code == 0
    lines = [line.split() for file in (tmp_path / "exp/labels").iterdir() for line in file.read_text().splitlines()]
    assert {len(line) for line in lines} == {6}
    assert max(len(file.read_text().splitlines()) for file in (tmp_path / "exp/labels").iterdir()) <= 5
    predictions = json.loads((tmp_path / "exp/a_predictions.json").read_text())
    assert len(predictions) == len(lines)
    assert "Average Precision" in out
    report = Report.load(tmp_path / "exp/report.json")
    assert any("pycocotools: AP" in note for note in report.notes)
    printed = {size: re.search(rf"Average Precision .*area= *{size} .*= (-?[0-9.]+)", out)[1]
               for size in ("small", "medium", "large")}  # fmt: skip
    present = {size: pytest.approx(float(ap), abs=6e-4) for size, ap in printed.items() if float(ap) >= 0}
    assert report.rows[0].ap_by_size == present
    assert present


def test_a_rectangle(known, program, tmp_path):
    assert program("--imgsz", 64, 96)[0] == 0
    with open_runner(known[0] / "a.onnx") as runner:
        expected = evaluate(runner, load_data(known[0] / "data.yaml"), EvalConfig(imgsz=(64, 96), workers=0))
    row = Report.load(tmp_path / "exp/report.json").rows[0]
    assert (row.ap, row.input_size) == (pytest.approx(expected.ap, abs=1e-6), "64x96")


def test_other_splits_and_options(program):
    assert program("--imgsz", 64, "--task", "train", "--single-cls", "--rect", "--limit", 4)[0] == 0
    code, _, err = program("--imgsz", 64, "--task", "test")
    assert (code, err.strip().endswith("has no 'test:' entry; it has train, val")) == (2, True)


def test_coco_yaml_writes_json_by_itself(known, program, tmp_path):
    """As upstream's val.py does."""
    folder, _ = known
    (folder / "coco.yaml").write_text((folder / "data.yaml").read_text())
    assert program("--imgsz", 64, "--limit", 2, data="coco.yaml")[0] == 0
    assert (tmp_path / "exp/a_predictions.json").is_file()
