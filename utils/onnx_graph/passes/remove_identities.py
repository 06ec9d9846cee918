"""Nodes that give what they read are dropped, so that patterns of other passes match."""

from __future__ import annotations

from onnx import ModelProto

from utils.onnx_graph.view import pure, rename_inputs, set_nodes


@pure
def remove_identities(model: ModelProto) -> None:
    """Drop Identity nodes, and Splits into one part; one that writes a graph output stays: outputs keep their names."""
    outputs = {value.name for value in model.graph.output}
    renamed: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        nothing = node.op_type == "Identity" or (node.op_type == "Split" and len(node.output) == 1)
        if nothing and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    set_nodes(model, kept)
