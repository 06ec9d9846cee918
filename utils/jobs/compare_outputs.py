"""Comparison of an exported file with the network that it was exported from: ONNX Runtime beside PyTorch, a few images.

Three things are compared: the predictions, with their masks; for a quantized network every stretch between two
quantizers by itself, see `compare_tensors.py`; and the detections of a file with NMS with those of the evaluation
loop's NMS on the file's own predictions. The reference for masks in boxes is torchvision's ROIAlign. TensorRT's plugin
runs in TensorRT only: ONNX's operators stand in for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import torchvision
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from utils.core.files import read_onnx
from utils.core.input_spec import with_channels
from utils.core.tasks import SEGMENT, Prediction, Task, predicted, task_of_head
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.masks import between
from utils.evaluation.nms import non_max_suppression, packed_detections
from utils.jobs.compare_tensors import (
    LIMITS,
    Differences,
    compare_predictions,
    compare_tensors,
    feed_of,
    pixels,
    together,
)
from utils.onnx_graph.output_formats import NmsSettings, replace_plugin
from utils.onnx_graph.qdq_view import Provenance
from utils.onnx_graph.view import input_spec, metadata_of
from utils.runners.onnxrt import open_session

FREE_BATCH = 2  # images at a time for a dynamic batch; memory holds every tensor of the network for them
DIFFERENT_DETECTIONS = 0.02  # fraction; NMS may drop another box of a pair whose IoU is at the threshold
SAME_MASK = 1e-3  # largest difference of equal masks, in 0..1
SAME_BOX, SAME_SCORE = 0.01, 1e-4  # largest differences of equal detections: pixels, score
ROWS = "output"  # of DeepStream's form
DIFFERENT_ROWS = "the rows are not the predictions"
OTHER_DETECTIONS = "detections differ from those of the evaluation loop's NMS"
OTHER_MASKS = "masks are not what the file's own coefficients and prototypes make"


@dataclass(frozen=True)
class Parity:
    """Differences of the predictions and, for a quantized network, of each stretch.

    Attributes:
        problems: differences that are too large, a sentence each.
    """

    outputs: Differences
    stretches: Differences
    problems: tuple[str, ...]


def check_onnx(
    path: str | Path,
    model: nn.Module,
    images: Tensor,
    order: Mapping[str, Provenance] | None = None,
    *,
    half: bool = False,
) -> Parity:
    """Compare an exported file with its network; limits of a quantized one are for stretches after equal INT8 values.

    Args:
        model: what it was exported from, on the CPU, since a GPU may compute with less than float32.
        images: `[N, 3, H, W]` in 0..1; rounded to whole pixels if the file takes bytes.
        order: of a quantized network, see `compare_tensors`.
        half: whether the file computes in FP16.
    """
    graph = read_onnx(path)
    comparison = _Comparison(graph, model, order)
    if input_spec(graph).kind != "float":
        images = pixels(images) / 255
    batch_size = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value or min(len(images), FREE_BATCH)
    for part in images.split(batch_size):
        padding = part[-1:].expand(batch_size - len(part), -1, -1, -1)  # fills up a static batch
        comparison.add(torch.cat([part, padding]))
    return comparison.parity(half)


class _Comparison:
    """Differences of the batches that were added, see `check_onnx`."""

    def __init__(self, graph: ModelProto, model: nn.Module, order: Mapping[str, Provenance] | None) -> None:
        layers: Any = model.model
        head = layers[-1]
        self._graph = graph
        self._model = model
        self._order = order
        self._task = task_of_head(head)
        self._run = observed(graph, self._task, head.nc)
        metadata = metadata_of(graph)
        self._nms = NmsSettings(**json.loads(metadata["nms"])) if "nms" in metadata else None
        self._framed = metadata.get("mask_resolution") != "0"
        self._outputs: list[Differences] = []
        self._stretches: list[Differences] = []
        self._counts = Counter[str]()

    def add(self, images: Tensor) -> None:
        """Compare the results for a batch, float32 `[B, 3, H, W]` in 0..1."""
        results = self._run(feed_of(self._graph, images))
        prediction = Prediction.of(results, self._task)
        with torch.no_grad():
            expected = Prediction(*predicted(self._model(images)))
        height, width = images.shape[2:]
        self._outputs.append(compare_predictions(prediction, expected, (height, width)))
        if self._order:
            self._stretches.append(compare_tensors(self._model, self._graph, images, self._order))
        if self._nms:
            self._counts += compare_detections(results, prediction, self._nms, width, framed=self._framed)
        elif ROWS in results and not same_rows(results[ROWS], prediction):
            self._counts[DIFFERENT_ROWS] += 1

    def parity(self, half: bool) -> Parity:
        """Combine the differences and hold them against the limits of FP32 or, with `half`, of FP16."""
        outputs = together(self._outputs)
        stretches = together(self._stretches)
        problems = [*_too_large(stretches or outputs, half), *self._too_many()]
        return Parity(outputs, stretches, tuple(problems))

    def _too_many(self) -> Iterator[str]:
        """Yield the kinds of differences that are too many: more than `DIFFERENT_DETECTIONS` of all detections."""
        tolerated = max(1, DIFFERENT_DETECTIONS * self._counts["detections"])
        if self._counts[DIFFERENT_ROWS]:
            yield DIFFERENT_ROWS
        for kind in (OTHER_DETECTIONS, OTHER_MASKS):
            if self._counts[kind] > tolerated:
                yield kind


def _too_large(differences: Differences, half: bool) -> Iterator[str]:
    """Yield a sentence for each difference above its limit."""
    for name, value in differences.items():
        unit, limit, limit_of_half = LIMITS[name]
        if half:
            limit = limit_of_half
        if not value <= limit:  # or NaN
            amount = f"{value:.3g} {unit}".rstrip()
            yield f"{name}: {amount} apart, {limit:g} at most was expected"


def observed(graph: ModelProto, task: Task, classes: int) -> Callable[[np.ndarray], dict[str, Tensor]]:
    """Return a function that runs a graph in ONNX Runtime on an array of `feed_of`.

    It gives the results by name, the predictions too. ONNX's own operators stand in for TensorRT's plugin.
    """
    graph = replace_plugin(graph, classes)
    names = [value.name for value in graph.graph.output]
    for name in task.outputs:
        if name not in names:
            graph.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
            names.append(name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = open_session(graph.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(feed: np.ndarray) -> dict[str, Tensor]:
        values = session.run(names, {graph.graph.input[0].name: feed})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    return run


def same_rows(rows: Tensor, predicted: Prediction) -> bool:
    """Return whether DeepStream's rows `[B, anchors, 6]` are the predictions."""
    boxes = torchvision.ops.box_convert(predicted.boxes.mT, "cxcywh", "xyxy")
    scores = predicted.scores.mT
    best = scores.amax(2)
    label = rows[..., 5:].long().clamp(0, scores.shape[2] - 1)
    score_of_label = scores.gather(2, label)[..., 0]
    pairs = ((rows[..., :4], boxes), (rows[..., 4], best), (score_of_label, best))
    return all(torch.allclose(values, expected, atol=SAME_BOX, rtol=0) for values, expected in pairs)


