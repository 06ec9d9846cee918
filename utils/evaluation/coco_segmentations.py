"""Masks in COCO's annotation files: polygons and run lengths, checked before pycocotools' C code reads them.

That code trusts its input: it draws a polygon however far away its corners are, and reads a damaged text of run lengths
beyond its end.
"""

from __future__ import annotations

from typing import Any

from utils.core.shown import shown

LARGEST_SIDE = 65_535  # pixels of an image's side: JPEG has no longer ones
LARGEST_AREA = 1 << 30  # pixels of an image: OpenCV reads no larger ones
LONGEST_OUTLINE = 2_000_000  # pixels of an annotation: with them pycocotools takes some 120 MB for a moment
# of a file: it keeps 1.4 GB of them; with as many annotations as COCO's training split, 1,100 for each
LONGEST_OUTLINES = 1_000_000_000
CONTINUES, NEGATIVE, BITS = 32, 16, 31  # in a character of a text of run lengths


def wrong_segmentation(found: Any, size: tuple[int, int]) -> str:
    """What is wrong with an annotation's `segmentation`, or ''.

    Args:
        found: polygons `[[x1, y1, x2, y2, x3, y3, ...], ...]` in pixels, or `{"size": [height, width], "counts": ...}`
            with run lengths, column after column and beginning with those outside, as numbers or as COCO's text.
        size: (height, width) of the image.
    """
    height, width = size
    if isinstance(found, list) and found and all(map(_is_polygon, found)):
        if all(-side <= one <= 2 * side for part in found for side, axis in ((width, 0), (height, 1))
               for one in part[axis::2]):  # fmt: skip
            return ""
        return f"has a polygon that is far outside its image of {width}x{height} pixels"
    if not isinstance(found, dict):
        return f"has the segmentation {shown(found)}; expected polygons in pixels, or run lengths"
    if found.get("size") != [height, width]:
        return f"has run lengths of the size {shown(found.get('size'))}; expected that of its image, {[height, width]}"
    counts = found.get("counts")
    if isinstance(counts, str):
        counts = _counts_of(counts)
    if not isinstance(counts, list) or not all(type(one) is int and one >= 0 for one in counts):
        return f"has the run lengths {shown(found.get('counts'))}; expected numbers of pixels, or COCO's text of them"
    if sum(counts) != height * width:
        return f"has run lengths of {sum(counts)} pixels; its image has {height * width}"
    return ""


def _is_polygon(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 6 and len(value) % 2 == 0 and all(map(is_number, value))


def outline_length(found: Any) -> float:
    """How many pixels pycocotools walks along the polygons of a `segmentation` that is not wrong; 0 for run lengths."""
    return sum(map(_length, found)) if isinstance(found, list) else 0


def _length(polygon: list[float]) -> float:
    x, y = polygon[::2], polygon[1::2]
    edges = zip(x, x[1:] + x[:1], y, y[1:] + y[:1], strict=True)
    return sum(max(abs(x1 - x0), abs(y1 - y0)) for x0, x1, y0, y1 in edges)


def is_number(value: Any) -> bool:
    """Whether it is a finite integer or float, of a size that a float has."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _counts_of(text: str) -> list[int] | None:
    """Run lengths from COCO's text, as pycocotools' `rleFrString` reads them; None for a text that it did not write.

    A number takes characters of five bits each, lowest first; from the fourth on it is the difference to the number
    before the last.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            return None
        value |= (bits & BITS) << shift
        shift += 5
        if bits & CONTINUES:
            continue
        if bits & NEGATIVE:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    return None if shift else counts
