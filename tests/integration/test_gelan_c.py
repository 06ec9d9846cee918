"""Upstream's yolov9-c, as trained but with random weights, through all programs, and what its ONNX files hold."""

import json

import onnx
import pytest
import torch
from qat_runs import write_small_set
from random_networks import random_network, save_float

from utils.jobs.compare_outputs import check_onnx
from utils.jobs.open import load_network
from utils.onnx_graph import output_formats
from utils.onnx_graph.export import ExportConfig, export_forms
from utils.onnx_graph.output_formats import NmsSettings
from utils.onnx_graph.verify import verify

SIDE = "128"  # pixels


@pytest.fixture(scope="module")
def best(tmp_path_factory, start, demo_data, upstream_yaml):
    """The quantized checkpoint, exported with raw predictions and with NMS inside."""
    folder = tmp_path_factory.mktemp("yolov9-c")
    data = write_small_set(folder / "set", demo_data, train=8, val=4)
    training = save_float(folder / "best.pt", random_network(upstream_yaml("yolov9-c"), nc=10))
    weights = folder / "gelan-c.pt"
    options = ["--data", data, "--imgsz", SIDE, "--batch-size", "2", "--workers", "0", "--device", "cpu"]

    def run(*command):
        result = start(*command)
        assert result.returncode == 0, result.stderr[-1500:]
        return result.stdout

    run("reparameterization.py", "--weights", training, "--save", weights, "--device", "cpu")
    schedule = ["--iters", "2", "--epochs", "1", "--calib-images", "4", "--no-eval-origin", "--project", folder]
    run("qat.py", "quantize", "--weights", weights, *options, *schedule, "--name", "qat")
    best = folder / "qat/weights/qat_best_gelan-c.pt"
    run("qat.py", "eval", "--weights", best, *options, "--project", folder, "--name", "eval")
    said = run("export_qat.py", "--weights", best, "--imgsz", SIDE, "--batch-size", "2", "--check", "1",
               "--include", "onnx", "onnx_end2end", "--nms", "onnx")  # fmt: skip
    # Whether PTQ or QAT is best is chance here: with random weights there is nothing to learn.
    assert said.count(", DDetect, INT8 and FP16 (strongly typed), opset 19, images [2, 3, 128, 128] -> ") == 2
    for name in ("qat_best_gelan-c-int8-strong.onnx", "qat_best_gelan-c-int8-strong-end2end.onnx"):
        assert "hold" in run("export_qat.py", "--verify", best.with_name(name))
    report = json.loads((folder / "eval/report.json").read_text())
    assert report["rows"][0]["ap"] is not None
    return best


def test_every_other_form_verifies_and_computes_what_torch_computes(best, tmp_path):
    every = {
        "efficient": output_formats.end2end(NmsSettings("efficient")),
        "none": output_formats.end2end(NmsSettings("none")),
        "deepstream": output_formats.deepstream(),
    }
    network = load_network(best, torch.device("cpu"))
    files = {tmp_path / f"{name}.onnx": form for name, form in every.items()}
    config = ExportConfig((128, 128), typing="strong")
    for result in export_forms(network.model, config, files, network.metadata()):
        assert verify(onnx.load(result.path)).ok
        image = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
        assert check_onnx(result.path, network.model, image, result.quantizers, half=True).problems == ()
