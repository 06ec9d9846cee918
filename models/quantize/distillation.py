"""Distances between the quantized model (the student) and the FP32 model (the teacher).

The task loss compares what detection is made of: the head's raw maps, each anchor weighted by the score that the
teacher gives it. It is distillation of class probabilities and box distributions (Hinton et al., "Distilling the
Knowledge in a Neural Network", 2015; Zheng et al., "Localization Distillation for Dense Object Detection", CVPR 2022),
without labels. A segmentation head also has the coefficients and prototypes that masks are made of (Bolya et al.,
"YOLACT: Real-time Instance Segmentation", ICCV 2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
        if by_image:
            return values.reshape(len(values), -1).sum(1)
        return values.sum()

    student_maps, student_masks = trained(student)
    teacher_maps, teacher_masks = trained(teacher)
    student_bins, student_logits = _split_maps(student_maps, classes)
    teacher_bins, teacher_logits = _split_maps(teacher_maps, classes)
    probability = teacher_logits.sigmoid()
    cross = functional.binary_cross_entropy_with_logits(student_logits, probability, reduction="none")
    entropy = functional.binary_cross_entropy_with_logits(teacher_logits, probability, reduction="none")
    distance = total(cross - entropy)  # not of sums: they are large, and nearly equal
    best = probability.amax(1)  # [B, anchors]
    boxes = (teacher_bins.exp() * (teacher_bins - student_bins)).sum((1, 2))
    distance = distance + total(best * boxes)
    if teacher_masks:
        distance = distance + total(mask_distance(student_masks, teacher_masks, best))
    return distance, total(best)


def _split_maps(maps: Sequence[Tensor], classes: int) -> tuple[Tensor, Tensor]:
    """Join the raw maps of all levels and split them by meaning.

    Returns:
        log probabilities of the distances to the four sides, float32 `[B, 4, bins, anchors]`, and logits of the
        classes, float32 `[B, classes, anchors]`.
    """
    joined = torch.cat([level.flatten(2) for level in maps], 2).float()
    sides = joined.shape[1] - classes
    bins = joined[:, :sides].unflatten(1, (4, -1)).log_softmax(2)
    return bins, joined[:, sides:]


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
    student_factors, student_prototypes = _flat_masks(student)
    factors, prototypes = _flat_masks(teacher)
    differences = torch.cat((student_prototypes, student_prototypes - prototypes), 1)
    errors = _mean_squares(torch.cat((student_factors - factors, factors), 1), differences)
    variances = _mean_squares(factors, prototypes - prototypes.mean(2, keepdim=True))
    objects = best.sum(1)  # [B]
    share = best / objects.clamp(min=SMALLEST_SHARE)[:, None]
    ratios = (share * errors).sum(1) / (share * variances).sum(1).clamp(min=SMALLEST_VARIANCE)
    return objects * ratios


def _flat_masks(masks: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Coefficients `[B, masks, anchors]` and prototypes `[B, masks, pixels]` in float32."""
    coefficients, prototypes = masks
    return coefficients.float(), prototypes.float().flatten(2)


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
    """Return the images, or a black one in the place of none, and whether they count."""
    if len(images):
        return images, True
    return images.new_zeros((1, *images.shape[1:])), False
