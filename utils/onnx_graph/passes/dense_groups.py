"""Convolutions of few, narrow groups are dense ones: INT8 kernels take groups of 32 channels and more."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, numpy_helper

from utils.onnx_graph.qdq_view import INT8_VECTOR, weight_quantizers
from utils.onnx_graph.view import GraphView, attribute, pure

FEW_GROUPS = 8  # a dense convolution multiplies so many times as much, at most


@pure
def dense_groups(model: ModelProto) -> None:
    """Write quantized convolutions of few, narrow groups as dense ones: block-diagonal weights, the same results.

    TensorRT's INT8 kernels take groups of 32 channels and more; narrower ones run in float between conversions. The
    head of YOLOv9 has such groups (4 of 16 channels). A scale an output channel stays what it was, since zeros do not
    change a maximum. Depthwise convolutions have kernels of their own and stay.
    """
    view = GraphView(model)
    weights: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        groups = attribute(node, "group", 1) if node.op_type == "Conv" else 1
        quantizer = weight_quantizers(node, view)[0] if groups > 1 else None
        weight = view.array(quantizer.input[0]) if quantizer is not None else None
        if quantizer is None or weight is None or not 1 < weight.shape[1] < INT8_VECTOR or groups > FEW_GROUPS:
            continue
        rows, columns = len(weight) // groups, weight.shape[1]
        dense = np.zeros((len(weight), columns * groups, *weight.shape[2:]), weight.dtype)
        for index in range(groups):
            block = slice(index * rows, (index + 1) * rows)
            dense[block, index * columns : (index + 1) * columns] = weight[block]
        weights[quantizer.input[0]] = dense
        for item in node.attribute:
            if item.name == "group":
                item.i = 1
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    if weights:
        del model.graph.value_info[:]  # it holds the old weights' shapes
