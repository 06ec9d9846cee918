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
    """`count` channels of `one` from `start` on are those of `other` from `other_start` on."""

    one: str
    start: int
    other: str
    other_start: int
    count: int


def align_channels(model: ModelProto) -> ModelProto:
    """Widen parts of Concats and Splits to whole blocks, see above; only where quantized tensors are concerned."""
    graph, result = _Graph(model), deepcopy(model)
    layouts = graph.layouts()
    for node in result.graph.node:
        if node.op_type == QUANTIZE and node.input[0] in layouts:
            layout = layouts[node.input[0]]
            annotate(node, places=layout.places.tolist(), count=layout.count)
    if layouts:
        _widen(result, layouts, graph.channels)
    return result


class _Graph:
    """Which channels of which tensors are the same, and which of them can become more."""

    def __init__(self, model: ModelProto) -> None:
        self.view = QdqGraph(model)
        self.channels = Counter(channel_counts(model))  # 0 where they are not known
        self.links: list[_Link] = []
        self.fixed = self.view.inputs | self.view.outputs
        for node in self.view.nodes:
            found = self._links_of(node)
            if found is None:
                self.fixed |= {*node.input, *node.output}
            else:
                self.links += found

    def layouts(self) -> dict[str, ChannelLayout]:
        """Find the layouts of the tensors that become wider, by name."""
        parts = self._parts()
        of_part = {name: [same for _, same in found] for name, found in parts.items()}
        fixed = {same for name in self.fixed for same in of_part.get(name, ())}
        int8 = {node.output[0] for node in self.view.of_type(QUANTIZE)}
        quantized = {same for name in int8 for same in of_part.get(name, ())}
        wider = {
            same
            for found in parts.values()
            for count, same in found[:-1]  # nothing follows the last
            if count < _whole(count) <= GROWTH * count
        }
        wider = (wider & quantized) - fixed
        return {
            name: _layout([(count, same in wider) for count, same in found])
            for name, found in parts.items()
            if any(same in wider for _, same in found)
        }

    def _links_of(self, node: NodeProto) -> list[_Link] | None:
        """Say which channels a node only hands on; None if its channels must stay as they are."""
        output = node.output[0]
        if node.op_type in CHANNELWISE:
            count = self.channels[output]
            inputs = [name for name in node.input if name and not self.view.is_constant(name)]
            constants = [value for name in node.input if (value := self.view.array(name)) is not None]
            same = count > 0 and all(self.channels[name] == count for name in inputs)
            if not same or (node.op_type != "Resize" and any(value.size != 1 for value in constants)):
                return None
            if node.op_type == "Div" and not self.view.is_constant(node.input[1]):
                return None  # zero by zero is no number, and no weight of zero takes it away
            return [_Link(name, 0, output, 0, count) for name in inputs]
        if node.op_type == "Concat" and attribute(node, "axis") == 1:
            return self._side_by_side(output, node.input)
        if node.op_type == "Split" and attribute(node, "axis", 0) == 1:
            return self._side_by_side(node.input[0], node.output)
        if (bounds := self.view.channel_bounds(node)) is not None:
            start, count = bounds[0], min(bounds[1], self.channels[node.input[0]]) - bounds[0]
            return [_Link(node.input[0], start, output, 0, count)] if self.channels[output] == count else None
        return [] if node.op_type == "Conv" and self._can_be_rewritten(node) else None

    def _side_by_side(self, whole: str, parts: Iterable[str]) -> list[_Link] | None:
        links, start = [], 0
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
        known = len(node.input) < 3 or self.view.is_constant(node.input[2])
        return known and np.ndim(self.view.constant(quantizers[0].input[1])) == 1

    def _parts(self) -> dict[str, list[tuple[int, int]]]:
        """The parts of each tensor that a link names, in order: channels, and a number that parts of the same share.

        All channels of all tensors are numbered. Of two linked tensors one has a border wherever the other has.
        """
        if not self.links:
            return {}
        names = list(dict.fromkeys(name for link in self.links for name in (link.one, link.other)))
        ends = np.cumsum([0, *map(self.channels.__getitem__, names)])
        starts, total = dict(zip(names, ends.tolist(), strict=False)), int(ends[-1])
        first: np.ndarray = np.zeros(total + 1, bool)  # channels that a part begins with
        first[ends], pairs = True, []
        for link in self.links:
            sides = (starts[link.one] + link.start, starts[link.other] + link.other_start)
            pairs.append([np.arange(side, side + link.count) for side in sides])
            for side in sides:
                first[[side, side + link.count]] = True
        rows, columns = (np.concatenate(side) for side in zip(*pairs, strict=True))
        graph = coo_array((np.ones(len(rows)), (rows, columns)), (total, total))
        _, same = connected_components(graph, directed=False)
        first = np.isin(same, same[first[:-1]])  # also where a part begins that is linked to another
        found = {}
        for name, start in starts.items():
            places = np.flatnonzero(first[start : start + self.channels[name]])
            counts = np.diff([*places, self.channels[name]])
            found[name] = list(zip(counts.tolist(), same[start + places].tolist(), strict=True))
        return found


def _whole(count: int) -> int:
    """The next multiple of a block."""
    return -(-count // INT8_VECTOR) * INT8_VECTOR


def _layout(parts: Iterable[tuple[int, bool]]) -> ChannelLayout:
    """Lay parts side by side, each given by its channels and by whether it becomes wider."""
    places, cuts, old, new = [], {0: 0}, 0, 0
    for count, wider in parts:
        places.append(np.arange(new, new + count))
        old, new = old + count, new + (_whole(count) if wider else count)
        cuts[old] = new
    return ChannelLayout(np.concatenate(places), new, cuts)


def _widen(model: ModelProto, layouts: Mapping[str, ChannelLayout], channels: Mapping[str, int]) -> None:
    """Give a graph wider tensors, in place."""
    view, counts = QdqGraph(model), {**channels, **{name: layout.count for name, layout in layouts.items()}}
    for node in model.graph.node:
        if not any(name in layouts for name in (*node.input, *node.output)):
            continue
        if node.op_type == "Conv":
            _widen_convolution(model, node, view, layouts)
        elif node.op_type == "Split":
            sizes = np.array([counts[name] for name in node.output])
            node.input[:] = [node.input[0], store(model, f"{node.name}/sizes", sizes)]
            for item in [item for item in node.attribute if item.name == "num_outputs"]:
                node.attribute.remove(item)  # from opset 18; it goes with equal sizes only
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
    before, after = layouts.get(node.input[0]), layouts.get(node.output[0])
    stored, *parameters = quantizers[0].input
    weight = view.constant(stored)
    weight = weight if before is None else before.spread(weight, 1)
    overwrite(model, {stored: weight if after is None else after.spread(weight, 0)})
    if after is None:
        return
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
