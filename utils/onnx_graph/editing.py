"""What passes are made of: a pass edits a copy of the graph with these functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from utils.onnx_graph.view import GraphView


def pure(edit: Callable[..., None]) -> Callable[..., ModelProto]:
    """Run an in-place edit on a copy and return the copy."""

    @wraps(edit)
    def run(model: ModelProto, *args: object, **kwargs: object) -> ModelProto:
        result = ModelProto()
        result.CopyFrom(model)
        edit(result, *args, **kwargs)
        return result

    return run


def set_nodes(model: ModelProto, nodes: list[NodeProto]) -> None:
    """Make these the graph's nodes; they may be some of its own."""
    copies = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)  # deleting the field would empty the originals
        copies.append(copy)
    del model.graph.node[:]
    model.graph.node.extend(copies)


def rename_inputs(node: NodeProto, renamed: Mapping[str, str]) -> None:
    """Replace input names of a node."""
    if renamed:
        node.input[:] = [renamed.get(name, name) for name in node.input]


def drop_unused(model: ModelProto) -> None:
    """Drop nodes, initializers and shape records that no graph output depends on."""
    view = GraphView(model)
    needed = view.upstream(sorted(view.outputs))
    set_nodes(model, [node for node in model.graph.node if set(node.output) & needed])
    for field in (model.graph.initializer, model.graph.value_info):
        for index in reversed([i for i, entry in enumerate(field) if entry.name not in needed]):
            del field[index]


class Tail:
    """Adds nodes behind the last ones of a graph, in place; names start with `prefix`."""

    def __init__(self, model: ModelProto, prefix: str) -> None:
        self._graph = model.graph
        self._prefix = prefix
        self._count = 0

    def add(
        self, kind: str, *inputs: str, outputs: Sequence[str] = ("",), domain: str = "", **attributes: object
    ) -> list[str]:
        """Add a node; returns the names of its results, which are made up where `outputs` has an empty text."""
        name = self._name(kind)
        results = [given or f"{name}_output_{index}" for index, given in enumerate(outputs)]
        node = helper.make_node(kind, list(inputs), results, name=name, domain=domain, **attributes)
        self._graph.node.append(node)
        return list(node.output)

    def value(self, value: object, dtype: type[np.generic] = np.int64) -> str:
        """Add a constant; returns its name."""
        name = self._name("constant")
        self._graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def outputs(self, values: Sequence[ValueInfoProto]) -> None:
        """Make these the graph's outputs, in place of those before."""
        del self._graph.output[:]
        self._graph.output.extend(values)

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"/{self._prefix}/{kind}_{self._count}"
