"""Detections drawn on images, with the models side by side; and masks as polygons.

What two models agree on is blue; what only one of them found is orange and dashed; ground truth is green. Masks have
the colour of their box.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError, no_file
from utils.reports.figures import BLUE, GREEN, VERMILLION, new_figure
from utils.reports.schema import Box, Sample

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MATCH = 0.5  # IoU from which on two boxes are one object, as in AP50
FILL = 0.35  # opacity of a mask
TRUTH = "ground truth"  # the column of the labels
LONGEST_SIDE = 1400  # pixels of what is drawn: more than a panel has


def outline_of(inside: np.ndarray, left: int = 0, top: int = 0) -> tuple[str, ...]:
    """A mask (bool or uint8 `[h, w]`) as polygons through the middles of its outermost pixels: outer edges, and holes.

    Filled together by the even-odd rule, their own pixels included, as `cv2.fillPoly` does, they are the mask. Their
    form is that of SVG's attribute `points`: "12,30 14,30 14,33"; `left` and `top` are the mask's place in the image.
    """
    import cv2
    import numpy as np

    pixels = np.ascontiguousarray(inside, np.uint8)
    polygons, _ = cv2.findContours(pixels, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top))
    return tuple(" ".join(f"{x},{y}" for x, y in polygon[:, 0].tolist()) for polygon in polygons)


def points_of(polygon: str) -> np.ndarray:
    """The corners of a polygon: int32 `[n, 2]`, x, y in pixels."""
    import numpy as np

    return np.array([pair.split(",") for pair in polygon.split(" ")], np.int32)


def detection_sheet(samples: Sequence[Sample]) -> Figure:
    """A line per image, a column per stage, truth first where there is one; `InputError` for an unreadable image.

    The first two stages are compared with each other, all others with the first.
    """
    stages = dict.fromkeys(stage for sample in samples for stage in sample.predictions)
    columns = list(stages)
    if any(sample.truth for sample in samples):
        columns.insert(0, TRUTH)
    figure, grid = new_figure(3.6 * len(columns), 3.6 * len(samples), len(samples), len(columns))
    for stage, axes in zip(columns, grid, strict=False):
        axes.set_title(stage)
    panels = iter(grid)
    for sample in samples:
        image, (first, second, *_) = read_image(sample.image), [*sample.predictions.values(), None, None]
        for stage, axes in zip(columns, panels, strict=False):
            if stage == TRUTH:
                _draw(axes, image, sample.truth, None)
            else:
                boxes = sample.predictions.get(stage, [])
                _draw(axes, image, boxes, second if boxes is first else first)
    return figure


def unmatched(boxes: Sequence[Box], others: Sequence[Box]) -> list[bool]:
    """For each box: is there no box of the same class in `others` that overlaps with an IoU of MATCH or more?

    Boxes pair one to one, best score first, as detections pair with truth in AP.
    """
    free = list(others)
    result = [True] * len(boxes)
    for index in sorted(range(len(boxes)), key=lambda i: -(boxes[i].score or 0.0)):
        overlaps = [_iou(boxes[index], other) if other.name == boxes[index].name else 0.0 for other in free]
        if overlaps and max(overlaps) >= MATCH:
            result[index] = False
            del free[overlaps.index(max(overlaps))]
    return result


def differences_in(sample: Sample) -> int:
    """How many boxes of a sample's first two models have no partner in the other."""
    models = list(sample.predictions.values())
    if len(models) < 2:
        return 0
    return sum(unmatched(models[0], models[1])) + sum(unmatched(models[1], models[0]))


def _iou(box: Box, other: Box) -> float:
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = box.xyxy, other.xyxy
    overlap = max(0.0, min(ax1, bx1) - max(ax0, bx0)) * max(0.0, min(ay1, by1) - max(ay0, by0))
    union = (ax1 - ax0) * (ay1 - ay0) + (bx1 - bx0) * (by1 - by0) - overlap
    return overlap / union if union > 0 else 0.0


def read_image(path: str | Path) -> tuple[Any, tuple[int, int]]:
    """The image as uint8 RGB `[h, w, 3]`, turned as its EXIF data says, and its height and width, or `InputError`.

    One with a side above `LONGEST_SIDE` is made smaller, since drawing takes 24 bytes for each pixel.
    """
    import numpy as np
    from PIL import Image, ImageOps

    remedy = "samples need the images where they were"
    if not os.path.isfile(path):  # opening a pipe waits for ever
        raise InputError(f"cannot read the image: {no_file(path, remedy)}")
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read the image {path}: {error}; {remedy}") from None
    size = image.height, image.width
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image), size


def _draw(axes: Axes, image: tuple[Any, tuple[int, int]], boxes: Sequence[Box], others: Sequence[Box] | None) -> None:
    """Draw an image, as `read_image` gives it, with boxes; those without a partner in `others` stand out."""
    import numpy as np
    from matplotlib.colors import to_rgba
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Line

    pixels, (height, breadth) = image
    axes.imshow(pixels, interpolation="lanczos", extent=(0, breadth, height, 0))
    axes.set(xlim=(0, breadth), ylim=(height, 0))
    axes.axis("off")
    alone = [False] * len(boxes) if others is None else unmatched(boxes, others)
    for box, different in zip(boxes, alone, strict=True):
        colour = VERMILLION if different else GREEN if box.score is None else BLUE
        if box.outline:  # outer edges and holes run in opposite directions, so that holes stay empty
            rings = [points_of(text) + 0.5 for text in box.outline]
            mask = Line.make_compound_path(*(Line(np.concatenate([ring, ring[:1]]), closed=True) for ring in rings))
            axes.add_patch(PathPatch(mask, fc=to_rgba(colour, FILL), ec=colour, lw=0.9, zorder=0.9))
        x0, y0, x1, y1 = box.xyxy
        for edge, width, style in (("white", 2.8, "-"), (colour, 1.6, "--" if different else "-")):
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=edge, lw=width, ls=style))
        inside, right = y0 < 0.05 * height, x0 > 0.85 * breadth  # else the label would leave the image
        axes.text(
            x1 if right else x0, y0, box.name if box.score is None else f"{box.name} {box.score:.2f}",
            ha="right" if right else "left", va="top" if inside else "bottom", fontsize=7.5, color="white",
            clip_on=True, parse_math=False,
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0, "alpha": 0.92},
        )  # fmt: skip
