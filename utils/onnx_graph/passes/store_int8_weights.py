"""Quantized weights are INT8 initializers, on demand (`--int8-weights`): a file of a quarter of the size."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, numpy_helper

from utils.onnx_graph.qdq_view import along_axis
from utils.onnx_graph.view import QUANTIZE, GraphView, drop_unused, pure, rename_inputs, set_nodes


@pure
def store_int8_weights(model: ModelProto) -> None:
    """Let DequantizeLinear read INT8 initializers, rounded as QuantizeLinear rounds: half to even, saturated.

    This is not done by default, because TensorRT 8.6 asks for FP32 weights followed by a QuantizeLinear (developer
    guide, "Quantized Weights"); newer ones take both (TensorRT 11, "Explicit Quantization"), as ONNX Runtime does.
    """
    view = GraphView(model)
    renamed: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        constants = [view.array(name) for name in node.input] if node.op_type == QUANTIZE else []
        weight, scale, zero_point = constants if len(constants) == 3 else (None, None, None)
        if weight is None or scale is None or zero_point is None or zero_point.dtype != np.int8 or zero_point.any():
            kept.append(node)
            continue
        renamed[node.output[0]] = name = f"{node.input[0]}_quantized"
        integers = np.clip(np.rint(weight / along_axis(node, weight, scale)), -128, 127).astype(np.int8)
        model.graph.initializer.append(numpy_helper.from_array(integers, name))
    set_nodes(model, kept)
    drop_unused(model)
