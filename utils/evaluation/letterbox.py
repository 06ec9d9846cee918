"""Letterboxing: fitting an image into the network's input, and boxes back into the image.

Sizes are rounded as upstream does it, so that the network sees the same pixels as in upstream's `val.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.core.device import sent

FILL = 114  # the grey that upstream trains with
GROUP = 32  # images that share a shape: the default batch size of val.py


@dataclass(frozen=True)
class Letterbox:
    """Place of an image in an input: pixel `x` of the original lies at `x * ratio[1] + pad[0]` of the input.

    Attributes:
        original, resized: (height, width) of the image, and of it in the input.
        pad: (left, top) pixels. Where it has halves, the image lies half a pixel further left or up; as upstream.
    """

    original: tuple[int, int]
    resized: tuple[int, int]
    pad: tuple[float, float]

    @property
    def ratio(self) -> tuple[float, float]:
        """(height, width) of the resized image over the original's."""
        height, width = self.original
        return self.resized[0] / height, self.resized[1] / width

    @classmethod
    def of(cls, original: tuple[int, int], fit: tuple[int, int], shape: tuple[int, int]) -> Letterbox:
        """Place an image, resized to fit into `fit`, in an input of `shape`; all (height, width) in pixels.

        An image that `shape` was not made for, since its file says another size than its pixels have, fits into both.
        """
        ratio = min(fit[0] / original[0], fit[1] / original[1])
        height = max(int(original[0] * ratio), 1)  # upstream truncates here
        width = max(int(original[1] * ratio), 1)
        if height > shape[0] or width > shape[1]:
            return cls.of(original, shape, shape)
        left = (shape[1] - width) / 2
        top = (shape[0] - height) / 2
        return cls(original, (height, width), (left, top))


def letterboxed_planes(image: np.ndarray, fit: tuple[int, int], shape: tuple[int, int]) -> tuple[np.ndarray, Letterbox]:
    """Resize uint8 `[H, W, 3]` BGR to fit into `fit`, keeping the aspect ratio, and pad to `shape`, see `Letterbox.of`.

    The image as networks take it is uint8 `[3, *shape]` RGB, centred on grey.
    """
    box = Letterbox.of((image.shape[0], image.shape[1]), fit, shape)
    height, width = box.resized
    left = round(box.pad[0] - 0.1)
    top = round(box.pad[1] - 0.1)
    bottom = top + height
    right = left + width
    planes: np.ndarray = np.empty((3, *shape), np.uint8)
    planes[:, :top] = FILL
    planes[:, bottom:] = FILL
    planes[:, top:bottom, :left] = FILL
    planes[:, top:bottom, right:] = FILL
    if box.resized != box.original:
        is_enlarged = height > box.original[0] or width > box.original[1]
        interpolation = cv2.INTER_LINEAR if is_enlarged else cv2.INTER_AREA
        image = cv2.resize(image, (width, height), interpolation=interpolation)
    planes[:, top:bottom, left:right] = image[..., ::-1].transpose(2, 0, 1)
    return planes, box


def points_to_input(points: np.ndarray, box: Letterbox) -> np.ndarray:
    """Turn x, y as fractions of the image, float32 `[n, 2]`, into pixels of the input."""
    size = np.array(box.resized[::-1], np.float32)
    offset = np.array(box.pad, np.float32)
    pixels: np.ndarray = points * size + offset
    return pixels


def boxes_to_image(boxes: Tensor, owner: Tensor, letterboxes: Sequence[Letterbox]) -> Tensor:
    """Turn xyxy in pixels of the input into pixels of the original images, clipped to them.

    Each axis has its own ratio, because the resized image has whole pixels; upstream takes the height's for both.

    `boxes` are float `[n, 4]`, and `owner`, int64 `[n]`, is the index of each one's letterbox.
    """
    rows = [(2 * box.pad, 2 * box.ratio[::-1], 2 * box.original[::-1]) for box in letterboxes]
    table = sent(torch.tensor(rows, dtype=boxes.dtype), boxes.device)  # offset, ratio and size, each x, y, x, y
    offset, ratio, limit = table[owner].unbind(1)
    corners = (boxes - offset) / ratio
    return corners.clamp(min=0).minimum(limit)


def rectangular_shapes(sizes: Sequence[tuple[int, int]], imgsz: int, stride: int) -> list[tuple[int, int]]:
    """Input shapes for rectangular inference, those that `val.py --batch-size 32` chooses.

    Upstream gives each batch, of images sorted by aspect ratio, the smallest shape that holds them. Here groups are
    always of val.py's default size, 32, so that AP does not depend on the batch size.

    `sizes` are (width, height), and shapes (height, width), for each image in pixels, multiples of `stride` with half
    of it as a border, as val.py has it.
    """
    ratios = np.array([height / width for width, height in sizes])
    order = ratios.argsort()  # the default sort, as upstream: it decides which of equal ratios share a group
    shapes = [(0, 0)] * len(sizes)
    for start in range(0, len(order), GROUP):
        members = order[start : start + GROUP]
        relative = _relative_sides(ratios[members])
        height, width = np.ceil(relative * imgsz / stride + 0.5).astype(int) * stride
        for member in members:
            shapes[member] = (int(height), int(width))
    return shapes


def _relative_sides(ratios: np.ndarray) -> np.ndarray:
    """Height and width of the smallest shape, its longer side 1, that holds images of these height / width `[n]`."""
    lowest = ratios.min()
    highest = ratios.max()
    sides: np.ndarray = np.ones(2)
    if highest < 1:
        sides[0] = highest
    elif lowest > 1:
        sides[1] = 1 / lowest
    return sides
