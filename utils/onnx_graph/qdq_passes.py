"""Passes over the quantizers of an ONNX graph: QuantizeLinear / DequantizeLinear pairs. Pure, as in `cleanup.py`.

None of them changes what the graph computes, except that `round_weights` settles how weights between two quantized
values are rounded.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from utils.onnx_graph.qdq_view import WEIGHTED, QdqGraph
from utils.onnx_graph.view import (
    DEQUANTIZE,
    QDQ,
    QUANTIZE,
    GraphView,
    attribute,
    drop_unused,
    pure,
    rename_inputs,
    set_nodes,
)


@pure
def scalar_scales(model: ModelProto) -> None:
    """Give per-tensor quantizers scalar scales and zero points: torch writes tensors of one element.

    A one-element scale with an axis may belong to a weight with one output channel, and stays.
    """
    view = GraphView(model)
    scalars: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ or attribute(node, "axis") is not None:
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            value = view.array(name)
            if value is None or value.ndim == 0 or value.size != 1:
                continue
            if name not in scalars:
                scalars[name] = f"{name}/scalar"
                model.graph.initializer.append(numpy_helper.from_array(value.reshape(()), scalars[name]))
            node.input[position] = scalars[name]
    drop_unused(model)


@pure
def number_quantizers(model: ModelProto) -> None:
    """Write into each activation quantizer which one it is: torch calls them in this order, and passes drop some."""
    for number, node in enumerate(QdqGraph(model).activations):
        node.doc_string = str(number)


def take_numbers(model: ModelProto) -> dict[str, int]:
    """The activation quantizers of a cleaned up graph, by name, and what `number_quantizers` wrote into them.

    The numbers are taken out of the graph, in place.
    """
    found = {node.name: int(node.doc_string) for node in QdqGraph(model).activations}
    for node in model.graph.node:
        node.ClearField("doc_string")
    return found


@pure
def merge_quantizers(model: ModelProto) -> None:
    """Leave one QuantizeLinear and one DequantizeLinear a tensor, and one of the nodes that compute the same tensor.

    Two of a kind on one tensor with equal scale, zero point and axis become one. A quantizer that reads a
    DequantizeLinear of the same scale is dropped with its partner: quantizing twice gives the same integers. Other
    nodes of a kind, as two Concats of the same tensors, become one if their results are quantized with equal scales.
    """
    view = GraphView(model)
    first: dict[tuple[object, ...], list[str]] = {}
    renamed: dict[str, str] = {}
    source: dict[str, tuple[str, tuple[object, ...]]] = {}  # DQ output → (its integer input, parameters)
    kept = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        parameters = quantizer_parameters(node, view) if node.op_type in QDQ else _computation(node, view)
        if parameters is None or set(node.output) & view.outputs:
            kept.append(node)
            continue
        key = (node.op_type, node.input[0], *parameters)
        integers, before = source.get(node.input[0], ("", ()))
        if node.op_type == QUANTIZE and integers and before == parameters:
            renamed[node.output[0]] = integers
        elif key in first:
            renamed |= {name: other for name, other in zip(node.output, first[key], strict=True) if name}
        else:
            first[key] = list(node.output)
            kept.append(node)
            if node.op_type == DEQUANTIZE:
                source[node.output[0]] = (node.input[0], parameters)
    set_nodes(model, kept)


def _computation(node: NodeProto, view: GraphView) -> tuple[object, ...] | None:
    """What a node computes and how its results are quantized, comparable; None of a convolution, or if none of them is.

    Nodes with equal results whose scales differ stay apart: a tensor has one quantizer.
    """
    readers = [reader for name in node.output for reader in view.consumers(name) if reader.op_type == QUANTIZE]
    if not readers or not node.input or node.op_type in WEIGHTED:
        return None
    attributes = sorted(item.SerializeToString() for item in node.attribute)
    scales = {(list(node.output).index(reader.input[0]), *quantizer_parameters(reader, view)) for reader in readers}
    inputs = [_comparable(name, view) for name in node.input]
    return (node.domain, *inputs, *attributes, len(node.output), frozenset(scales))


def quantizer_parameters(node: NodeProto, view: GraphView) -> tuple[object, ...]:
    """Scale, zero point and axis of a quantizer, comparable: by value where they are constant, else by name."""
    found = [_comparable(name, view) for name in node.input[1:]]
    scale = view.array(node.input[1])
    return (*found, None if scale is not None and scale.ndim == 0 else attribute(node, "axis", 1))


def _comparable(name: str, view: GraphView) -> object:
    """A tensor by its value where that is constant, else by its name."""
    value = view.array(name)
    return name if value is None else (str(value.dtype), value.shape, value.tobytes())


@pure
def share_scales(model: ModelProto) -> None:
    """Let quantizers with equal scales (or zero points) read one initializer, so that equality shows in the graph."""
    view = GraphView(model)
    first: dict[object, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            if view.is_constant(name):
                node.input[position] = first.setdefault(_comparable(name, view), name)
    drop_unused(model)


@pure
def name_quantizers(model: ModelProto) -> None:
    """Name each quantizer and its scale after the tensor that it quantizes.

    `/model.4/cv1/act/Mul` → `/model.4/cv1/act/Mul/QuantizeLinear`, `.../scale`; weight `model.4.cv1.conv.weight` →
    `model.4.cv1.conv.weight/QuantizeLinear`. Torch names them after the module that happens to hold the quantizer.
    A shared scale is named after the first tensor that has it.
    """
    view = GraphView(model)
    taken = {node.name for node in view.nodes if node.op_type not in QDQ}
    renamed: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        base = _quantized_tensor(node, view)
        node.name = _unique(f"{base}/{node.op_type}", taken)
        for name, wanted in zip(node.input[1:], (f"{base}/scale", "zero_point"), strict=False):
            if view.is_constant(name) and name not in renamed:
                renamed[name] = _unique(wanted, taken)
        if node.output[0] not in view.outputs:
            renamed[node.output[0]] = f"{node.name}_output_0"
    for node in model.graph.node:
        rename_inputs(node, renamed)
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for entry in [*model.graph.initializer, *model.graph.value_info]:
        entry.name = renamed.get(entry.name, entry.name)


def _quantized_tensor(node: NodeProto, view: GraphView) -> str:
    """What a quantizer is named after: the node, initializer or input that its tensor comes from."""
    name = node.input[0]
    producer = view.producer(name)
    if node.op_type == DEQUANTIZE and producer is not None and producer.op_type == QUANTIZE:
        name = producer.input[0]
        producer = view.producer(name)
    if producer is None or not producer.name:
        return name
    index = list(producer.output).index(name)
    return producer.name if index == 0 else f"{producer.name}.{index}"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate


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
            factor = _along_axis(node, weight, scale)
            integers = np.clip(np.rint(weight * (np.float32(1) / factor)), -128, 127)
            rounded[node.input[0]] = (integers * factor).astype(weight.dtype)
    for tensor in model.graph.initializer:
        if tensor.name in rounded:
            tensor.CopyFrom(numpy_helper.from_array(rounded[tensor.name], tensor.name))


def weight_quantizers(node: NodeProto, view: GraphView) -> tuple[NodeProto | None, NodeProto | None]:
    """QuantizeLinear and DequantizeLinear in front of a convolution's weights; None for what is not there."""
    dequantizer = view.producer(node.input[1])
    return (view.producer(dequantizer.input[0]) if dequantizer is not None else None), dequantizer


def own_quantizers(node: NodeProto, view: GraphView) -> tuple[NodeProto, NodeProto] | None:
    """QuantizeLinear and DequantizeLinear of a convolution's weights, if they are its own and known."""
    quantizer, dequantizer = weight_quantizers(node, view)
    if dequantizer is None or quantizer is None or quantizer.op_type != QUANTIZE:
        return None
    alone = all(len(view.consumers(name)) == 1 for name in (node.input[1], dequantizer.input[0], quantizer.input[0]))
    known = all(view.array(name) is not None for name in (*quantizer.input, *dequantizer.input[1:]))
    return (quantizer, dequantizer) if alone and known else None


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
    integers = np.rint(weight / _along_axis(node, weight, scale))
    return np.clip(integers, -128, 127).astype(np.int8)


def _along_axis(node: NodeProto, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A quantizer's scale in a shape that broadcasts over its weight."""
    if scale.ndim == 0:
        return scale
    axis = attribute(node, "axis", 1) % weight.ndim
    return scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
