"""Passes for OpenVINO: activations whose INT8 range begins where their values begin, and weights of 7 bits.

A file for TensorRT has symmetric ranges, since TensorRT knows no other. SiLU is never below -0.279, so nearly half of
the 256 values of its range are never used. OpenVINO takes zero points: `offset_activations` begins each range at the
least value that a tensor can have, which makes the steps down to half as large. Nothing is calibrated for it.

On x86 processors without VNNI (AVX2, AVX-512 of Skylake) OpenVINO's results for a file with signed activations are not
those of the graph, in two ways, seen with 2026.4.1:

- A convolution behind a Concat of signed values gives other numbers than the graph. The values of
  `offset_activations` are stored unsigned.
- The products of two neighbouring channels are added in 16 bits, which saturate: 255 * 127 * 2 > 32767. OpenVINO's
  documentation names the way out, weights of 7 bits: `seven_bit_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto

from utils.onnx_graph.export_config import Target
from utils.onnx_graph.qdq_view import POOLS, QdqGraph
from utils.onnx_graph.view import DEQUANTIZE, QDQ, QUANTIZE, GraphView, drop_unused, pure, rename_inputs, store

TARGET_KEY = "target"  # of the metadata of a quantized file, where it is not for TensorRT
SEVEN_BIT_TARGET: Target = "openvino-avx2"  # the one whose weights are -64..64

LARGEST_INT8 = 127
LARGEST_ZERO_POINT = 128  # of a symmetric range; a range that begins later has a smaller one
STEPS = 255  # between the 256 values of a byte
LEAST_SILU = -0.27846455  # minimum of x * sigmoid(x), at x = -1.2785
KEEPS_BOUND = frozenset({*QDQ, *POOLS, "Cast", "Identity"})  # beside operators that only move values


@pure
def offset_activations(model: ModelProto) -> None:
    """Store quantized activations as UINT8, in ranges that begin at the least value that a tensor can have.

    A symmetric range of scale s is -128 s to 127 s. If a tensor is never below m (-128 s ≤ m ≤ 0), its range becomes m
    to 127 s: the scale is (127 s - m) / 255, and the zero point -m / scale, rounded. If no m is known, all values stay,
    since `(q + 128) - 128 = q`. Tensors of equal scales keep equal scales, so that Concat moves integers.
    """
    graph = QdqGraph(model)
    bounds = lower_bounds(graph)
    pairs = _signed_pairs(graph)
    least: dict[bytes, float] = {}  # scale → the least value of all tensors that have it; at most 0
    for quantizer, readers in pairs:
        key = graph.constant(readers[0].input[1]).tobytes()
        bound = bounds.get(quantizer.input[0], -np.inf)
        least[key] = min(least.get(key, 0.0), bound)

    # scales of a node and of its group → names of the node's new scale and zero point
    stored: dict[tuple[str, str], tuple[str, str]] = {}
    for quantizer, readers in pairs:
        group = readers[0].input[1]
        for node in (quantizer, *readers):
            key_of_node = (node.input[1], group)
            if key_of_node not in stored:
                stored[key_of_node] = _store_range(model, graph, *key_of_node, least)
            node.input[1], node.input[2] = stored[key_of_node]
    del model.graph.value_info[:]  # the types in it are those from before
    drop_unused(model)


@pure
def drop_repeated_quantizers(model: ModelProto) -> None:
    """Drop a quantizer behind operators that only move values, such as Concat, whose inputs are on its grid already.

    Rounding such values again changes nothing. TensorRT wants a quantizer on both sides of these operators. OpenVINO
    runs the second one as a layer of its own, above all where there are zero points: of yolov9-t's 305 layers 59 are
    gone without them.
    """
    graph = QdqGraph(model)
    renamed: dict[str, str] = {}  # the result of a pair that goes → the tensor that it rounds
    for quantizer in graph.activations:
        producer = graph.producer(quantizer.input[0])
        before = graph.common_dequantizer(producer) if producer is not None else None
        if before is None or graph.quantizer_parameters(before) != graph.quantizer_parameters(quantizer):
            continue
        for dequantizer in graph.consumers(quantizer.output[0]):
            renamed[dequantizer.output[0]] = quantizer.input[0]
    for node in graph.nodes:
        rename_inputs(node, renamed)
    drop_unused(model)


def _signed_pairs(graph: QdqGraph) -> list[tuple[NodeProto, list[NodeProto]]]:
    """QuantizeLinear nodes of activations that are INT8, each with the DequantizeLinear nodes that read it."""
    pairs = []
    for quantizer in graph.activations:
        readers = [node for node in graph.consumers(quantizer.output[0]) if node.op_type == DEQUANTIZE]
        zero_point = graph.zero_point(quantizer)
        if readers and zero_point is not None and zero_point.dtype == np.int8:
            pairs.append((quantizer, readers))
    return pairs


def _store_range(
    model: ModelProto, graph: QdqGraph, name: str, group: str, least: Mapping[bytes, float]
) -> tuple[str, str]:
    """Add the new scale and the zero point of a node; returns their names.

    Args:
        name: the node's scale. For images as bytes the QuantizeLinear's is 255 times that of its group.
        group: the scale of the DequantizeLinear nodes.
        least: a group's scale → the least value of its tensors.
    """
    symmetric = graph.constant(group)
    factor = np.rint(graph.constant(name) / symmetric)
    lowest = np.maximum(least[symmetric.tobytes()], -LARGEST_ZERO_POINT * symmetric)
    scale = ((LARGEST_INT8 * symmetric - lowest) / STEPS).astype(symmetric.dtype)
    zero_point = np.rint(-lowest / scale).astype(np.uint8)
    new_name = f"{name}/uint8" if name == group else f"{name}/uint8/{group}"
    store(model, new_name, scale * factor.astype(scale.dtype))
    store(model, f"{new_name}/zero_point", zero_point)
    return new_name, f"{new_name}/zero_point"


def lower_bounds(graph: QdqGraph) -> dict[str, float]:
    """Return the least value that each tensor can have, as far as operators tell; the graph's inputs are images, ≥ 0.

    Rounding to a quantizer's steps is not counted: it moves a value by half a step at most.
    """
    bounds = {value.name: 0.0 for value in graph.model.graph.input}
    for node in graph.nodes:  # producers before consumers, as ONNX demands
        bound = _lower_bound(graph, node, bounds)
        if bound is not None:
            bounds.update(dict.fromkeys(node.output, bound))
    return bounds


def _lower_bound(graph: QdqGraph, node: NodeProto, bounds: Mapping[str, float]) -> float | None:
    """The least value of a node's results, None if that is not known."""
    if node.op_type in ("Relu", "Sigmoid"):
        return 0.0
    if _is_silu(graph, node):
        return LEAST_SILU
    if node.op_type in ("Add", "Concat"):
        operands = list(node.input)
    elif node.op_type in KEEPS_BOUND or graph.is_moving(node):
        operands = [node.input[0]]
    else:
        return None
    if not all(name in bounds for name in operands):
        return None
    values = [bounds[name] for name in operands]
    if node.op_type == "Add":
        return sum(values)
    return min(0.0, *values)  # an average counts zeros of its padding


