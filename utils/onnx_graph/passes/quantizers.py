"""Quantizers, their scales and the weights that they read: how they are stored, rounded and named.

Equal scales become one initializer. A tensor has one QuantizeLinear and one DequantizeLinear, since TensorRT computes
all that a graph has. Weights are whole multiples of their scales, so that every runtime computes with the integers of
the training. An engine's layers carry the names of the tensors that are quantized.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto

from utils.onnx_graph.qdq_view import WEIGHTED, QdqGraph, along_axis
from utils.onnx_graph.view import (
    DEQUANTIZE,
    QDQ,
    QUANTIZE,
    attribute,
    by_value,
    drop_unused,
    overwrite,
    pure,
    rename_inputs,
    set_nodes,
    store,
)


@pure
def share_scales(model: ModelProto) -> None:
    """Let quantizers with equal scales (or zero points) read one initializer; one-element tensors become scalars.

    A one-element scale with an axis may belong to a weight with one output channel, and stays.
    """
    view = QdqGraph(model)
    first: dict[object, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            value = view.array(name)
            if value is None:
                continue
            scalar_name = name
            if value.size == 1 and value.ndim and attribute(node, "axis") is None:
                value = value.reshape(())
                scalar_name = f"{name}/scalar"
            key = by_value(value)
            if key not in first:
                first[key] = scalar_name
                if scalar_name != name:
                    store(model, scalar_name, value)
            node.input[position] = first[key]
    drop_unused(model)


@pure
def round_weights(model: ModelProto) -> None:
    """Store each quantized weight as the values that its quantizer gives in torch: whole multiples of its scale.

    Weights halfway between two quantized values (such as half the largest weight: 63.5) are rounded up by one library
    and down by another, since torch multiplies by 1 / scale and ONNX divides by scale. On whole multiples all agree, so
    that every runtime computes with the integers that the network was trained with.
    """
    view = QdqGraph(model)
    rounded: dict[str, np.ndarray] = {}
    for node in view.of_type(QUANTIZE):
        weight = view.array(node.input[0])
        scale = view.array(node.input[1])
        if weight is None or scale is None:
            continue
        factor = along_axis(node, weight, scale)
        steps = weight * (np.float32(1) / factor)
        integers = np.clip(np.rint(steps), -128, 127)
        rounded[node.input[0]] = (integers * factor).astype(weight.dtype)
    overwrite(model, rounded)


@pure
def merge_quantizers(model: ModelProto) -> None:
    """Leave one QuantizeLinear and one DequantizeLinear a tensor, and one of the nodes that compute the same tensor.

    Two of a kind on one tensor with equal scale, zero point and axis become one. A quantizer that reads a
    DequantizeLinear of the same scale is dropped with its partner: quantizing twice gives the same integers. Other
    nodes of a kind, as two Concats of the same tensors, become one if their results are quantized with equal scales.
    """
    view = QdqGraph(model)
    first: dict[tuple[object, ...], list[str]] = {}
    renamed: dict[str, str] = {}
    source: dict[str, tuple[str, tuple[object, ...]]] = {}  # DQ output → (its integer input, parameters)
    remaining = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        parameters = view.quantizer_parameters(node) if node.op_type in QDQ else _computation(node, view)
        if parameters is None or not view.outputs.isdisjoint(node.output):
            remaining.append(node)
            continue
        key = (node.op_type, node.input[0], *parameters)
        integers, source_parameters = source.get(node.input[0], ("", ()))
        if node.op_type == QUANTIZE and integers and source_parameters == parameters:
            renamed[node.output[0]] = integers
        elif key in first:
            for name, other in zip(node.output, first[key], strict=True):
                if name:
                    renamed[name] = other
        else:
            first[key] = list(node.output)
            remaining.append(node)
            if node.op_type == DEQUANTIZE:
                source[node.output[0]] = (node.input[0], parameters)
    set_nodes(model, remaining)


def _computation(node: NodeProto, view: QdqGraph) -> tuple[object, ...] | None:
    """Key that is equal for nodes with equal results and equal quantizers of these.

    The key is None for a convolution, and for a node whose results are not quantized. Nodes whose scales differ
    have different keys: a tensor has one quantizer.
    """
    if not node.input or node.op_type in WEIGHTED:
        return None
    scales: set[tuple[object, ...]] = set()
    for index, name in enumerate(node.output):
        for quantizer in view.quantizers(name):
            scales.add((index, *view.quantizer_parameters(quantizer)))
    if not scales:
        return None
    attributes = sorted(item.SerializeToString() for item in node.attribute)
    inputs = [view.comparable(name) for name in node.input]
    return (node.domain, *inputs, *attributes, len(node.output), frozenset(scales))


@pure
def name_quantizers(model: ModelProto) -> None:
    """Name each quantizer and its scale after the tensor that it quantizes.

    `/model.4/cv1/act/Mul` → `/model.4/cv1/act/Mul/QuantizeLinear`, `.../scale`; weight `model.4.cv1.conv.weight` →
    `model.4.cv1.conv.weight/QuantizeLinear`. Torch names them after the module that happens to hold the quantizer.
    A shared scale is named after the first tensor that has it.
    """
    view = QdqGraph(model)
    taken = {node.name for node in view.nodes if node.op_type not in QDQ}
    renamed: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        base = node.input[0]
        producer = view.producer(base)
        if node.op_type == DEQUANTIZE and producer is not None and producer.op_type == QUANTIZE:
            base = producer.input[0]
            producer = view.producer(base)
        if producer is not None and producer.name:
            index = list(producer.output).index(base)
            base = producer.name if index == 0 else f"{producer.name}.{index}"
        node.name = _unique(f"{base}/{node.op_type}", taken)
        for name, new_name in zip(node.input[1:], (f"{base}/scale", "zero_point"), strict=False):
            if view.is_constant(name) and name not in renamed:
                renamed[name] = _unique(new_name, taken)
        if node.output[0] not in view.outputs:
            renamed[node.output[0]] = f"{node.name}_output_0"
    for node in model.graph.node:
        rename_inputs(node, renamed)
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for entry in [*model.graph.initializer, *model.graph.value_info]:
        entry.name = renamed.get(entry.name, entry.name)


def _unique(name: str, taken: set[str]) -> str:
    candidate = name
    number = 1
    while candidate in taken:
        candidate = f"{name}_{number}"
        number += 1
    taken.add(candidate)
    return candidate


@pure
def store_int8_weights(model: ModelProto) -> None:
    """Let DequantizeLinear read INT8 initializers, rounded as QuantizeLinear rounds: half to even, saturated.

    Weights take a quarter of their bytes in FP32, half of those in FP16. This is not done by default, because TensorRT
    8.6 asks for FP32 weights followed by a QuantizeLinear (developer guide, "Quantized Weights"); newer ones take both
    (TensorRT 11, "Explicit Quantization"), as ONNX Runtime does.
    """
    view = QdqGraph(model)
    renamed: dict[str, str] = {}
    remaining = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        integers = _integers(node, view) if node.op_type == QUANTIZE else None
        if integers is None:
            remaining.append(node)
        else:
            renamed[node.output[0]] = store(model, f"{node.input[0]}_quantized", integers)
    set_nodes(model, remaining)
    drop_unused(model)


def _integers(quantizer: NodeProto, view: QdqGraph) -> np.ndarray | None:
    """The INT8 result of a symmetric quantizer of a constant; None for other quantizers."""
    if len(quantizer.input) != 3:
        return None
    weight, scale, zero_point = (view.array(name) for name in quantizer.input)
    if weight is None or scale is None or zero_point is None:
        return None
    if zero_point.dtype != np.int8 or zero_point.any():
        return None
    steps = np.rint(weight / along_axis(quantizer, weight, scale))
    integers: np.ndarray = np.clip(steps, -128, 127).astype(np.int8)
    return integers
