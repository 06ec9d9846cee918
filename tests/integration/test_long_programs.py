"""scripts/quickstart.sh, benchmarks/accuracy.py, cpu.py and placement.py on a CPU, to their ends, on few images."""

import json
import os
import re
import shutil
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

from utils.reports.tables import stage_name

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


def test_a_network_goes_to_its_table(benchmark, demo_data, demo_weights, tmp_path):
    (tmp_path / "settings.yaml").write_text("PTQ: --ptq-only --calib-images 20\n")
    words = ["--data", write_small_set(tmp_path, demo_data), "--weights", demo_weights, "--imgsz", 160, "--device",
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
    check_cpu(benchmark, tmp_path, folder / "gelan-digits-float.onnx", folder / "gelan-digits-PTQ.onnx", ap)


def check_cpu(benchmark, tmp_path, float_file: Path, int8_file: Path, ap: dict[str, float]) -> None:
    """cpu.py of both files: every network gets AP and times, once; `ap` is what val_trt.py gave, in ONNX Runtime."""
    output = tmp_path / "cpu/digits.json"
    words = ["--float", float_file, "--int8", int8_file, "--data", tmp_path / "data.yaml", "--output", output,
             "--peers", "onnxruntime", "--calib-images", 4, "--seconds", 0.1, "--rounds", 1]  # fmt: skip
    benchmark("cpu.py", *words)
    content = json.loads(output.read_text())
    rows = {(row["file"], row["runtime"], row["rest"]): row for row in content["rows"]}
    assert {("FP32", "OpenVINO", "FP32"), ("ours", "OpenVINO", "FP32"), ("FP32", "ONNX Runtime", "FP32"),
            ("quantize_static", "ONNX Runtime", "FP32")} <= set(rows)  # fmt: skip
    for runtime in ("OpenVINO", "ONNX Runtime"):
        assert rows["FP32", runtime, "FP32"]["ap"] == pytest.approx(ap["float-ONNX"], abs=1e-3)
    ours = rows["ours", "OpenVINO", "FP32"]
    assert ours["ap"] == pytest.approx(ap["PTQ-ONNX"], rel=0.5)
    assert ours["to_float"] == ours["ap"] - rows["FP32", "OpenVINO", "FP32"]["ap"]
    assert all(set(row["times"]) == {"1", "2"} for row in rows.values())
    (peer,) = output.with_suffix("").glob("*.onnx")
    quantized = [node for node in onnx.load(peer).graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantized) > 10
    benchmark("cpu.py", *words)
    assert json.loads(output.read_text())["rows"] == content["rows"]


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


LIBRARY = """
. {root}/scripts/lib.sh
OVERLAY_ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
YOLOV9_CHECKOUT={checkout}
setup_environment() {{ PYTHON={python}; }}
setup_checkout() {{ :; }}
"""


def test_a_small_set_comes_to_a_report(demo_data, checkout, demo_weights, fork_server, tmp_path):
    root = tmp_path / "a repository"
    for folder in ("scripts", "data/demo"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/quickstart.sh", root / "scripts")
    python = fork_server.interpreter(tmp_path / "python")
    (root / "scripts/lib.sh").write_text(LIBRARY.format(root=ROOT, checkout=checkout, python=python))
    shutil.copy(demo_weights, root / "data/demo")
    data = write_small_set(tmp_path / "few", demo_data, train=8, val=6)
    options = ["--epochs", "1", "--iters", "1", "--batch-size", "4", "--device", "cpu", "--data", data]
    done = subprocess.run(
        ["bash", root / "scripts/quickstart.sh", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run = root / "runs/quickstart"
    report = json.loads((run / "report-merged.json").read_text())
    stages = [row["stage"] for row in report["rows"]]
    assert stages in (["float", "PTQ", "QAT", "ONNX"], ["float", "PTQ", "best (PTQ)", "ONNX"])
    for row in report["rows"]:
        assert row["ap"] > 0.3
        assert row["size_bytes"] == (root / row["file"]).stat().st_size
        assert row["ms_per_image"] > 0
        assert re.search(rf"^{re.escape(stage_name(row['stage']))} (.* )?{row['ap']:.4f} ", done.stdout, re.MULTILINE)
        assert row["measured_on"] in done.stdout
    assert "ONNX Runtime" in report["rows"][3]["measured_on"]
    assert abs(report["rows"][3]["ap"] - report["rows"][2]["ap"]) < 0.05, "6 images only"

    assert [entry["epoch"] for entry in report["history"]] == [0]
    assert {row["kind"] for row in report["ranges"]} == {"activation", "weight"}
    predictions = [sample["predictions"] for sample in report["samples"]]
    assert 1 <= len(predictions) <= 4
    assert {next(iter(drawn)) for drawn in predictions} == {"FP32"}
    assert "on which FP32 and INT8 differ most" in report["samples_are"]
    page = (run / "report.html").read_text()
    assert (page.count("data:image/jpeg"), page.count("data:image/svg+xml")) == (len(predictions), 3)
    assert not re.search(r"https?:", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)), "it stands alone"
    hidden = {path.name for path in run.rglob("*") if path.name.startswith(".") or "tmp" in path.name}
    assert hidden == {".quickstart", ".lock"}  # the former tells it its own folders
