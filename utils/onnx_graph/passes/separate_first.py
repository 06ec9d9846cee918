"""The first convolution of a large network is several of 32 channels, which TensorRT 8.6 has a kernel for.

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

from utils.onnx_graph.passes.convolve_pools import depthwise
from utils.onnx_graph.passes.separate_parts import Cut, compute_parts, numbered, quantized_convolution, replace_nodes
from utils.onnx_graph.qdq_view import INT8_VECTOR, QdqGraph, annotate
from utils.onnx_graph.view import QUANTIZE, drop_unused

ONE = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)


def separate_first(model: ModelProto) -> ModelProto:
    """Compute the first convolution in parts of 32 channels, which are copied and joined in front of its quantizer."""
    graph, result = QdqGraph(model), deepcopy(model)
    view, cuts = graph.view, []
    for cut in filter(None, (quantized_convolution(quantizer, graph) for quantizer in graph.activations)):
        dequantizer = view.producer(cut.nodes[0].input[0])
        quantizer = dequantizer and view.producer(dequantizer.input[0])
        of_image = quantizer and quantizer.op_type == QUANTIZE and quantizer.input[0] in view.inputs
        if of_image and cut.bounds[-1] > INT8_VECTOR and cut.bounds[-1] % INT8_VECTOR == 0:
            cuts.append(replace(cut, bounds=[*range(0, cut.bounds[-1] + 1, INT8_VECTOR)]))
    made: dict[str, list[NodeProto]] = {}
    renamed = {}
    for cut in cuts:
        whole = cut.nodes[-2].input[0]
        renamed[whole] = f"{whole}.joined"
        nodes, joined = compute_parts(cut, result, view), []
        for index, bounds in enumerate(pairwise(cut.bounds)):
            added = _copied(cut, index, result)
            annotate(added[-2], channels=bounds)
            nodes += added
            joined.append(added[-1].output[0])
        join = helper.make_node("Concat", joined, [renamed[whole]], f"{cut.nodes[0].name}/Concat", axis=1)
        made[cut.nodes[0].output[0]] = [*nodes, join]
    if cuts:
        replace_nodes(result, made, renamed)
        drop_unused(result)
    return result


def _copied(cut: Cut, index: int, model: ModelProto) -> list[NodeProto]:
    """A convolution that gives what it reads, a part of 32 channels, and its quantizers."""
    source = f"{cut.result}.{index}"
    name, weight = f"{cut.nodes[0].name}.{index}.copy", numbered(cut.weights[0].input[0], f"{index}.copy")
    nodes = depthwise(source, f"{source}.copy", (name, weight), ONE, INT8_VECTOR, [1, 1, 1, 1], model)
    tensor = nodes[-1].output[0]
    for node in cut.nodes[-2:]:
        copy = deepcopy(node)
        copy.name = f"{name}/{node.op_type}"
        copy.input[0], copy.output[0] = tensor, f"{name}/{node.op_type}_output_0"
        tensor = copy.output[0]
        nodes.append(copy)
    return nodes
