"""Average pools of 2x2 are depthwise convolutions, whose INT8 kernel is faster."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.view import DEQUANTIZE, QDQ, QUANTIZE, attribute, channel_counts, pure, set_nodes

MEAN_OF_FOUR = {  # attributes of the average pools that upstream's ADown and AConv have
    "kernel_shape": [2, 2], "strides": [1, 1], "pads": [0, 0, 0, 0], "dilations": [1, 1], "auto_pad": b"NOTSET",
}  # fmt: skip


@pure
def convolve_pools(model: ModelProto) -> None:
    """Write average pools of 2x2 between quantizers as depthwise convolutions: the same means.

    The INT8 kernel of TensorRT 8.6 for the largest pool of gelan-c takes four times as long as the memory needs, its
    kernel for depthwise convolutions of 3x3 less than twice (docs/placement.md). So the weights are 3x3, four
    quarters and five zeros; a quarter is 64 steps of 2**-8. In FP32 the means are exact, since scales are float16
    numbers; in FP16 one halfway between two quantized values may be rounded to the other one.
    """
    context = QdqGraph(model)
    pools = {node.output[0] for node in context.nodes("AveragePool") if _is_int8_mean(node, context)}
    if not pools:
        return
    channels = channel_counts(model)
    quarters: np.ndarray = np.zeros((3, 3), np.float32)
    quarters[:2, :2] = 0.25
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        result = node.output[0]
        if result not in pools or result not in channels:
            nodes.append(node)
            continue
        names = node.name, f"{node.name or result}/weight"
        nodes += depthwise(node.input[0], result, names, quarters, channels[result], [0, 0, 1, 1], model)
    set_nodes(model, nodes)


def _is_int8_mean(node: NodeProto, context: QdqGraph) -> bool:
    """Whether a node is an average pool as in `MEAN_OF_FOUR`, from a DequantizeLinear to QuantizeLinears only.

    No activation may follow: a quantizer must not stand between a convolution and its activation.
    """
    view = context.view
    if any(attribute(node, *item) != item[1] for item in MEAN_OF_FOUR.items()) or node.output[0] in view.outputs:
        return False
    source, quantizers = view.producer(node.input[0]), view.consumers(node.output[0])
    if source is None or source.op_type != DEQUANTIZE or {item.op_type for item in quantizers} != {QUANTIZE}:
        return False
    consumers = view.consumers_through(node.output[0], frozenset(QDQ))
    return not any(consumer.op_type == "Mul" or context.is_activation(consumer) for consumer in consumers)


def depthwise(
    source: str, result: str, names: tuple[str, str], kernel: np.ndarray, channels: int, pads: list[int],
    model: ModelProto,
) -> list[NodeProto]:  # fmt: skip
    """A convolution of each channel with a kernel of 3x3, behind its weight's quantizers.

    Args:
        names: of the convolution and of its weight.
        kernel: of multiples of its largest magnitude / 64, which is the scale.
        model: gets the constants.
    """
    name, weight = names
    constants = {
        weight: np.broadcast_to(kernel, (channels, 1, 3, 3)).astype(np.float32),
        f"{weight}/scale": np.full(channels, np.abs(kernel).max() / 64, np.float32),
        f"{weight}/zero_point": np.zeros(channels, np.int8),
    }
    model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in constants.items())
    nodes, given = [], weight
    for kind in QDQ:
        inputs, given = [given, *list(constants)[1:]], f"{weight}/{kind}_output_0"
        nodes.append(helper.make_node(kind, inputs, [given], name=f"{weight}/{kind}", axis=0))
    conv = helper.make_node(
        "Conv", [source, given], [result], name=name, group=channels, kernel_shape=[3, 3], pads=pads
    )
    return [*nodes, conv]
