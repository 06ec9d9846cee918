"""Passes that write the same computation in a form for which TensorRT has faster INT8 kernels; pure, see `cleanup.py`.

Two more of this kind have files of their own: `split_convolutions.py` and `pad_channels.py`.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.onnx_graph.qdq_passes import weight_quantizers
from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.view import DEQUANTIZE, QDQ, QUANTIZE, GraphView, attribute, channel_counts, pure, set_nodes

INT8_VECTOR = 32  # channels that an INT8 kernel reads at once
FEW_GROUPS = 8  # a dense convolution multiplies so many times as much, at most
MEAN_OF_FOUR = {  # attributes of the average pools that upstream's ADown and AConv have
    "kernel_shape": [2, 2], "strides": [1, 1], "pads": [0, 0, 0, 0], "dilations": [1, 1], "auto_pad": b"NOTSET",
}  # fmt: skip


@pure
def dense_groups(model: ModelProto) -> None:
    """Write quantized convolutions of few, narrow groups as dense ones: block-diagonal weights, the same results.

    TensorRT's INT8 kernels take groups of 32 channels and more; narrower ones run in float between conversions. The
    head of YOLOv9 has such groups (4 of 16 channels). A scale an output channel stays what it was, since zeros do not
    change a maximum. Depthwise convolutions have kernels of their own and stay.
    """
    view = GraphView(model)
    weights: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        groups = attribute(node, "group", 1) if node.op_type == "Conv" else 1
        quantizer = weight_quantizers(node, view)[0] if groups > 1 else None
        weight = view.array(quantizer.input[0]) if quantizer is not None else None
        if quantizer is None or weight is None or not 1 < weight.shape[1] < INT8_VECTOR or groups > FEW_GROUPS:
            continue
        weights[quantizer.input[0]] = _block_diagonal(weight, groups)
        for item in node.attribute:
            if item.name == "group":
                item.i = 1
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    if weights:
        del model.graph.value_info[:]  # it holds the old weights' shapes


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
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        convolved = node.output[0] in pools and node.output[0] in channels
        nodes += _depthwise_mean(node, channels[node.output[0]], model) if convolved else [node]
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


def _depthwise_mean(pool: NodeProto, channels: int, model: ModelProto) -> list[NodeProto]:
    """The convolution, named as the pool was."""
    quarters: np.ndarray = np.zeros((3, 3), np.float32)
    quarters[:2, :2] = 0.25
    weight = f"{pool.name or pool.output[0]}/weight"
    return depthwise(pool.input[0], pool.output[0], (pool.name, weight), quarters, channels, [0, 0, 1, 1], model)


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


def _block_diagonal(weight: np.ndarray, groups: int) -> np.ndarray:
    """`[C_out, C_in / groups, h, w]` → `[C_out, C_in, h, w]`."""
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    dense = np.zeros((weight.shape[0], columns * groups, *weight.shape[2:]), weight.dtype)
    for index in range(groups):
        block = slice(index * rows, (index + 1) * rows)
        dense[block, index * columns : (index + 1) * columns] = weight[block]
    return dense
