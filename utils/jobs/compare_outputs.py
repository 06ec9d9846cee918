"""Does an exported file compute what the network computes? ONNX Runtime beside PyTorch, on a few images.

Three things are compared: the predictions, with the masks that they make; for a quantized network every stretch between
two quantizers by itself, see `compare_tensors.py`; and what the file's form makes of its own predictions. References:
the NMS and the masks of the evaluation loop, and torchvision's ROIAlign for masks in boxes. TensorRT's plugin runs in
TensorRT only: ONNX's operators stand in for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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

FREE_BATCH = 2  # images at a time where any number will do; every tensor of the network is kept for them
DIFFERENT_DETECTIONS = 0.02  # fraction: pairs of boxes at the very threshold
SAME_MASK = 1e-3  # in 0..1: a mask is another's equal
SAME_BOX, SAME_SCORE = 0.01, 1e-4  # pixels, score: a detection is another's equal
ROWS = "output"  # of DeepStream's form
DIFFERENT_ROWS = "the rows are not the predictions"
OTHER_DETECTIONS = "detections differ from those of the evaluation loop's NMS"
OTHER_MASKS = "masks are not what the file's own coefficients and prototypes make"


@dataclass(frozen=True)
class Parity:
    """Differences of the predictions and, of a quantized network, of each stretch; and what is too large, in words."""

    outputs: Differences
    stretches: Differences
    problems: tuple[str, ...]


def check_onnx(
    path: str | Path, model: nn.Module, images: Tensor, order: Mapping[str, Provenance] | None = None, *,
    half: bool = False,
) -> Parity:  # fmt: skip
    """Run an exported file on images; of a quantized network, only results behind equal INT8 values have limits.

    Args:
        model: what it was exported from, on the CPU: a GPU may compute with less than float32.
        images: `[N, 3, H, W]` in 0..1; rounded to whole pixels where the file takes bytes.
        order: of a quantized network, see `compare_tensors`.
        half: the file computes in FP16.
    """
    graph, head = read_onnx(path), model.model[-1]
    task, metadata = task_of_head(head), metadata_of(graph)
    nms = NmsSettings(**json.loads(metadata["nms"])) if "nms" in metadata else None
    if input_spec(graph).kind != "float":
        images = pixels(images) / 255
    run = observed(graph, task, head.nc)
    size = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value or min(len(images), FREE_BATCH)
    outputs, stretches, counts = list[Differences](), list[Differences](), Counter[str]()
    for part in images.split(size):
        batch = torch.cat([part, part[-1:].expand(size - len(part), -1, -1, -1)])  # a static batch is filled up
        results = run(feed_of(graph, batch))
        prediction = Prediction.of(results, task)
        with torch.no_grad():
            expected = Prediction(*predicted(model(batch)))
        outputs.append(compare_predictions(prediction, expected, (batch.shape[2], batch.shape[3])))
        if order:
            stretches.append(compare_tensors(model, graph, batch, order))
        if nms is None and ROWS in results:
            counts[DIFFERENT_ROWS] += not same_rows(results[ROWS], prediction)
        elif nms:
            framed = metadata.get("mask_resolution") != "0"
            counts += compare_detections(results, prediction, nms, batch.shape[3], framed=framed)
    parity = Parity(together(outputs), together(stretches), ())
    problems = []
    for what, value in (parity.stretches or parity.outputs).items():
        unit, *limits = LIMITS[what]
        if not value <= limits[half]:  # or NaN
            problems.append(f"{what}: {value:.3g} {unit}".rstrip() + f" apart, {limits[half]:g} at most was expected")
    tolerated = max(1, DIFFERENT_DETECTIONS * counts.pop("detections", 0))
    problems += [what for what, count in counts.items() if count > (0 if what == DIFFERENT_ROWS else tolerated)]
    return replace(parity, problems=tuple(problems))


def observed(graph: ModelProto, task: Task, classes: int) -> Callable[[np.ndarray], dict[str, Tensor]]:
    """A function that runs a graph in ONNX Runtime on what `feed_of` gives; its results by name, its predictions too.

    ONNX's own operators stand in for TensorRT's plugin.
    """
    graph = replace_plugin(graph, classes)
    names = [value.name for value in graph.graph.output]
    predictions = [name for name in task.outputs if name not in names]
    graph.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in predictions)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = open_session(graph.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(feed: np.ndarray) -> dict[str, Tensor]:
        values = session.run([*names, *predictions], {graph.graph.input[0].name: feed})
        return dict(zip([*names, *predictions], map(torch.from_numpy, values), strict=True))

    return run


def same_rows(rows: Tensor, predicted: Prediction) -> bool:
    """Whether DeepStream's rows `[B, anchors, 6]` are the predictions."""
    boxes, scores = torchvision.ops.box_convert(predicted.boxes.mT, "cxcywh", "xyxy"), predicted.scores.mT
    label, best = rows[..., 5:].long().clamp(0, scores.shape[2] - 1), scores.amax(2)
    pairs = (rows[..., :4], boxes), (rows[..., 4], best), (scores.gather(2, label)[..., 0], best)
    return all(torch.allclose(*pair, atol=SAME_BOX, rtol=0) for pair in pairs)


