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

import numpy as np
import torch
import torchvision
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from utils.core.errors import DependencyError
from utils.core.files import read_onnx
from utils.core.input_spec import with_channels
from utils.core.tasks import DETECT, SEGMENT, Prediction, Task, predicted, task_of_head
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.masks import between
from utils.evaluation.nms import non_max_suppression, packed_detections
from utils.jobs.compare_tensors import LIMITS, Differences, compare_predictions, compare_tensors, together
from utils.onnx_graph.output_formats import PLUGIN, NmsSettings
from utils.onnx_graph.qdq_view import Provenance
from utils.onnx_graph.view import drop_unused, input_spec, metadata_of
from utils.runners.base import as_feed
from utils.runners.onnxrt import open_session

FREE_BATCH = 2  # images at a time where any number will do; every tensor of the network is kept for them
DIFFERENT_DETECTIONS = 0.02  # fraction: pairs of boxes at the very threshold
SAME_MASK = 1e-3  # in 0..1: a mask is another's equal
SAME_BOX, SAME_SCORE = 0.01, 1e-4  # pixels, score: a detection is another's equal
ROWS = "output"  # of DeepStream's form


@dataclass(frozen=True)
class Parity:
    """What a comparison of outputs found.

    Attributes:
        outputs: differences of the predictions.
        stretches: differences where each stretch between quantizers is compared by itself; empty for a float network.
        problems: what is too large, in words.
    """

    outputs: Differences
    stretches: Differences
    problems: tuple[str, ...]

    def __str__(self) -> str:
        outputs, stretches = (
            ", ".join(f"{what} {value:.2g} {LIMITS[what][0]}".rstrip() for what, value in differences.items())
            for differences in (self.outputs, self.stretches)
        )
        behind = f" (steps between INT8 values add up); from quantizer to quantizer {stretches}" if stretches else ""
        return f"ONNX Runtime beside PyTorch, largest differences: {outputs}{behind}"


def check_onnx(
    path: str | Path, model: nn.Module, images: Tensor, order: Mapping[str, Provenance] | None = None, *,
    half: bool = False,
) -> Parity:  # fmt: skip
    """Run an exported file on images.

    Of a quantized network, only results behind equal INT8 values are held against the limits.

    Args:
        model: what it was exported from, on the CPU: a GPU may compute with less than float32.
        images: `[N, 3, H, W]` in 0..1; a file of static batch gets them in its batches, the last one filled up. Where
            it takes bytes, they are rounded to whole pixels, for the network too.
        order: of a quantized network, see `compare_tensors`.
        half: the file computes in FP16.

    Raises:
        DependencyError: ONNX Runtime is not installed.
    """
    graph, task = read_onnx(path), task_of_head(model.model[-1])
    form, file = metadata_of(graph), ObservedFile(graph, task)
    if file.form.kind != "float":
        images = pixels(images) / 255
    outputs, stretches, problems = list[Differences](), list[Differences](), list[str]()
    detections, different_rows, wrong_masks = 0, 0, 0
    size = file.batch or min(len(images), FREE_BATCH)
    for part in images.split(size):
        batch = torch.cat([part, part[-1:].expand(size - len(part), -1, -1, -1)])
        results = file(batch)
        with torch.no_grad():
            expected = Prediction(*predicted(model(batch)))
        prediction = Prediction(results[task.prediction], results.get(task.prototypes))
        outputs.append(compare_predictions(prediction, expected, (batch.shape[2], batch.shape[3])))
        if order:
            stretches.append(compare_tensors(model, graph, batch, order, file.feed(batch)))
        if not same_rows(form, results, prediction):
            problems.append("the rows are not the predictions")
        if file.nms is None or (file.plugin and not file.behind_plugin):
            continue
        expected_rows = loop_detections(prediction, file.nms)
        if file.plugin:
            results = file(batch, expected_rows)
        table, all_masks = table_and_masks(
            results, () if expected.prototypes is None else expected.prototypes.shape[2:]
        )
        for image, loop_rows in enumerate(expected_rows):
            rows = table[image][table[image, :, 4] > 0]
            same = same_detections(rows, loop_rows)
            different_rows += max(int((~same.any(1)).sum()), int((~same.any(0)).sum()))
            detections += len(loop_rows)
            if all_masks is not None:
                masks, framed = all_masks[image, : len(rows)], form.get("mask_resolution") != "0"
                wrong_masks += different_masks(masks, rows, loop_rows, prediction, image, batch.shape[3], framed=framed)
    parity = Parity(together(outputs), together(stretches), ())
    for what, value in (parity.stretches or parity.outputs).items():
        unit, *limits = LIMITS[what]
        if not value <= limits[half]:  # or NaN
            problems.append(f"{what}: {value:.3g} {unit}".rstrip() + f" apart, {limits[half]:g} at most was expected")
    tolerated = max(1, DIFFERENT_DETECTIONS * detections)
    if different_rows > tolerated:
        problems.append(f"detections differ from those of the evaluation loop's NMS: {different_rows}")
    if wrong_masks > tolerated:
        problems.append(f"masks are not what the file's own coefficients and prototypes make: {wrong_masks}")
    return replace(parity, problems=tuple(problems))


