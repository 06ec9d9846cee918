"""benchmarks/: which steps run, what is refused, what tables say; without programs that compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from decoding_graph import head_graph
from report_examples import example_row, resampled

from benchmarks import accuracy, peers, placement, video
from benchmarks.steps import Setup
from utils.core.errors import InputError
from utils.jobs.pipeline.steps import RunStep, StepError
from utils.reports.schema import AtThreshold, Report

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import pathlib, sys
folder, *words = sys.argv[1:]
with open(pathlib.Path(folder) / "calls", "a") as calls:
    calls.write(" ".join(words) + chr(10))
(pathlib.Path(folder) / "state").touch()
if "fail" in words:
    sys.exit("no such thing")
(pathlib.Path(folder) / "result").write_text("7")
"""


@pytest.fixture
def run_step(tmp_path):
    """Runs a step in a folder of its own, with a program that notes its words."""
    (tmp_path / "program.py").write_text(PROGRAM)
    setup = Setup(tmp_path, "", "weak", [], [])

    def run(*words: str, output: str = "result") -> Path:
        resume = (tmp_path / "state", ["--resume"])
        setup.run(RunStep("one", ["program.py", tmp_path, *words], tmp_path / output, resume), tmp_path)
        return tmp_path / output

    return run


def test_a_step_runs_once_and_again_only_where_its_output_is_gone(run_step, tmp_path):
    assert run_step("--a") == run_step("--a") == tmp_path / "result"
    assert (tmp_path / "calls").read_text() == "--a\n"
    (tmp_path / "result").unlink()
    run_step("--a")
    assert (tmp_path / "calls").read_text() == "--a\n--a --resume\n"  # goes on with what the first call began
    with pytest.raises(InputError, match=r"one in .* --a; choose another"):
        run_step("--b")


def test_a_step_that_fails_or_leaves_nothing_names_its_log_and_runs_again(run_step, tmp_path):
    with pytest.raises(StepError, match=r"exit code 1; see .*logs/one\.log"):
        run_step("fail")
    assert "no such thing" in (tmp_path / "logs/one.log").read_text()
    assert run_step().read_text() == "7"
    with pytest.raises(StepError, match="left no nothing"):
        run_step(output="nothing")


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        ("accuracy.py", "--data a.yaml --weights a.yaml --deploy QTA", "--deploy QTA"),
        ("placement.py", "b", "--checkout"),
        ("cpu.py", "--float a.onnx --int8 b.onnx --data c.yaml --output o.json", "a.onnx does not exist"),
        ("cpu.py", "--float a.onnx --int8 b.onnx --data c.yaml --output o.json --peers ncnn", "--peers ncnn"),
        ("video.py", "a.onnx --images . --checkout none --output o.json", "--checkout"),
    ],
)
def test_mistakes_are_one_line(program, words, named, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / program, *words.split()], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, env={**os.environ, "YOLOV9_CHECKOUT": ""}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n"), named in done.stderr) == (2, 1, True), done.stderr


def test_labels_of_two_runs_are_compared():
    first = {"a_1.txt": "3 0.5 0.5 0.25 0.5 0.9\n1 0.1 0.1 0.1 0.1 0.5\n", "a_2.txt": "3 0.5 0.5 0.25 0.5 0.9\n"}
    assert video.compare_labels(dict(first), first) == {"files": 2, "differing": 0, "largest": 0.0}
    moved = first | {"a_1.txt": first["a_1.txt"].replace("0.25", "0.26")}
    assert video.compare_labels(moved, first) == {"files": 2, "differing": 1, "largest": pytest.approx(0.01)}
    for other in (first["a_2.txt"].replace("3", "4"), first["a_1.txt"]):
        assert video.compare_labels(first | {"a_2.txt": other}, first)["largest"] is None
    assert video.compare_labels({"a_1.txt": first["a_1.txt"]}, first)["differing"] == 1


TIMES = {
    "a-fp16": {1: 2.0}, "a-int8-convs": {1: 4.0}, "a-int8": {1: 1.0}, "a-float": {8: 4.0, 1: 2.0}, "a-QAT": {1: 1.5},
}  # fmt: skip


