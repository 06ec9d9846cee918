"""Convolutions for which TensorRT has fast INT8 kernels, in place of operators without: 3x3 on single channels.

Average pools of 2x2 become such convolutions.

The convolution that reads the image has 64 channels in large networks. TensorRT 8.6.0 has a kernel for up to 32 that
reads three channels as they lie; for more the image is copied to 32 channels first. So it becomes several of 32
channels. Where that kernel writes right into a Concat, it takes the wrong place for all images of a batch but the first
one, so each part is copied by a depthwise convolution that changes nothing (docs/placement.md).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
from onnx import ModelProto, NodeProto, helper

from utils.onnx_graph.passes.separate_parts import Cut, compute_parts, numbered, quantized_convolution, replace_nodes
from utils.onnx_graph.qdq_view import INT8_VECTOR, QdqGraph, annotate
from utils.onnx_graph.view import QDQ, QUANTIZE, attribute, channel_counts, overwrite, pure, set_nodes, store

FEW_GROUPS = 8  # a dense convolution multiplies so many times as much, at most
ONE = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)
QUARTERS = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]], np.float32) / 4
MEAN_OF_FOUR = {  # attributes of the average pools that upstream's ADown and AConv have
    "kernel_shape": [2, 2],
    "strides": [1, 1],
    "pads": [0, 0, 0, 0],
    "dilations": [1, 1],
    "auto_pad": b"NOTSET",
}


@pure
def dense_groups(model: ModelProto) -> None:
    """Write quantized convolutions of few, narrow groups as dense ones: block-diagonal weights, the same results.

    Narrower groups run in float between conversions; the head of YOLOv9 has them (4 of 16 channels). A scale an output
    channel stays what it was, since zeros do not change a maximum. Depthwise convolutions have kernels of their own.
    """
    view = QdqGraph(model)
    weights: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        groups = attribute(node, "group", 1)
        if node.op_type != "Conv" or not 1 < groups <= FEW_GROUPS:
            continue
        quantizer, _ = view.weight_quantizers(node)
        weight = None if quantizer is None else view.array(quantizer.input[0])
        if quantizer is None or weight is None or not 1 < weight.shape[1] < INT8_VECTOR:
            continue
        weights[quantizer.input[0]] = _block_diagonal(weight, groups)
        for item in node.attribute:
            if item.name == "group":
                item.i = 1
    overwrite(model, weights)
    if weights:
        del model.graph.value_info[:]  # it holds the old weights' shapes


def _block_diagonal(weight: np.ndarray, groups: int) -> np.ndarray:
    """The dense weight `[C_out, C_in, h, w]` of a grouped convolution's `[C_out, C_in / groups, h, w]`."""
    rows = len(weight) // groups
    columns = weight.shape[1]
    dense: np.ndarray = np.zeros((len(weight), columns * groups, *weight.shape[2:]), weight.dtype)
    for group in range(groups):
        row = slice(group * rows, (group + 1) * rows)
        column = slice(group * columns, (group + 1) * columns)
        dense[row, column] = weight[row]
    return dense


