"""The ink of a digit as one polygon, the form of upstream's labels, and as COCO's run lengths.

Everything here is pure: masks in, numbers out.
"""

from __future__ import annotations

import cv2
import numpy as np


def polygon(ink: np.ndarray) -> np.ndarray:
    """Outline a mask by one polygon that ``cv2.fillPoly`` fills with the same pixels again.

    A label has room for one polygon, but an 8 has three outlines. They are joined by bridges, each there and back
    between the two nearest points: the filling goes by parity, so a bridge crossed twice changes nothing beside it, and
    the line itself lies in the ink. Only a bridge between two pieces of ink adds pixels.

    Args:
        ink: bool [h, w], at least one pixel set.

    Returns:
        int64 [n, 2]: columns and rows of pixels, n >= 1; a bridge's ends come twice.
    """
    found, _ = cv2.findContours(ink.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    waiting = [outline[:, 0].astype(np.int64) for outline in found]
    joined = waiting.pop(0)
    while waiting:
        distances = [((joined[:, None] - outline[None]) ** 2).sum(axis=2) for outline in waiting]
        nearest = min(range(len(waiting)), key=lambda index: int(distances[index].min()))
        here, there = divmod(int(distances[nearest].argmin()), len(waiting[nearest]))
        outline = np.roll(waiting.pop(nearest), -there, axis=0)
        joined = np.concatenate([joined[: here + 1], outline, outline[:1], joined[here:]])
    return _corners(joined)


def _corners(points: np.ndarray) -> np.ndarray:
    """Leave out what lies on a straight run: points int [n, 2] whose step in equals their step out."""
    steps = np.diff(points, axis=0, append=points[:1])
    kept = (steps != np.roll(steps, 1, axis=0)).any(axis=1)
    return points[kept] if kept.any() else points


def run_lengths(mask: np.ndarray) -> dict[str, list[int]]:
    """Encode a mask as COCO's uncompressed run lengths, which pycocotools reads.

    Args:
        mask: bool [h, w].

    Returns:
        ``size``: [h, w]. ``counts``: pixels that are clear, set, clear, ... column after column, beginning with clear.
    """
    pixels = np.concatenate([[False], mask.ravel(order="F")])
    changes = np.flatnonzero(pixels[1:] != pixels[:-1])
    counts = np.diff(changes, prepend=0, append=mask.size)
    return {"size": [int(side) for side in mask.shape], "counts": [int(count) for count in counts]}
