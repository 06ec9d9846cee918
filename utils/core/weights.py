"""A network's weights: the FP32 weights that they were made from, and their size."""

from __future__ import annotations

from typing import Any

FLOAT_HASH = "float_weights_hash"  # in checkpoints and metadata: `upstream.hash_of_weights` of the FP32 model

# Bytes of a value as it is computed with, by TensorProto's number of its type: FP32, INT8, FP16, BF16
BYTES = {1: 4, 3: 1, 10: 2, 16: 2}
FLOATS = (1, 10, 16)
WITH_WEIGHTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
QUANTIZER = "QuantizeLinear"
BETWEEN = (QUANTIZER, "DequantizeLinear", "Cast", "Identity")  # a weight and the operator that reads it


def is_quantized(model: Any) -> bool:
    """True if a ModelProto has quantizers."""
    return any(node.op_type == QUANTIZER for node in model.graph.node)


def onnx_weight_bytes(model: Any, float_bytes: int | None = None) -> int:
    """Bytes that the weights of an ONNX graph take as they are computed with.

    A quantized weight counts one byte for each value, also where the file stores it in FP32 in front of a quantizer.

    Args:
        model: a ModelProto.
        float_bytes: of each value that is not quantized, such as 2 in an FP16 engine; None: that of its type.
    """
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    producers = {}
    for node in graph.node:
        for name in node.output:
            producers[name] = node
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            stored[node.output[0]] = node.attribute[0].t
    total = 0
    for node in graph.node:
        if node.op_type not in WITH_WEIGHTS:
            continue
        for name in node.input:
            behind_quantizer = False
            while name not in stored and name in producers and producers[name].op_type in BETWEEN:
                behind_quantizer |= producers[name].op_type == QUANTIZER
                name = producers[name].input[0]
            if name in stored:
                total += _bytes_of(stored[name], behind_quantizer, float_bytes)
    return total


def _bytes_of(tensor: Any, behind_quantizer: bool, float_bytes: int | None) -> int:
    """Bytes of a TensorProto's values as they are computed with."""
    count = 1
    for side in tensor.dims:
        count *= side
    if behind_quantizer:
        return count
    if tensor.data_type in FLOATS and float_bytes is not None:
        return count * float_bytes
    return count * BYTES.get(tensor.data_type, 0)
