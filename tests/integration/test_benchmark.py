"""scripts/benchmark_trt.py with upstream's networks on the CPU: PyTorch beside ONNX Runtime, and what is refused."""

import json
from functools import partial

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


def test_upstreams_network_can_be_compiled(tmp_path, monkeypatch):
    """TorchDynamo reads it as one graph; the compiler behind it, which takes minutes on a CPU, is left out."""
    model = load_checkpoint(save_float(tmp_path / "tiny.pt", random_network(TINY)), torch.device("cpu"))
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted, fullgraph=True))
    shape = (2, 64, 64)
    found = open_checkpoint(tmp_path / "tiny.pt", model, shape, torch.device("cpu"), compiled=True, graphs=False)
    assert [one.row.error for one in found] == [""] * 4
    eager, compiled, half, _ = (one.running[0] for one in found)
    assert half.buffers["output0"].dtype == torch.float16  # also of anchors, which a network keeps
    for execution in (eager, compiled):
        execution.buffers["images"].copy_(
            torch.rand(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(0))
        )
        execution.run()
    torch.testing.assert_close(compiled.buffers["output0"], eager.buffers["output0"])
    assert eager.buffers["output0"].std() > 0
    assert len(graphs) == 2  # one for each type, and none for a second run
