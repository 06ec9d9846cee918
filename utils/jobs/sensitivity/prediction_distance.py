"""How far a quantized network's predictions are from the float one's, without labels and without NMS.

AP depends on the boxes that survive NMS: where they lie, to the last percent of IoU, and how their scores are ordered.
Scores that all move alike cost nothing, so the distance is mostly one of boxes. Every anchor counts by the third power
of the score that either network gives it: that is close to what NMS keeps, and background, which is most of an image,
counts for nothing.

Where there are masks, those of the best anchors are compared too: how much of a mask's probability both networks give
to the same pixels, inside the float network's box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.core.tasks import AP_CONFIDENCE
from utils.evaluation.masks import between

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction

SCORES = 0.1  # a difference in score against an equal one in IoU
BEST = 100  # anchors of an image whose masks are compared


def distance(reference: Prediction, other: Prediction, size: tuple[int, int]) -> Tensor:
    """Distance of predictions, summed over images, float32 scalar, 0 for equal ones. `weight` gives its scale.

    Args:
        reference: of the float network.
        size: (height, width) of the input.
    """
    ours, theirs = reference.scores.float(), other.scores.float()
    counts = ours.maximum(theirs)
    counts = counts * (counts > AP_CONFIDENCE)  # evaluation drops scores below it
    weights = counts.amax(1) ** 3
    boxes = weights * (1 - overlap(reference.boxes, other.boxes))
    found = boxes.sum() + SCORES * (counts.square() * (ours - theirs).abs()).sum()
    return found if reference.prototypes is None else found + _of_masks(reference, other, weights, size)


def weight(reference: Prediction) -> Tensor:
    """What a distance is relative to: about 1 if no box of the float network is in its place, and 2 if no mask is."""
    return (reference.scores.float().amax(1) ** 3).sum()


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes `[B, 4, n]` (cx, cy, w, h) with the box at the same place, `[B, n]`."""
    a, b = a.float(), b.float()
    low = (a[:, :2] - a[:, 2:] / 2).maximum(b[:, :2] - b[:, 2:] / 2)
    high = (a[:, :2] + a[:, 2:] / 2).minimum(b[:, :2] + b[:, 2:] / 2)
    common = (high - low).clamp(min=0).prod(1)
    union = a[:, 2:].prod(1) + b[:, 2:].prod(1) - common
    return common / union.clamp(min=1e-9)


def _of_masks(reference: Prediction, other: Prediction, weights: Tensor, size: tuple[int, int]) -> Tensor:
    """What the masks of the best anchors add, by IoU of probabilities; `weights` are of all anchors, `[B, anchors]`.

    One image at a time: at 640 pixels its masks take 20 MB.
    """
    total = weights.new_zeros(())
    for image, (value, anchors) in enumerate(zip(*weights.topk(min(BEST, weights.shape[1])), strict=True)):
        boxes = reference.boxes[image, :, anchors].float()
        ours, theirs = (_masks(one, image, anchors, boxes, size) for one in (reference, other))
        common, union = (one.sum((1, 2)) for one in (ours.minimum(theirs), ours.maximum(theirs)))
        total = total + (value * (1 - (common + 1e-6) / (union + 1e-6))).sum()  # two empty masks are equal
    return total


def _masks(prediction: Prediction, image: int, anchors: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks of some anchors of an image, `[n, h, w]` in 0..1, cropped to `boxes` `[4, n]` (cx, cy, w, h)."""
    assert prediction.prototypes is not None  # who calls this has looked
    prototypes = prediction.prototypes[image].float()
    sums = prediction.coefficients[image, :, anchors].T.float() @ prototypes.flatten(1)
    height, width = prototypes.shape[1:]
    scale = boxes.new_tensor([[width / size[1]], [height / size[0]]])
    low, high = ((boxes[:2] + sign * boxes[2:] / 2) * scale for sign in (-1, 1))
    inside = between(low[1], high[1], height)[:, :, None] & between(low[0], high[0], width)[:, None, :]
    return sums.sigmoid_().unflatten(1, (height, width)) * inside
