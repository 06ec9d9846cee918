"""A convolution whose result is joined whole and also read in parts becomes one convolution for each part.

ELAN blocks compute `concat(y, c, d)`, where y is the result of their first convolution and c comes from y's second
half. TensorRT lets a convolution write its result right into a Concat, but not when something else reads a part of it:
then y is copied. Two convolutions of half the channels each write where they are read. They read their input once more,
which costs less than the copy (docs/placement.md). The results are the same.

    graph, parts = separate_parts(graph)

The convolution that reads the image has 64 channels in large networks. TensorRT 8.6.0 has a kernel for up to 32 that
reads three channels as they lie; for more the image is copied to 32 channels first. So it becomes several of 32
channels. Where that kernel writes right into a Concat, it takes the wrong place for all images of a batch but the first
one, so each part is copied by a depthwise convolution that changes nothing (docs/placement.md).

    graph, parts = separate_first(graph)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.onnx_graph.int8_kernels import INT8_VECTOR, depthwise
from utils.onnx_graph.qdq_passes import merge_quantizers, own_quantizers
from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.view import (
    QDQ,
    QUANTIZE,
    GraphView,
    attribute,
    channel_bounds,
    drop_unused,
    rename_inputs,
    set_nodes,
)

ONE = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)


@dataclass(frozen=True)
class _Cut:
    """A convolution whose quantized result is computed in parts.

    Attributes:
        nodes: the convolution, its activation, QuantizeLinear and DequantizeLinear, in graph order.
        weights: QuantizeLinear and DequantizeLinear of its weights.
        bounds: first channels of the parts, and the end.
        taken: names of parts that a Split or Slice makes → which part.
    """

    nodes: list[NodeProto]
    weights: tuple[NodeProto, NodeProto]
    bounds: list[int]
    taken: dict[str, int]

    @property
    def result(self) -> str:
        return str(self.nodes[-1].output[0])


def separate_parts(model: ModelProto) -> tuple[ModelProto, dict[str, tuple[str, slice]]]:
    """Compute the parts of quantized results that are cut one by one, see above.

    Returns:
        The new graph; and its new activation quantizers by name, each with the one that it is a part of, and the
        channels.
    """
    context = QdqGraph(model)
    cuts = [cut for quantizer in context.activations if (cut := _find(quantizer, context)) is not None]
    result = ModelProto()
    result.CopyFrom(model)
    if not cuts:
        return result, {}
    made = {cut.nodes[0].output[0]: _parts(cut, result, context.view) for cut in cuts}
    renamed = {name: f"{cut.result}.{index}" for cut in cuts for name, index in cut.taken.items()}
    whole = {cut.result: [f"{cut.result}.{index}" for index in range(len(cut.bounds) - 1)] for cut in cuts}
    for node in result.graph.node:
        if node.op_type == "Concat":
            node.input[:] = [part for name in node.input for part in whole.get(name, [name])]
    _put_in(result, made, renamed)
    result = merge_quantizers(result)  # a part that had a quantizer of its own
    drop_unused(result)
    return result, _origins(cuts)


def separate_first(model: ModelProto) -> tuple[ModelProto, dict[str, tuple[str, slice]]]:
    """Compute the first convolution in parts of 32 channels, which are copied and joined in front of its quantizer.

    Returns:
        As `separate_parts`.
    """
    context = QdqGraph(model)
    found = (_convolution(quantizer, context) for quantizer in context.activations)
    view, cuts = context.view, []
    for cut in filter(None, found):
        dequantizer = view.producer(cut.nodes[0].input[0])
        quantizer = dequantizer and view.producer(dequantizer.input[0])
        of_image = quantizer and quantizer.op_type == QUANTIZE and quantizer.input[0] in view.inputs
        if of_image and cut.bounds[-1] > INT8_VECTOR and cut.bounds[-1] % INT8_VECTOR == 0:
            cuts.append(replace(cut, bounds=[*range(0, cut.bounds[-1] + 1, INT8_VECTOR)]))
    result = ModelProto()
    result.CopyFrom(model)
    made: dict[str, list[NodeProto]] = {}
    renamed, copies = {}, {}
    for cut in cuts:
        whole, quantizer = cut.nodes[-2].input[0], cut.nodes[-2].name
        renamed[whole] = f"{whole}.joined"
        nodes, joined = _parts(cut, result, view), []
        for index, bounds in enumerate(pairwise(cut.bounds)):
            added = _copied(cut, index, result)
            copies[added[-2].name] = (quantizer, slice(*bounds))
            nodes += added
            joined.append(added[-1].output[0])
        join = helper.make_node("Concat", joined, [renamed[whole]], f"{cut.nodes[0].name}/Concat", axis=1)
        made[cut.nodes[0].output[0]] = [*nodes, join]
    if cuts:
        _put_in(result, made, renamed)
        drop_unused(result)
    return result, _origins(cuts) | copies


def _copied(cut: _Cut, index: int, model: ModelProto) -> list[NodeProto]:
    """A convolution that gives what it reads, a part of 32 channels, and its quantizers."""
    source = f"{cut.result}.{index}"
    name, weight = f"{cut.nodes[0].name}.{index}.copy", _numbered(cut.weights[0].input[0], f"{index}.copy")
    nodes = depthwise(source, f"{source}.copy", (name, weight), ONE, INT8_VECTOR, [1, 1, 1, 1], model)
    tensor = nodes[-1].output[0]
    for node in cut.nodes[-2:]:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{name}/{node.op_type}"
        copy.input[0], copy.output[0] = tensor, f"{name}/{node.op_type}_output_0"
        tensor = copy.output[0]
        nodes.append(copy)
    return nodes


def _put_in(model: ModelProto, made: Mapping[str, Sequence[NodeProto]], renamed: Mapping[str, str]) -> None:
    """Put nodes in front of those whose result is named, and have all nodes read other tensors."""
    nodes = [new for node in model.graph.node for new in (*made.get(node.output[0], ()), node)]
    for node in nodes:
        rename_inputs(node, renamed)
    set_nodes(model, nodes)


def _origins(cuts: Sequence[_Cut]) -> dict[str, tuple[str, slice]]:
    """The quantizers of parts by name, each with the one that it is a part of, and the channels."""
    return {
        _name(cut.nodes[-2], index): (cut.nodes[-2].name, slice(*bounds))
        for cut in cuts
        for index, bounds in enumerate(pairwise(cut.bounds))
    }


def _find(quantizer: NodeProto, context: QdqGraph) -> _Cut | None:
    """What a quantizer's result is made of, if it is cut as described."""
    cut, view = _convolution(quantizer, context), context.view
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