def compare_detections(
    results: Mapping[str, Tensor], predicted: Prediction, nms: NmsSettings, width: int, *, framed: bool
) -> Counter[str]:
    """Compare the detections of a file with NMS with those of the evaluation loop's NMS on the file's own predictions.

    Returns:
        Counts of what differs, and of all `detections`. A detection that only one side has counts once.
    """
    counts = Counter[str]()
    grid = () if predicted.prototypes is None else predicted.prototypes.shape[2:]
    table, all_masks = table_and_masks(results, grid)
    for image, loop_rows in enumerate(loop_detections(predicted, nms)):
        rows = table[image][table[image, :, 4] > 0]
        same = same_detections(rows, loop_rows)
        without_partner = int((~same.any(1)).sum())
        loops_without_partner = int((~same.any(0)).sum())
        counts["detections"] += len(loop_rows)
        counts[OTHER_DETECTIONS] += max(without_partner, loops_without_partner)
        if all_masks is not None:
            masks = all_masks[image, : len(rows)]
            counts[OTHER_MASKS] += different_masks(masks, rows, loop_rows, predicted, image, width, framed=framed)
    return counts


def loop_detections(predicted: Prediction, nms: NmsSettings) -> Sequence[Tensor]:
    """Detections of each image, `[n, 7]`, by the evaluation loop's NMS on a file's predictions, at its settings."""
    if nms.kind != "none":
        return non_max_suppression(predicted, nms.conf_thres, nms.iou_thres, max_det=nms.topk, agnostic=nms.agnostic)
    if nms.agnostic:  # the best class of each anchor only
        best, label = predicted.scores.max(1, keepdim=True)
        scores = torch.zeros_like(predicted.scores).scatter(1, label, best)
        raw = torch.cat([predicted.boxes, scores, predicted.coefficients], 1)
        predicted = replace(predicted, raw=raw)
    return non_max_suppression(predicted, nms.conf_thres, 1.0, max_det=nms.topk, agnostic=False)


