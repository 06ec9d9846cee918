"""What an exported graph computes, whatever its tensors are called.

The signature of a tensor is a hash of the operator that gives it, its attributes and the signatures of what it reads;
that of a constant is its type, shape and bytes. So the outputs' signatures stand for the whole graph, and nodes that
nothing reads do not count. `counts` says where two graphs differ.
"""

import hashlib
from collections import Counter
from typing import Any

import onnx
from onnx import numpy_helper


def signature(model: onnx.ModelProto) -> dict[str, Any]:
    """Outputs (name, type, shape, hash), inputs, operators by number, constants by number, opset, metadata's keys."""
    graph = model.graph
    known: dict[str, str] = {"": "none"}
    for value in graph.input:
        known[value.name] = _hash("input", value.name, value.type.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        known[tensor.name] = _of_constant(tensor)
    for node in graph.node:  # a valid graph's nodes come behind what they read
        attributes = sorted(_of_attribute(one) for one in node.attribute)
        whole = _hash(node.domain, node.op_type, *attributes, *(known[name] for name in node.input))
        if node.op_type == "Constant":  # the same as an initializer
            (one,) = node.attribute
            whole = _of_constant(one.t) if one.name == "value" else whole
        for index, name in enumerate(node.output):
            known[name] = whole if node.op_type == "Constant" else _hash(whole, str(index))
    return {
        "inputs": {value.name: _shape(value) for value in graph.input},
        "outputs": {value.name: [_shape(value), known[value.name][:16]] for value in graph.output},
        "operators": dict(sorted(Counter(node.op_type for node in _live(graph)).items())),
        "opset": {one.domain or "ai.onnx": one.version for one in model.opset_import},
    }


def _live(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that an output depends on, but for constants."""
    wanted = {value.name for value in graph.output}
    found = []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            if node.op_type != "Constant":
                found.append(node)
    return found


def _of_attribute(attribute: onnx.AttributeProto) -> str:
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _hash(attribute.name, _of_constant(attribute.t))
    assert attribute.type != onnx.AttributeProto.GRAPH, "no graph of ours has a graph inside"
    return _hash(attribute.SerializeToString(deterministic=True))


def _of_constant(tensor: onnx.TensorProto) -> str:
    array = numpy_helper.to_array(tensor)
    return _hash("constant", str(array.dtype), str(array.shape), array.tobytes())


def _shape(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    sides = [side.dim_param or str(side.dim_value) for side in kind.shape.dim]
    return f"{onnx.TensorProto.DataType.Name(kind.elem_type)}[{','.join(sides)}]"


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
