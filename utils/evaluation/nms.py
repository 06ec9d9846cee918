"""Non-maximum suppression on raw predictions, on the device that they are on.

The semantics are those of upstream's `non_max_suppression`, without its time limit, which leaves the rest of a batch
without detections when a machine is slow, and with a fixed order among equal scores, which INT8 networks give often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from utils.core.tasks import DETECTIONS
from utils.core.thresholds import EVERYDAY_NMS_IOU

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction
    from utils.evaluation.per_image import PerImage

MAX_CANDIDATES = 30_000  # per image, the best ones
FIRST_CANDIDATES = 4  # times max_det: how many take part at first
CLASS_OFFSET = 7680.0  # pixels: moves the boxes of different classes apart, so that one pass handles all classes


def non_max_suppression(
    prediction: Prediction,
    conf_thres: float,
    iou_thres: float,
    *,
    max_det: int = 300,
    agnostic: bool = False,
) -> PerImage:
    """Detections of each image, best first. A box counts once for each class whose score suffices.

    Args:
        prediction: of a batch, float16 or float32.
        conf_thres: a score must be above it.
        iou_thres: of two boxes of a class that overlap by more, the one with the lower score goes.
        max_det: at most so many detections per image.
        agnostic: boxes suppress each other across classes.

    Returns:
        For each image float32 `[n, 6]`: x1, y1, x2, y2 in pixels, score, class; with mask coefficients `[n, 7]`:
        the anchor too, to find them by. Boxes that are not finite are left out.
    """
    from utils.evaluation.per_image import PerImage

    if prediction.raw.is_cuda:
        return suppress_together(prediction, conf_thres, iou_thres, max_det, agnostic)
    candidate = ~(prediction.scores.amax(1) <= conf_thres)  # also where a class is NaN: the others are looked at
    found = []
    for boxes, scores, keep in zip(prediction.boxes, prediction.scores, candidate, strict=True):
        anchors = keep.nonzero()[:, 0] if prediction.layout.nm else None
        rows = _candidates(boxes[:, keep], scores[:, keep], anchors, conf_thres)
        rows = rows[rows[:, 4].argsort(descending=True, stable=True)[:MAX_CANDIDATES]]
        found.append(rows[_kept(rows, iou_thres, max_det, agnostic)])
    return PerImage.of(found)


def suppress_together(
    prediction: Prediction, conf_thres: float, iou_thres: float, max_det: int, agnostic: bool
) -> PerImage:
    """The same, computed for all images at once: many times as fast on a GPU, and slower on a CPU."""
    import torch

    from utils.core.light_torchvision import torchvision
    from utils.evaluation.batched_nms import suppress_batch

    scores = prediction.scores.mT.float()
    corners = torchvision.ops.box_convert(prediction.boxes.mT.float(), "cxcywh", "xyxy")
    candidate = (scores > conf_thres) & corners.isfinite().all(2, keepdim=True)
    image, anchor, label = candidate.nonzero().unbind(1)
    columns = [corners[image, anchor], scores[image, anchor, label, None], label[:, None].float()]
    rows = torch.cat([*columns, anchor[:, None].float()] if prediction.layout.nm else columns, 1)
    return suppress_batch(
        rows, image, len(scores), iou_thres, max_det, 0.0 if agnostic else CLASS_OFFSET,
        limit=MAX_CANDIDATES, first=FIRST_CANDIDATES * max_det,
        one=lambda rows: _kept(rows, iou_thres, max_det, agnostic),
    )  # fmt: skip


def packed_detections(outputs: Mapping[str, Tensor]) -> Tensor:
    """The outputs of a network with NMS inside (`DETECTIONS`) as one table.

    Returns:
        float32 `[B, K, 6]`: x1, y1, x2, y2 in pixels of the input, score, class; rows that hold no detection are zero.
    """
    import torch

    counts, boxes, scores, classes = (outputs[name] for name in DETECTIONS)
    table = torch.cat([boxes.float(), scores[..., None].float(), classes[..., None].float()], 2)
    behind = torch.arange(table.shape[1], device=table.device) >= counts.view(-1, 1)
    return table.masked_fill(behind[..., None], 0)


def _candidates(boxes: Tensor, scores: Tensor, anchors: Tensor | None, conf_thres: float) -> Tensor:
    """Cxcywh `[4, anchors]`, scores `[nc, anchors]` → `[n, 6]` xyxy, score, class for scores above the threshold.

    With `anchors`, the numbers of these anchors, they are a seventh column.
    """
    import torch

    from utils.core.light_torchvision import torchvision

    boxes, scores = torchvision.ops.box_convert(boxes.T.float(), "cxcywh", "xyxy"), scores.T.float()
    anchor, label = (scores > conf_thres).nonzero().unbind(1)
    columns = [boxes[anchor], scores[anchor, label, None], label[:, None].float()]
    found = torch.cat(columns if anchors is None else [*columns, anchors[anchor, None].float()], 1)
    return found[found[:, :4].isfinite().all(1)]


def _kept(found: Tensor, iou_thres: float, max_det: int, agnostic: bool) -> Tensor:
    """Which of an image's candidates stay, int64 `[m]`; they come best first.

    Suppress among the best rows, and take more of them in only while less than `max_det` remain.

    Whether a box remains depends on better ones alone, so this is exact; and it saves most of the time, which grows
    with the square of the number of boxes.
    """
    from utils.core.light_torchvision import torchvision

    boxes = found[:, :4] if agnostic else found[:, :4] + found[:, 5:6] * CLASS_OFFSET
    size = FIRST_CANDIDATES * max_det
    while True:
        keep = torchvision.ops.nms(boxes[:size], found[:size, 4], iou_thres)
        if len(keep) >= max_det or size >= len(found):
            return keep[:max_det]
        size *= FIRST_CANDIDATES


def best_class(found: Tensor) -> Tensor:
    """Of boxes `[n, 6]` in one place the best one, int64 `[m]`: which of them, best first.

    AP counts a box for several classes, a drawing shows one object.
    """
    from utils.core.light_torchvision import torchvision

    return torchvision.ops.nms(found[:, :4], found[:, 4], EVERYDAY_NMS_IOU)
