"""Exported graphs with a fault, for tests of the tests that compare graphs; each function gives a changed copy."""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper


def _copy(graph: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(graph)
    return copy


def change_constant(graph: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    """Give the initializer of that name the value that `change` makes of its own."""
    copy = _copy(graph)
    (tensor,) = (tensor for tensor in copy.graph.initializer if tensor.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(change(value).astype(value.dtype), name))
    return copy


def convolution_weights(graph: onnx.ModelProto) -> list[str]:
    """Names of the weights that convolutions read as they are."""
    constants = {tensor.name for tensor in graph.graph.initializer}
    return [node.input[1] for node in graph.graph.node if node.op_type == "Conv" and node.input[1] in constants]


def swap_weights(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Let two convolutions, whose weights have one shape, read each other's."""
    copy = _copy(graph)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in copy.graph.initializer}
    first_of_shape: dict[tuple[int, ...], onnx.NodeProto] = {}
    for node in copy.graph.node:
        if node.op_type != "Conv" or node.input[1] not in shapes:
            continue
        other = first_of_shape.setdefault(shapes[node.input[1]], node)
        if other.input[1] != node.input[1]:
            other.input[1], node.input[1] = node.input[1], other.input[1]
            return copy
    raise AssertionError("no two convolutions have weights of one shape")


def activation_scales(graph: onnx.ModelProto) -> dict[str, float]:
    """Scales of activations by name: the scalar ones that QuantizeLinear reads."""
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    names = [node.input[1] for node in graph.graph.node if node.op_type == "QuantizeLinear"]
    values = {name: numpy_helper.to_array(constants[name]) for name in names if name in constants}
    return {name: float(value) for name, value in values.items() if value.ndim == 0}


def share_scale(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Let all that reads the second activation scale read the first one, which has another value."""
    copy = _copy(graph)
    scales = activation_scales(copy)
    first, *others = scales
    second = next(name for name in others if scales[name] != scales[first])
    for node in copy.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.input[1] == second:
            node.input[1] = first
    return copy


def change_nms_iou(graph: onnx.ModelProto, iou: float) -> onnx.ModelProto:
    """Give TensorRT's NMS another IoU threshold."""
    copy = _copy(graph)
    (nms,) = (node for node in copy.graph.node if node.op_type == "EfficientNMS_TRT")
    (threshold,) = (attribute for attribute in nms.attribute if attribute.name == "iou_threshold")
    assert threshold.f != np.float32(iou)
    threshold.f = iou
    return copy