def _is_silu(graph: QdqGraph, node: NodeProto) -> bool:
    """Whether a node is the product of a tensor and its sigmoid."""
    if node.op_type != "Mul":
        return False
    for tensor, gate in (node.input, reversed(node.input)):
        sigmoid = graph.producer(gate)
        if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.input[0] == tensor:
            return True
    return False


@pure
def seven_bit_weights(model: ModelProto) -> None:
    """Quantize weights to -64..64 in place of -127..127, with scales twice as large.

    It needs scales that do not clip weights, as this project's do not. Other integers, such as biases, stay.
    """
    view = GraphView(model)
    doubled: dict[str, str] = {}  # scale → the one in its place
    halved: dict[str, str] = {}  # weights that the file holds as INT8 → those in their place
    for node in view.of_type(QUANTIZE, DEQUANTIZE):
        name, scale = node.input[:2]
        weight = name
        quantizer = view.producer(name) if node.op_type == DEQUANTIZE else None
        if quantizer is not None:
            weight = quantizer.input[0]
        if not view.is_constant(weight) or view.constant(weight).dtype not in (np.int8, np.float32, np.float16):
            continue  # of an activation, or a bias
        if scale not in doubled:
            values = view.constant(scale)
            doubled[scale] = store(model, f"{scale}/7bits", values * values.dtype.type(2))
        node.input[1] = doubled[scale]
        if node.op_type == DEQUANTIZE and view.is_constant(name):
            if name not in halved:
                integers = np.rint(view.constant(name) / 2).astype(np.int8)
                halved[name] = store(model, f"{name}/7bits", integers)
            node.input[0] = halved[name]
    drop_unused(model)