@pure
def convolve_pools(model: ModelProto) -> None:
    """Write average pools of 2x2 between quantizers as depthwise convolutions: the same means.

    The INT8 kernel of TensorRT 8.6 for the largest pool of gelan-c takes four times as long as the memory needs, its
    kernel for depthwise convolutions of 3x3 less than twice (docs/placement.md). So the weights are 3x3, four
    quarters and five zeros; a quarter is 64 steps of 2**-8. In FP32 the means are exact, since scales are float16
    numbers; in FP16 one halfway between two quantized values may be rounded to the other one.
    """
    view = QdqGraph(model)
    pools = {node.output[0] for node in view.of_type("AveragePool") if _is_int8_mean(node, view)}
    if not pools:
        return
    channels = channel_counts(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        result = node.output[0]
        if result in pools and result in channels:
            names = (node.name, f"{node.name or result}/weight")
            nodes += depthwise(model, node.input[0], result, names, QUARTERS, channels[result], [0, 0, 1, 1])
        else:
            nodes.append(node)
    set_nodes(model, nodes)


def _is_int8_mean(node: NodeProto, view: QdqGraph) -> bool:
    """Whether a node is an average pool as in `MEAN_OF_FOUR`, from a DequantizeLinear to QuantizeLinears only.

    No activation may follow: a quantizer must not stand between a convolution and its activation.
    """
    result = node.output[0]
    for name, value in MEAN_OF_FOUR.items():
        if attribute(node, name, value) != value:
            return False
    readers = view.consumers(result)
    if result in view.outputs or not readers or readers != view.quantizers(result):
        return False
    if view.dequantizer(node.input[0]) is None:
        return False
    consumers = view.consumers_through(result, frozenset(QDQ))
    return not any(view.is_activation(consumer) for consumer in consumers)


def depthwise(
    model: ModelProto,
    source: str,
    result: str,
    names: tuple[str, str],
    kernel: np.ndarray,
    channels: int,
    pads: list[int],
) -> list[NodeProto]:
    """A convolution of each channel with a kernel of 3x3, behind its weight's quantizers; the model gets the constants.

    Args:
        names: of the convolution and of its weight.
        kernel: of multiples of its largest magnitude / 64, which is the scale.
    """
    name, weight = names
    tensor = store(model, weight, np.broadcast_to(kernel, (channels, 1, 3, 3)))
    scale = store(model, f"{weight}/scale", np.full(channels, np.abs(kernel).max() / 64, np.float32))
    zero_point = store(model, f"{weight}/zero_point", np.zeros(channels, np.int8))
    nodes = []
    for kind in QDQ:
        inputs = [tensor, scale, zero_point]
        tensor = f"{weight}/{kind}_output_0"
        nodes.append(helper.make_node(kind, inputs, [tensor], name=f"{weight}/{kind}", axis=0))
    attributes = {"group": channels, "kernel_shape": [3, 3], "pads": pads}
    return [*nodes, helper.make_node("Conv", [source, tensor], [result], name, **attributes)]


def separate_first(model: ModelProto) -> ModelProto:
    """Compute the first convolution in parts of 32 channels, which are copied and joined in front of its quantizer."""
    view = QdqGraph(model)
    result = deepcopy(model)
    new_nodes: dict[str, list[NodeProto]] = {}  # in front of the node with this result
    renamed: dict[str, str] = {}
    for quantizer in view.activations:
        cut = quantized_convolution(quantizer, view)
        if cut is None or not _reads_image(cut.nodes[0], view):
            continue
        count = cut.bounds[-1]
        if count <= INT8_VECTOR or count % INT8_VECTOR:
            continue
        cut = replace(cut, bounds=[*range(0, count + 1, INT8_VECTOR)])
        whole = cut.nodes[-2].input[0]
        renamed[whole] = f"{whole}.joined"
        nodes = compute_parts(cut, result, view)
        parts = []
        for index, bounds in enumerate(pairwise(cut.bounds)):
            copies = _copied(cut, index, result)
            annotate(copies[-2], channels=bounds)
            nodes += copies
            parts.append(copies[-1].output[0])
        join = helper.make_node("Concat", parts, [renamed[whole]], f"{cut.nodes[0].name}/Concat", axis=1)
        new_nodes[cut.nodes[0].output[0]] = [*nodes, join]
    if new_nodes:
        replace_nodes(result, new_nodes, renamed)
    return result


def _reads_image(convolution: NodeProto, view: QdqGraph) -> bool:
    """Whether a convolution reads an input of the graph through QuantizeLinear and DequantizeLinear."""
    dequantizer = view.producer(convolution.input[0])
    quantizer = None if dequantizer is None else view.producer(dequantizer.input[0])
    return quantizer is not None and quantizer.op_type == QUANTIZE and quantizer.input[0] in view.inputs


def _copied(cut: Cut, index: int, model: ModelProto) -> list[NodeProto]:
    """A depthwise convolution that copies a part of 32 channels, and its quantizers."""
    source = f"{cut.result}.{index}"
    name = f"{cut.nodes[0].name}.{index}.copy"
    weight = numbered(cut.weights[0].input[0], f"{index}.copy")
    nodes = depthwise(model, source, f"{source}.copy", (name, weight), ONE, INT8_VECTOR, [1, 1, 1, 1])
    tensor = nodes[-1].output[0]
    for node in cut.nodes[-2:]:
        copy = deepcopy(node)
        copy.name = f"{name}/{node.op_type}"
        copy.input[0] = tensor
        copy.output[0] = f"{name}/{node.op_type}_output_0"
        tensor = copy.output[0]
        nodes.append(copy)
    return nodes