def write_times(path: Path, *names: str, device: str = "a GPU", **changes: float) -> None:
    rows = [
        {"model": name, "batch": batch, "figures": {"latency": {"median": changes.get("ms", ms)}},
         "images_per_second": 1000 * batch / ms, "error": ""}
        for name in names for batch, ms in TIMES[name].items()
    ]  # fmt: skip
    content = {"rows": rows, "device": {"Selected Device": device}, "software": "TensorRT", "date": "today"}
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def test_the_table_of_accuracy(tmp_path):
    found = AtThreshold(threshold=0.5, objects=100, found=90, precision=0.9, recall=0.9,
                        recall_resampled=resampled(0.89, 0.91))  # fmt: skip
    fewer = found.model_copy(update={"found": 80, "recall": 0.8, "recall_resampled": resampled(0.8, 0.8)})
    states = {
        "float": example_row(ap=0.55, ap_resampled=resampled(0.5, 0.6), at_threshold=found, ap_by_size={"small": 0.25}),
        "QAT-seed-57": example_row("QAT", ap=0.57, ap_resampled=resampled(0.51, 0.63), agreement=0.96,
                                   at_threshold=fewer),
        "QAT-seed-58": example_row("QAT", ap=0.54, ap_resampled=resampled(0.49, 0.59)),
        "float-engine": example_row("engine", ap=0.54), "QAT-engine": example_row("engine", ap=0.56),
        "float-ONNX": example_row("ONNX", ap=0.55), "not-done": example_row(),
    }  # fmt: skip
    (tmp_path / "a/done").mkdir(parents=True)
    for time, (step, row) in enumerate(states.items()):
        Report(rows=[row], command="").save(tmp_path / "a" / step / "report.json")
        if step != "not-done":
            (tmp_path / "a/done" / step).touch()
            os.utime(tmp_path / "a/done" / step, (time, time))
    write_times(tmp_path / "a/times-engine/benchmark.json", "a-float", "a-QAT")
    write_times(tmp_path / "a/times-ONNX/benchmark.json", "a-float", device="a CPU", ms=90.0)
    for step in ("train", "times-engine", "times-ONNX"):
        (tmp_path / "a/done" / step).touch()
    lines = accuracy.ap_table(tmp_path)
    assert lines[2:9] == [
        "| a | float | 0.5500 |  |  |  | small 0.2500 |  |  |  |",
        # 0.01 and 0.03: their standard deviation; 10 of 100 objects; 0.09 and 0.11: theirs
        "| a | QAT-seed-57 | 0.5700 | +0.0200 ± 0.0141 | 0.9600 | -0.1000 ± 0.0141 |  |  |  |  |",
        "| a | QAT-seed-58 | 0.5400 | -0.0100 ± 0.0000 |  |  |  |  |  |  |",
        "| a | float-engine | 0.5400 | -0.0100 |  |  |  | 2.00 | 4.00 | 2,000 |",
        "| a | QAT-engine | 0.5600 | +0.0100 |  |  |  | 1.50 |  |  |",
        "| a | float-ONNX | 0.5500 | +0.0000 |  |  |  | 90.00 | 90.00 | 2,000 |",
        # √(0.00707² + 0.00045 / 2): the mean of two errors, and the variance of +0.02 and -0.01 over two seeds
        "| a | QAT, mean of 2 seeds | 0.5550 | +0.0050 ± 0.0166 |  |  |  |  |  |  |",
    ]
    assert any("a GPU" in line for line in lines)


def test_the_table_of_placements(tmp_path):
    layers = [
        {"kind": "compute", "precision": "INT8", "ms": 3.0}, {"kind": "compute", "precision": "FP16", "ms": 0.5},
        {"kind": "reformat", "precision": "", "ms": 0.5},
    ]  # fmt: skip
    write_times(tmp_path / "a/times/benchmark.json", "a-fp16", "a-int8-convs", "a-int8")
    (tmp_path / "a/a-int8-b1.layers.json").write_text(json.dumps(layers))
    assert placement.model_rows(tmp_path / "a") == ("a GPU, TensorRT, today", [
        ["a", "1", "fp16", "2.000", "1.00", "500", "", ""],
        ["a", "1", "int8-convs", "4.000", "0.50", "250", "", ""],
        ["a", "1", "int8", "1.000", "2.00", "1,000", "1 of 2, 75%", "1, 12%"],
    ])  # fmt: skip


def test_decoding_is_all_behind_the_last_convolutions_and_dfls_own():
    nodes = head_graph().graph.node
    decoding = {node.name for node in peers.decoding_nodes(head_graph())}
    convolutions = {node.name for node in nodes if node.op_type == "Conv"}
    assert {node.name for node in nodes} - decoding == {"/model.5/Conv"}
    assert len(convolutions & decoding) == 1
