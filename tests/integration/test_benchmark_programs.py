"""benchmarks/accuracy.py and placement.py on a CPU, to their ends: real programs, a small network, few images."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from qat_runs import write_small_set
from random_networks import TINY

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--", "--duration", "0.1", "--warmUp", "0")  # of benchmark_trt.py
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# As `python PROGRAM ...`, where the programs that it starts are forked.
FORKING = "import runpy, sys; _, sys.executable, *sys.argv = sys.argv; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture
def benchmark(checkout, fork_server, tmp_path):
    """Runs a benchmark; gives what it printed."""

    def call(program: str, *words: object) -> str:
        python = fork_server.interpreter(tmp_path / "python")
        done = subprocess.run(
            [sys.executable, "-c", FORKING, python, ROOT / "benchmarks" / program, *map(str, words)],
            capture_output=True, text=True, timeout=800, env={**os.environ, "YOLOV9_CHECKOUT": str(checkout)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_a_network_goes_to_its_table(benchmark, demo_data, small_weights, tmp_path):
    (tmp_path / "settings.yaml").write_text("PTQ: --ptq-only --calib-images 20\n")
    words = ["--data", write_small_set(tmp_path, demo_data), "--weights", small_weights, "--imgsz", 96, "--device",
             "cpu", "--workers", 0, "--settings", tmp_path / "settings.yaml", "--deploy", "PTQ",
             "--output", tmp_path / "out", *QUICK]  # fmt: skip
    folder = tmp_path / "out/gelan-digits"
    table = benchmark("accuracy.py", *words)
    done = {path.name for path in (folder / "done").iterdir()}
    assert done == {"float", "PTQ-seed-57", "export-float", "export-PTQ", "times-ONNX", "float-ONNX", "PTQ-ONNX"}
    reports = {name: folder / name / "report.json" for name in ("float", "PTQ-seed-57", "float-ONNX", "PTQ-ONNX")}
    ap = {name: json.loads(report.read_text())["rows"][-1]["ap"] for name, report in reports.items()}
    assert ap["PTQ-seed-57"] > 0
    assert ap["float-ONNX"] == pytest.approx(ap["float"], abs=1e-4)
    assert ap["PTQ-ONNX"] == pytest.approx(ap["PTQ-seed-57"], rel=0.5)
    difference = ap["PTQ-seed-57"] - ap["float"]
    assert f"| gelan-digits | PTQ-seed-57 | {ap['PTQ-seed-57']:.4f} | {difference:+.4f} ± " in table
    times = json.loads((folder / "times-ONNX/benchmark.json").read_text())
    assert [row["batch"] for row in times["rows"]] == [1, 1, 8, 8]


def test_three_placements_of_one_network_are_timed(benchmark, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    words = [tmp_path / "tiny.yaml", "--imgsz", 64, "--batch-size", 1, "--device", "cpu", "--output", tmp_path / "out"]
    table = benchmark("placement.py", *words, *QUICK)
    folder = tmp_path / "out/tiny"
    files = {name: folder / f"tiny-{name}.onnx" for name in ("fp16", "int8-convs", "int8")}
    lines = [line.split(" | ")[:3] for line in table.splitlines() if line.startswith("| tiny")]
    assert lines == [["| tiny", "1", name] for name in files]
    counts = {name: Counter(node.op_type for node in onnx.load(file).graph.node) for name, file in files.items()}
    assert counts["fp16"]["QuantizeLinear"] == 0
    graph = onnx.load(files["int8-convs"]).graph
    producers = {output: node for node in graph.node for output in node.output}
    quantized = [node for node in graph.node if node.op_type == "Conv" and node.input[1] in producers]
    inputs = [producers[producers[node.input[0]].input[0]] for node in quantized]
    assert len(quantized) == counts["fp16"]["Conv"] - 1  # DFL's is in float
    assert all(node.op_type == "QuantizeLinear" for node in inputs)
    assert len({node.input[1] for node in inputs}) == len(quantized)  # each has a scale of its own
    assert counts["int8-convs"]["QuantizeLinear"] == 2 * len(quantized)  # no Add, Concat or pool
    image = np.random.default_rng(0).random((1, 3, 64, 64), dtype=np.float32)
    outputs = {}
    for name, file in {**files, "whole": folder / "whole.onnx"}.items():
        session = onnxruntime.InferenceSession(file)
        (outputs[name], *_) = session.run(None, {session.get_inputs()[0].name: image})
    far = {name: float(np.abs(found - outputs["fp16"]).mean()) for name, found in outputs.items()}
    assert 0 < far["int8-convs"] < 2 * far["whole"]
