"""A convolution whose result is joined whole and also read in parts becomes one convolution for each part.

ELAN blocks compute `concat(y, c, d)`, where y is the result of their first convolution and c comes from y's second
half. TensorRT lets a convolution write its result right into a Concat, but not when something else reads a part of it:
then y is copied. Two convolutions of half the channels each write where they are read. They read their input once more,
which costs less than the copy (docs/placement.md). The results are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from onnx import ModelProto, NodeProto

from utils.onnx_graph.passes.quantizers import merge_quantizers
from utils.onnx_graph.qdq_view import QdqGraph, annotate
from utils.onnx_graph.view import QDQ, attribute, drop_unused, rename_inputs, set_nodes, store


@dataclass(frozen=True)
class Cut:
    """A convolution whose quantized result is computed in parts."""

    nodes: list[NodeProto]  # the convolution, its activation, QuantizeLinear and DequantizeLinear, in graph order
    weights: tuple[NodeProto, NodeProto]  # QuantizeLinear and DequantizeLinear of its weights
    bounds: list[int]  # first channels of the parts, and the end
    taken: dict[str, int]  # names of parts that a Split or Slice makes → which part

    @property
    def result(self) -> str:
        """Name of the whole, behind its quantizers."""
        return str(self.nodes[-1].output[0])


def separate_parts(model: ModelProto) -> ModelProto:
    """Compute the parts of quantized results that are cut one by one, see above."""
    view, result = QdqGraph(model), deepcopy(model)
    cuts = [cut for quantizer in view.activations if (cut := _find(quantizer, view)) is not None]
    if not cuts:
        return result
    made = {cut.nodes[0].output[0]: compute_parts(cut, result, view) for cut in cuts}
    renamed = {name: f"{cut.result}.{index}" for cut in cuts for name, index in cut.taken.items()}
    whole = {cut.result: [f"{cut.result}.{index}" for index in range(len(cut.bounds) - 1)] for cut in cuts}
    for node in result.graph.node:
        if node.op_type == "Concat":
            node.input[:] = [part for name in node.input for part in whole.get(name, [name])]
    replace_nodes(result, made, renamed)
    result = merge_quantizers(result)  # a part that had a quantizer of its own
    drop_unused(result)
    return result


def replace_nodes(model: ModelProto, made: Mapping[str, Sequence[NodeProto]], renamed: Mapping[str, str]) -> None:
    """Put nodes in front of those whose result is named, and have all nodes read other tensors."""
    nodes = [new for node in model.graph.node for new in (*made.get(node.output[0], ()), node)]
    for node in nodes:
        rename_inputs(node, renamed)
    set_nodes(model, nodes)
    drop_unused(model)


def _find(quantizer: NodeProto, view: QdqGraph) -> Cut | None:
    """What a quantizer's result is made of, if it is cut as described."""
    cut = quantized_convolution(quantizer, view)
    if cut is None:
        return None
    count = cut.bounds[-1]
    taken = _taken(cut.result, count, view)
    if not taken:
        return None
    bounds = sorted({0, count, *(end for part in taken.values() for end in part)})
    parts = {part: index for index, part in enumerate(pairwise(bounds))}
    if any(part not in parts for part in taken.values()):  # one part contains another
        return None
    if any(set(node.output) & view.outputs for node in cut.nodes) or set(taken) & view.outputs:
        return None
    return replace(cut, bounds=bounds, taken={name: parts[part] for name, part in taken.items()})


def quantized_convolution(quantizer: NodeProto, view: QdqGraph) -> Cut | None:
    """The convolution whose result a quantizer rounds, in one part; None if its channels cannot be told apart."""
    consumers = view.consumers(quantizer.output[0])
    if np.ndim(view.array(quantizer.input[1])):  # a scale for each channel
        return None
    conv = view.producer(view.before_activation(quantizer.input[0]))
    if conv is None or conv.op_type != "Conv" or attribute(conv, "group", 1) != 1 or len(consumers) != 1:
        return None
    weights = view.own_quantizers(conv)
    chain = _chain(conv.output[0], quantizer, view)
    if weights is None or chain is None or any(len(node.input) < 3 for node in weights):
        return None
    weight = view.array(weights[0].input[0])
    count = 0 if weight is None else len(weight)
    if any(np.shape(view.array(name)) != (count,) for name in (*weights[0].input[1:], *conv.input[2:])):
        return None
    return Cut([conv, *chain, quantizer, consumers[0]], weights, [0, count], {})


