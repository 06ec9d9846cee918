"""Does an exported file compute what the network computes? ONNX Runtime beside PyTorch, on a few images.

Three things are compared: the predictions, with the masks that they make; for a quantized network every stretch between
two quantizers by itself, see `compare_tensors.py`; and what the file's form makes of its own predictions, with the NMS
of the evaluation loop as reference, see `compare_detections.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from utils.core.device import import_torchvision
from utils.core.errors import DependencyError
from utils.core.files import read_onnx
from utils.core.tasks import Prediction, Task, prediction_of, task_of_head
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.nms import non_max_suppression
from utils.jobs.compare_detections import (
    ROWS,
    SAME_BOX,
    BehindPlugin,
    MaskAgreement,
    compare_masks,
    different_masks,
    same_detections,
    table_and_masks,
    topk_anchors,
)
from utils.jobs.compare_tensors import Agreement, compare, missed
from utils.onnx_graph.decoding import ANCHORS
from utils.onnx_graph.input_forms import input_spec
from utils.onnx_graph.output_formats import PLUGIN, NmsSettings
from utils.onnx_graph.pad_channels import Traced
from utils.onnx_graph.view import drop_unused, metadata_of
from utils.runners.base import as_feed
from utils.runners.onnxrt import open_session

torchvision = import_torchvision()

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


FULL, HALF = Limits(box=0.1, score=1e-3), Limits(box=4.0, score=0.05, fraction=0.05, masks=0.05, pixels=0.02)
DIFFERENT_DETECTIONS = 0.02  # fraction: pairs of boxes at the very threshold


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


def check(
    path: str | Path, model: nn.Module, images: Tensor, order: Mapping[str, Traced] | None = None,
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
    boxes, scores, left = [], [], []  # of each part, largest differences
    problems: list[str] = []
    found: list[tuple[Tensor, Tensor]] = []
    stretches: list[Agreement] = []
    masks: list[MaskAgreement | None] = []
    wrong_masks = 0
    size = file.batch or min(len(images), FREE_BATCH)
    if file.form.kind != "float":
        images = pixels(images) / 255
    for part in images.split(size):
        count = len(part)
        batch = torch.cat([part, part[-1:].expand(size - count, -1, -1, -1)])
        results = {name: value[:count] for name, value in file(batch).items()}
        with torch.no_grad():
            whole = prediction_of(task, model(batch))
        whole, chosen = whole.of_first(count), results.get(ANCHORS)
        expected = whole.at(chosen)
        left.append(missed(whole, chosen))
        given = Prediction(results[task.prediction], whole.layout, results.get(task.prototypes))
        best = topk_anchors(expected)
        apart = (given.boxes - expected.boxes).abs()
        boxes.append(float(apart.gather(2, best[:, None].expand(-1, apart.shape[1], -1)).max()))
        masks.append(compare_masks(given, expected, best, (part.shape[2], part.shape[3])))
        scores.append(float((given.scores - expected.scores).abs().max()))
        if order:
            stretches.append(compare(model, graph, batch, order, file.feed(batch)))
        for image, (mine, rows, shown) in enumerate(_detections(form, file, results, given)):
            found.append((mine, rows))
            if shown is not None:
                framed = form.get("mask_resolution") != "0"
                wrong_masks += different_masks(shown, mine, rows, given, image, part.shape[3], framed=framed)
        problems += _form_problems(form, results, given)
    together = _together(stretches)
    box, score = float(np.max(boxes)), float(np.max(scores))  # NaN, if one is
    of_masks = MaskAgreement.together(masks)
    problems += _beyond(box, score, float(np.max(left)), of_masks, together, limits)
    different = 0  # detections of either side that have no equal on the other
    for mine, rows in found:
        same = same_detections(mine, rows)
        different += max(int((~same.any(1)).sum()), int((~same.any(0)).sum()))
    few = max(1, DIFFERENT_DETECTIONS * sum(len(expected) for _, expected in found))
    if different > few:
        problems.append(f"{different} detections differ from those of the evaluation loop's NMS")
    if wrong_masks > few:
        problems.append(f"{wrong_masks} masks are not what the file's own coefficients and prototypes make")
    return Parity(len(images), box, score, together, tuple(problems), of_masks)


def _together(parts: list[Agreement]) -> Agreement | None:
    if not parts:
        return None
    return Agreement(
        parts[0].tensors, max(part.steps for part in parts), sum(part.fraction for part in parts) / len(parts),
        float(np.max([part.output for part in parts])), MaskAgreement.together([part.masks for part in parts]),
        float(np.max([part.missed for part in parts])),
    )  # fmt: skip


def _beyond(
    box: float, score: float, missed: float, masks: MaskAgreement | None, stretches: Agreement | None, limits: Limits
) -> list[str]:
    """Lines on differences that are beyond their limits, or NaN.

    Of a quantized network only what follows equal INT8 values can be held against limits. A file that decodes only some
    anchors has to choose the best.
    """
    values: list[tuple[str, str, float, float]]
    if stretches is None:
        values = [("box", "px", box, limits.box), ("score", "", score, limits.score)]
    else:
        missed, masks = stretches.missed, stretches.masks
        values = [
            ("INT8 value", "steps", stretches.steps, limits.steps),
            ("share of INT8 values", "", stretches.fraction, limits.fraction),
            ("result behind equal INT8 values", "px or score", stretches.output, limits.box),
        ]
    values.append(("the best anchor that is left out and the worst that is chosen", "in score", missed, limits.score))
    if masks is not None:
        values += [
            ("mask coefficient", "of the largest", masks.coefficients, limits.masks),
            ("prototype", "of the largest", masks.prototypes, limits.masks),
            ("share of the masks' pixels", "", masks.pixels, limits.pixels),
        ]
    return [
        f"{what}: {value:.3g} {unit}".rstrip() + f" apart, {limit:g} at most was expected"
        for what, unit, value, limit in values
        if not value <= limit
    ]


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
        observed, self._names = _observed(graph, task)
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


def _observed(graph: ModelProto, task: Task) -> tuple[ModelProto, dict[str, str]]:
    """The graph with its predictions among its outputs, and what a result is called here → in the graph."""
    result = ModelProto()
    result.CopyFrom(graph)
    plugin = next((node for node in result.graph.node if node.op_type == PLUGIN), None)
    names = {value.name: value.name for value in result.graph.output}
    if plugin is not None:
        names = {"plugin boxes": plugin.input[0], "plugin scores": plugin.input[1]}
        result.graph.node.remove(plugin)
        del result.graph.output[:]
    written = {name for node in result.graph.node for name in node.output}
    names |= {name: name for name in (*task.outputs, ANCHORS) if name in written}
    present = {value.name for value in result.graph.output}
    for name in (name for name in names.values() if name not in present):
        kind = TensorProto.INT64 if name == ANCHORS else TensorProto.FLOAT
        result.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    drop_unused(result)
    return result, names


# --- what a form makes of the predictions -----------------------------------------------------------------------------


def _form_problems(form: dict[str, str], results: dict[str, Tensor], given: Prediction) -> list[str]:
    """Rows of the DeepStream form, or what the plugin reads, beside the predictions that they are made of."""
    boxes, scores = torchvision.ops.box_convert(given.boxes.mT, "cxcywh", "xyxy"), given.scores.mT
    pairs: list[tuple[Tensor, Tensor]] = []
    if form.get("form") == "deepstream" and "nms" not in form:
        rows = results[ROWS]
        label = rows[..., 5:].long().clamp(0, scores.shape[2] - 1)
        best = scores.amax(2)
        pairs = [(rows[..., :4], boxes), (rows[..., 4], best), (scores.gather(2, label)[..., 0], best)]
    elif "plugin boxes" in results:
        pairs = [(results["plugin boxes"], boxes), (results["plugin scores"], scores)]
    wrong = [pair for pair in pairs if not torch.allclose(*pair, atol=SAME_BOX, rtol=0)]
    return ["the rows are not the predictions"] if wrong else []


def _detections(
    form: dict[str, str], file: ObservedFile, results: dict[str, Tensor], given: Prediction
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """For each image the file's detections `[n, 6]`, the loop's, and the file's masks.

    Nothing where TensorRT's plugin keeps the detections; where masks stand behind it, it is taken to keep the loop's.
    """
    if "nms" not in form or (file.behind_plugin is None and "plugin boxes" in results):
        return []
    settings = NmsSettings(**json.loads(form["nms"]))
    overlap = settings.iou_thres
    compared = given
    if settings.kind == "none":
        overlap = 1.0
        if settings.agnostic:
            best, label = given.scores.max(1, keepdim=True)
            alone = torch.zeros_like(given.scores).scatter(1, label, best)
            compared = replace(given, raw=torch.cat([given.boxes, alone, given.coefficients], 1))
    agnostic = settings.agnostic and settings.kind != "none"
    expected = non_max_suppression(compared, settings.conf_thres, overlap, max_det=settings.topk, agnostic=agnostic)
    if file.behind_plugin is not None:
        results = file.behind_plugin(results, expected, settings.topk)
    grid = () if given.prototypes is None else given.prototypes.shape[2:]
    table, masks = table_and_masks(results, grid)
    rows = [one[one[:, 4] > 0] for one in table]
    shown = [None] * len(rows) if masks is None else [one[: len(mine)] for one, mine in zip(masks, rows, strict=True)]
    return list(zip(rows, expected, shown, strict=True))


def check_images(count: int, size: tuple[int, int], data: DataConfig | None) -> Tensor:
    """`[count, 3, height, width]` in 0..1: a dataset's images, or without one soft coloured patches and noise."""
    if data is not None:
        from utils.evaluation.dataset import make_loader

        split = "val" if "val" in data.splits else "train"
        images = next(iter(make_loader(data, split, imgsz=size, batch_size=count, workers=0, limit=count))).images
        if len(images):
            return images.float() / 255
    random = torch.Generator().manual_seed(0)
    patches = torch.rand(count, 3, 12, 12, generator=random)
    soft = torch.nn.functional.interpolate(patches, size=size, mode="bilinear")
    return soft * 0.9 + torch.rand(count, 3, *size, generator=random) * 0.1


def pixels(images: Tensor) -> Tensor:
    """Images in 0..1 → bytes."""
    return (images * 255).round().to(torch.uint8)
