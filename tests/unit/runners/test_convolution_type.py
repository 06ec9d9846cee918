"""In which type ONNX Runtime computes convolutions: what a file holds does not say it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from one_conv import write_onnx
from onnx import TensorProto, helper, numpy_helper

from utils.onnx_graph.view import set_metadata
from utils.runners import onnxrt
from utils.runners.onnxrt import OnnxRuntimeRunner, convolution_type

IMAGES = {"images": torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))}


def write_quantized(path: Path, between: str) -> Path:
    """A convolution of quantized weights between quantizers, with another operator before the second one."""
    stored = {
        "scale": np.float32(0.01), "zero": np.int8(0), "weights": np.ones((4, 3, 1, 1), np.int8),
        "steps": np.full(4, 0.01, np.float32), "zeros": np.zeros(4, np.int8),
    }  # fmt: skip
    pair = ["scale", "zero"]
    nodes = [
        helper.make_node("QuantizeLinear", ["images", *pair], ["levels"]),
        helper.make_node("DequantizeLinear", ["levels", *pair], ["rounded"]),
        helper.make_node("DequantizeLinear", ["weights", "steps", "zeros"], ["weight"], axis=0),
        helper.make_node("Conv", ["rounded", "weight"], ["raw"]),
        helper.make_node(between, ["raw"], ["map"]),
        helper.make_node("QuantizeLinear", ["map", *pair], ["out"]),
        helper.make_node("DequantizeLinear", ["out", *pair], ["output0"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, 8, 8])
              for name, channels in (("images", 3), ("output0", 4))]  # fmt: skip
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize(("between", "kind"), [("Identity", "INT8"), ("Sigmoid", "FP32")])
def test_a_quantizer_right_behind_makes_it_one_of_integers(between, kind, tmp_path):
    """As SiLU, Sigmoid stands between: then the convolution is of floats, although its inputs are quantized."""
    assert convolution_type(write_quantized(tmp_path / "a.onnx", between), IMAGES) == kind


def test_float_files(tmp_path):
    assert convolution_type(write_onnx(tmp_path / "a.onnx"), IMAGES) == "FP32"
    node = helper.make_node("Identity", ["images"], ["output0"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8]) for name in ("images", "output0")]
    graph, opset = helper.make_graph([node], "net", values[:1], values[1:]), helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
    onnx.save(model, tmp_path / "none.onnx")
    assert convolution_type(tmp_path / "none.onnx", IMAGES) is None


@pytest.mark.parametrize(("first", "typing", "warned"), [("99", "strong", 1), ("99", "weak", 0), ("1.16", "strong", 0)])
def test_an_onnx_runtime_that_computes_other_values_from_fp16_scales_says_so(
    first, typing, warned, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(onnxrt, "FP16_SCALES", onnxrt.Version(first))
    model = onnx.load(write_quantized(tmp_path / "a.onnx", "Sigmoid"))
    onnx.save(set_metadata(model, {"typing": typing, "kind": "ptq"}), tmp_path / "a.onnx")
    with OnnxRuntimeRunner(tmp_path / "a.onnx"):
        assert len(caplog.messages) == warned == sum("--typing weak" in message for message in caplog.messages)
