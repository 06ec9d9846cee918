"""Upstream's gelan-c with random weights through all programs, as a user would type them, and what its ONNX holds."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from qat_runs import write_small_set
from random_networks import random_network, save_float


@pytest.fixture(scope="module")
def exported(tmp_path_factory, checkout, demo_data, upstream_yaml):
    folder = tmp_path_factory.mktemp("gelan-c")
    data = write_small_set(folder / "set", demo_data, train=8, val=4)
    weights = save_float(folder / "gelan-c.pt", random_network(upstream_yaml("gelan-c"), nc=10))
    options = ["--data", data, "--imgsz", "320", "--batch-size", "2", "--workers", "0", "--device", "cpu"]

    def run(*command):
        result = subprocess.run(
            [sys.executable, *map(str, command)], cwd=checkout, capture_output=True, text=True, timeout=280
        )
        assert result.returncode == 0, result.stderr[-1500:]
        return result.stdout

    training = ["--iters", "4", "--epochs", "1", "--calib-batches", "2", "--no-eval-origin", "--project", folder]
    run("qat.py", "quantize", "--weights", weights, *options, *training, "--name", "qat")
    best = folder / "qat/weights/qat_best_gelan-c.pt"
    run("qat.py", "eval", "--weights", best, *options, "--project", folder, "--name", "eval")
    run("export_qat.py", "--weights", best, "--imgsz", "320", "--batch-size", "2", "--include", "onnx")
    assert "hold" in run("export_qat.py", "--verify", best.with_suffix(".onnx"))
    report = json.loads((folder / "eval/report.json").read_text())
    assert report["rows"][0]["ap"] is not None
    return onnx.load(best.with_suffix(".onnx"))


def constants(model):
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def exported_path(node):
    """The last module in a node's name: '/model.22/dfl/conv/Conv' → 'dfl'."""
    return node.name.split("/")[-3]


def test_every_convolution_reads_quantized_tensors_and_weights_per_channel(exported):
    makers = {name: node for node in exported.graph.node for name in node.output}
    values = constants(exported)
    convolutions = [node for node in exported.graph.node if node.op_type == "Conv"]
    outside = []
    for conv in convolutions:
        data, weight = makers.get(conv.input[0]), makers.get(conv.input[1])
        if data is None or data.op_type != "DequantizeLinear":
            outside.append(conv)
            continue
        assert values[data.input[1]].size == 1
        assert weight.op_type == "DequantizeLinear"
        quantize = makers.get(weight.input[0])
        source = values[(quantize or weight).input[0]]
        assert values[weight.input[1]].shape == (source.shape[0],)
        assert (values[weight.input[1]] > 0).all()
    assert len(convolutions) == 145
    assert [exported_path(conv) for conv in outside] == ["dfl"]  # a fixed sum, part of the decoding


def test_concats_have_one_scale_for_inputs_and_result(exported):
    makers = {name: node for node in exported.graph.node for name in node.output}
    readers = {}
    for node in exported.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    values = constants(exported)
    checked = 0
    for concat in (node for node in exported.graph.node if node.op_type == "Concat"):
        sources = [makers.get(name) for name in concat.input]
        if not all(node is not None and node.op_type == "DequantizeLinear" for node in sources):
            continue  # the head's maps and the decoding are float
        (quantize,) = readers[concat.output[0]]
        assert quantize.op_type == "QuantizeLinear"
        assert len({float(values[node.input[1]]) for node in (*sources, quantize)}) == 1
        checked += 1
    assert checked == 34
    assert all(np.isfinite(value).all() for value in values.values() if value.dtype.kind == "f")
