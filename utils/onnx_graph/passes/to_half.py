"""A pass that turns the float body of a network to FP16.

What becomes FP16 is decided by rule, not by running data:

- everything up to and including the last convolutions of the head
- an activation behind one, as the prototypes of masks have it, so that the two fuse
- what only moves the values of these
- DFL, whose tensors are the largest behind them. Sizes in cells then have steps of 1/128 from 8 to 16, and of 1/64
  above, which is half a pixel of a box of more than 500.

What follows (boxes in pixels, scores) is FP32: FP16 has steps of half a pixel above 512 wherever a box is. Input and
output stay FP32 as well, so that a file in FP16 is fed like one in FP32.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from utils.onnx_graph.qdq_view import WEIGHTED, QdqGraph
from utils.onnx_graph.view import drop_unused, pure, rename_inputs, set_nodes, store, with_shapes

KEPT_INPUTS = {"Resize": (1, 2)}  # float arguments that are not data: the operator wants FP32
LARGEST = float(np.finfo(np.float16).max)


@pure
def to_half(model: ModelProto) -> None:
    """FP16 from the image to the last convolutions and DFL, with a Cast where a tensor crosses the border."""
    graph = QdqGraph(model)
    body = graph.upstream([graph.after_activation(node.output[0]) for node in graph.last_convolutions])
    decoding = graph.upstream(sorted(graph.decoders))
    for node in graph.nodes:  # through what only moves the body's values, and through DFL
        of_dfl = node.op_type in ("Softmax", *WEIGHTED) and node.output[0] in decoding
        if (of_dfl or graph.is_moving(node)) and set(graph.operands(node)) <= body:
            body.update(node.output)
    results = {value.name for value in model.graph.output} & body
    floats = {value.name for value in with_shapes(model) if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats |= {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    nodes: list[NodeProto] = []
    casts: dict[str, str] = {}
    stored: dict[str, str] = {}

    def cast(name: str, to: int) -> str:
        if name not in casts:
            casts[name] = f"{name}/cast"
            nodes.append(helper.make_node("Cast", [name], [casts[name]], name=f"{name}/Cast", to=to))
        return casts[name]

    for node in list(model.graph.node):
        inside = bool(set(node.output) & body)
        names: dict[str, str] = {}
        for position, name in enumerate(node.input):
            if name not in floats or node.op_type == "Shape" or position in KEPT_INPUTS.get(node.op_type, ()):
                continue
            if inside and graph.is_constant(name):
                names[name] = stored.setdefault(name, f"{name}/half")
            elif inside and name in results:
                names[name] = f"{name}/half"
            elif inside and name in graph.inputs:
                names[name] = cast(name, TensorProto.FLOAT16)
            elif not inside and name in body - results and not graph.is_constant(name):
                names[name] = cast(name, TensorProto.FLOAT)
        rename_inputs(node, names)
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name in results:
                node.output[position] = f"{name}/half"
                nodes.append(helper.make_node("Cast", [f"{name}/half"], [name], f"{name}/Cast", to=TensorProto.FLOAT))
    for name, half in stored.items():
        store(model, half, np.clip(graph.array(name), -LARGEST, LARGEST).astype(np.float16))
    set_nodes(model, nodes)
    del model.graph.value_info[:]  # the types in it are those from before
    drop_unused(model)
