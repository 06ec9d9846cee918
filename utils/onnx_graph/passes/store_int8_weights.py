"""Quantized weights are INT8 initializers, on demand (`--int8-weights`): a file of a quarter of the size."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from utils.onnx_graph.qdq_view import along_axis
from utils.onnx_graph.view import QUANTIZE, GraphView, drop_unused, pure, rename_inputs, set_nodes


@pure
def store_int8_weights(model: ModelProto) -> None:
    """Store quantized weights as INT8 initializers that feed DequantizeLinear directly: a file a quarter the size.

    It rounds as QuantizeLinear does: half to even, saturated.

    This is not done by default, because TensorRT 8.6 asks for FP32 weights followed by a QuantizeLinear (developer
    guide, "Quantized Weights"); newer ones take both (TensorRT 11, "Explicit Quantization"), as ONNX Runtime does.
    """
    view = GraphView(model)
    renamed: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        stored = _int8_weight(node, view) if node.op_type == QUANTIZE else None
        if stored is None:
            kept.append(node)
            continue
        name = f"{node.input[0]}_quantized"
        renamed[node.output[0]] = name
        model.graph.initializer.append(numpy_helper.from_array(stored, name))
    set_nodes(model, kept)
    drop_unused(model)


def _int8_weight(node: NodeProto, view: GraphView) -> np.ndarray | None:
    weight, scale = view.array(node.input[0]), view.array(node.input[1])
    zero_point = view.array(node.input[2]) if len(node.input) > 2 else None
    if weight is None or scale is None or zero_point is None or zero_point.dtype != np.int8 or zero_point.any():
        return None
    integers = np.rint(weight / along_axis(node, weight, scale))
    return np.clip(integers, -128, 127).astype(np.int8)
