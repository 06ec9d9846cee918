"""What the quantized network (the student) is compared with the float one (the teacher) by.

The task loss compares what detection is made of: the head's raw maps, each anchor weighted by the score that the
teacher gives it. It is distillation of class probabilities and box distributions (Hinton et al., "Distilling the
Knowledge in a Neural Network", 2015; Zheng et al., "Localization Distillation for Dense Object Detection", CVPR 2022),
without labels. A segmentation head also has the coefficients and prototypes that masks are made of (Bolya et al.,
"YOLACT: Real-time Instance Segmentation", ICCV 2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from utils.core.tasks import trained

SMALLEST_VARIANCE = 1e-8  # constant masks must not divide by zero
SMALLEST_WEIGHT = 1.0  # of a batch in which the teacher sees nothing: about one certain object
SMALLEST_SHARE = 1e-12  # of an image in which it sees nothing


def task_terms(student: Any, teacher: Any, classes: int, *, by_image: bool = False) -> tuple[Tensor, Tensor]:
    """Distance of the student's head from the teacher's, and what it is relative to; two float32 scalars.

    The distance is the sum over anchors of the Kullback-Leibler divergences of the class probabilities (each class a
    Bernoulli variable) and, weighted by the teacher's best probability at that anchor, of the four distributions of the
    distances to the box's sides; and of a segmentation head `mask_distance`. The weight is the sum of those best
    probabilities. Levels are taken together, so that one without objects weighs nothing.

    Args:
        student, teacher: what the head returns while training: for each level the raw map
            `[B, 4 * bins + classes, H, W]`, logits of the distances, then of the classes; with masks a tuple of these,
            the coefficients and the prototypes.
        by_image: give both of each image, `[B]`, whose sums are those of the batch.
    """

    def total(values: Tensor) -> Tensor:
        return values.reshape(len(values), -1).sum(1) if by_image else values.sum()

    (our_maps, our_masks), (their_maps, their_masks) = trained(student), trained(teacher)
    ours, theirs = (torch.cat([one.flatten(2) for one in maps], 2).float() for maps in (our_maps, their_maps))
    sides = ours.shape[1] - classes
    our_logits, their_logits = ours[:, sides:], theirs[:, sides:]
    probability = their_logits.sigmoid()
    cross, entropy = (
        functional.binary_cross_entropy_with_logits(logits, probability, reduction="none")
        for logits in (our_logits, their_logits)
    )
    distance = total(cross - entropy)  # not of sums: they are large, and nearly equal
    best = probability.amax(1)  # [B, anchors]
    our_bins, their_bins = (one[:, :sides].unflatten(1, (4, -1)).log_softmax(2) for one in (ours, theirs))
    boxes = (their_bins.exp() * (their_bins - our_bins)).sum((1, 2))
    distance = distance + total(best * boxes)
    if their_masks:
        distance = distance + total(mask_distance(our_masks, their_masks, best))
    return distance, total(best)


def mask_distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], best: Tensor) -> Tensor:
    """Distance of the student's masks from the teacher's, without computing one; float32 `[B]`.

    The logits of an anchor's mask are its coefficients c times the image's prototypes P. With d for a difference from
    the teacher's, those of the student's are off by dc P + c dP; the mean square of that over all pixels is a quadratic
    form in (dc, c), whose matrix holds the mean products of (P, dP). In each image these errors, where anchors are
    weighted by `best` as their boxes are, are taken relative to the variance of the teacher's logits, weighted alike.
    The ratio counts as often as the teacher sees objects: by the sum of the weights. Nothing depends on other images,
    so that parts of a batch add up.

    Args:
        student, teacher: coefficients `[B, masks, anchors]` and prototypes `[B, masks, h, w]`.
        best: the weight of each anchor, in 0..1, `[B, anchors]`.
    """
    (ours, our_prototypes), (theirs, prototypes) = (
        (one.float(), maps.float().flatten(2)) for one, maps in (student, teacher)
    )
    differences = torch.cat((our_prototypes, our_prototypes - prototypes), 1)
    errors = _mean_squares(torch.cat((ours - theirs, theirs), 1), differences)
    variances = _mean_squares(theirs, prototypes - prototypes.mean(2, keepdim=True))
    objects = best.sum(1)  # [B]
    share = best / objects.clamp(min=SMALLEST_SHARE)[:, None]
    ratios = (share * errors).sum(1) / (share * variances).sum(1).clamp(min=SMALLEST_VARIANCE)
    return objects * ratios


def _mean_squares(factors: Tensor, maps: Tensor) -> Tensor:
    """Mean squares over pixels of products of `[B, n, anchors]` and `[B, n, pixels]`, `[B, anchors]`."""
    products = maps @ maps.transpose(1, 2) / maps.shape[2]
    return (factors * (products @ factors)).sum(1)


@contextlib.contextmanager
def raw_head(model: Any) -> Iterator[None]:
    """Everything in eval mode, except that the head itself returns what training reads; eval mode again afterwards."""
    model.eval()
    head = model.model[-1]
    head.training = True  # not .train(): that would also reach the head's children
    try:
        yield
    finally:
        model.eval()


def placeholder(images: Tensor) -> tuple[Tensor, bool]:
    """The images, or a black one in the place of none, and whether they count."""
    if len(images):
        return images, True
    return images.new_zeros((1, *images.shape[1:])), False
