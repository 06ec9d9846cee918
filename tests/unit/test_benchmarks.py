"""benchmarks/: which steps run, what is refused, and what the tables say, without programs that compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from report_examples import make_row, resampled

from benchmarks import accuracy, placement, steps
from benchmarks.steps import RunStep, StepError, StepRunner
from utils.core.errors import InputError
from utils.reports.schema import AtThreshold

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import pathlib, sys
folder, *words = sys.argv[1:]
with open(pathlib.Path(folder) / "calls", "a") as calls:
    calls.write(" ".join(words) + chr(10))
(pathlib.Path(folder) / "begun").touch()
if "fail" in words:
    sys.exit("no such thing")
(pathlib.Path(folder) / "result").write_text("7")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout/program.py").write_text(PROGRAM)
    return tmp_path / "checkout"


def step(folder: Path, *words: str, name: str = "one") -> RunStep:
    resume = (folder / "begun", ["--resume"])
    return RunStep(name, ["program.py", folder, *words], folder / "result", lambda path: int(path.read_text()), resume)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


class TestRunner:
    def test_a_step_runs_once_and_again_only_where_its_output_is_gone(self, checkout, tmp_path):
        folder = tmp_path / "a"
        folder.mkdir()
        for _ in range(2):
            assert StepRunner(checkout, folder, {}).run(step(folder, "--a")) == 7
        assert calls(folder) == ["--a"]
        (folder / "result").unlink()
        assert StepRunner(checkout, folder, {}).run(step(folder, "--a")) == 7
        assert calls(folder) == ["--a", "--a --resume"]  # goes on with what the first call began
        known = json.loads((folder / steps.RESULTS).read_text())["steps"]["one"]
        assert (known["command"], known["result"]) == (["program.py", "a", "--a"], 7)  # no folder of this machine

    def test_a_step_that_fails_or_leaves_nothing_names_its_log_and_runs_again(self, checkout, tmp_path):
        with pytest.raises(StepError, match=r"exit code 1: no such thing; see .*logs/one-two\.log"):
            StepRunner(checkout, tmp_path, {}).run(step(tmp_path, "fail", name="one, two"))
        assert StepRunner(checkout, tmp_path, {}).run(step(tmp_path, name="one, two")) == 7
        with pytest.raises(StepError, match="left no nothing"):
            StepRunner(checkout, tmp_path, {}).run(RunStep("one", ["program.py", tmp_path], tmp_path / "nothing"))

    def test_results_of_something_else_are_refused(self, checkout, tmp_path):
        StepRunner(checkout, tmp_path, {"--weights": "1"}).run(step(tmp_path, "--a"))
        with pytest.raises(InputError, match="--weights"):
            StepRunner(checkout, tmp_path, {"--weights": "2"})
        with pytest.raises(InputError, match="--a"):
            StepRunner(checkout, tmp_path, {"--weights": "1"}).run(step(tmp_path, "--b"))


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        ("accuracy.py", ["--data", "none.yaml", "--weights", "a.pt"], "--data none.yaml"),
        ("accuracy.py", ["--data", "d.yaml"], "--networks"),
        ("accuracy.py", ["--data", "d.yaml", "--weights", "a.pt", "b/a.pt"], "--weights"),
        ("accuracy.py", ["--data", "d.yaml", "--weights", "a.pt", "--deploy", "QTA"], "--deploy QTA"),
        ("accuracy.py", ["--data", "d.yaml", "--weights", "a.pt", "--settings", "d.yaml"], "--settings d.yaml"),
        ("accuracy.py", ["--data", "d.yaml", "--weights", "a.pt"], "--checkout"),
        ("placement.py", ["a.yaml"], "--checkout"),
    ],
)
def test_mistakes_are_one_line(program, words, named, tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("a.pt", "b/a.pt"):
        (tmp_path / name).touch()
    (tmp_path / "d.yaml").write_text("names: [a]\n")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / program, *words], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, env={**os.environ, "YOLOV9_CHECKOUT": ""}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert named in done.stderr


def entry(**result: object) -> dict[str, object]:
    return {"command": [], "seconds": 1.0, "result": result}


TIMES = [
    ("a-fp16", 1, 2.0), ("a-int8-convs", 1, 4.0), ("a-int8", 1, 1.0), ("a-float", 8, 4.0), ("a-float", 1, 2.0),
    ("a-QAT", 1, 1.5),
]  # fmt: skip


def times(*names: str) -> dict[str, object]:
    rows = [
        {"model": model, "batch": batch, "ms": ms, "images_per_second": 1000 * batch / ms, "error": ""}
        for model, batch, ms in TIMES if model in names
    ]  # fmt: skip
    return {"measured_on": "a GPU", "rows": rows}


def at_threshold(found: int, *recall: float) -> AtThreshold:
    return AtThreshold(
        threshold=0.5, objects=100, found=found, precision=0.9, recall=found / 100, recall_resampled=resampled(*recall)
    )


def stored(stage: str, ap: float, *resamplings: float, **changes: object) -> dict[str, object]:
    row = make_row(stage, ap=ap, ap_resampled=resampled(*resamplings) if resamplings else "", **changes)
    return {"command": [], "seconds": 1.0, "result": row.model_dump(mode="json")}


def test_the_table_of_accuracy():
    content = {"steps": {
        "train": {"command": [], "seconds": 1.0, "result": None},
        "float": stored("float", 0.55, 0.5, 0.6, at=at_threshold(90, 0.89, 0.91)),
        "QAT, seed 57": stored("QAT", 0.57, 0.51, 0.63, agreement=0.96, at=at_threshold(80, 0.8, 0.8)),
        "QAT, seed 58": stored("QAT", 0.54, 0.49, 0.59),
        "times, engine": entry(**times("a-float", "a-QAT")),
        "times, ONNX": entry(measured_on="a CPU", rows=[{**times("a-float")["rows"][1], "ms": 90.0}]),
        "float engine": stored("engine", 0.54),
        "QAT engine": stored("engine", 0.56),
        "float ONNX": stored("ONNX", 0.55),
    }}  # fmt: skip
    lines = accuracy.ap_table({"a": content})
    assert lines[2:9] == [
        "| a | float | 0.5500 |  |  |  |  |  |  |",
        # 0.01 and 0.03: their standard deviation; 10 of 100 objects; 0.09 and 0.11: theirs
        "| a | QAT, seed 57 | 0.5700 | +0.0200 ± 0.0141 | 0.9600 | -0.1000 ± 0.0141 |  |  |  |",
        "| a | QAT, seed 58 | 0.5400 | -0.0100 ± 0.0000 |  |  |  |  |  |",
        "| a | float engine | 0.5400 | -0.0100 |  |  | 2.00 | 4.00 | 2,000 |",
        "| a | QAT engine | 0.5600 | +0.0100 |  |  | 1.50 |  |  |",
        "| a | float ONNX | 0.5500 | +0.0000 |  |  | 90.00 |  |  |",
        # √(0.00707² + 0.00045 / 2): the mean of two errors, and the variance of +0.02 and -0.01 over two seeds
        "| a | QAT, mean of 2 seeds | 0.5550 | +0.0050 ± 0.0166 |  |  |  |  |  |",
    ]
    assert any("a GPU" in line for line in lines)


def test_the_table_of_placements(tmp_path):
    layers = [
        {"kind": "compute", "precision": "INT8", "ms": 3.0}, {"kind": "compute", "precision": "FP16", "ms": 0.5},
        {"kind": "reformat", "precision": "", "ms": 0.5},
    ]  # fmt: skip
    (tmp_path / "a.layers.json").write_text(json.dumps(layers))
    found = placement.read_layers(tmp_path / "a.layers.json")
    results = {"times": times("a-fp16", "a-int8-convs", "a-int8"), "layers a-int8-b1": found}
    assert placement.rows_of("a", results) == [
        ["a", "1", "fp16", "2.000", "1.00", "500", "", ""],
        ["a", "1", "int8-convs", "4.000", "0.50", "250", "", ""],
        ["a", "1", "int8", "1.000", "2.00", "1,000", "1 of 2, 75%", "1, 12%"],
    ]
