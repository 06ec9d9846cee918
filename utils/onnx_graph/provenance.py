"""Where each activation quantizer of a graph comes from: passes drop, rename, cut and widen them.

`number_quantizers` writes into each QuantizeLinear which of torch's calls it is, as its doc_string; passes that cut or
widen tensors add what they did. `provenance_of` reads all of it, and `without_provenance` removes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto

from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.view import pure


@dataclass(frozen=True)
class ChannelLayout:
    """Where the channels of a tensor lie after widening.

    Attributes:
        places: int64 `[C]`, of the channels that were there before.
        count: of channels now.
        cuts: channel at which a part begins (and C, the end) → where that is now.
    """

    places: np.ndarray
    count: int
    cuts: Mapping[int, int]

    def spread(self, array: np.ndarray, axis: int, filling: float = 0) -> np.ndarray:
        """An array with its entries along an axis at their new places, and `filling` between them."""
        shape = list(array.shape)
        shape[axis] = self.count
        result = np.full(shape, filling, array.dtype)
        index: list[slice | np.ndarray] = [slice(None)] * array.ndim
        index[axis] = self.places
        result[tuple(index)] = array
        return result


@dataclass(frozen=True)
class Provenance:
    """Where a graph's activation quantizer comes from.

    Attributes:
        call: which of torch's calls of activation quantizers it is, from 0.
        channels: which of torch's channels the graph's tensor holds; None: all.
        layout: where these lie if the graph's tensor is wider.
    """

    call: int
    channels: slice | None = None
    layout: ChannelLayout | None = None


def annotate(quantizer: NodeProto, **entries: object) -> None:
    """Add entries to what a QuantizeLinear says of itself: `call`, `channels` (bounds), `places` and `count`."""
    known = json.loads(quantizer.doc_string) if quantizer.doc_string else {}
    quantizer.doc_string = json.dumps({**known, **entries}, default=int)


@pure
def number_quantizers(model: ModelProto) -> None:
    """Write into each activation quantizer which one it is: torch calls them in this order, and passes drop some."""
    for node in model.graph.node:
        node.ClearField("doc_string")  # torch's
    for number, node in enumerate(QdqGraph(model).activations):
        annotate(node, call=number)


def provenance_of(model: ModelProto) -> dict[str, Provenance]:
    """The activation quantizers by name, and what passes wrote into them; empty for a float network."""
    result = {}
    for node in QdqGraph(model).activations:
        entries = json.loads(node.doc_string)
        channels = slice(*entries["channels"]) if "channels" in entries else None
        layout = ChannelLayout(np.array(entries["places"]), entries["count"], {}) if "places" in entries else None
        result[node.name] = Provenance(entries["call"], channels, layout)
    return result


@pure
def without_provenance(model: ModelProto) -> None:
    """A graph whose nodes have no doc_strings."""
    for node in model.graph.node:
        node.ClearField("doc_string")
