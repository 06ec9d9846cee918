"""Does a Q/DQ graph compute what the fake-quantized network computes? Tensor by tensor, in INT8 steps; and masks.

The graph is cut behind every activation quantizer: the integers that the torch network had there are fed in. So every
stretch between two quantizers is compared by itself, and differences do not add up: what remains is float arithmetic in
another order, which may move a value across the border between two quantized values. (Without the cuts such steps grow
from layer to layer until both results are as far apart as quantization noise, which says nothing about the graph.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
import torchvision
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from models.quantize.flow import export_mode
from utils.core.tasks import Prediction, Task, prediction_of, task_of_head
from utils.core.text import plural
from utils.evaluation.masks import Masks
from utils.onnx_graph.qdq_view import Provenance, QdqGraph
from utils.onnx_graph.view import DEQUANTIZE, drop_unused

BEST = 100  # anchors of an image whose boxes and masks are compared: those without an object have boxes of no meaning
SMALLEST = 1e-12  # of a largest value that others are divided by


@dataclass(frozen=True)
class MaskAgreement:
    """How far the masks of a file are from those of a network.

    Attributes:
        coefficients, prototypes: largest differences, as fractions of the network's largest absolute value.
        pixels: fraction of the pixels inside the boxes, on the prototypes' grid, that belong to one mask and not to
            the other.
    """

    coefficients: float
    prototypes: float
    pixels: float

    @classmethod
    def together(cls, parts: Sequence[MaskAgreement | None]) -> MaskAgreement | None:
        """Of several parts of the images, of one size; None where there are no masks."""
        masks = [part for part in parts if part is not None]
        if not masks:
            return None
        return cls(
            coefficients=float(np.max([part.coefficients for part in masks])),  # NaN, if one is
            prototypes=float(np.max([part.prototypes for part in masks])),
            pixels=sum(part.pixels for part in masks) / len(masks),
        )

    def __str__(self) -> str:
        return (
            f"mask coefficients by up to {100 * self.coefficients:.2g} %, prototypes by up to "
            f"{100 * self.prototypes:.2g} % of the largest, and masks in {100 * self.pixels:.2g} % of their pixels"
        )


def topk_anchors(prediction: Prediction) -> Tensor:
    """The anchors of an image with the highest scores, int64 `[B, K]`."""
    return prediction.scores.amax(1).topk(min(BEST, prediction.raw.shape[2])).indices


def compare_masks(
    predicted: Prediction, expected: Prediction, anchors: Tensor, size: tuple[int, int]
) -> MaskAgreement | None:
    """Compare the masks of some anchors; both are cropped to the expected boxes, which are compared elsewhere.

    Args:
        anchors: int64 `[B, K]`.
        size: (height, width) of the input.

    Returns:
        None for detection.
    """
    if expected.prototypes is None or predicted.prototypes is None:
        return None
    expected_coefficients = _at_anchors(expected.coefficients, anchors)
    coefficients = _at_anchors(predicted.coefficients, anchors)
    boxes = torchvision.ops.box_convert(_at_anchors(expected.boxes, anchors), "cxcywh", "xyxy")
    images, count = anchors.shape

    def pixels(prototypes: Tensor, coefficients: Tensor) -> Tensor:
        """Masks bool `[B, K, h, w]`."""
        masks = Masks(prototypes, tuple(coefficients.float()), tuple(boxes.float()), size)
        return masks.pixels(torch.arange(images), torch.arange(count).expand(images, -1))

    different = pixels(expected.prototypes, expected_coefficients) != pixels(predicted.prototypes, coefficients)
    inside = pixels(torch.ones_like(expected.prototypes[:, :1]), torch.ones_like(coefficients[..., :1]))
    return MaskAgreement(
        coefficients=_largest_share(coefficients, expected_coefficients),
        prototypes=_largest_share(predicted.prototypes, expected.prototypes),
        pixels=float(different.sum() / inside.sum().clamp(min=1)),
    )


def _at_anchors(values: Tensor, anchors: Tensor) -> Tensor:
    """Columns of `[B, n, anchors]` as `[B, K, n]`."""
    return values.gather(2, anchors[:, None].expand(-1, values.shape[1], -1)).mT


def _largest_share(values: Tensor, expected: Tensor) -> float:
    """The largest difference, as a fraction of the largest expected absolute value."""
    return float((values - expected).abs().max() / expected.abs().max().clamp(min=SMALLEST))


@dataclass(frozen=True)
class Agreement:
    """How far a graph is from the network, each stretch between quantizers by itself.

    Attributes:
        tensors: how many quantized tensors were compared.
        steps: the largest difference of two integers.
        fraction: of the values that differ at all.
        output: the largest difference of the network's result, pixels or score, for equal last quantized tensors.
        masks: of the best anchors for equal last quantized tensors; None for detection.
    """

    tensors: int
    steps: int
    fraction: float
    output: float
    masks: MaskAgreement | None = None

    @classmethod
    def together(cls, parts: Sequence[Agreement]) -> Agreement | None:
        """Combine several parts of the images, of one size; None where there are no parts."""
        if not parts:
            return None
        return cls(
            tensors=parts[0].tensors,
            steps=max(part.steps for part in parts),
            fraction=sum(part.fraction for part in parts) / len(parts),
            output=float(np.max([part.output for part in parts])),  # NaN, if one is
            masks=MaskAgreement.together([part.masks for part in parts]),
        )


def compare_tensors(
    model: nn.Module, graph: ModelProto, images: Tensor, order: Mapping[str, Provenance], feed: np.ndarray | None = None
) -> Agreement:
    """Compare every quantized activation of a network with the exported graph's.

    Args:
        model: on the CPU.
        images: `[B, 3, H, W]` in 0..1.
        order: the graph's quantizers.
        feed: the same images in the form that the graph takes, if that is another.

    Raises:
        ValueError: the graph has other quantizers, or the network fewer.
    """
    task = task_of_head(model.model[-1])
    cut, scales = _cut(graph, order, task)
    quantizers = list(order.values())
    calls, expected = _torch_integers(
        model, task, images, {one.call: scale for one, scale in zip(quantizers, scales.values(), strict=True)}
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(cut.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {graph.graph.input[0].name: images.numpy() if feed is None else feed}
    expected_integers = {}
    for name, quantizer in zip(scales, quantizers, strict=True):
        value = calls[quantizer.call] if quantizer.channels is None else calls[quantizer.call][:, quantizer.channels]
        expected_integers[name] = value
        feeds[f"{name}/fed"] = value if quantizer.layout is None else quantizer.layout.spread(value, 1)
    inputs, outputs = ([entry.name for entry in side] for side in (session.get_inputs(), session.get_outputs()))
    values = session.run(outputs, {name: feeds[name] for name in inputs})
    results = dict(zip(outputs, values, strict=True))
    steps, differing, total = 0, 0, 0
    for (name, expected_values), quantizer in zip(expected_integers.items(), quantizers, strict=True):
        integers = results[name] if quantizer.layout is None else results[name][:, quantizer.layout.places]
        differences = np.abs(expected_values.astype(np.int16) - integers)
        steps, total = max(steps, int(differences.max())), total + differences.size
        differing += int((differences > 0).sum())
    predicted = Prediction.of({name: torch.from_numpy(results[name]) for name in task.outputs}, task)
    pairs = ((predicted.boxes, expected.boxes), (predicted.scores, expected.scores))
    output = float(np.max([float((values - wanted).abs().max()) for values, wanted in pairs]))  # NaN, if one is
    masks = compare_masks(predicted, expected, topk_anchors(expected), (images.shape[2], images.shape[3]))
    return Agreement(len(order), steps, differing / total, output, masks)


def _torch_integers(
    model: Any, task: Task, images: Tensor, scales: Mapping[int, float]
) -> tuple[dict[int, np.ndarray], Prediction]:
    """INT8 results of the calls of activation quantizers that have a scale here, and the network's predictions."""
    expected: dict[int, np.ndarray] = {}
    count = 0

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal count
        if count in scales:
            steps = (output.float() / scales[count]).round().clamp(-128, 127)
            expected[count] = steps.to(torch.int8).numpy()
        count += 1

    hooks = [quantizer.register_forward_hook(keep) for quantizer in model.activation_quantizers.values()]
    try:
        with torch.no_grad(), export_mode():
            result = prediction_of(task, model(images))
    finally:
        for hook in hooks:
            hook.remove()
    if len(expected) != len(scales):
        raise ValueError(
            f"{plural(count, 'quantizer')} run in torch, and the graph has one that is number {max(scales)}"
        )
    return expected, result


