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
    part_of: dict[str, int]  # name of each result of a Split or Slice → the index of its part

    @property
    def result(self) -> str:
        """Name of the whole, behind its quantizers."""
        return str(self.nodes[-1].output[0])


def separate_parts(model: ModelProto) -> ModelProto:
    """Compute each part of a quantized result by its own convolution, see the module's docstring."""
    view = QdqGraph(model)
    result = deepcopy(model)
    new_nodes: dict[str, list[NodeProto]] = {}  # in front of the node with this result
    renamed: dict[str, str] = {}
    parts_of: dict[str, list[str]] = {}
    for quantizer in view.activations:
        cut = _find(quantizer, view)
        if cut is None:
            continue
        new_nodes[cut.nodes[0].output[0]] = compute_parts(cut, result, view)
        parts = [f"{cut.result}.{index}" for index in range(len(cut.bounds) - 1)]
        parts_of[cut.result] = parts
        for name, index in cut.part_of.items():
            renamed[name] = parts[index]
    if not new_nodes:
        return result
    for node in result.graph.node:
        if node.op_type == "Concat":
            node.input[:] = [part for name in node.input for part in parts_of.get(name, [name])]
    replace_nodes(result, new_nodes, renamed)
    result = merge_quantizers(result)  # a part that had a quantizer of its own
    drop_unused(result)
    return result


def replace_nodes(model: ModelProto, new_nodes: Mapping[str, Sequence[NodeProto]], renamed: Mapping[str, str]) -> None:
    """Put new nodes in front of the nodes whose results are named, and rename the inputs of all nodes."""
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes += new_nodes.get(node.output[0], ())
        nodes.append(node)
    for node in nodes:
        rename_inputs(node, renamed)
    set_nodes(model, nodes)
    drop_unused(model)


def _find(quantizer: NodeProto, view: QdqGraph) -> Cut | None:
    """The convolution behind a quantizer, if its result is joined whole and read in parts; else None."""
    cut = quantized_convolution(quantizer, view)
    if cut is None:
        return None
    count = cut.bounds[-1]
    slices = _slices(cut.result, count, view)
    if not slices:
        return None
    bounds = {0, count}
    for start, end in slices.values():
        bounds |= {start, end}
    indices = {part: index for index, part in enumerate(pairwise(sorted(bounds)))}
    if any(part not in indices for part in slices.values()):  # a part contains another
        return None
    names = {name for node in cut.nodes for name in node.output} | set(slices)
    if names & view.outputs:
        return None
    part_of = {name: indices[part] for name, part in slices.items()}
    return replace(cut, bounds=sorted(bounds), part_of=part_of)


def quantized_convolution(quantizer: NodeProto, view: QdqGraph) -> Cut | None:
    """The convolution whose result a quantizer rounds, not yet cut; None if its channels cannot be separated."""
    consumers = view.consumers(quantizer.output[0])
    if len(consumers) != 1 or np.ndim(view.array(quantizer.input[1])):  # a scale for each channel
        return None
    conv = view.producer(view.before_activation(quantizer.input[0]))
    if conv is None or conv.op_type != "Conv" or attribute(conv, "group", 1) != 1:
        return None
    weights = view.own_quantizers(conv)
    chain = _chain(conv.output[0], quantizer, view)
    if weights is None or chain is None or any(len(node.input) < 3 for node in weights):
        return None
    weight, *parameters = weights[0].input
    count = len(view.constant(weight))
    for name in (*parameters, *conv.input[2:]):
        if np.shape(view.array(name)) != (count,):
            return None
    return Cut([conv, *chain, quantizer, consumers[0]], weights, [0, count], {})


def _chain(start: str, quantizer: NodeProto, view: QdqGraph) -> list[NodeProto] | None:
    """The activation between a convolution's result and its quantizer; None if others read a tensor between."""
    names = set()
    waiting = [quantizer.input[0]]
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
    if any(value is not None and value.size != 1 for value in constants):
        return None
    return chain


def _slices(tensor: str, count: int, view: QdqGraph) -> dict[str, tuple[int, int]]:
    """Results of the Splits and Slices of a tensor: name → first channel and end.

    Empty if no Concat reads it whole, or if a node of another kind reads it.
    """
    slices: dict[str, tuple[int, int]] = {}
    is_joined = False
    for node in view.consumers(tensor):
        axis = attribute(node, "axis", 0)
        bounds = view.channel_bounds(node)
        if node.op_type == "Concat" and axis == 1:
            is_joined = True
        elif bounds is not None:
            start, end = bounds
            slices[node.output[0]] = (start, min(end, count))
        elif node.op_type == "Split" and axis == 1:
            sizes = _split_sizes(node, count, view)
            if sizes is None:
                return {}
            ends = np.cumsum([0, *sizes]).tolist()
            for name, part in zip(node.output, pairwise(ends), strict=True):
                if name:
                    slices[name] = part
        else:
            return {}
    return slices if is_joined else {}


def _split_sizes(split: NodeProto, count: int, view: QdqGraph) -> list[int] | None:
    """The sizes of a Split's parts; None if they are not known, or if their sum is not `count`."""
    if len(split.input) > 1:
        stored = view.array(split.input[1])
        if stored is None:
            return None
        sizes = stored.tolist()
    else:
        sizes = [count // len(split.output)] * len(split.output)
    return sizes if sum(sizes) == count else None


def compute_parts(cut: Cut, model: ModelProto, view: QdqGraph) -> list[NodeProto]:
    """Return the nodes that compute the parts, with numbered names; their constants go into the model."""
    nodes = []
    for index, bounds in enumerate(pairwise(cut.bounds)):
        nodes += _compute_part(cut, index, bounds, model, view)
    return nodes


def _compute_part(cut: Cut, index: int, bounds: tuple[int, int], model: ModelProto, view: QdqGraph) -> list[NodeProto]:
    """The nodes of the part with this index and these channels, see `compute_parts`."""
    conv = cut.nodes[0]
    quantizer, _ = cut.weights
    weight = numbered(quantizer.input[0], index)
    originals = [*cut.weights, *cut.nodes]
    names = {name: f"{name}.{index}" for node in originals for name in node.output}
    names[quantizer.input[0]] = weight
    for name in conv.input[2:]:
        names[name] = f"{weight}/bias"
    for node in cut.weights:  # both have the same parameters, perhaps under other names
        names[node.input[1]] = f"{weight}/scale"
        names[node.input[2]] = f"{weight}/zero_point"
    start, end = bounds
    for name in (*quantizer.input, *conv.input[2:]):
        store(model, names[name], view.constant(name)[start:end])
    copies = []
    for node in originals:
        copy = deepcopy(node)
        tensor, slash, kind = node.name.rpartition("/")
        if node in cut.weights:
            copy.name = f"{weight}/{node.op_type}"
        elif slash and kind in QDQ:  # `.../Mul/QuantizeLinear` → `.../Mul.0/QuantizeLinear`
            copy.name = f"{tensor}.{index}/{kind}"
        else:
            copy.name = f"{node.name}.{index}"
        if node is cut.nodes[-2]:
            annotate(copy, channels=bounds)
        copy.output[:] = [names[name] for name in node.output]
        rename_inputs(copy, names)
        copies.append(copy)
    return copies


def numbered(weight: str, index: int | str) -> str:
    """`model.2.cv1.conv.weight` → `model.2.cv1.conv.0.weight`: the path of the module stays a prefix of the name."""
    path, dot, last = weight.rpartition(".")
    if dot:
        return f"{path}.{index}.{last}"
    return f"{weight}.{index}"
