"""One QuantizeLinear and DequantizeLinear a tensor: TensorRT computes each that is there."""

from __future__ import annotations

from onnx import ModelProto, NodeProto

from utils.onnx_graph.qdq_view import WEIGHTED, comparable, quantizer_parameters
from utils.onnx_graph.view import DEQUANTIZE, QDQ, QUANTIZE, GraphView, pure, rename_inputs, set_nodes


@pure
def merge_quantizers(model: ModelProto) -> None:
    """Leave one QuantizeLinear and one DequantizeLinear a tensor, and one of the nodes that compute the same tensor.

    Two of a kind on one tensor with equal scale, zero point and axis become one. A quantizer that reads a
    DequantizeLinear of the same scale is dropped with its partner: quantizing twice gives the same integers. Other
    nodes of a kind, as two Concats of the same tensors, become one if their results are quantized with equal scales.
    """
    view = GraphView(model)
    first: dict[tuple[object, ...], list[str]] = {}
    renamed: dict[str, str] = {}
    source: dict[str, tuple[str, tuple[object, ...]]] = {}  # DQ output → (its integer input, parameters)
    kept = []
    for node in model.graph.node:
        rename_inputs(node, renamed)
        parameters = quantizer_parameters(node, view) if node.op_type in QDQ else _computation(node, view)
        if parameters is None or set(node.output) & view.outputs:
            kept.append(node)
            continue
        key = (node.op_type, node.input[0], *parameters)
        integers, before = source.get(node.input[0], ("", ()))
        if node.op_type == QUANTIZE and integers and before == parameters:
            renamed[node.output[0]] = integers
        elif key in first:
            renamed |= {name: other for name, other in zip(node.output, first[key], strict=True) if name}
        else:
            first[key] = list(node.output)
            kept.append(node)
            if node.op_type == DEQUANTIZE:
                source[node.output[0]] = (node.input[0], parameters)
    set_nodes(model, kept)


def _computation(node: NodeProto, view: GraphView) -> tuple[object, ...] | None:
    """What a node computes and how its results are quantized, comparable; None of a convolution, or if none of them is.

    Nodes with equal results whose scales differ stay apart: a tensor has one quantizer.
    """
    readers = [reader for name in node.output for reader in view.consumers(name) if reader.op_type == QUANTIZE]
    if not readers or not node.input or node.op_type in WEIGHTED:
        return None
    attributes = sorted(item.SerializeToString() for item in node.attribute)
    scales = {(list(node.output).index(reader.input[0]), *quantizer_parameters(reader, view)) for reader in readers}
    inputs = [comparable(name, view) for name in node.input]
    return (node.domain, *inputs, *attributes, len(node.output), frozenset(scales))
