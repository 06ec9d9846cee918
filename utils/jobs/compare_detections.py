"""How far masks are apart: of two predictions, and of a file with NMS inside from what its own predictions make.

The reference is torchvision's ROIAlign for masks in boxes, and the evaluation loop's masks for those on the prototypes'
grid. Behind TensorRT's plugin, which runs in TensorRT only, the rest of the graph gets the detections of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor

from utils.core.device import import_torchvision
from utils.core.tasks import DETECT, SEGMENT, Prediction
from utils.evaluation.masks import Masks, between
from utils.evaluation.nms import packed_detections
from utils.onnx_graph.output_formats import PLUGIN
from utils.onnx_graph.view import GraphView, drop_unused
from utils.runners.onnxrt import open_session

torchvision = import_torchvision()

SAME_MASK = 1e-3  # in 0..1: a mask is another's equal
SAME_BOX, SAME_SCORE = 0.01, 1e-4  # pixels, score: a detection is another's equal
ROWS = "output"  # of DeepStream's form
BEST = 100  # anchors of an image whose boxes and masks are compared: those without an object have boxes of no meaning
SMALLEST = 1e-12  # of a largest value that others are divided by


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


def same_detections(found: Tensor, expected: Tensor) -> Tensor:
    """Which of `found` `[n, 6]` is which of `expected` `[m, 6]`: bool `[n, m]`."""
    apart = (found[:, None, :6] - expected[None, :, :6]).abs()
    return (apart[..., :4].amax(2) < SAME_BOX) & (apart[..., 4] < SAME_SCORE) & (apart[..., 5] == 0)


def different_masks(
    masks: Tensor, found: Tensor, expected: Tensor, given: Prediction, image: int, width: int, *, framed: bool
) -> int:
    """How many masks of an image's detections are others than those of equal detections of the loop's.

    Args:
        masks: `[n, rows, columns]`, in 0..1.
        found: the file's detections, `[n, 6]`.
        expected: the loop's, `[m, 7]`; the last column is the anchor.
        given: the file's predictions and prototypes.
        image: its number in the batch.
        width: of the input, pixels.
        framed: masks lie in their boxes' frames, and not on the prototypes' grid.
    """
    mine, theirs = same_detections(found, expected).nonzero().unbind(1)
    if given.prototypes is None or not len(mine):
        return 0
    coefficients = given.coefficients[image][:, expected[theirs, 6].long()].T
    sums = torch.einsum("nk,khw->nhw", coefficients, given.prototypes[image])
    boxes, scale = found[mine, :4], sums.shape[2] / width
    if not framed:
        wanted = sums.sigmoid() * _inside(boxes * scale, sums.shape[1:])
    else:
        numbered = torch.cat([torch.arange(len(boxes))[:, None].to(boxes), boxes], 1)
        size = (masks.shape[1], masks.shape[2])
        wanted = torchvision.ops.roi_align(sums[:, None], numbered, size, scale, 1, aligned=True)[:, 0].sigmoid()
    apart = (masks[mine] - wanted).abs().flatten(1).amax(1)
    least = apart.new_full((len(found),), float("inf")).scatter_reduce(0, mine, apart, "amin")
    return int((~(least[mine.unique()] <= SAME_MASK)).sum())


def _inside(boxes: Tensor, grid: Sequence[int]) -> Tensor:
    """Cells of the grid in each box, whose corners are in cells: bool `[n, *grid]`."""
    height, width = grid
    rows, columns = between(boxes[:, 1], boxes[:, 3], height), between(boxes[:, 0], boxes[:, 2], width)
    return rows[:, :, None] & columns[:, None]


class BehindPlugin:
    """What stands in a graph behind TensorRT's plugin, in ONNX Runtime."""

    def __init__(self, graph: ModelProto, options: Any) -> None:
        model = ModelProto()
        model.CopyFrom(graph)
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

    def __call__(self, results: Mapping[str, Tensor], rows: Sequence[Tensor], topk: int) -> dict[str, Tensor]:
        """The file's outputs, had the plugin kept `rows`, `[n, 6]` of each image."""
        number, boxes, scores, classes = DETECT.detections
        table = torch.zeros(len(rows), topk, 6)
        for image, one in enumerate(rows):
            table[image, : len(one)] = one[:, :6]
        kept = {
            number: torch.tensor([[len(one)] for one in rows], dtype=torch.int32), boxes: table[..., :4],
            scores: table[..., 4], classes: table[..., 5].int(),
        }  # fmt: skip
        feeds = {name: np.ascontiguousarray({**results, **kept}[name].numpy()) for name in self._inputs}
        (found,) = self._session.run([self._output], feeds)
        return {**kept, self._output: torch.from_numpy(found)}


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
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return cls(
            coefficients=float(np.max([part.coefficients for part in found])),  # NaN, if one is
            prototypes=float(np.max([part.prototypes for part in found])),
            pixels=sum(part.pixels for part in found) / len(found),
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
    given: Prediction, expected: Prediction, anchors: Tensor, size: tuple[int, int]
) -> MaskAgreement | None:
    """Compare the masks of some anchors; both are cropped to the expected boxes, which are compared elsewhere.

    Args:
        anchors: int64 `[B, K]`.
        size: (height, width) of the input.

    Returns:
        None for detection.
    """
    if expected.prototypes is None or given.prototypes is None:
        return None
    theirs, ours = (_chosen(one.coefficients, anchors) for one in (expected, given))
    boxes = torchvision.ops.box_convert(_chosen(expected.boxes, anchors), "cxcywh", "xyxy")
    images, count = anchors.shape

    def pixels(prototypes: Tensor, coefficients: Tensor) -> Tensor:
        """Masks bool `[B, K, h, w]`."""
        masks = Masks(prototypes, tuple(coefficients.float()), tuple(boxes.float()), size)
        return masks.pixels(torch.arange(images), torch.arange(count).expand(images, -1))

    wanted, found = pixels(expected.prototypes, theirs), pixels(given.prototypes, ours)
    everything = pixels(torch.ones_like(expected.prototypes[:, :1]), torch.ones_like(theirs[..., :1]))
    return MaskAgreement(
        coefficients=_largest(ours, theirs),
        prototypes=_largest(given.prototypes, expected.prototypes),
        pixels=float((wanted != found).sum() / everything.sum().clamp(min=1)),
    )


def _chosen(values: Tensor, anchors: Tensor) -> Tensor:
    """Columns of `[B, n, anchors]` as `[B, K, n]`."""
    return values.gather(2, anchors[:, None].expand(-1, values.shape[1], -1)).mT


def _largest(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).abs().max() / expected.abs().max().clamp(min=SMALLEST))
