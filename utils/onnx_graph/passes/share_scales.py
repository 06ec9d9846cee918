"""Quantizers with equal scales read one initializer, so that equality shows in the graph."""

from __future__ import annotations

from onnx import ModelProto

from utils.onnx_graph.qdq_view import comparable
from utils.onnx_graph.view import QDQ, GraphView, drop_unused, pure


@pure
def share_scales(model: ModelProto) -> None:
    """Let quantizers with equal scales (or zero points) read one initializer, so that equality shows in the graph."""
    view = GraphView(model)
    first: dict[object, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            if view.is_constant(name):
                node.input[position] = first.setdefault(comparable(name, view), name)
    drop_unused(model)
