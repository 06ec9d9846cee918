"""Does an exported graph compute what the fake-quantized network computes? Tensor by tensor, in INT8 steps.

The graph is cut behind every activation quantizer: each DequantizeLinear becomes an input that is fed with what the
torch network had there. So every stretch between two quantizers is compared by itself, and differences do not add up:
what remains is float arithmetic in another order, which may move a value across the border between two levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from models.quantize.modules import export_mode
from utils.onnx_graph.context import Context


@dataclass(frozen=True)
class Agreement:
    """How far a graph is from the network, each stretch between quantizers by itself.

    Attributes:
        tensors: how many quantized tensors were compared.
        steps: the largest difference of two integers.
        fraction: of the values that differ at all.
        output: the largest difference of the network's result, pixels or score, for equal last quantized tensors.
    """

    tensors: int
    steps: int
    fraction: float
    output: float


def compare(model: nn.Module, graph: ModelProto, images: Tensor, like: ModelProto | None = None) -> Agreement:
    """Compare every quantized activation of a network with the exported graph's.

    Args:
        images: `[B, 3, H, W]` in 0..1.
        like: the same graph with its nodes in the order of the trace, where `graph` has been reordered.
    """
    values, result = _torch_values(model, images)
    cut, names = _cut(graph, [node.name for node in Context(like or graph).activations])
    assert len(values) == len(names), f"{len(values)} quantizers run in torch, {len(names)} are in the graph"
    feeds = {"images": images.numpy(), **{entry.real: value for entry, value in zip(names, values, strict=True)}}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(cut.SerializeToString(), options, providers=["CPUExecutionProvider"])
    taken = {entry.name for entry in session.get_inputs()}
    wanted = ["output0", *(entry.integers for entry in names)]
    output, *levels = session.run(wanted, {key: value for key, value in feeds.items() if key in taken})
    steps, differing, total = 0, 0, 0
    for entry, value, level in zip(names, values, levels, strict=True):
        apart = np.abs(np.rint(value / entry.scale) - level)
        steps, differing, total = max(steps, int(apart.max())), differing + int((apart > 0).sum()), total + apart.size
    return Agreement(len(names), steps, differing / total, float(np.abs(output - result).max()))


@dataclass(frozen=True)
class _Pair:
    integers: str
    real: str
    scale: float


def _torch_values(model: nn.Module, images: Tensor) -> tuple[list[np.ndarray], np.ndarray]:
    """Results of the activation quantizers in the order of their calls, and the network's."""
    values: list[np.ndarray] = []
    hooks = [
        quantizer.register_forward_hook(lambda _module, _inputs, output: values.append(output.numpy()))
        for quantizer in model.activation_quantizers.values()
    ]
    try:
        with torch.no_grad(), export_mode():
            result = model(images)[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return values, result


def _cut(graph: ModelProto, order: list[str]) -> tuple[ModelProto, list[_Pair]]:
    context = Context(graph)
    quantizers = {node.name: node for node in context.activations}
    assert set(quantizers) == set(order)
    pairs = []
    for quantizer in (quantizers[name] for name in order):
        (dequantizer,) = context.view.consumers(quantizer.output[0])
        scale = float(context.view.array(quantizer.input[1]))
        pairs.append(_Pair(quantizer.output[0], dequantizer.output[0], scale))
    cut = ModelProto()
    cut.CopyFrom(graph)
    reals = {pair.real for pair in pairs}
    kept = [node for node in graph.graph.node if node.output[0] not in reals]
    del cut.graph.node[:], cut.graph.value_info[:]
    cut.graph.node.extend(kept)
    cut.graph.input.extend(helper.make_tensor_value_info(pair.real, TensorProto.FLOAT, None) for pair in pairs)
    cut.graph.output.extend(helper.make_tensor_value_info(pair.integers, TensorProto.INT8, None) for pair in pairs)
    return onnx.ModelProto.FromString(cut.SerializeToString()), pairs
