"""Channels of quantized tensors in blocks of 32, so that INT8 kernels can write into a Concat and read a part of one.

TensorRT's fast INT8 kernels keep 32 channels of a pixel together. A Concat of parts of 120 channels, or a Split of 240
in halves, cuts through such blocks, and every part has to be copied. Here parts whose neighbours would begin inside a
block get channels of zero weight up to the next multiple of 32, which the kernels compute in any case. Convolutions
that read them have zero weights there: the results are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from utils.onnx_graph.qdq_view import INT8_VECTOR, PIECES, ChannelLayout, QdqGraph, annotate
from utils.onnx_graph.view import QDQ, QUANTIZE, attribute, channel_counts, drop_unused, overwrite, store

# Each result channel comes from the same channel of the input, whatever the others hold.
CHANNELWISE = PIECES | {*QDQ, "AveragePool", "Identity", "MaxPool", "Resize"}
GROWTH = 2  # a part becomes so many times as wide, at most; wider ones were not measured


@dataclass(frozen=True)
class _Link:
    """`count` channels of `tensor` from `start` on are those of `other` from `other_start` on."""

    tensor: str
    start: int
    other: str
    other_start: int
    count: int


class _Part(NamedTuple):
    """Neighbouring channels of a tensor."""

    channels: int
    group: int  # a number that parts share if their channels are linked


def align_channels(model: ModelProto) -> ModelProto:
    """Widen parts of Concats and Splits to whole blocks, see above; only where quantized tensors are concerned."""
    graph = _Graph(model)
    result = deepcopy(model)
    layouts = graph.layouts()
    for node in result.graph.node:
        if node.op_type == QUANTIZE and node.input[0] in layouts:
            layout = layouts[node.input[0]]
            annotate(node, places=layout.places.tolist(), count=layout.count)
    if layouts:
        _widen(result, layouts, graph.channels)
    return result


class _Graph:
    """A graph with its links between channels of tensors, and with the tensors whose channels must stay as they are."""

    def __init__(self, model: ModelProto) -> None:
        self.view = QdqGraph(model)
        self.channels = Counter(channel_counts(model))  # 0 where they are not known
        self.links: list[_Link] = []
        self.fixed = self.view.inputs | self.view.outputs
        for node in self.view.nodes:
            links = self._links_of(node)
            if links is None:
                self.fixed |= {*node.input, *node.output}
            else:
                self.links += links

    def layouts(self) -> dict[str, ChannelLayout]:
        """Find the layouts of the tensors that become wider, by name."""
        parts = self._parts()
        wider: set[int] = set()  # groups of parts, see `_parts`
        for tensor_parts in parts.values():
            for part in tensor_parts[:-1]:  # nothing follows the last
                if part.channels < _whole(part.channels) <= GROWTH * part.channels:
                    wider.add(part.group)
        quantized = {node.output[0] for node in self.view.of_type(QUANTIZE)}
        wider &= _groups(parts, quantized)
        wider -= _groups(parts, self.fixed)
        layouts = {}
        for name, tensor_parts in parts.items():
            if any(part.group in wider for part in tensor_parts):
                layouts[name] = _layout(tensor_parts, wider)
        return layouts

    def _links_of(self, node: NodeProto) -> list[_Link] | None:
        """List the channels that a node only hands on; None if its channels must stay as they are."""
        if node.op_type in CHANNELWISE:
            return self._channelwise(node)
        if node.op_type == "Concat" and attribute(node, "axis") == 1:
            return self._side_by_side(node.output[0], node.input)
        if node.op_type == "Split" and attribute(node, "axis", 0) == 1:
            return self._side_by_side(node.input[0], node.output)
        if node.op_type == "Conv" and self._can_be_rewritten(node):
            return []
        bounds = self.view.channel_bounds(node)
        if bounds is None:
            return None
        start, end = bounds
        count = min(end, self.channels[node.input[0]]) - start
        if self.channels[node.output[0]] != count:
            return None
        return [_Link(node.input[0], start, node.output[0], 0, count)]

    def _channelwise(self, node: NodeProto) -> list[_Link] | None:
        """Links of a node that computes each channel from the same channel of its inputs, see `_links_of`."""
        output = node.output[0]
        count = self.channels[output]
        inputs = [name for name in node.input if name and not self.view.is_constant(name)]
        if count <= 0 or any(self.channels[name] != count for name in inputs):
            return None
        constants = [self.view.constant(name) for name in node.input if self.view.is_constant(name)]
        if node.op_type != "Resize" and any(value.size != 1 for value in constants):
            return None
        if node.op_type == "Div" and not self.view.is_constant(node.input[1]):
            return None  # zero by zero is NaN, and no weight of zero removes it
        return [_Link(name, 0, output, 0, count) for name in inputs]

    def _side_by_side(self, whole: str, parts: Iterable[str]) -> list[_Link] | None:
        links = []
        start = 0
        for name in parts:
            if not self.channels[name]:
                return None
            links.append(_Link(name, 0, whole, start, self.channels[name]))
            start += self.channels[name]
        return links if start == self.channels[whole] else None

    def _can_be_rewritten(self, node: NodeProto) -> bool:
        """A convolution between all channels, whose quantized weights, scales and bias can be written anew."""
        quantizers = self.view.own_quantizers(node)
        if attribute(node, "group", 1) != 1 or quantizers is None:
            return False
        if len(node.input) > 2 and not self.view.is_constant(node.input[2]):
            return False
        return np.ndim(self.view.constant(quantizers[0].input[1])) == 1

    def _parts(self) -> dict[str, list[_Part]]:
        """The parts of each tensor that a link names, in order.

        All channels of all tensors are numbered. Of two linked tensors both have a border wherever one of them has.
        """
        if not self.links:
            return {}
        names: dict[str, None] = {}  # a set in order
        for link in self.links:
            names[link.tensor] = None
            names[link.other] = None
        ends = np.cumsum([0, *(self.channels[name] for name in names)])
        starts = dict(zip(names, ends.tolist(), strict=False))
        total = int(ends[-1])
        begins: np.ndarray = np.zeros(total + 1, bool)  # True for a channel that a part begins with
        begins[ends] = True
        rows = []
        columns = []
        for link in self.links:
            start = starts[link.tensor] + link.start
            other = starts[link.other] + link.other_start
            rows.append(np.arange(start, start + link.count))
            columns.append(np.arange(other, other + link.count))
            begins[[start, start + link.count, other, other + link.count]] = True
        row = np.concatenate(rows)
        graph = coo_array((np.ones(len(row)), (row, np.concatenate(columns))), (total, total))
        _, group = connected_components(graph, directed=False)  # of each channel
        begins = np.isin(group, group[begins[:-1]])  # also where a part begins that is linked to another
        parts = {}
        for name, start in starts.items():
            places = np.flatnonzero(begins[start : start + self.channels[name]])
            counts = np.diff([*places, self.channels[name]])
            groups = group[start + places]
            parts[name] = [_Part(*pair) for pair in zip(counts.tolist(), groups.tolist(), strict=True)]
        return parts


def _whole(count: int) -> int:
    """The next multiple of a block."""
    return -(-count // INT8_VECTOR) * INT8_VECTOR


def _groups(parts: Mapping[str, list[_Part]], names: Iterable[str]) -> set[int]:
    """Groups of all parts of the tensors with these names."""
    groups: set[int] = set()
    for name in names:
        groups.update(part.group for part in parts.get(name, ()))
    return groups


def _layout(parts: Iterable[_Part], wider: set[int]) -> ChannelLayout:
    """Lay parts side by side; those of the groups in `wider` get whole blocks."""
    places = []
    cuts = {0: 0}
    old = 0
    new = 0
    for part in parts:
        places.append(np.arange(new, new + part.channels))
        old += part.channels
        new += _whole(part.channels) if part.group in wider else part.channels
        cuts[old] = new
    return ChannelLayout(np.concatenate(places), new, cuts)


def _widen(model: ModelProto, layouts: Mapping[str, ChannelLayout], channels: Mapping[str, int]) -> None:
    """Give a graph wider tensors, in place."""
    view = QdqGraph(model)
    counts = {**channels, **{name: layout.count for name, layout in layouts.items()}}
    for node in model.graph.node:
        if not any(name in layouts for name in (*node.input, *node.output)):
            continue
        if node.op_type == "Conv":
            _widen_convolution(model, node, view, layouts)
        elif node.op_type == "Split":
            sizes = np.array([counts[name] for name in node.output])
            node.input[:] = [node.input[0], store(model, f"{node.name}/sizes", sizes)]
            for item in list(node.attribute):
                if item.name == "num_outputs":  # from opset 18; it goes with equal sizes only
                    node.attribute.remove(item)
        elif node.op_type == "Slice":
            cuts = layouts[node.input[0]].cuts
            for position, name in ((1, "start"), (2, "end")):
                old = min(int(view.constant(node.input[position]).item()), max(cuts))
                node.input[position] = store(model, f"{node.name}/{name}", np.array([cuts[old]]))
        elif node.op_type == "Resize" and len(node.input) > 3:
            sizes = view.constant(node.input[3]).copy()
            sizes[1] = counts[node.output[0]]
            node.input[3] = store(model, f"{node.name}/sizes", sizes)
    del model.graph.value_info[:]  # the old shapes
    drop_unused(model)


def _widen_convolution(
    model: ModelProto, node: NodeProto, view: QdqGraph, layouts: Mapping[str, ChannelLayout]
) -> None:
    quantizers = view.own_quantizers(node)
    assert quantizers is not None, "only such tensors become wider"
    before = layouts.get(node.input[0])
    after = layouts.get(node.output[0])
    stored, *parameters = quantizers[0].input
    weight = view.constant(stored)
    if before is not None:
        weight = before.spread(weight, 1)
    if after is None:
        overwrite(model, {stored: weight})
        return
    overwrite(model, {stored: after.spread(weight, 0)})
    scale, zero_point = map(view.constant, parameters)
    name = quantizers[0].name
    parameters = [
        store(model, f"{name}/scale", after.spread(scale, 0, scale.max())),
        store(model, f"{name}/zero_point", after.spread(zero_point, 0)),
    ]
    for quantizer in quantizers:
        quantizer.input[1:] = parameters
    if len(node.input) > 2:
        node.input[2] = store(model, f"{node.name}/bias", after.spread(view.constant(node.input[2]), 0))
