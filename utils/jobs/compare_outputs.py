"""Does an exported file compute what the network computes? ONNX Runtime beside PyTorch, on a few images.

Three things are compared: the predictions, with the masks that they make; for a quantized network every stretch between
two quantizers by itself, see `compare_tensors.py`; and what the file's form makes of its own predictions. References:
the NMS and the masks of the evaluation loop, and torchvision's ROIAlign for masks in boxes. TensorRT's plugin runs in
TensorRT only: the graph behind it gets the detections of the loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from utils.core.errors import DependencyError
from utils.core.files import read_onnx
from utils.core.input_spec import with_channels
from utils.core.tasks import DETECT, SEGMENT, Prediction, Task, prediction_of, task_of_head
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.masks import between
from utils.evaluation.nms import non_max_suppression, packed_detections
from utils.jobs.compare_tensors import (
    Agreement,
    MaskAgreement,
    compare_masks,
    compare_tensors,
    topk_anchors,
)
from utils.onnx_graph.output_formats import PLUGIN, NmsSettings
from utils.onnx_graph.qdq_view import Provenance
from utils.onnx_graph.view import GraphView, drop_unused, input_spec, metadata_of
from utils.runners.base import as_feed
from utils.runners.onnxrt import open_session

FREE_BATCH = 2  # images at a time where any number will do; every tensor of the network is kept for them


@dataclass(frozen=True)
class Limits:
    """What float arithmetic in another order, or in FP16, explains.

    Attributes:
        box: pixels.
        score: in 0..1.
        steps: between two INT8 values, each stretch between quantizers by itself.
        fraction: of the INT8 values that differ.
        masks: of coefficients and prototypes, fractions of the largest.
        pixels: of masks, the fraction that differ.
    """

    box: float
    score: float
    steps: int = 1
    fraction: float = 1e-3
    masks: float = 1e-3
    pixels: float = 1e-3

    def exceeded(self, box: float, score: float, masks: MaskAgreement | None, stretches: Agreement | None) -> list[str]:
        """A line for each difference that is beyond its limit, or NaN.

        Of a quantized network, only results behind equal INT8 values are held against the limits.
        """
        values: list[tuple[str, str, float, float]]
        if stretches is None:
            values = [("box", "px", box, self.box), ("score", "", score, self.score)]
        else:
            masks = stretches.masks
            values = [
                ("INT8 value", "steps", stretches.steps, self.steps),
                ("share of INT8 values", "", stretches.fraction, self.fraction),
                ("result behind equal INT8 values", "px or score", stretches.output, self.box),
            ]
        if masks is not None:
            values += [
                ("mask coefficient", "of the largest", masks.coefficients, self.masks),
                ("prototype", "of the largest", masks.prototypes, self.masks),
                ("share of the masks' pixels", "", masks.pixels, self.pixels),
            ]
        return [
            f"{what}: {value:.3g} {unit}".rstrip() + f" apart, {limit:g} at most was expected"
            for what, unit, value, limit in values
            if not value <= limit
        ]


FULL, HALF = Limits(box=0.1, score=1e-3), Limits(box=4.0, score=0.05, fraction=0.05, masks=0.05, pixels=0.02)
DIFFERENT_DETECTIONS = 0.02  # fraction: pairs of boxes at the very threshold
SAME_MASK = 1e-3  # in 0..1: a mask is another's equal
SAME_BOX, SAME_SCORE = 0.01, 1e-4  # pixels, score: a detection is another's equal
ROWS = "output"  # of DeepStream's form


@dataclass(frozen=True)
class Parity:
    """What a comparison of outputs found.

    Attributes:
        images: how many.
        box, score: largest differences of the predictions; boxes in pixels, of the best anchors.
        stretches: of a quantized network, None for a float one.
        problems: differences that are too large, in words.
        masks: of the same anchors, None for detection.
    """

    images: int
    box: float
    score: float
    stretches: Agreement | None
    problems: tuple[str, ...]
    masks: MaskAgreement | None = None

    def __str__(self) -> str:
        text = f"boxes differ by up to {self.box:.2g} px, scores by up to {self.score:.2g}"
        if self.masks:
            text += f", {self.masks}"
        if self.stretches:
            text += (
                " (steps between INT8 levels add up); from quantizer to quantizer "
                f"{100 * self.stretches.fraction:.2g} % of the INT8 values differ, by {self.stretches.steps} at most, "
                f"and the results by {self.stretches.output:.2g}"
            )
            if self.stretches.masks:
                text += f"; there {self.stretches.masks}"
        return f"ONNX Runtime beside PyTorch, {self.images} image{'s' * (self.images > 1)}: {text}"


def check_onnx(
    path: str | Path, model: nn.Module, images: Tensor, order: Mapping[str, Provenance] | None = None,
    limits: Limits = FULL,
) -> Parity:  # fmt: skip
    """Run an exported file on images.

    Args:
        model: what it was exported from, on the CPU: a GPU may compute with less than float32.
        images: `[N, 3, H, W]` in 0..1; a file of static batch gets them in its batches, the last one filled up. Where
            it takes bytes or INT8 values, they are rounded to whole pixels, for the network too.
        order: of a quantized network, see `compare_tensors.compare`.

    Raises:
        DependencyError: ONNX Runtime is not installed.
    """
    graph = read_onnx(path)
    form, task = metadata_of(graph), task_of_head(model.model[-1])
    file = ObservedFile(graph, task)
    if file.form.kind != "float":
        images = pixels(images) / 255
    boxes, scores = [], []  # of each batch, largest differences
    masks: list[MaskAgreement | None] = []
    stretches: list[Agreement] = []
    problems: list[str] = []
    detections, different_rows, wrong_masks = 0, 0, 0
    size = file.batch or min(len(images), FREE_BATCH)
    for part in images.split(size):
        count = len(part)
        batch = torch.cat([part, part[-1:].expand(size - count, -1, -1, -1)])
        results = {name: value[:count] for name, value in file(batch).items()}
        with torch.no_grad():
            expected = prediction_of(task, model(batch)).of_first(count)
        predicted = Prediction(results[task.prediction], expected.layout, results.get(task.prototypes))
        best = topk_anchors(expected)
        differences = (predicted.boxes - expected.boxes).abs()
        boxes.append(float(differences.gather(2, best[:, None].expand(-1, differences.shape[1], -1)).max()))
        scores.append(float((predicted.scores - expected.scores).abs().max()))
        masks.append(compare_masks(predicted, expected, best, (part.shape[2], part.shape[3])))
        if order:
            stretches.append(compare_tensors(model, graph, batch, order, file.feed(batch)))
        if not same_rows(form, results, predicted):
            problems.append("the rows are not the predictions")
        for image, (rows, loop_rows, row_masks) in enumerate(detections_of_both(form, file, results, predicted)):
            same = same_detections(rows, loop_rows)
            different_rows += max(int((~same.any(1)).sum()), int((~same.any(0)).sum()))
            detections += len(loop_rows)
            if row_masks is not None:
                framed = form.get("mask_resolution") != "0"
                wrong_masks += different_masks(
                    row_masks, rows, loop_rows, predicted, image, part.shape[3], framed=framed
                )
    box, score = float(np.max(boxes)), float(np.max(scores))  # NaN, if one is
    all_masks, all_stretches = MaskAgreement.together(masks), Agreement.together(stretches)
    problems += limits.exceeded(box, score, all_masks, all_stretches)
    tolerated = max(1, DIFFERENT_DETECTIONS * detections)
    if different_rows > tolerated:
        problems.append(f"detections differ from those of the evaluation loop's NMS: {different_rows}")
    if wrong_masks > tolerated:
        problems.append(f"masks are not what the file's own coefficients and prototypes make: {wrong_masks}")
    return Parity(len(images), box, score, all_stretches, tuple(problems), all_masks)


# --- what a file computes, whatever its form --------------------------------------------------------------------------


class ObservedFile:
    """A graph in ONNX Runtime that also gives its predictions, whatever its form; TensorRT's plugin is left out.

    Attributes:
        batch: the static batch size, 0 if it is dynamic.
        form: in which it takes images.
        behind_plugin: what makes masks of what the plugin keeps; None where there is no plugin, or no masks.

    Raises:
        DependencyError: ONNX Runtime is not installed.
    """

    def __init__(self, graph: ModelProto, task: Task) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise DependencyError("--check needs ONNX Runtime: pip install onnxruntime, or --check 0") from error
        self.batch = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value
        self.form = input_spec(graph)
        self._input = graph.graph.input[0].name
        observed = deepcopy(graph)
        plugin = next((node for node in observed.graph.node if node.op_type == PLUGIN), None)
        self._names = {value.name: value.name for value in observed.graph.output}  # name here → in the graph
        if plugin is not None:
            self._names = {"plugin boxes": plugin.input[0], "plugin scores": plugin.input[1]}
            observed.graph.node.remove(plugin)
            del observed.graph.output[:]
        computed = {name for node in observed.graph.node for name in node.output}
        self._names |= {name: name for name in task.outputs if name in computed}
        outputs = {value.name for value in observed.graph.output}
        for name in (name for name in self._names.values() if name not in outputs):
            observed.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        drop_unused(observed)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = open_session(observed.SerializeToString(), options, ["CPUExecutionProvider"])
        masked = "plugin boxes" in self._names and task.prototypes in self._names
        self.behind_plugin = BehindPlugin(graph, options) if masked else None

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Results by name, the predictions among them, for images `[B, 3, H, W]` in 0..1."""
        values = self._session.run(list(self._names.values()), {self._input: self.feed(images)})
        return {name: torch.from_numpy(value) for name, value in zip(self._names, values, strict=True)}

    def feed(self, images: Tensor) -> np.ndarray:
        """What the file takes for images `[B, 3, H, W]` in 0..1."""
        if self.form.kind != "float":
            images = as_feed(pixels(images), self.form, "uint8")
        return np.ascontiguousarray(images.numpy())


