"""Weights are whole multiples of their scales, so that every runtime computes with the integers of the training."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, numpy_helper

from utils.onnx_graph.qdq_view import along_axis
from utils.onnx_graph.view import QUANTIZE, GraphView, pure


@pure
def round_weights(model: ModelProto) -> None:
    """Store each quantized weight as the values that its quantizer gives in torch: whole multiples of its scale.

    Weights halfway between two quantized values (half the largest weight is: 63.5) are rounded up by one library and
    down by another, since torch multiplies by 1 / scale and ONNX divides by scale. On whole multiples all agree, so
    that every runtime computes with the integers that the network was trained with.
    """
    view = GraphView(model)
    rounded: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        weight, scale = (view.array(name) for name in node.input[:2]) if node.op_type == QUANTIZE else (None, None)
        if weight is not None and scale is not None:
            factor = along_axis(node, weight, scale)
            integers = np.clip(np.rint(weight * (np.float32(1) / factor)), -128, 127)
            rounded[node.input[0]] = (integers * factor).astype(weight.dtype)
    for tensor in model.graph.initializer:
        if tensor.name in rounded:
            tensor.CopyFrom(numpy_helper.from_array(rounded[tensor.name], tensor.name))