def table_and_masks(results: Mapping[str, Tensor], grid: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """A file's detections `[B, K, 6]`, zero behind the last one, and their masks `[B, K, rows, columns]`.

    `grid` is the (height, width) of the prototypes; empty for a detector.
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
    """Pairs of equal detections, bool `[n, m]`, of `rows` `[n, 6]` and `expected` `[m, 6]`."""
    differences = (rows[:, None, :6] - expected[None, :, :6]).abs()
    boxes = differences[..., :4].amax(2)
    scores = differences[..., 4]
    classes = differences[..., 5]
    return (boxes < SAME_BOX) & (scores < SAME_SCORE) & (classes == 0)


def different_masks(
    masks: Tensor, rows: Tensor, expected: Tensor, predicted: Prediction, image: int, width: int, *, framed: bool
) -> int:
    """Count the masks `[n, h, w]` of an image's detections that differ from those of the loop's equal detections.

    Args:
        rows: the file's detections, `[n, 6]`.
        expected: the loop's detections, `[m, 7]`, whose last column is the anchor.
        width: of the input in pixels.
        framed: masks lie in the frames of their boxes; others lie on the prototypes' grid.
    """
    row, loop_row = same_detections(rows, expected).nonzero().unbind(1)
    if predicted.prototypes is None or not len(row):
        return 0
    coefficients = predicted.coefficients[image][:, expected[loop_row, 6].long()].T
    sums = torch.einsum("nk,khw->nhw", coefficients, predicted.prototypes[image])
    boxes = rows[row, :4]
    scale = sums.shape[2] / width
    if framed:
        expected_masks = _masks_in_frames(sums, boxes, scale, (masks.shape[1], masks.shape[2]))
    else:
        expected_masks = _masks_on_grid(sums, boxes * scale)
    differences = (masks[row] - expected_masks).abs().flatten(1).amax(1)
    # a detection may equal several of the loop: the one with the most similar mask counts
    infinite = differences.new_full((len(rows),), float("inf"))
    least = infinite.scatter_reduce(0, row, differences, "amin")
    differs = ~(least[row.unique()] <= SAME_MASK)  # True for NaN
    return int(differs.sum())


def _masks_in_frames(sums: Tensor, boxes: Tensor, scale: float, size: tuple[int, int]) -> Tensor:
    """Masks `[n, *size]` in the frames of boxes `[n, 4]`, of sums `[n, h, w]` on a grid of `scale` of the input."""
    places = torch.arange(len(boxes))[:, None].to(boxes)
    frames = torch.cat([places, boxes], 1)
    return torchvision.ops.roi_align(sums[:, None], frames, size, scale, 1, aligned=True)[:, 0].sigmoid()


def _masks_on_grid(sums: Tensor, boxes: Tensor) -> Tensor:
    """Masks `[n, h, w]` of sums on the prototypes' grid, 0 outside of boxes `[n, 4]` in cells of that grid."""
    x1, y1, x2, y2 = boxes.unbind(1)
    inside_y = between(y1, y2, sums.shape[1])
    inside_x = between(x1, x2, sums.shape[2])
    return sums.sigmoid() * (inside_y[:, :, None] & inside_x[:, None])


def check_images(count: int, size: tuple[int, int], data: DataConfig | None, channels: int = 3) -> Tensor:
    """Return `[count, channels, height, width]` in 0..1: a dataset's images, or without one soft patches with noise."""
    if data is not None:
        from utils.evaluation.dataset import make_loader

        split = "val" if "val" in data.splits else "train"
        loader = make_loader(data, split, imgsz=size, batch_size=count, workers=0, limit=count)
        images = next(iter(loader)).images
        if len(images):
            return with_channels(images, channels).float() / 255
    random = torch.Generator().manual_seed(0)
    patches = torch.rand(count, channels, 12, 12, generator=random)
    soft = torch.nn.functional.interpolate(patches, size=size, mode="bilinear")
    return soft * 0.9 + torch.rand(count, channels, *size, generator=random) * 0.1
