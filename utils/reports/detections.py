"""Detections drawn on images, with the models side by side; and masks as polygons.

Boxes that two models agree on are blue; boxes that only one of them has are orange and dashed; ground truth is green.
Masks have the colour of their box.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError, no_file
from utils.reports.figures import BLUE, GREEN, VERMILLION, new_figure
from utils.reports.schema import Box, Sample
from utils.reports.tables import stage_name

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

    `cv2.fillPoly` makes the mask of them again: it fills all of them by the even-odd rule, with their own pixels. The
    form is that of SVG's attribute `points`; `left` and `top` are the mask's place in the image.

    >>> import numpy as np
    >>> outline_of(np.ones((2, 3), bool), left=10, top=5)
    ('10,5 10,6 12,6 12,5',)
    """
    import cv2
    import numpy as np

    pixels = np.ascontiguousarray(inside, np.uint8)
    polygons, _ = cv2.findContours(pixels, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top))
    outlines = []
    for polygon in polygons:
        corners = [f"{x},{y}" for x, y in polygon[:, 0].tolist()]
        outlines.append(" ".join(corners))
    return tuple(outlines)


def points_of(polygon: str) -> np.ndarray:
    """The corners of a polygon: int32 `[n, 2]`, x, y in pixels."""
    import numpy as np

    points: np.ndarray = np.array([pair.split(",") for pair in polygon.split(" ")], np.int32)
    return points


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
        axes.set_title(stage_name(stage))
    panels = iter(grid)
    for sample in samples:
        image = read_image(sample.image)
        first, second, *_ = [*sample.predictions.values(), None, None]
        for stage, axes in zip(columns, panels, strict=False):
            if stage == TRUTH:
                _draw(axes, image, sample.truth, None)
                continue
            boxes = sample.predictions.get(stage, [])
            others = second if boxes is first else first
            _draw(axes, image, boxes, others)
    return figure


def unmatched(boxes: Sequence[Box], others: Sequence[Box]) -> list[bool]:
    """For each box, whether no box of the same class in `others` overlaps with an IoU of MATCH or more.

    Boxes pair one to one, best score first, as detections pair with truth in AP.
    """
    free = list(others)
    result = [True] * len(boxes)
    by_score = sorted(range(len(boxes)), key=lambda index: -(boxes[index].score or 0.0))
    for index in by_score:
        box = boxes[index]
        overlaps = [_iou(box, other) if other.name == box.name else 0.0 for other in free]
        best = max(overlaps, default=0.0)
        if best >= MATCH:
            result[index] = False
            del free[overlaps.index(best)]
    return result


def differences_in(sample: Sample) -> int:
    """Number of boxes of a sample's first two models that have no partner in the other."""
    models = list(sample.predictions.values())
    if len(models) < 2:
        return 0
    first, second = models[:2]
    return unmatched(first, second).count(True) + unmatched(second, first).count(True)


def _iou(box: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    left, top, right, bottom = box.xyxy
    other_left, other_top, other_right, other_bottom = other.xyxy
    width = max(0.0, min(right, other_right) - max(left, other_left))
    height = max(0.0, min(bottom, other_bottom) - max(top, other_top))
    overlap = width * height
    area = (right - left) * (bottom - top)
    other_area = (other_right - other_left) * (other_bottom - other_top)
    union = area + other_area - overlap
    return overlap / union if union > 0 else 0.0


def read_image(path: str | Path) -> tuple[Any, tuple[int, int]]:
    """The image as uint8 RGB `[h, w, 3]`, turned by its EXIF data, and its height and width, or `InputError`.

    An image with a side above `LONGEST_SIDE` is made smaller, since drawing takes 24 bytes for each pixel.
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
    size = (image.height, image.width)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image), size


def _draw(axes: Axes, image: tuple[Any, tuple[int, int]], boxes: Sequence[Box], others: Sequence[Box] | None) -> None:
    """Draw an image, as `read_image` gives it, with boxes; those without a partner in `others` stand out."""
    pixels, size = image
    height, width = size
    axes.imshow(pixels, interpolation="lanczos", extent=(0, width, height, 0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    is_alone = [False] * len(boxes) if others is None else unmatched(boxes, others)
    for box, stands_out in zip(boxes, is_alone, strict=True):
        if stands_out:
            colour = VERMILLION
        elif box.score is None:
            colour = GREEN
        else:
            colour = BLUE
        if box.outline:
            _draw_mask(axes, box, colour)
        _draw_edges(axes, box, colour, "--" if stands_out else "-")
        _draw_label(axes, box, colour, size)


def _draw_mask(axes: Axes, box: Box, colour: str) -> None:
    """Fill the mask of a box; outer edges and holes run in opposite directions, so that holes stay empty."""
    import numpy as np
    from matplotlib.colors import to_rgba
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Line

    lines = []
    for text in box.outline:
        ring = points_of(text) + 0.5
        lines.append(Line(np.concatenate([ring, ring[:1]]), closed=True))
    mask = Line.make_compound_path(*lines)
    axes.add_patch(PathPatch(mask, fc=to_rgba(colour, FILL), ec=colour, lw=0.9, zorder=0.9))


def _draw_edges(axes: Axes, box: Box, colour: str, style: str) -> None:
    """Draw the edges of a box in its colour, on a wider white line that shows on any image."""
    from matplotlib.patches import Rectangle

    x0, y0, x1, y1 = box.xyxy
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec="white", lw=2.8, ls="-"))
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=colour, lw=1.6, ls=style))


def _draw_label(axes: Axes, box: Box, colour: str, size: tuple[int, int]) -> None:
    """Write class and score at a corner of a box, inside the image of this height and width."""
    height, width = size
    x0, y0, x1, _ = box.xyxy
    is_at_top = y0 < 0.05 * height
    is_at_right = x0 > 0.85 * width
    x = x1 if is_at_right else x0
    text = box.name if box.score is None else f"{box.name} {box.score:.2f}"
    horizontal = "right" if is_at_right else "left"
    vertical = "top" if is_at_top else "bottom"
    background = {"facecolor": colour, "edgecolor": "none", "pad": 1.0, "alpha": 0.92}
    axes.text(
        x,
        y0,
        text,
        ha=horizontal,
        va=vertical,
        fontsize=7.5,
        color="white",
        clip_on=True,
        parse_math=False,
        bbox=background,
    )
