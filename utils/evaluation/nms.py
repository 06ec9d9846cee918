"""Non-maximum suppression on raw predictions, on the device that they are on.

The semantics are those of upstream's `non_max_suppression`, without its time limit, and with a fixed order among equal
scores, which INT8 networks give often. On a CPU torchvision suppresses image by image. On a GPU that is ten times as
slow as the network, since each image waits; there `suppress_together` does the same for a whole batch. It starts some
hundred kernels, which one image does not fill, so that the candidates of one image go to the CPU if they are few.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from utils.core.tasks import DETECTIONS, DISPLAY_IOU
from utils.evaluation.batch import RaggedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction


MAX_CANDIDATES = 30_000  # per image, the best ones
FIRST_CANDIDATES = 4  # times max_det: how many take part at first
CLASS_OFFSET = 7680.0  # pixels: moves the boxes of different classes apart, so that one pass handles all classes
FEW = 2048  # candidates of a single image on a GPU up to which the CPU is faster
PAIRS = 1 << 25  # of boxes whose overlaps are computed together: up to 800 MB
STEPS = 8  # between two looks whether anything still changes


def non_max_suppression(
    prediction: Prediction,
    conf_thres: float,
    iou_thres: float,
    *,
    max_det: int = 300,
    agnostic: bool = False,
) -> RaggedBatch:
    """Detections of each image, best first. A box counts once for each class whose score suffices.

    Args:
        prediction: of a batch, float16 or float32.
        conf_thres: a score must be above it.
        iou_thres: where two boxes of a class overlap by more, the one with the lower score goes.
        max_det: at most so many detections per image.
        agnostic: boxes suppress each other across classes.

    Returns:
        For each image float32 `[n, 6]`: x1, y1, x2, y2 in pixels, score, class; with mask coefficients `[n, 7]`:
        the anchor too, to find them by. Boxes that are not finite are left out. They are on the prediction's device,
        those of a single image with few candidates on the CPU.
    """
    rows, image = candidates(prediction, conf_thres)
    images = len(prediction.raw)
    if images == 1 and len(rows) <= FEW:
        rows, image = rows.cpu(), torch.zeros(len(rows), dtype=torch.int64)
    if rows.is_cuda:
        return suppress_together(prediction, (rows, image), iou_thres, max_det, agnostic)
    of_images = []
    for image_rows in rows.split(image.bincount(minlength=images).tolist()):
        best = _best_of_image(image_rows)
        indices = _suppressed(best, iou_thres, max_det, agnostic)
        of_images.append(best[indices])
    detections = RaggedBatch.of(of_images)
    if prediction.nm:
        return detections
    return RaggedBatch(detections.flat[:, :6], detections.counts)


@lru_cache(maxsize=1)
def torchvision_nms() -> Callable[..., Tensor]:
    """NMS of torchvision: boxes xyxy `[n, 4]`, scores `[n]`, IoU → indices that stay, int64 `[m]`, best first.

    Its compiled library is loaded alone where it can be: importing torchvision imports torch's compiler, for seconds.
    """
    spec: Any = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations or [] if spec else []
    libraries = [path for folder in folders for path in Path(folder).glob("_C*.so")]
    try:
        torch.ops.load_library(libraries[0])
    except (IndexError, OSError):
        import torchvision

        nms: Callable[..., Tensor] = torchvision.ops.nms
    else:
        nms = torch.ops.torchvision.nms
    return nms


def candidates(prediction: Prediction, conf_thres: float) -> tuple[Tensor, Tensor]:
    """Candidates: each score above the threshold, with its box.

    Returns:
        float32 `[n, 7]`: cx, cy, w, h in pixels, score, class, anchor; the image of each, int64 `[n]`.
    """
    scores = prediction.scores.mT.float()
    image, anchor, label = (scores > conf_thres).nonzero().unbind(1)
    boxes = prediction.boxes.mT[image, anchor].float()
    columns = torch.stack((scores[image, anchor, label], label.float(), anchor.float()), 1)
    return torch.cat([boxes, columns], 1), image


def _with_corners(rows: Tensor) -> Tensor:
    """Convert the boxes of candidates, float32 `[n, 7]`, from cx, cy, w, h to xyxy."""
    center = rows[:, :2]
    half_size = 0.5 * rows[:, 2:4]
    return torch.cat([center - half_size, center + half_size, rows[:, 4:]], 1)


def _best_of_image(rows: Tensor) -> Tensor:
    """The MAX_CANDIDATES best candidates of one image whose boxes are finite, best first, with xyxy: `[n, 7]`."""
    rows = _with_corners(rows)
    rows = rows[rows[:, :4].isfinite().all(1)]
    order = rows[:, 4].argsort(descending=True, stable=True)
    return rows[order[:MAX_CANDIDATES]]


def _best_first(rows: Tensor, image: Tensor, images: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_best_of_image` of several images at once, one image behind the other, with few kernel launches.

    Returns:
        float32 `[n, 7]`: xyxy, score, class, anchor; the number of each image's, int64 `[B]`; the image of each, `[n]`.
    """
    rows = _with_corners(rows)
    is_finite = rows[:, :4].isfinite().all(1)
    # by image, best score first: a float32 that is not negative, read as an integer, has the order of its value
    score = rows[:, 4].contiguous().view(torch.int32).masked_fill(~is_finite, -1)
    order = (image * 2**32 - score).argsort(stable=True)
    rows = rows[order]
    image = image[order]
    is_finite = is_finite[order]
    totals = image.new_zeros(images).scatter_add_(0, image, torch.ones_like(image))
    counts = image.new_zeros(images).scatter_add_(0, image, is_finite.long())
    starts = totals.cumsum(0) - totals
    rank = torch.arange(len(rows), device=rows.device) - starts[image]
    best = (is_finite & (rank < MAX_CANDIDATES)).nonzero()[:, 0]  # one wait of a GPU for both
    return rows[best], counts.clamp(max=MAX_CANDIDATES), image[best]


