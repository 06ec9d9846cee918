"""Outlines of objects: polygons and COCO's run lengths, clipped to the image, as the one polygon that a label has."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from utils.core.errors import DependencyError
from utils.core.text import short_repr

ROWS = 256  # points that are compared at a time: outlines of masks can have thousands
STEPS = 0.4  # pixels: smaller steps of a slanting edge are left out
FINE = 4  # contours run through centres of pixels: in a mask enlarged so many times they are its edge


def rings_of(segmentation: Any) -> tuple[np.ndarray, ...]:
    """The rings of COCO's `segmentation`: polygons, or the outer edges of a mask; float64 `[points, 2]` in pixels.

    Raises:
        ValueError: it is neither.
        DependencyError: a mask needs pycocotools, which is not installed.
    """
    if not segmentation:
        return ()
    if isinstance(segmentation, dict):
        return _rings_of_mask(segmentation)
    if not isinstance(segmentation, list):
        raise ValueError(f"expected polygons or run lengths, found {short_repr(segmentation)}")
    polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
    return tuple(ring_of(polygon) for polygon in polygons)


def ring_of(polygon: Any) -> np.ndarray:
    """Convert a polygon x1 y1 x2 y2 ..., of numbers or texts of them, to float64 `[points, 2]`; or raise `ValueError`.

    >>> ring_of([0, 0, 4, 0, "4", "3"]).tolist()
    [[0.0, 0.0], [4.0, 0.0], [4.0, 3.0]]
    """
    try:
        ring = np.array(polygon, np.float64)
    except (TypeError, ValueError):
        ring = np.zeros(0)
    if ring.ndim != 1 or len(ring) < 6 or len(ring) % 2 or not np.isfinite(ring).all():
        raise ValueError(f"expected x1 y1 x2 y2 x3 y3 ..., found {short_repr(polygon)}")
    points: np.ndarray = ring.reshape(-1, 2)
    return points


def _rings_of_mask(run_lengths: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Outer edges of the parts of a mask, within half a pixel."""
    try:
        from pycocotools import mask as coco_masks
    except ImportError as error:
        raise DependencyError("run lengths need pycocotools; install it with: pip install pycocotools") from error
    try:
        height, width = (int(side) for side in run_lengths["size"])
        if isinstance(run_lengths["counts"], list):
            run_lengths = coco_masks.frPyObjects(run_lengths, height, width)
        mask = coco_masks.decode(run_lengths)
    except Exception as error:  # pycocotools raises several unrelated types
        raise ValueError(f"run lengths that cannot be decoded ({type(error).__name__})") from error
    return _edges(mask)


def _edges(mask: np.ndarray) -> tuple[np.ndarray, ...]:
    """Outer edges of the parts of a mask, uint8 `[H, W]`, as rings in pixels."""
    rows = np.nonzero(mask.any(1))[0]
    columns = np.nonzero(mask.any(0))[0]
    if not len(rows):
        return ()
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    large = part.repeat(FINE, 0).repeat(FINE, 1)
    contours, _ = cv2.findContours(large, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    corner = (columns[0], rows[0])
    rings = []
    for contour in contours:
        ring = cv2.approxPolyDP(contour, STEPS * FINE, True)[:, 0]
        if len(ring) > 2:
            rings.append((ring + 0.5) / FINE + corner)
    return tuple(rings)


def clipped_ring(ring: np.ndarray) -> np.ndarray:
    """Clip a polygon to 0..1 on both axes (Sutherland and Hodgman); `[0, 2]` if nothing is inside.

    >>> clipped_ring(np.array([[0.5, 0.5], [1.5, 0.5], [1.5, 1.0], [0.5, 1.0]])).tolist()
    [[0.5, 0.5], [1.0, 0.5], [1.0, 1.0], [0.5, 1.0]]
    """
    for axis in (0, 1):
        for limit, sign in ((0.0, 1.0), (1.0, -1.0)):
            ring = _clipped_at(ring, axis, limit, sign)
    return ring


def _clipped_at(ring: np.ndarray, axis: int, limit: float, sign: float) -> np.ndarray:
    """The part of a polygon where `sign * (coordinate - limit)` is not negative."""
    depth = sign * (ring[:, axis] - limit)
    if (depth >= 0).all():
        return ring
    points: list[np.ndarray] = []
    for index, point in enumerate(ring):
        following = (index + 1) % len(ring)
        is_inside = depth[index] >= 0
        if is_inside:
            points.append(point)
        if is_inside != (depth[following] >= 0):
            fraction = depth[index] / (depth[index] - depth[following])
            crossing = point + (ring[following] - point) * fraction
            crossing[axis] = limit
            points.append(crossing)
    clipped: np.ndarray = np.array(points).reshape(-1, 2)
    return clipped


def joined_ring(rings: list[np.ndarray]) -> np.ndarray:
    """Join several polygons into one: bridges of no width, walked there and back, lie where two are nearest."""
    whole, *others = rings
    for ring in others:
        here, there = _nearest(whole, ring)
        around = np.concatenate([ring[there:], ring[: there + 1]])
        whole = np.concatenate([whole[: here + 1], around, whole[here:]])
    return whole


def _nearest(first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """The indices of the two points of two rings that lie nearest to each other."""
    least, places = np.inf, (0, 0)
    for start in range(0, len(first), ROWS):
        distances = ((first[start : start + ROWS, None] - second[None]) ** 2).sum(2)
        row, column = divmod(int(distances.argmin()), len(second))
        if distances[row, column] < least:
            least, places = distances[row, column], (start + row, column)
    return places


def area_of(ring: np.ndarray) -> float:
    """The area of a polygon, float64 `[points, 2]`.

    >>> area_of(np.array([[0.0, 0.0], [4.0, 0.0], [4.0, 3.0]]))
    6.0
    """
    x, y = ring.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)