def _cut(graph: ModelProto, order: Collection[str], task: Task) -> tuple[ModelProto, dict[str, float]]:
    """The graph with each DequantizeLinear of an activation reading an input, and all integers as outputs.

    Returns:
        The graph; and the names of its integers, `NAME/fed` as inputs, with their scales.
    """
    qdq_graph = QdqGraph(graph)
    quantizers = {node.name: node for node in qdq_graph.activations}
    if set(quantizers) != set(order):
        raise ValueError(
            f"the graph has {plural(len(quantizers), 'quantizer')}, {len(order)} were traced; their names differ"
        )
    scales: dict[str, float] = {}
    for name in order:
        integers = quantizers[name].output[0]
        readers = [node for node in qdq_graph.view.consumers(integers) if node.op_type == DEQUANTIZE]
        # not the QuantizeLinear's, which is 255 times as much where it reads bytes
        scale = qdq_graph.view.array(readers[0].input[1]) if readers else None
        scales[integers] = float(scale) if scale is not None else 1.0
    cut = deepcopy(graph)
    for node in cut.graph.node:
        node.input[:] = [f"{name}/fed" if name in scales else name for name in node.input]
    del cut.graph.output[:], cut.graph.value_info[:]
    kind = TensorProto.INT8
    outputs = [*((name, TensorProto.FLOAT) for name in task.outputs), *((name, kind) for name in scales)]
    cut.graph.input.extend(helper.make_tensor_value_info(f"{name}/fed", kind, None) for name in scales)
    cut.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in outputs)
    drop_unused(cut)
    return ModelProto.FromString(cut.SerializeToString()), scales
