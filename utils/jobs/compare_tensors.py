"""Differences between the results of two networks: predictions, masks, and a Q/DQ graph's integers.

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

BEST = 100  # anchors of an image whose boxes and masks are compared: boxes of anchors without an object mean nothing
SMALLEST = 1e-12  # of a divisor
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
    """Combine the differences of several parts of the images, of one size: means of shares, else the largest value.

    NaN in a part gives NaN.
    """
    combined: Differences = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        combined[name] = float(np.mean(values) if name in (STEPPED, PIXELS) else np.max(values))
    return combined


def compare_predictions(predicted: Prediction, expected: Prediction, size: tuple[int, int]) -> Differences:
    """Compare all scores, and boxes and masks of the anchors with the highest expected scores.

    Masks are cropped to the expected boxes. `size` is (height, width) of the input in pixels.
    """
    anchors = expected.scores.amax(1).topk(min(BEST, expected.raw.shape[2])).indices
    boxes = _at(anchors, expected.boxes)
    differences = {
        "box": float((_at(anchors, predicted.boxes) - boxes).abs().max()),
        "score": float((predicted.scores - expected.scores).abs().max()),
    }
    if expected.prototypes is None or predicted.prototypes is None:
        return differences
    corners = torchvision.ops.box_convert(boxes, "cxcywh", "xyxy").float()
    coefficients = _at(anchors, expected.coefficients)
    predicted_coefficients = _at(anchors, predicted.coefficients)
    masks = _mask_pixels(expected.prototypes, coefficients, corners, size)
    predicted_masks = _mask_pixels(predicted.prototypes, predicted_coefficients, corners, size)
    ones = torch.ones_like(expected.prototypes[:, :1])
    inside = _mask_pixels(ones, torch.ones_like(coefficients[..., :1]), corners, size)
    return differences | {
        COEFFICIENTS: _relative_to_largest(predicted_coefficients, coefficients),
        PROTOTYPES: _relative_to_largest(predicted.prototypes, expected.prototypes),
        PIXELS: float((masks != predicted_masks).sum() / inside.sum().clamp(min=1)),
    }


def _at(anchors: Tensor, values: Tensor) -> Tensor:
    """The columns of `values` `[B, n, all anchors]` at `anchors` `[B, K]`, as `[B, K, n]`."""
    return values.gather(2, anchors[:, None].expand(-1, values.shape[1], -1)).mT


def _mask_pixels(prototypes: Tensor, coefficients: Tensor, corners: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks, bool `[B, K, h, w]`, of boxes `corners` `[B, K, 4]`, xyxy, in images of (height, width) `size`."""
    masks = Masks(prototypes, tuple(coefficients.float()), tuple(corners), size)
    images, count = corners.shape[:2]
    return torch.stack([masks.pixels(image, torch.arange(count)) for image in range(images)])


def _relative_to_largest(values: Tensor, reference: Tensor) -> float:
    """The largest difference as a fraction of the largest magnitude of the reference."""
    difference = (values - reference).abs().max()
    return float(difference / reference.abs().max().clamp(min=SMALLEST))


def pixels(images: Tensor) -> Tensor:
    """Convert images in 0..1 to bytes."""
    return (images * 255).round().to(torch.uint8)


def feed_of(graph: ModelProto, images: Tensor) -> np.ndarray:
    """Convert images `[B, 3, H, W]` in 0..1 to the form that a file takes."""
    form = input_spec(graph)
    if form.kind != "float":
        images = as_feed(pixels(images), form, "uint8")
    array: np.ndarray = np.ascontiguousarray(images.numpy())
    return array


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
    grids = {quantizer.call: grid for quantizer, grid in zip(order.values(), parameters.values(), strict=True)}
    hook = _GridHook(grids)
    expected = _run_with_grids(model, images, hook)
    feeds = {graph.graph.input[0].name: feed_of(graph, images)}
    integers: dict[str, np.ndarray] = {}
    for name, quantizer in zip(parameters, order.values(), strict=True):
        integers[name] = _own_channels(hook.integers[quantizer.call], quantizer)
        feeds[f"{name}/fed"] = _as_fed(integers[name], quantizer, parameters[name][1])
    results = _run(cut, feeds)
    steps = differing = total = 0
    for name, quantizer in zip(parameters, order.values(), strict=True):
        result = results[name]
        if quantizer.layout is not None:
            result = result[:, quantizer.layout.places]
        differences = np.abs(integers[name].astype(np.int16) + parameters[name][1] - result)
        steps = max(steps, int(differences.max()))
        differing += int((differences > 0).sum())
        total += differences.size
    predicted = Prediction.of({name: torch.from_numpy(results[name]) for name in task.outputs}, task)
    boxes = (predicted.boxes - expected.boxes).abs().max()
    scores = (predicted.scores - expected.scores).abs().max()
    differences_of_masks = compare_predictions(predicted, expected, (images.shape[2], images.shape[3]))
    del differences_of_masks["box"], differences_of_masks["score"]
    return {
        STEPS: steps,
        STEPPED: differing / total,
        RESULT: float(torch.maximum(boxes, scores)),
        RANGES: hook.moved,
        **differences_of_masks,
    }


