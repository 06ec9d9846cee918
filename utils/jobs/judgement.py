"""The rule for a loss: how a difference to the FP32 model is judged, and in which words.

    judgement = judge(Difference(-0.0002, 0.0005), 0.002, images="500 images")
    print(judgement.words)     # loses at most 0.0012 AP (95 %, 500 images; measured -0.0002 ± 0.0005)

`judge` is the only place that decides whether INT8 loses too much.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from utils.core.score import AGREEMENT, Difference
from utils.core.text import plural
from utils.reports.schema import AnyAp, Level, Row

TARGET_DROP = 0.002  # AP that INT8 may lose, unless a user says otherwise
TARGET_DISAGREEMENT = 0.025  # the same of agreement, which is AP where there are no labels


class Judgement(NamedTuple):
    """Level of a difference, and the reason for it, as words that follow 'INT8'."""

    level: Level
    words: str


def judge(difference: Difference, target: float, what: str = "AP", images: str = "these images") -> Judgement:
    """Judge a difference to the FP32 model by its value, its standard error and the loss that is allowed.

    OK: with 95 % confidence the loss is at most `target`. LOSS: the loss is significant, and larger than `target`.
    CHECK: there are not enough images to tell.

    Args:
        what: name of the score, such as 'mask AP'.
        images: the images that were evaluated, such as '500 images'.
    """
    if difference.error is None or difference.most_lost is None:
        words = f"differs by {difference} {what}, and no standard error tells whether that is noise"
        return Judgement(Level.CHECK, words)
    size = f"{abs(difference.value):.4f} ± {difference.error:.4f} {what}"
    if difference.significant and difference.value < -target:
        return Judgement(Level.LOSS, f"loses {size} ({images}), more than the {target:g} allowed")
    bound = f"loses at most {difference.most_lost:.4f} {what} (95 %, {images}; measured {difference})"
    if difference.most_lost > target:
        return Judgement(Level.CHECK, f"{bound}, and {target:g} is allowed: not enough images to tell")
    if difference.significant and difference.value > 0:
        return Judgement(Level.OK, f"gains {size} ({images})")
    return Judgement(Level.OK, bound)


def more_units(difference: Difference, target: float, units: int) -> int:
    """Return how many more images (or groups) could tell whether a loss exceeds `target`, if the difference stays.

    The margin of error falls with the square root of the number of images. It must become as small as the distance
    from the measured loss to the target; a distance below a quarter of the target counts as a quarter. The result is
    at least `units`.
    """
    distance = max(abs(target + difference.value), target / 4, 1e-6)
    margin = difference.margin or 0.0
    needed = units * (margin / distance) ** 2
    return max(math.ceil(needed) - units, units)


def allowed_drop(target_drop: float | None, unlabelled: bool) -> float:
    """Return the AP, or without labels the agreement, that INT8 may lose; `target_drop` is the user's, if given."""
    if target_drop is not None:
        return target_drop
    return TARGET_DISAGREEMENT if unlabelled else TARGET_DROP


def score_name(row: Row, score: AnyAp) -> str:
    """Return the name of a score in a sentence."""
    if score == "mask_ap":
        return "mask AP"
    return "agreement" if AGREEMENT in row.ap_with else "AP"


def measured_on(row: Row) -> str:
    """Return the images that a row was measured on, in words: '500 images', '13 groups of 800 images'."""
    images = plural(row.images, "image") if row.images else "these images"
    return images if row.resampled_over == "images" else f"{row.resampled_over} of {images}"
