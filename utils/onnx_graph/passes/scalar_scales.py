"""Scales and zero points of whole tensors are scalars: torch writes tensors of one element."""

from __future__ import annotations

from onnx import ModelProto, numpy_helper

from utils.onnx_graph.view import QDQ, GraphView, attribute, drop_unused, pure


@pure
def scalar_scales(model: ModelProto) -> None:
    """Give per-tensor quantizers scalar scales and zero points: torch writes tensors of one element.

    A one-element scale with an axis may belong to a weight with one output channel, and stays.
    """
    view = GraphView(model)
    scalars: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ or attribute(node, "axis") is not None:
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            value = view.array(name)
            if value is None or value.ndim == 0 or value.size != 1:
                continue
            if name not in scalars:
                scalars[name] = f"{name}/scalar"
                model.graph.initializer.append(numpy_helper.from_array(value.reshape(()), scalars[name]))
            node.input[position] = scalars[name]
    drop_unused(model)
