"""Quantizers with equal scales read one initializer, so that equality shows in the graph; of whole tensors a scalar."""

from __future__ import annotations

from onnx import ModelProto, numpy_helper

from utils.onnx_graph.view import QDQ, GraphView, attribute, drop_unused, pure


@pure
def share_scales(model: ModelProto) -> None:
    """Let quantizers with equal scales (or zero points) read one initializer; torch's tensors of one become scalars.

    A one-element scale with an axis may belong to a weight with one output channel, and stays.
    """
    view = GraphView(model)
    first: dict[object, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        for position in range(1, len(node.input)):
            name = node.input[position]
            value = view.array(name)
            if value is None:
                continue
            scalar = value.size == 1 and attribute(node, "axis") is None
            key = (str(value.dtype), () if scalar else value.shape, value.tobytes())
            if key not in first:
                first[key] = f"{name}/scalar" if scalar and value.ndim else name
                if first[key] != name:
                    model.graph.initializer.append(numpy_helper.from_array(value.reshape(()), first[key]))
            node.input[position] = first[key]
    drop_unused(model)
