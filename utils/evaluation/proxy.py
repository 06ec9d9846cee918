"""How far a quantized network's predictions are from the float one's, without labels and without NMS.

AP depends on the boxes that survive NMS: where they lie, to the last percent of IoU, and how their scores are ordered.
Scores that all move alike cost nothing, so the distance is mostly one of boxes. Every anchor counts by the third power
of the score that either network gives it: that is close to what NMS keeps, and background, which is most of an image,
counts for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.core.thresholds import AP_CONFIDENCE

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction

SCORES = 0.1  # a difference in score against an equal one in IoU


def distance(reference: Prediction, other: Prediction) -> Tensor:
    """Distance of predictions, summed over images, float32 scalar, 0 for equal ones. `weight` gives its scale."""
    ours, theirs = reference.scores.float(), other.scores.float()
    counts = ours.maximum(theirs)
    counts = counts * (counts > AP_CONFIDENCE)  # evaluation drops scores below it
    boxes = counts.amax(1) ** 3 * (1 - overlap(reference.boxes, other.boxes))
    return boxes.sum() + SCORES * (counts.square() * (ours - theirs).abs()).sum()


def weight(reference: Prediction) -> Tensor:
    """What a distance is relative to: about 1 if no box of the float network has its place any more."""
    return (reference.scores.float().amax(1) ** 3).sum()


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes `[B, 4, n]` (cx, cy, w, h) with the box at the same place, `[B, n]`."""
    a, b = a.float(), b.float()
    low = (a[:, :2] - a[:, 2:] / 2).maximum(b[:, :2] - b[:, 2:] / 2)
    high = (a[:, :2] + a[:, 2:] / 2).minimum(b[:, :2] + b[:, 2:] / 2)
    common = (high - low).clamp(min=0).prod(1)
    union = a[:, 2:].prod(1) + b[:, 2:].prod(1) - common
    return common / union.clamp(min=1e-9)
