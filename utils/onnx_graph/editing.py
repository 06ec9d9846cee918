"""What passes are made of: a pass edits a copy of the graph with these functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps

from onnx import ModelProto, NodeProto

from utils.onnx_graph.graph import GraphView


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
