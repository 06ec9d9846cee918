"""Constants are initializers: passes look for values in one place."""

from __future__ import annotations

from onnx import ModelProto

from utils.onnx_graph.view import attribute, pure, set_nodes


@pure
def constants_to_initializers(model: ModelProto) -> None:
    """Turn Constant nodes into initializers, under the same tensor name."""
    kept = []
    for node in model.graph.node:
        value = attribute(node, "value") if node.op_type == "Constant" else None
        if value is None:
            kept.append(node)
        else:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
    set_nodes(model, kept)
