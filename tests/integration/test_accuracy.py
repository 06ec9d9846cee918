"""scripts/accuracy.py on a CPU: upstream trains and converts a network, and one that is trained goes to its page."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from qat_runs import write_small_set

import export_qat
import qat
import val_trt
from utils import upstream
from utils.cli import run_program
from utils.jobs.accuracy.steps import Steps

pytest.importorskip("pycocotools")


def load(checkout: Path, name: str):
    """A program of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_program", checkout / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
    return module


def test_upstream_trains_a_network_and_it_is_converted(checkout, demo_data, tmp_path):
    data = write_small_set(tmp_path, demo_data, train=8, val=4)
    words = ["--data", data, "--networks", "yolov9-t", "--steps", "train", "--imgsz", 64, "--epochs", 1]
    words += ["--batch-size", 4, "--workers", 0, "--device", "cpu", "--output", tmp_path / "out"]
    command = [sys.executable, "scripts/accuracy.py", *map(str, words)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    network = upstream.load_float(tmp_path / "out/yolov9-t/float.pt")
    assert (network.nc, type(network.model.model[-1]).__name__) == (10, "DDetect")
    steps = json.loads((tmp_path / "out/yolov9-t/steps.json").read_text())
    assert [step["step"] for step in steps] == ["train", "convert"]
    assert "yolov9-t: train, " in (tmp_path / "out/accuracy.md").read_text()


@pytest.mark.usefixtures("blank_plots")
def test_a_trained_network_goes_to_its_page(checkout, demo_data, demo_weights, tmp_path, monkeypatch, capsys):
    """The programs run in this process, which saves their starts."""
    data = write_small_set(tmp_path, demo_data, train=6, val=6)
    accuracy, benchmark = load(checkout, "accuracy"), load(checkout, "benchmark_trt")
    programs = {
        "qat.py": qat.main,
        "export_qat.py": export_qat.main,
        "val_trt.py": lambda words: run_program(val_trt.make_parser(), val_trt.main, words),
        "scripts/benchmark_trt.py": lambda words: benchmark.run([*words, "--duration", "0.1", "--warmUp", "0"]),
    }
    called = []

    def call(self, step, command, *, tensorrt=False):
        words = [str(word) for word in command]
        assert not tensorrt
        assert programs[words[0]](words[1:]) == 0, capsys.readouterr().err
        called.append(step)
        self._note(step, words, 0.0)

    monkeypatch.setattr(Steps, "call", call)
    output = tmp_path / "out"
    words = ["--data", data, "--weights", demo_weights, "--imgsz", 96, "--device", "cpu", "--workers", 0,
             "--qat-epochs", 1, "--qat-iters", 1, "--output", output]  # fmt: skip
    for _ in range(2):  # the second time there is nothing to do
        assert run_program(accuracy.make_parser(), accuracy.main, [*map(str, words)]) == 0
    assert called == ["eval float", "ptq-auto", "ranges", "qat", "export float", "export int8", "times-onnx",
                      "eval float onnx", "eval int8 onnx"]  # fmt: skip
    (network,) = json.loads((output / "accuracy.json").read_text())["networks"]
    rows = network["rows"]
    assert list(rows) == ["float", "float ONNX", "PTQ", "PTQ auto", "ranges only", "QAT", "INT8 ONNX"]
    assert rows["float"]["ap"] > 0.02
    assert rows["float ONNX"]["ap"] == pytest.approx(rows["float"]["ap"], abs=0.01)
    assert all(
        0 < row["ap_difference_error"] < 0.2 for stage, row in rows.items() if stage not in ("float", "float ONNX")
    )
    assert rows["float"]["ap_by_size"].keys() & {"small", "medium"}
    assert [(time["kind"], time["batch"]) for time in network["times"]] == [
        ("float", 1), ("int8", 1), ("float", 8), ("int8", 8),
    ]  # fmt: skip
    assert str(tmp_path) not in (output / "accuracy.html").read_text()


def test_weights_that_cannot_be_taken_say_so(checkout, demo_data, tmp_path, capsys):
    (tmp_path / "mine.pt").write_text("no network")
    accuracy = load(checkout, "accuracy")
    words = ["--data", demo_data, "--weights", tmp_path / "mine.pt", "--device", "cpu", "--output", tmp_path / "out"]
    assert run_program(accuracy.make_parser(), accuracy.main, [*map(str, words)]) == 2
    assert "mine.pt" in capsys.readouterr().err
