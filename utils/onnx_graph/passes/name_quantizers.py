"""Quantizers and scales are named after the tensor that they quantize: an engine's layers carry these names."""

from __future__ import annotations

from onnx import ModelProto

from utils.onnx_graph.view import DEQUANTIZE, QDQ, QUANTIZE, GraphView, pure, rename_inputs


@pure
def name_quantizers(model: ModelProto) -> None:
    """Name each quantizer and its scale after the tensor that it quantizes.

    `/model.4/cv1/act/Mul` → `/model.4/cv1/act/Mul/QuantizeLinear`, `.../scale`; weight `model.4.cv1.conv.weight` →
    `model.4.cv1.conv.weight/QuantizeLinear`. Torch names them after the module that happens to hold the quantizer.
    A shared scale is named after the first tensor that has it.
    """
    view = GraphView(model)
    taken = {node.name for node in view.nodes if node.op_type not in QDQ}
    renamed: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type not in QDQ:
            continue
        base = node.input[0]
        producer = view.producer(base)
        if node.op_type == DEQUANTIZE and producer is not None and producer.op_type == QUANTIZE:
            base = producer.input[0]
            producer = view.producer(base)
        if producer is not None and producer.name:
            index = list(producer.output).index(base)
            base = producer.name if index == 0 else f"{producer.name}.{index}"
        node.name = _unique(f"{base}/{node.op_type}", taken)
        for name, wanted in zip(node.input[1:], (f"{base}/scale", "zero_point"), strict=False):
            if view.is_constant(name) and name not in renamed:
                renamed[name] = _unique(wanted, taken)
        if node.output[0] not in view.outputs:
            renamed[node.output[0]] = f"{node.name}_output_0"
    for node in model.graph.node:
        rename_inputs(node, renamed)
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for entry in [*model.graph.initializer, *model.graph.value_info]:
        entry.name = renamed.get(entry.name, entry.name)


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate
