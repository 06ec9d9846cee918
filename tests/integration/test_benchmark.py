"""scripts/benchmark_trt.py with upstream's networks on the CPU: PyTorch beside ONNX Runtime, and what is refused."""

import json

import pytest
import torch
from random_networks import TINY, random_network, save_float

from utils.jobs.benchmark import load_checkpoint, open_checkpoint


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


def test_upstreams_network_runs_in_half_precision(tmp_path):
    model = load_checkpoint(save_float(tmp_path / "tiny.pt", random_network(TINY)), torch.device("cpu"))
    found = open_checkpoint(tmp_path / "tiny.pt", model, (2, 64, 64), torch.device("cpu"))
    assert [one.row.error for one in found] == [""] * 2
    eager, half = (one.running[0] for one in found)
    assert half.buffers["output0"].dtype == torch.float16  # also of anchors, which a network keeps
    eager.buffers["images"].copy_(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    eager.run()
    assert eager.buffers["output0"].std() > 0