class ObservedFile:
    """A graph in ONNX Runtime that also gives its predictions, whatever its form.

    TensorRT's plugin is left out: what it reads are further outputs, and what stands behind it takes its results as
    inputs.

    Attributes:
        batch: the static batch size, 0 if it is dynamic.
        form: in which it takes images.
        nms: the settings of NMS inside; None without.
        plugin: whether NMS is TensorRT's plugin.
        behind_plugin: those of the plugin's results that something reads, which makes masks of them.

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
        nms = metadata_of(graph).get("nms")
        self.nms = NmsSettings(**json.loads(nms)) if nms else None
        self._input = graph.graph.input[0].name
        observed = deepcopy(graph)
        self._names = {value.name: value.name for value in observed.graph.output}  # name here → in the graph
        plugin = next((node for node in observed.graph.node if node.op_type == PLUGIN), None)
        self.plugin, self.behind_plugin = plugin is not None, list[str]()
        if plugin is not None:
            observed.graph.node.remove(plugin)
            read = {name for node in observed.graph.node for name in node.input}
            self.behind_plugin = [name for name in plugin.output if name in read]
            for name in self.behind_plugin:
                kind = TensorProto.INT32 if name in (DETECT.detections[0], DETECT.detections[3]) else TensorProto.FLOAT
                observed.graph.input.append(helper.make_tensor_value_info(name, kind, None))
            self._names = {name: name for name in self._names if name not in plugin.output}
            self._names |= {"plugin boxes": plugin.input[0], "plugin scores": plugin.input[1]}
        computed = {name for node in observed.graph.node for name in node.output}
        self._names |= {name: name for name in task.outputs if name in computed}
        del observed.graph.output[:]
        kinds = {value.name: value for value in graph.graph.output}
        observed.graph.output.extend(
            kinds.get(name) or helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            for name in dict.fromkeys(self._names.values())
        )
        drop_unused(observed)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = open_session(observed.SerializeToString(), options, ["CPUExecutionProvider"])

    def __call__(self, images: Tensor, kept: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Results by name, the predictions among them, for images `[B, 3, H, W]` in 0..1.

        `kept` are the detections of each image that the plugin shall keep, `[n, 6]`; none by default.
        """
        feeds, outputs = {self._input: self.feed(images)}, dict[str, Tensor]()
        if self.behind_plugin and self.nms:
            table = torch.zeros(len(images), self.nms.topk, 6)
            for image, rows in enumerate(kept):
                table[image, : len(rows)] = rows[:, :6]
            counts = torch.tensor([[len(rows)] for rows in kept] or [[0]] * len(images), dtype=torch.int32)
            columns = counts, table[..., :4], table[..., 4], table[..., 5].int()
            outputs = dict(zip(DETECT.detections, columns, strict=True))
            feeds |= {name: np.ascontiguousarray(outputs[name].numpy()) for name in self.behind_plugin}
        values = self._session.run(list(self._names.values()), feeds)
        return outputs | {name: torch.from_numpy(value) for name, value in zip(self._names, values, strict=True)}

    def feed(self, images: Tensor) -> np.ndarray:
        """What the file takes for images `[B, 3, H, W]` in 0..1."""
        if self.form.kind != "float":
            images = as_feed(pixels(images), self.form, "uint8")
        return np.ascontiguousarray(images.numpy())


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


def pixels(images: Tensor) -> Tensor:
    """Images in 0..1 → bytes."""
    return (images * 255).round().to(torch.uint8)
