"""scripts/benchmark_trt.py with upstream's networks on the CPU: PyTorch beside ONNX Runtime, and what is refused."""

import json

import pytest


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    """Start the program as a user does; returns what it did, and its run folder."""
    project = tmp_path_factory.mktemp("runs")

    def call(*words):
        fixed = ["--project", str(project), "--exist-ok", "--warmUp", "0", "--duration", "0.2", "--rounds", "1"]
        return start("scripts/benchmark_trt.py", *words, *fixed), project / "exp"

    return call


def test_the_demo_checkpoint_beside_its_onnx_file(run, start, demo_weights, tmp_path):
    words = ["--imgsz", "64", "--dynamic", "--check", "0", "--output", str(tmp_path / "demo.onnx")]
    assert start("export_qat.py", "--weights", demo_weights, *words).returncode == 0
    done, folder = run(tmp_path / "demo.onnx", demo_weights, "--device", "cpu", "--imgsz", 64, "--batch-size", 1)
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "benchmark.json").read_text())["rows"]
    assert [(one["runtime"], one["precision"]) for one in rows] == [
        ("PyTorch", "FP32"), ("PyTorch", "FP16"), ("ONNX Runtime", "FP32"),
    ]  # fmt: skip
    assert all(one["images_per_second"] > 0 and one["speedup"] > 0 for one in rows)