# --- what a form makes of the predictions -----------------------------------------------------------------------------


def same_rows(form: Mapping[str, str], results: Mapping[str, Tensor], predicted: Prediction) -> bool:
    """Whether DeepStream's rows, or what TensorRT's plugin reads, are the predictions; True for other forms."""
    boxes, scores = torchvision.ops.box_convert(predicted.boxes.mT, "cxcywh", "xyxy"), predicted.scores.mT
    pairs: list[tuple[Tensor, Tensor]] = []
    if form.get("form") == "deepstream" and "nms" not in form:
        rows = results[ROWS]
        label = rows[..., 5:].long().clamp(0, scores.shape[2] - 1)
        best = scores.amax(2)
        pairs = [(rows[..., :4], boxes), (rows[..., 4], best), (scores.gather(2, label)[..., 0], best)]
    elif "plugin boxes" in results:
        pairs = [(results["plugin boxes"], boxes), (results["plugin scores"], scores)]
    return all(torch.allclose(*pair, atol=SAME_BOX, rtol=0) for pair in pairs)


def detections_of_both(
    form: Mapping[str, str], file: ObservedFile, results: Mapping[str, Tensor], predicted: Prediction
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """For each image the file's detections `[n, 6]`, those of the evaluation loop's NMS, and the file's masks.

    Empty where TensorRT's plugin keeps the detections; where masks stand behind the plugin, it gets the loop's.
    """
    if "nms" not in form or (file.behind_plugin is None and "plugin boxes" in results):
        return []
    settings = NmsSettings(**json.loads(form["nms"]))
    iou_thres, agnostic = settings.iou_thres, settings.agnostic
    candidates = predicted
    if settings.kind == "none":
        iou_thres, agnostic = 1.0, False
        if settings.agnostic:  # the best class of each anchor only
            best, label = predicted.scores.max(1, keepdim=True)
            scores = torch.zeros_like(predicted.scores).scatter(1, label, best)
            candidates = replace(predicted, raw=torch.cat([predicted.boxes, scores, predicted.coefficients], 1))
    expected = non_max_suppression(candidates, settings.conf_thres, iou_thres, max_det=settings.topk, agnostic=agnostic)
    if file.behind_plugin is not None:
        results = file.behind_plugin(results, expected, settings.topk)
    grid = () if predicted.prototypes is None else predicted.prototypes.shape[2:]
    table, masks = table_and_masks(results, grid)
    detections = [rows[rows[:, 4] > 0] for rows in table]
    if masks is None:
        return [(rows, loop_rows, None) for rows, loop_rows in zip(detections, expected, strict=True)]
    return [
        (rows, loop_rows, row_masks[: len(rows)])
        for rows, loop_rows, row_masks in zip(detections, expected, masks, strict=True)
    ]


def table_and_masks(results: Mapping[str, Tensor], grid: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """A file's detections `[B, K, 6]`, zero behind the last one, and their masks `[B, K, rows, columns]`.

    Args:
        results: of a form with NMS inside, by name.
        grid: (height, width) of the prototypes; empty for a detector.
    """
    if ROWS in results:
        table, masks = results[ROWS].tensor_split([6], dim=2)
        return table, masks.unflatten(2, tuple(grid))
    shares = results.get(SEGMENT.masks)
    if shares is not None and shares.ndim == 3:
        side = round(shares.shape[2] ** 0.5)
        shares = shares.unflatten(2, (side, side))
    return packed_detections(results), shares


def same_detections(rows: Tensor, expected: Tensor) -> Tensor:
    """Which of `rows` `[n, 6]` is which of `expected` `[m, 6]`: bool `[n, m]`."""
    differences = (rows[:, None, :6] - expected[None, :, :6]).abs()
    boxes, scores, classes = differences[..., :4].amax(2), differences[..., 4], differences[..., 5]
    return (boxes < SAME_BOX) & (scores < SAME_SCORE) & (classes == 0)


def different_masks(
    masks: Tensor, rows: Tensor, expected: Tensor, predicted: Prediction, image: int, width: int, *, framed: bool
) -> int:
    """How many masks of an image's detections are others than those of equal detections of the loop's.

    Args:
        masks: `[n, rows, columns]`, in 0..1.
        rows: the file's detections, `[n, 6]`.
        expected: the loop's, `[m, 7]`; the last column is the anchor.
        predicted: the file's predictions and prototypes.
        image: its number in the batch.
        width: of the input, pixels.
        framed: masks lie in their boxes' frames, and not on the prototypes' grid.
    """
    row, loop_row = same_detections(rows, expected).nonzero().unbind(1)
    if predicted.prototypes is None or not len(row):
        return 0
    coefficients = predicted.coefficients[image][:, expected[loop_row, 6].long()].T
    sums = torch.einsum("nk,khw->nhw", coefficients, predicted.prototypes[image])
    boxes, scale = rows[row, :4], sums.shape[2] / width
    if not framed:
        x1, y1, x2, y2 = (boxes * scale).unbind(1)
        inside_y, inside_x = between(y1, y2, sums.shape[1]), between(x1, x2, sums.shape[2])
        expected_masks = sums.sigmoid() * (inside_y[:, :, None] & inside_x[:, None])
    else:
        numbered = torch.cat([torch.arange(len(boxes))[:, None].to(boxes), boxes], 1)
        size = (masks.shape[1], masks.shape[2])
        expected_masks = torchvision.ops.roi_align(sums[:, None], numbered, size, scale, 1, aligned=True)
        expected_masks = expected_masks[:, 0].sigmoid()
    differences = (masks[row] - expected_masks).abs().flatten(1).amax(1)
    least = differences.new_full((len(rows),), float("inf")).scatter_reduce(0, row, differences, "amin")
    return int((~(least[row.unique()] <= SAME_MASK)).sum())


class BehindPlugin:
    """What stands in a graph behind TensorRT's plugin, in ONNX Runtime."""

    def __init__(self, graph: ModelProto, options: Any) -> None:
        model = deepcopy(graph)
        view = GraphView(model)
        inputs = [DETECT.prediction, SEGMENT.prototypes]
        for node in [*map(view.producer, inputs), *(node for node in view.nodes if node.op_type == PLUGIN)]:
            if node is not None:
                model.graph.node.remove(node)
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs]
        for name in DETECT.detections:
            kind = TensorProto.INT32 if name in (DETECT.detections[0], DETECT.detections[3]) else TensorProto.FLOAT
            values.append(helper.make_tensor_value_info(name, kind, None))
        outputs = [value for value in model.graph.output if value.name in (ROWS, SEGMENT.masks)]
        del model.graph.output[:], model.graph.input[:], model.graph.value_info[:]
        model.graph.output.extend(outputs)
        drop_unused(model)
        needed = {name for node in model.graph.node for name in node.input}
        model.graph.input.extend(value for value in values if value.name in needed)
        self._inputs = [value.name for value in model.graph.input]
        self._output = outputs[0].name
        self._session = open_session(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def __call__(self, results: Mapping[str, Tensor], detections: Sequence[Tensor], topk: int) -> dict[str, Tensor]:
        """The file's outputs, had the plugin kept these `detections`, `[n, 6]` of each image."""
        number, boxes, scores, classes = DETECT.detections
        table = torch.zeros(len(detections), topk, 6)
        for image, rows in enumerate(detections):
            table[image, : len(rows)] = rows[:, :6]
        outputs = {
            number: torch.tensor([[len(rows)] for rows in detections], dtype=torch.int32), boxes: table[..., :4],
            scores: table[..., 4], classes: table[..., 5].int(),
        }  # fmt: skip
        feeds = {name: np.ascontiguousarray({**results, **outputs}[name].numpy()) for name in self._inputs}
        (masks,) = self._session.run([self._output], feeds)
        return {**outputs, self._output: torch.from_numpy(masks)}


def check_images(count: int, size: tuple[int, int], data: DataConfig | None, channels: int = 3) -> Tensor:
    """`[count, channels, height, width]` in 0..1: a dataset's images, or without one soft patches and noise."""
    if data is not None:
        from utils.evaluation.dataset import make_loader

        split = "val" if "val" in data.splits else "train"
        images = next(iter(make_loader(data, split, imgsz=size, batch_size=count, workers=0, limit=count))).images
        if len(images):
            return with_channels(images, channels).float() / 255
    random = torch.Generator().manual_seed(0)
    patches = torch.rand(count, channels, 12, 12, generator=random)
    soft = torch.nn.functional.interpolate(patches, size=size, mode="bilinear")
    return soft * 0.9 + torch.rand(count, channels, *size, generator=random) * 0.1


def pixels(images: Tensor) -> Tensor:
    """Images in 0..1 → bytes."""
    return (images * 255).round().to(torch.uint8)