def _own_channels(values: np.ndarray, quantizer: Provenance) -> np.ndarray:
    """The channels of a call's integers that a quantizer of the graph computes."""
    if quantizer.channels is None:
        return values
    channels: np.ndarray = values[:, quantizer.channels]
    return channels


def _as_fed(values: np.ndarray, quantizer: Provenance, zero_point: np.ndarray) -> np.ndarray:
    """Integers in the graph's layout and type."""
    if quantizer.layout is not None:
        values = quantizer.layout.spread(values, 1)
    integers: np.ndarray = (values.astype(np.int16) + zero_point).astype(zero_point.dtype)
    return integers


def _run(graph: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a graph in ONNX Runtime without rewrites; returns its results by name."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
    outputs = [entry.name for entry in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, inputs), strict=True))


class _GridHook:
    """Forward hook that lets a network's activation quantizers round to the graph's grids.

    Attributes:
        integers: results of the calls that have a grid, in steps of it, zero point taken off: int16, by call.
        moved: how far grids with a zero point move a result, in steps of the quantizer's own grid.
    """

    def __init__(self, grids: Mapping[int, Grid]) -> None:
        self.integers: dict[int, np.ndarray] = {}
        self.moved = 0.0
        self._grids = grids  # by call
        self._grid_of: dict[nn.Module, Grid] = {}  # also of the calls that the graph has no quantizer for
        self._calls = itertools.count()

    def __call__(self, quantizer: TensorQuantizer, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        """Return the result of a quantizer in place of `output`, None to keep that."""
        call = next(self._calls)
        if call in self._grids:
            self._grid_of[quantizer] = self._grids[call]
        if quantizer not in self._grid_of:
            return None
        scale, zero_point = self._grid_of[quantizer]
        limits = np.iinfo(zero_point.dtype)
        is_symmetric = limits.min < 0
        values = output if is_symmetric else inputs[0]
        steps = (values.float() / scale).round()
        steps = steps.clamp(limits.min - int(zero_point), limits.max - int(zero_point))
        if call in self._grids:
            self.integers[call] = steps.to(torch.int16).numpy()
        if is_symmetric:
            return None
        result = steps * scale
        own_scale = float(quantizer.amax) / INT8.max
        self.moved = max(self.moved, float((result - output).abs().max()) / own_scale)
        return result


def _run_with_grids(model: Any, images: Tensor, hook: _GridHook) -> Prediction:
    """Run a network whose activation quantizers round to the graph's grids; `hook` collects their results."""
    handles = [quantizer.register_forward_hook(hook) for quantizer in model.activation_quantizers.values()]
    try:
        with torch.no_grad(), export_mode():
            return Prediction(*predicted(model(images)))
    finally:
        for handle in handles:
            handle.remove()


def _cut(graph: ModelProto, order: Collection[str], task: Task) -> tuple[ModelProto, dict[str, Grid]]:
    """Cut a graph behind its activation quantizers.

    In the result each DequantizeLinear of an activation reads an input `NAME/fed`, and the integers are outputs.

    Returns:
        The graph, and the grid of each integer tensor by NAME.
    """
    parameters = _quantizer_parameters(graph, order)
    cut = deepcopy(graph)
    for node in cut.graph.node:
        node.input[:] = [f"{name}/fed" if name in parameters else name for name in node.input]
    del cut.graph.output[:], cut.graph.value_info[:]
    for name in task.outputs:
        cut.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    for name, (_, zero_point) in parameters.items():
        kind = helper.np_dtype_to_tensor_dtype(zero_point.dtype)
        cut.graph.input.append(helper.make_tensor_value_info(f"{name}/fed", kind, None))
        cut.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    drop_unused(cut)
    return ModelProto.FromString(cut.SerializeToString()), parameters


def _quantizer_parameters(graph: ModelProto, order: Collection[str]) -> dict[str, Grid]:
    """Grid of each integer tensor, by its name, of the activation quantizers named in `order`."""
    qdq_graph = QdqGraph(graph)
    quantizers = {node.name: node for node in qdq_graph.activations}
    parameters: dict[str, Grid] = {}
    for name in order:
        integers = quantizers[name].output[0]
        readers = [node for node in qdq_graph.consumers(integers) if node.op_type == DEQUANTIZE]
        # The scale of the reader, since that of the QuantizeLinear is 255 times as large where it reads bytes.
        scale = qdq_graph.array(readers[0].input[1]) if readers else None
        zero_point = qdq_graph.constant(quantizers[name].input[2])
        parameters[integers] = (1.0 if scale is None else float(scale), zero_point)
    return parameters
