"""val_trt.py on ONNX files whose answers are known."""

import json
import re
from dataclasses import replace

import pytest
from known_images import SQUARE, KnowingModel, export_answers, write_set

from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.loop import evaluate
from utils.jobs.evaluate import make_config
from utils.jobs.open import open_runner
from utils.jobs.options import ValOptions
from utils.reports.schema import Report
from utils.runners.pytorch import TorchRunner

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
def program(known, tmp_path, start):
    """Run the program on a file; returns (exit code, lines of standard output, those of standard error)."""
    words = ["--project", tmp_path, "--workers", 0, "--device", "cpu"]

    def run(*more, file="a.onnx", data="data.yaml"):
        return start("val_trt.py", "--engine-file", known[0] / file, "--data", known[0] / data, *words, *more)

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
    for words in (f"{expected.ap:.3g}", "cat"):  # a row for each class when there are few
        assert words in "\n".join(out)
    assert out[-1] == f"next: scripts/generate_trt_engine.sh {folder / 'a.onnx'}"


def test_files_that_are_asked_for(program, tmp_path):
    code, out, _ = program("--imgsz", 64, "--save-txt", "--save-conf", "--save-json", "--max-det", 5, "--verbose")
    assert code == 0
    lines = [line.split() for file in (tmp_path / "exp/labels").iterdir() for line in file.read_text().splitlines()]
    assert {len(line) for line in lines} == {6}
    assert max(len(file.read_text().splitlines()) for file in (tmp_path / "exp/labels").iterdir()) <= 5
    predictions = json.loads((tmp_path / "exp/a_predictions.json").read_text())
    assert len(predictions) == len(lines)
    out = "\n".join(out)
    report = Report.load(tmp_path / "exp/report.json")
    assert any("pycocotools: AP" in note for note in report.notes)
    printed = {size: re.search(rf"Average Precision .*area= *{size} .*= ([0-9.]+|no objects)\n", out)[1]
               for size in ("small", "medium", "large")}  # fmt: skip
    present = {size: pytest.approx(float(ap), abs=6e-4) for size, ap in printed.items() if ap != "no objects"}
    assert report.rows[0].ap_by_size == present
    assert present


@pytest.mark.parametrize(
    ("file", "words", "size", "batch"),
    [("a.onnx", ("--imgsz", 64, 96), (64, 96), 32), ("fixed.onnx", (), (64, 64), 16)],
)
def test_a_rectangle_and_a_fixed_file_which_decides_size_and_batch(known, program, tmp_path, file, words, size, batch):
    assert program(*words, file=file)[0] == 0
    with open_runner(known[0] / file) as runner:
        config = EvalConfig(imgsz=size, batch_size=batch, workers=0)
        expected = evaluate(runner, load_data(known[0] / "data.yaml"), config)
    row = Report.load(tmp_path / "exp/report.json").rows[0]
    assert (row.ap, row.input_size) == (pytest.approx(expected.ap, abs=1e-6), f"{size[0]}x{size[1]}")
    assert f"batch {batch}, {row.input_size}" in row.measured_on
    assert row.ap > (0.3 if file == "fixed.onnx" else 0)


def test_other_splits_and_options_and_coco_yaml_which_writes_json_by_itself(known, program, tmp_path):
    """As with upstream's val.py."""
    text = (known[0] / "data.yaml").read_text()
    (known[0] / "coco.yaml").write_text(text.replace('"val":', '"train": "images/val", "val":'))
    options = ("--imgsz", 64, "--task", "train", "--single-cls", "--rect", "--limit", 4)
    assert program(*options, data="coco.yaml")[0] == 0
    assert (tmp_path / "exp/a_predictions.json").is_file()
    bare = replace(load_data(known[0] / "coco.yaml"), root=tmp_path)
    assert not make_config(ValOptions(data="coco.yaml", engine_file="a.onnx"), bare).save_json, "labels are needed then"
    code, _, err = program("--imgsz", 64, "--task", "test", data="coco.yaml")
    assert (code, err[-1].endswith("has no 'test:' entry; it has train, val")) == (2, True)
    assert Report.load(tmp_path / "exp/report.json").data_splits == ["train", "val"]


def test_the_report_of_a_set_of_test_images_alone_says_so(known, program, tmp_path):
    """The commands that it offers are those of `test_advice.py`."""
    text = (known[0] / "data.yaml").read_text()
    (known[0] / "tests.yaml").write_text(text.replace('"val":', '"test":'))
    assert program("--imgsz", 64, "--task", "test", "--limit", 4, data="tests.yaml")[0] == 0
    assert Report.load(tmp_path / "exp/report.json").data_splits == ["test"]