def _convolution(quantizer: NodeProto, context: QdqGraph) -> _Cut | None:
    """The convolution whose result a quantizer rounds, in one part; None if its channels cannot be told apart."""
    view = context.view
    consumers = view.consumers(quantizer.output[0])
    if np.ndim(view.array(quantizer.input[1])):  # a scale for each channel
        return None
    conv = view.producer(context.before_activation(quantizer.input[0]))
    if conv is None or conv.op_type != "Conv" or attribute(conv, "group", 1) != 1 or len(consumers) != 1:
        return None
    weights = own_quantizers(conv, view)
    chain = _chain(conv.output[0], quantizer, view)
    if weights is None or chain is None or any(len(node.input) < 3 for node in weights):
        return None
    weight = view.array(weights[0].input[0])
    count = 0 if weight is None else len(weight)
    if any(np.shape(view.array(name)) != (count,) for name in (*weights[0].input[1:], *conv.input[2:])):
        return None
    return _Cut([conv, *chain, quantizer, consumers[0]], weights, [0, count], {})


def _chain(start: str, quantizer: NodeProto, view: GraphView) -> list[NodeProto] | None:
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


def _taken(tensor: str, count: int, view: GraphView) -> dict[str, tuple[int, int]]:
    """Parts that Splits and Slices make of a tensor: name → first channel and end.

    Empty if no Concat reads it whole, or if something reads it that is neither.
    """
    taken: dict[str, tuple[int, int]] = {}
    joined = False
    for node in view.consumers(tensor):
        axis = attribute(node, "axis", 0)
        if node.op_type == "Concat" and axis == 1:
            joined = True
        elif node.op_type == "Slice" and (bounds := channel_bounds(node, view)) is not None:
            taken[node.output[0]] = (bounds[0], min(bounds[1], count))
        elif node.op_type == "Split" and axis == 1 and (sizes := _sizes(node, count, view)) is not None:
            ends = np.cumsum([0, *sizes]).tolist()
            taken |= {name: part for name, part in zip(node.output, pairwise(ends), strict=True) if name}
        else:
            return {}
    return taken if joined else {}


def _sizes(node: NodeProto, count: int, view: GraphView) -> list[int] | None:
    """Sizes of a Split's parts, or None if they are not known."""
    if len(node.input) > 1:
        sizes = view.array(node.input[1])
        return None if sizes is None else [int(size) for size in sizes]
    return None if count % len(node.output) else [count // len(node.output)] * len(node.output)


def _parts(cut: _Cut, model: ModelProto, view: GraphView) -> list[NodeProto]:
    """New nodes, named as before and numbered; their constants go into the model."""
    conv, (quantizer, dequantizer) = cut.nodes[0], cut.weights
    nodes = []
    for index, bounds in enumerate(pairwise(cut.bounds)):
        weight = _numbered(quantizer.input[0], index)
        names = {name: f"{name}.{index}" for node in (quantizer, dequantizer, *cut.nodes) for name in node.output}
        names |= {quantizer.input[0]: weight} | dict.fromkeys(conv.input[2:], f"{weight}/bias")
        for node in cut.weights:  # equal parameters, perhaps by other names
            names |= {node.input[1]: f"{weight}/scale", node.input[2]: f"{weight}/zero_point"}
        for name in (*quantizer.input, *conv.input[2:]):
            value = view.array(name)
            assert value is not None, f"{name} is constant"
            model.graph.initializer.append(numpy_helper.from_array(value[slice(*bounds)], names[name]))
        for node in (quantizer, dequantizer, *cut.nodes):
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = _name(node, index) if node not in cut.weights else f"{weight}/{node.op_type}"
            copy.output[:] = [names[name] for name in node.output]
            rename_inputs(copy, names)
            nodes.append(copy)
    return nodes


def _name(node: NodeProto, index: int) -> str:
    """`/model.2/cv1/act/Mul` → `.../Mul.0`, `/model.2/cv1/act/Mul/QuantizeLinear` → `.../Mul.0/QuantizeLinear`."""
    tensor, slash, kind = node.name.rpartition("/")
    return f"{tensor}.{index}/{kind}" if slash and kind in QDQ else f"{node.name}.{index}"


def _numbered(weight: str, index: int | str) -> str:
    """`model.2.cv1.conv.weight` → `model.2.cv1.conv.0.weight`: the name still says which module it belongs to."""
    path, dot, last = weight.rpartition(".")
    return f"{path}.{index}.{last}" if dot else f"{weight}.{index}"
