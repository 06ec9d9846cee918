"""Masks as polygons of whole pixels, which reports hold as texts.

A mask has a polygon for each of its outer edges and one for each hole, through the middles of its outermost pixels, in
the form of SVG's attribute `points`: "12,30 14,30 14,33". Filled together by the even-odd rule, their own pixels
included, as `cv2.fillPoly` does, they are the mask.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from utils.core.file_schema import Mismatch, Rule, listing, text

if TYPE_CHECKING:
    import numpy as np

POLYGONS, POINTS = 50, 500  # of a mask at most
LARGEST = (1 << 20) - 1  # pixels: OpenCV reads no wider image
_POLYGON = r"[0-9]{1,7},[0-9]{1,7}(?: [0-9]{1,7},[0-9]{1,7})*"


def outline_of(inside: np.ndarray, left: int = 0, top: int = 0) -> tuple[str, ...]:
    """The polygons of a mask, largest first; a mask of many corners loses small ones, and polygons beyond `POLYGONS`.

    Args:
        inside: bool or uint8 `[h, w]`.
        left, top: its first pixel in the image.
    """
    import cv2
    import numpy as np

    pixels = np.ascontiguousarray(inside, np.uint8)
    exact, _ = cv2.findContours(pixels, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top))
    exact = sorted(exact, key=cv2.contourArea, reverse=True)[:POLYGONS]
    polygons, tolerance = exact, 0.5
    while sum(map(len, polygons)) > POINTS:
        polygons = [cv2.approxPolyDP(one, tolerance, closed=True) for one in exact]
        tolerance *= 2
    return tuple(" ".join(f"{x},{y}" for x, y in one[:, 0].tolist()) for one in polygons)


def points_of(polygon: str) -> np.ndarray:
    """The corners of a polygon: int32 `[n, 2]`, x, y in pixels."""
    import numpy as np

    return np.array([pair.split(",") for pair in polygon.split(" ")], np.int32)


def outline_rule() -> Rule:
    """What a report's JSON holds for a mask."""
    polygons = listing(text(_POLYGON, "a polygon such as '12,30 14,30 14,33'"), 1, POLYGONS)

    def rule(value: Any, field: str) -> None:
        polygons(value, field)
        count, largest = _extent(value)
        if count > POINTS:
            raise Mismatch.said(f"{field} has {count} points, expected at most {POINTS}")
        if largest > LARGEST:
            raise Mismatch.said(f"{field} names pixel {largest}, expected at most {LARGEST}")

    return rule


def _extent(outline: Sequence[str]) -> tuple[int, int]:
    """How many points polygons have, and the largest number in them."""
    numbers = [int(number) for polygon in outline for number in re.findall("[0-9]+", polygon)]
    return len(numbers) // 2, max(numbers)
