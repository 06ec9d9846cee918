"""What an exported graph computes, whatever its tensors are called.

The signature of a tensor is a hash of the operator that gives it, its attributes and the signatures of what it reads;
that of a constant is its type, shape and bytes. So the outputs' signatures stand for the whole graph, and nodes that
nothing reads do not count.

Batch norms are folded where a float checkpoint is loaded, and how that rounds depends on the processor. So weights and
biases of a float network's convolutions can be taken out of the hashes: `parameters` describes them by numbers that
`different_parameters` compares within a bound. Which convolution reads which of them stays in the hashes.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

# Largest error of a parameter's magnitude or projection, as a part of its magnitude. Measured: none between the
# settings of an AVX2 processor, 6e-8 from batch norms that are folded in float64; a Xeon with AMX rounds otherwise too.
PARAMETERS = 2e-6


def signature(model: onnx.ModelProto, *, folded: bool = False) -> dict[str, Any]:
    """Describe inputs (type, shape), outputs (type, shape, hash), operators by number, and opsets.

    Args:
        folded: batch norms were folded on this machine: describe the convolutions' parameters apart from the hashes.
    """
    graph = model.graph
    known: dict[str, str] = {"": "none"}
    for value in graph.input:
        known[value.name] = _hash("input", value.name, value.type.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        known[tensor.name] = _of_constant(tensor)
    parameters = _parameters(graph) if folded else {}
    for position, (name, tensor) in enumerate(parameters.items()):
        known[name] = _hash("parameter", str(position), _type_and_shape(tensor))
    for node in graph.node:  # a valid graph's nodes come behind what they read
        attributes = sorted(_of_attribute(one) for one in node.attribute)
        whole = _hash(node.domain, node.op_type, *attributes, *(known[name] for name in node.input))
        if node.op_type == "Constant":  # the same as an initializer
            (one,) = node.attribute
            whole = _of_constant(one.t) if one.name == "value" else whole
        for index, name in enumerate(node.output):
            known[name] = whole if node.op_type == "Constant" else _hash(whole, str(index))
    description = {
        "inputs": {value.name: _shape(value) for value in graph.input},
        "outputs": {value.name: [_shape(value), known[value.name][:16]] for value in graph.output},
        "operators": dict(sorted(Counter(node.op_type for node in _live(graph)).items())),
        "opset": {one.domain or "ai.onnx": one.version for one in model.opset_import},
    }
    if folded:
        description["parameters"] = [_by_numbers(tensor) for tensor in parameters.values()]
    return description


def different_parameters(parameters: Sequence[str], golden: Sequence[str]) -> list[str]:
    """Compare the `parameters` of two signatures; gives a line for each that differs by more than PARAMETERS."""
    if len(parameters) != len(golden):
        return [f"{len(parameters)} parameters, golden {len(golden)}"]
    lines = []
    for position, (parameter, golden_parameter) in enumerate(zip(parameters, golden, strict=True)):
        if not _same_parameter(parameter.split(), golden_parameter.split()):
            lines.append(f"parameter {position}: {parameter}, golden {golden_parameter}")
    return lines


def _same_parameter(parameter: list[str], golden: list[str]) -> bool:
    if parameter[0] != golden[0]:
        return False
    magnitude, projection = map(float, parameter[1:])
    golden_magnitude, golden_projection = map(float, golden[1:])
    largest_error = max(abs(magnitude - golden_magnitude), abs(projection - golden_projection))
    return largest_error <= PARAMETERS * golden_magnitude


def _parameters(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Weights and biases that convolutions read as they are, by name, in the order of the convolutions."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    names = [name for node in convolutions for name in node.input[1:]]
    return {name: constants[name] for name in names if name in constants}


def _by_numbers(tensor: onnx.TensorProto) -> str:
    """Type and shape; the magnitude, a mean; the projection, a mean with another weight for every element.

    The projection changes where elements change places.
    """
    values = numpy_helper.to_array(tensor).astype(np.float64).ravel()
    weights = np.cos(np.arange(values.size))
    return f"{_type_and_shape(tensor)} {np.abs(values).mean():.12g} {(values * weights).mean():.12g}"


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


def _type_and_shape(tensor: onnx.TensorProto) -> str:
    return f"{onnx.TensorProto.DataType.Name(tensor.data_type)}[{','.join(map(str, tensor.dims))}]"


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