def _suppressed(
    rows: Tensor,
    iou_thres: float,
    max_det: int,
    agnostic: bool,
) -> Tensor:
    """Indices of an image's candidates that stay after suppression, int64 `[m]`, best first.

    At first only the best take part, and more while less than `max_det` remain, since time grows with the square of
    their number; this is exact: whether a box stays depends on better ones alone.
    """
    boxes = _apart(rows, agnostic)
    size = FIRST_CANDIDATES * max_det
    while True:
        indices = torchvision_nms()(boxes[:size], rows[:size, 4], iou_thres)
        if len(indices) >= max_det or size >= len(rows):
            return indices[:max_det]
        size *= FIRST_CANDIDATES


def _apart(rows: Tensor, agnostic: bool) -> Tensor:
    """The boxes `[..., 4]` of rows, those of different classes far from each other unless `agnostic`."""
    boxes = rows[..., :4]
    if agnostic:
        return boxes
    return boxes + rows[..., 5:6] * CLASS_OFFSET


def suppress_together(
    prediction: Prediction,
    above: tuple[Tensor, Tensor],
    iou_thres: float,
    max_det: int,
    agnostic: bool,
) -> RaggedBatch:
    """Suppress in all images of a batch at once, with a few waits for the GPU however many images there are.

    `above` are the batch's `candidates`.
    """
    rows, counts, image = _best_first(*above, len(prediction.raw))
    candidate_numbers = counts.tolist()
    largest = max(candidate_numbers)
    width = FIRST_CANDIDATES * max_det
    stays = _staying(rows, counts, min(width, largest), iou_thres, max_det, agnostic)
    while True:  # in images where too few remain, more candidates take part, as in `_suppressed`
        remaining = torch.zeros_like(counts).scatter_add_(0, image, stays.long())
        numbers = remaining.tolist()
        pairs = zip(candidate_numbers, numbers, strict=True)
        if not any(before > width and after < max_det for before, after in pairs):
            break
        again = (counts > width) & (remaining < max_det)
        width *= FIRST_CANDIDATES
        chosen = again[image]
        stays[chosen] = _staying(rows[chosen], counts[again], min(width, largest), iou_thres, max_det, agnostic)
    detections = rows[stays] if prediction.nm else rows[stays, :6]
    return RaggedBatch(detections, numbers)


def _staying(
    rows: Tensor,
    counts: Tensor,
    width: int,
    iou_thres: float,
    max_det: int,
    agnostic: bool,
) -> Tensor:
    """Mask of the rows that greedy suppression leaves, bool `[n]`, where the first `width` of each image take part.

    A box goes if a better box that stays overlaps it. Starting from "all stay" and applying that again and again, the
    first n boxes are right after n steps at most; all are after a few, as chains of boxes that decide are short.

    `rows` are `[n, 7]`, best first within each image, and `counts` their numbers by image, int64 `[B]`.
    """
    starts = counts.cumsum(0) - counts
    column = torch.arange(width, device=rows.device)
    stays = rows.new_zeros(len(rows) + 1, dtype=torch.bool)  # the last stands for places without a candidate
    together = max(PAIRS // max(width, 1) ** 2, 1)  # images
    for images in torch.arange(len(counts), device=rows.device).split(together):
        is_candidate = column < counts[images, None]
        place = (starts[images, None] + column).masked_fill_(~is_candidate, len(rows))
        boxes = _apart(rows[place.clamp(max=len(rows) - 1)], agnostic)
        overlaps = _overlap(boxes, iou_thres).triu_(1).logical_and_(is_candidate[:, :, None])  # [B, better, worse]
        before = ~is_candidate
        now = is_candidate
        while not torch.equal(before, now):
            for _ in range(STEPS):
                before = now
                is_suppressed = (overlaps & now[:, :, None]).any(1)
                now = is_candidate > is_suppressed
        stays[place] = now & (now.cumsum(1) <= max_det)
    return stays[:-1]


def _overlap(boxes: Tensor, iou_thres: float) -> Tensor:
    """Mask of the pairs of boxes `[B, n, 4]` that overlap by more than a threshold, bool `[B, n, n]`."""
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    side = high.sub_(low).clamp_(min=0)
    shared = side[..., 0] * side[..., 1]  # prod(-1) would be a reduction
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    union = (area[:, :, None] + area[:, None, :]).sub_(shared)
    return shared.div_(union) > iou_thres


def packed_detections(outputs: Mapping[str, Tensor]) -> Tensor:
    """The outputs of a network with NMS inside as float32 `[B, K, 6]`: xyxy in the input, score, class; or 0."""
    counts, boxes, scores, classes = (outputs[name] for name in DETECTIONS)
    table = torch.cat([boxes.float(), scores[..., None].float(), classes[..., None].float()], 2)
    behind = torch.arange(table.shape[1], device=table.device) >= counts.view(-1, 1)
    return table.masked_fill(behind[..., None], 0)


def best_class(detections: Tensor) -> Tensor:
    """Indices, int64 `[m]`, of the best one among overlapping boxes `[n, 6]` of any class, for a drawing."""
    return torchvision_nms()(detections[:, :4], detections[:, 4], DISPLAY_IOU)