def compare_detections(
    results: Mapping[str, Tensor], predicted: Prediction, nms: NmsSettings, width: int, *, framed: bool
) -> Counter[str]:
    """Hold NMS in a file against the evaluation loop's on the file's own predictions; counts of what differs."""
    counts = Counter[str]()
    table, all_masks = table_and_masks(results, () if predicted.prototypes is None else predicted.prototypes.shape[2:])
    for image, loop_rows in enumerate(loop_detections(predicted, nms)):
        rows = table[image][table[image, :, 4] > 0]
        same = same_detections(rows, loop_rows)
        counts["detections"] += len(loop_rows)
        counts[OTHER_DETECTIONS] += max(int((~same.any(1)).sum()), int((~same.any(0)).sum()))
        if all_masks is not None:
            masks = all_masks[image, : len(rows)]
            counts[OTHER_MASKS] += different_masks(masks, rows, loop_rows, predicted, image, width, framed=framed)
    return counts


def loop_detections(predicted: Prediction, nms: NmsSettings) -> Sequence[Tensor]:
    """What the evaluation loop's NMS keeps of a file's predictions at its settings: of each image `[n, 7]`."""
    iou_thres, agnostic = (1.0, False) if nms.kind == "none" else (nms.iou_thres, nms.agnostic)
    if nms.kind == "none" and nms.agnostic:  # the best class of each anchor only
        best, label = predicted.scores.max(1, keepdim=True)
        scores = torch.zeros_like(predicted.scores).scatter(1, label, best)
        predicted = replace(predicted, raw=torch.cat([predicted.boxes, scores, predicted.coefficients], 1))
    return non_max_suppression(predicted, nms.conf_thres, iou_thres, max_det=nms.topk, agnostic=agnostic)


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
    """Which of `rows` `[n, 6]` is which of `expected` `[m, 6]`: bool `[n, m]`."""
    differences = (rows[:, None, :6] - expected[None, :, :6]).abs()
    boxes, scores, classes = differences[..., :4].amax(2), differences[..., 4], differences[..., 5]
    return (boxes < SAME_BOX) & (scores < SAME_SCORE) & (classes == 0)


def different_masks(
    masks: Tensor, rows: Tensor, expected: Tensor, predicted: Prediction, image: int, width: int, *, framed: bool
) -> int:
    """How many masks `[n, rows, columns]` of an image's detections are others than those of the loop's equal ones.

    The file's detections are `rows`, `[n, 6]`, the loop's `expected`, `[m, 7]` with the anchor behind. `width` is that
    of the input in pixels. `framed` masks lie in their boxes' frames, others on the prototypes' grid.
    """
    row, loop_row = same_detections(rows, expected).nonzero().unbind(1)
    if predicted.prototypes is None or not len(row):
        return 0
    coefficients = predicted.coefficients[image][:, expected[loop_row, 6].long()].T
    sums = torch.einsum("nk,khw->nhw", coefficients, predicted.prototypes[image])
    boxes, scale = rows[row, :4], sums.shape[2] / width
    if framed:
        numbered = torch.cat([torch.arange(len(boxes))[:, None].to(boxes), boxes], 1)
        size = (masks.shape[1], masks.shape[2])
        expected_masks = torchvision.ops.roi_align(sums[:, None], numbered, size, scale, 1, aligned=True)
        expected_masks = expected_masks[:, 0].sigmoid()
    else:
        x1, y1, x2, y2 = (boxes * scale).unbind(1)
        inside_y, inside_x = between(y1, y2, sums.shape[1]), between(x1, x2, sums.shape[2])
        expected_masks = sums.sigmoid() * (inside_y[:, :, None] & inside_x[:, None])
    differences = (masks[row] - expected_masks).abs().flatten(1).amax(1)
    least = differences.new_full((len(rows),), float("inf")).scatter_reduce(0, row, differences, "amin")
    return int((~(least[row.unique()] <= SAME_MASK)).sum())


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
