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

FP32_INPUTS = {"Resize": (1, 2)}  # operator → positions of float arguments that are not data: they must be FP32
LARGEST = float(np.finfo(np.float16).max)


@pure
def to_half(model: ModelProto) -> None:
    """FP16 from the image to the last convolutions and DFL, with a Cast where a tensor crosses the border.

    A node that computes in FP16 reads

    - a constant     as its FP16 copy, `{name}/half`
    - an output      of the graph before its Cast to FP32, `{name}/half`
    - an input       of the graph behind a Cast to FP16, `{name}/cast`

    and a node that computes in FP32 reads a tensor of the FP16 part behind a Cast to FP32, `{name}/cast`.
    """
    graph = QdqGraph(model)
    border = _Border(model, graph, _half_tensors(graph))
    for node in list(model.graph.node):
        border.add(node)
    for name in border.constants:
        half = np.clip(graph.array(name), -LARGEST, LARGEST).astype(np.float16)
        store(model, f"{name}/half", half)
    set_nodes(model, border.nodes)
    del model.graph.value_info[:]  # the types in it are those from before
    drop_unused(model)


def _half_tensors(graph: QdqGraph) -> set[str]:
    """Names of the tensors that become FP16, see above."""
    tensors = graph.upstream([graph.after_activation(node.output[0]) for node in graph.last_convolutions])
    decoding = graph.upstream(sorted(graph.decoders))
    for node in graph.nodes:  # through what only moves these values, and through DFL
        is_dfl = node.op_type in ("Softmax", *WEIGHTED) and node.output[0] in decoding
        if not is_dfl and not graph.is_moving(node):
            continue
        if tensors.issuperset(graph.operands(node)):
            tensors.update(node.output)
    return tensors


def _float_tensors(model: ModelProto) -> set[str]:
    """Names of the FP32 tensors and initializers."""
    names = set()
    for value in with_shapes(model):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            names.add(value.name)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            names.add(tensor.name)
    return names


class _Border:
    """The nodes of the graph with Casts wherever a tensor crosses the border of its FP16 part.

    Args:
        half: names of the tensors that become FP16.
    """

    def __init__(self, model: ModelProto, graph: QdqGraph, half: set[str]) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, None] = {}  # those that the FP16 part reads, in order
        self._graph = graph
        self._half = half
        self._outputs = {value.name for value in model.graph.output} & half
        self._floats = _float_tensors(model)
        self._casts: set[str] = set()

    def add(self, node: NodeProto) -> None:
        """Append a node, renamed in place, with the Casts that it needs."""
        is_half = not self._half.isdisjoint(node.output)
        fp32_inputs = FP32_INPUTS.get(node.op_type, ())
        renamed: dict[str, str] = {}
        for position, name in enumerate(node.input):
            if name not in self._floats or node.op_type == "Shape" or position in fp32_inputs:
                continue
            renamed[name] = self._half_input(name) if is_half else self._float_input(name)
        rename_inputs(node, renamed)
        self.nodes.append(node)
        for position, name in enumerate(node.output):
            if name in self._outputs:
                node.output[position] = f"{name}/half"
                self._cast(f"{name}/half", name, f"{name}/Cast", TensorProto.FLOAT)

    def _half_input(self, name: str) -> str:
        """Name by which a node in FP16 reads a float tensor."""
        if self._graph.is_constant(name):
            self.constants[name] = None
            return f"{name}/half"
        if name in self._outputs:
            return f"{name}/half"
        if name in self._graph.inputs:
            return self._cast_once(name, TensorProto.FLOAT16)
        return name

    def _float_input(self, name: str) -> str:
        """Name by which a node in FP32 reads a float tensor."""
        is_half = name in self._half and name not in self._outputs
        if is_half and not self._graph.is_constant(name):
            return self._cast_once(name, TensorProto.FLOAT)
        return name

    def _cast_once(self, name: str, to: int) -> str:
        result = f"{name}/cast"
        if name not in self._casts:
            self._casts.add(name)
            self._cast(name, result, f"{name}/Cast", to)
        return result

    def _cast(self, name: str, result: str, node_name: str, to: int) -> None:
        self.nodes.append(helper.make_node("Cast", [name], [result], name=node_name, to=to))