def _chain(start: str, quantizer: NodeProto, view: QdqGraph) -> list[NodeProto] | None:
    """The activation between a convolution's result and its quantizer; None if others read what is between."""
    names, waiting = set(), [quantizer.input[0]]
    while waiting:
        name = waiting.pop()
        node = view.producer(name)
        if name == start or node is None or node.output[0] in names:
            continue
        names.add(node.output[0])
        waiting += node.input
    chain = [node for node in view.nodes if node.output[0] in names]
    inside = names | {quantizer.output[0]}
    for name in (start, *names):
        if any(consumer.output[0] not in inside for consumer in view.consumers(name)):
            return None
    constants = (view.array(name) for node in chain for name in node.input)
    return None if any(value is not None and value.size != 1 for value in constants) else chain


def _taken(tensor: str, count: int, view: QdqGraph) -> dict[str, tuple[int, int]]:
    """Parts that Splits and Slices make of a tensor: name → first channel and end.

    Empty if no Concat reads it whole, or if something reads it that is neither.
    """
    taken: dict[str, tuple[int, int]] = {}
    joined = False
    for node in view.consumers(tensor):
        axis = attribute(node, "axis", 0)
        if node.op_type == "Concat" and axis == 1:
            joined = True
        elif (bounds := view.channel_bounds(node)) is not None:
            taken[node.output[0]] = (bounds[0], min(bounds[1], count))
        elif node.op_type == "Split" and axis == 1:
            equal = [count // len(node.output)] * len(node.output)  # where the file says no sizes
            sizes = view.array(node.input[1]) if len(node.input) > 1 else np.array(equal)
            if sizes is None or sizes.sum() != count:
                return {}
            ends = np.cumsum([0, *sizes]).tolist()
            taken |= {name: part for name, part in zip(node.output, pairwise(ends), strict=True) if name}
        else:
            return {}
    return taken if joined else {}


def compute_parts(cut: Cut, model: ModelProto, view: QdqGraph) -> list[NodeProto]:
    """New nodes, named as before and numbered; their constants go into the model."""
    conv, (quantizer, dequantizer) = cut.nodes[0], cut.weights
    nodes = []
    for index, bounds in enumerate(pairwise(cut.bounds)):
        weight = numbered(quantizer.input[0], index)
        names = {name: f"{name}.{index}" for node in (quantizer, dequantizer, *cut.nodes) for name in node.output}
        names |= {quantizer.input[0]: weight} | dict.fromkeys(conv.input[2:], f"{weight}/bias")
        for node in cut.weights:  # equal parameters, perhaps by other names
            names |= {node.input[1]: f"{weight}/scale", node.input[2]: f"{weight}/zero_point"}
        for name in (*quantizer.input, *conv.input[2:]):
            store(model, names[name], view.constant(name)[slice(*bounds)])
        for node in (quantizer, dequantizer, *cut.nodes):
            copy = deepcopy(node)
            tensor, slash, kind = node.name.rpartition("/")  # `.../Mul/QuantizeLinear` → `.../Mul.0/QuantizeLinear`
            copy.name = f"{tensor}.{index}/{kind}" if slash and kind in QDQ else f"{node.name}.{index}"
            if node in cut.weights:
                copy.name = f"{weight}/{node.op_type}"
            if node is cut.nodes[-2]:
                annotate(copy, channels=bounds)
            copy.output[:] = [names[name] for name in node.output]
            rename_inputs(copy, names)
            nodes.append(copy)
    return nodes


def numbered(weight: str, index: int | str) -> str:
    """`model.2.cv1.conv.weight` → `model.2.cv1.conv.0.weight`: the name still says which module it belongs to."""
    path, dot, last = weight.rpartition(".")
    return f"{path}.{index}.{last}" if dot else f"{weight}.{index}"
