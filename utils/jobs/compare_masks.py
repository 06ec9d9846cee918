"""How far the masks of two predictions for the same images are apart: what they are made of, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.core.light_torchvision import torchvision
from utils.core.tasks import Prediction
from utils.evaluation.masks import Masks

BEST = 100  # anchors of an image whose boxes and masks are compared: those without an object have boxes of no meaning
SMALLEST = 1e-12  # of a largest value that others are divided by


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


def best_anchors(prediction: Prediction) -> Tensor:
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
