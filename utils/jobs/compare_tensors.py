"""How far are two networks' results apart? Predictions and masks; and a Q/DQ graph's integers from the torch network's.

For the integers the graph is cut behind every activation quantizer: those that the torch network had there are fed in.
So every stretch between two quantizers is compared by itself, and differences do not add up: what remains is float
arithmetic in another order, which may move a value across the border between two quantized values. (Without the cuts
such steps grow from layer to layer until both results are as far apart as quantization noise, which says nothing about
the graph.)

Differences have names, see `LIMITS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import onnxruntime
import torch
import torchvision
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from models.quantize.fake_quantize import INT8, TensorQuantizer
from models.quantize.flow import export_mode
from utils.core.tasks import Prediction, Task, predicted, task_of_head
from utils.evaluation.masks import Masks
from utils.onnx_graph.qdq_view import Provenance, QdqGraph
from utils.onnx_graph.view import DEQUANTIZE, drop_unused, input_spec
from utils.runners.base import as_feed

Differences = dict[str, float]
Grid = tuple[float, np.ndarray]  # scale and zero point (INT8 0, or UINT8 of a file for OpenVINO) of a tensor

BEST = 100  # anchors of an image whose boxes and masks are compared: those without an object have boxes of no meaning
SMALLEST = 1e-12  # of a largest value that others are divided by
STEPS, STEPPED, RESULT = "INT8 value", "share of INT8 values", "result behind equal INT8 values"
RANGES = "activation in the file's range from one in its symmetric range"
COEFFICIENTS, PROTOTYPES, PIXELS = "mask coefficient", "prototype", "share of the masks' pixels"
LIMITS = {  # what differs → its unit, and how much float arithmetic in another order explains, in FP32 and in FP16
    "box": ("px", 0.1, 4.0),  # of the best anchors
    "score": ("", 1e-3, 0.05),
    STEPS: ("steps", 1, 1),
    STEPPED: ("", 1e-3, 0.05),  # those that differ at all
    RESULT: ("px or score", 0.1, 4.0),
    RANGES: ("steps", 1.01, 1.01),  # half a step of each
    COEFFICIENTS: ("of the largest", 1e-3, 0.05),
    PROTOTYPES: ("of the largest", 1e-3, 0.05),
    PIXELS: ("", 1e-3, 0.02),  # inside the boxes, on the prototypes' grid: those of one mask and not of the other
}


def together(parts: Sequence[Differences]) -> Differences:
    """The differences of several parts of the images, of one size: means of shares, else the largest; NaN if one is."""
    return {
        name: float((np.mean if name in (STEPPED, PIXELS) else np.max)([part[name] for part in parts]))
        for name in (parts[0] if parts else ())
    }


def compare_predictions(predicted: Prediction, expected: Prediction, size: tuple[int, int]) -> Differences:
    """Compare all scores; of the anchors with the highest ones boxes, too, and masks cropped to the expected boxes."""
    anchors = expected.scores.amax(1).topk(min(BEST, expected.raw.shape[2])).indices
    images, count = anchors.shape

    def of_best(values: Tensor) -> Tensor:
        """Columns of `[B, n, anchors]` as `[B, K, n]`."""
        return values.gather(2, anchors[:, None].expand(-1, values.shape[1], -1)).mT

    boxes = of_best(expected.boxes)
    found = {
        "box": float((of_best(predicted.boxes) - boxes).abs().max()),
        "score": float((predicted.scores - expected.scores).abs().max()),
    }
    if expected.prototypes is None or predicted.prototypes is None:
        return found
    corners = torchvision.ops.box_convert(boxes, "cxcywh", "xyxy")
    coefficients, others = of_best(expected.coefficients), of_best(predicted.coefficients)

    def pixels(prototypes: Tensor, coefficients: Tensor) -> Tensor:
        """Masks bool `[B, K, h, w]`."""
        masks = Masks(prototypes, tuple(coefficients.float()), tuple(corners.float()), size)
        return torch.stack([masks.pixels(image, torch.arange(count)) for image in range(images)])

    def of_largest(values: Tensor, reference: Tensor) -> float:
        return float((values - reference).abs().max() / reference.abs().max().clamp(min=SMALLEST))

    different = pixels(expected.prototypes, coefficients) != pixels(predicted.prototypes, others)
    inside = pixels(torch.ones_like(expected.prototypes[:, :1]), torch.ones_like(coefficients[..., :1]))
    return found | {
        COEFFICIENTS: of_largest(others, coefficients),
        PROTOTYPES: of_largest(predicted.prototypes, expected.prototypes),
        PIXELS: float(different.sum() / inside.sum().clamp(min=1)),
    }


def pixels(images: Tensor) -> Tensor:
    """Images in 0..1 → bytes."""
    return (images * 255).round().to(torch.uint8)


def feed_of(graph: ModelProto, images: Tensor) -> np.ndarray:
    """What a file takes for images `[B, 3, H, W]` in 0..1."""
    form = input_spec(graph)
    return np.ascontiguousarray((images if form.kind == "float" else as_feed(pixels(images), form, "uint8")).numpy())


def compare_tensors(
    model: nn.Module, graph: ModelProto, images: Tensor, order: Mapping[str, Provenance]
) -> Differences:
    """Compare every quantized activation of a network with the exported graph's, and the results behind equal ones.

    Args:
        model: on the CPU.
        images: `[B, 3, H, W]` in 0..1.
        order: the graph's quantizers.
    """
    task = task_of_head(model.model[-1])
    cut, parameters = _cut(graph, order, task)
    quantizers = list(order.values())
    grids = {one.call: grid for one, grid in zip(quantizers, parameters.values(), strict=True)}
    calls, expected, moved = _torch_integers(model, task, images, grids)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(cut.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {graph.graph.input[0].name: feed_of(graph, images)}
    integers = {}
    for (name, (_, zero_point)), quantizer in zip(parameters.items(), quantizers, strict=True):
        value = calls[quantizer.call] if quantizer.channels is None else calls[quantizer.call][:, quantizer.channels]
        integers[name] = value
        fed = value if quantizer.layout is None else quantizer.layout.spread(value, 1)
        feeds[f"{name}/fed"] = (fed.astype(np.int16) + zero_point).astype(zero_point.dtype)
    inputs, outputs = ([entry.name for entry in side] for side in (session.get_inputs(), session.get_outputs()))
    results = dict(zip(outputs, session.run(outputs, {name: feeds[name] for name in inputs}), strict=True))
    steps, differing, total = 0, 0, 0
    for (name, value), quantizer in zip(integers.items(), quantizers, strict=True):
        found = results[name] if quantizer.layout is None else results[name][:, quantizer.layout.places]
        differences = np.abs(value.astype(np.int16) + parameters[name][1] - found)
        steps, total = max(steps, int(differences.max())), total + differences.size
        differing += int((differences > 0).sum())
    predicted = Prediction.of({name: torch.from_numpy(results[name]) for name in task.outputs}, task)
    apart = torch.cat([predicted.boxes - expected.boxes, predicted.scores - expected.scores], 1).abs().max()
    masks = compare_predictions(predicted, expected, (images.shape[2], images.shape[3]))
    masks = {name: value for name, value in masks.items() if name not in ("box", "score")}
    return {STEPS: steps, STEPPED: differing / total, RESULT: float(apart), RANGES: moved, **masks}


def _torch_integers(
    model: Any, task: Task, images: Tensor, grids: Mapping[int, Grid]
) -> tuple[dict[int, np.ndarray], Prediction, float]:
    """Run the network with the graph's grids.

    Returns:
        The results of the calls of activation quantizers that have a grid, in steps of it (int16, zero point taken
        off); the network's predictions; and how far grids with a zero point move a result, in steps of its own grid.
    """
    expected: dict[int, np.ndarray] = {}
    moved = 0.0
    grid_of: dict[nn.Module, Grid] = {}  # also of the calls that the graph has no quantizer for
    calls = itertools.count()

    def replaced(quantizer: TensorQuantizer, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        """Result of a quantizer in place of `output`, None to keep that."""
        nonlocal moved
        call = next(calls)
        if call in grids:
            grid_of[quantizer] = grids[call]
        if quantizer not in grid_of:
            return None
        scale, zero_point = grid_of[quantizer]
        limits = np.iinfo(zero_point.dtype)
        is_symmetric = limits.min < 0
        values = output if is_symmetric else inputs[0]
        steps = (values.float() / scale).round()
        steps = steps.clamp(limits.min - int(zero_point), limits.max - int(zero_point))
        if call in grids:
            expected[call] = steps.to(torch.int16).numpy()
        if is_symmetric:
            return None
        result = steps * scale
        own_scale = float(quantizer.amax) / INT8.max
        moved = max(moved, float((result - output).abs().max()) / own_scale)
        return result

    hooks = [quantizer.register_forward_hook(replaced) for quantizer in model.activation_quantizers.values()]
    try:
        with torch.no_grad(), export_mode():
            result = Prediction(*predicted(model(images)))
    finally:
        for hook in hooks:
            hook.remove()
    return expected, result, moved


def _cut(graph: ModelProto, order: Collection[str], task: Task) -> tuple[ModelProto, dict[str, Grid]]:
    """The graph with each DequantizeLinear of an activation reading an input, `NAME/fed`, and integers as outputs.

    The second result is the grid of each integer tensor by NAME.
    """
    qdq_graph = QdqGraph(graph)
    quantizers = {node.name: node for node in qdq_graph.activations}
    parameters: dict[str, Grid] = {}
    for name in order:
        integers = quantizers[name].output[0]
        readers = [node for node in qdq_graph.consumers(integers) if node.op_type == DEQUANTIZE]
        # not the QuantizeLinear's, which is 255 times as much where it reads bytes
        scale = qdq_graph.array(readers[0].input[1]) if readers else None
        zero_point = qdq_graph.constant(quantizers[name].input[2])
        parameters[integers] = float(scale) if scale is not None else 1.0, zero_point
    cut = deepcopy(graph)
    for node in cut.graph.node:
        node.input[:] = [f"{name}/fed" if name in parameters else name for name in node.input]
    del cut.graph.output[:], cut.graph.value_info[:]
    kinds = {name: helper.np_dtype_to_tensor_dtype(zero.dtype) for name, (_, zero) in parameters.items()}
    outputs = [*((name, TensorProto.FLOAT) for name in task.outputs), *kinds.items()]
    cut.graph.input.extend(helper.make_tensor_value_info(f"{name}/fed", kind, None) for name, kind in kinds.items())
    cut.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in outputs)
    drop_unused(cut)
    return ModelProto.FromString(cut.SerializeToString()), parameters
