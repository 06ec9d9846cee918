"""Letterboxing: fitting an image into the network's input, and boxes back into the image.

Sizes are rounded as upstream does it, so that the network sees the same pixels as in upstream's `val.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.core.device import sent

FILL = 114  # the grey that upstream trains with


@dataclass(frozen=True)
class Letterbox:
    """How an image was placed: pixel `x` of the original lies at `x * ratio[1] + pad[0]` of the input.

    Attributes:
        original: (height, width) of the image.
        ratio: (height, width) of the resized image over the original's.
        pad: (left, top) pixels. Where it has halves, the image lies half a pixel further left or up; as upstream.
    """

    original: tuple[int, int]
    ratio: tuple[float, float]
    pad: tuple[float, float]

    @property
    def resized(self) -> tuple[int, int]:
        """(height, width) of the resized image."""
        (height, width), ratio = self.original, self.ratio
        return round(height * ratio[0]), round(width * ratio[1])

    @property
    def corner(self) -> tuple[int, int]:
        """The resized image's first row and column in the input."""
        left, top = self.pad
        return round(top - 0.1), round(left - 0.1)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]:
        """In the form that upstream's datasets give."""
        return self.original, (self.ratio, self.pad)


def placed(size: tuple[int, int], fit: tuple[int, int], shape: tuple[int, int]) -> Letterbox:
    """Where an image of `size` lies in an input of `shape`.

    Args:
        size: (height, width) of the image.
        fit: (height, width) that the resized image must not exceed.
        shape: (height, width) of the input, not smaller than the resized image.
    """
    height, width = size
    ratio = min(fit[0] / height, fit[1] / width)
    new_height, new_width = max(int(height * ratio), 1), max(int(width * ratio), 1)  # upstream truncates here
    pad_x, pad_y = (shape[1] - new_width) / 2, (shape[0] - new_height) / 2
    return Letterbox((height, width), (new_height / height, new_width / width), (pad_x, pad_y))


def letterboxed_planes(image: np.ndarray, fit: tuple[int, int], shape: tuple[int, int]) -> tuple[np.ndarray, Letterbox]:
    """Resize to fit into `fit`, keeping the aspect ratio, and pad to `shape`.

    Args:
        image: uint8 `[H, W, 3]` BGR.
        fit, shape: see `placed`.

    Returns:
        The image as networks take it, uint8 `[3, *shape]` RGB, centred on grey, and where it lies.
    """
    box = placed((image.shape[0], image.shape[1]), fit, shape)
    (height, width), (top, left) = box.resized, box.corner
    bottom, right = top + height, left + width
    planes: np.ndarray = np.empty((3, *shape), np.uint8)
    planes[:, :top] = planes[:, bottom:] = FILL
    planes[:, top:bottom, :left] = planes[:, top:bottom, right:] = FILL
    if (height, width) != box.original:
        enlarged = height > box.original[0] or width > box.original[1]
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR if enlarged else cv2.INTER_AREA)
    planes[:, top:bottom, left:right] = image[..., ::-1].transpose(2, 0, 1)
    return planes, box


def points_to_input(points: np.ndarray, box: Letterbox) -> np.ndarray:
    """Turn x, y as fractions of the image, float32 `[n, 2]`, into pixels of the input."""
    (height, width), ratio = box.original, box.ratio
    scale = np.array([round(width * ratio[1]), round(height * ratio[0])], dtype=np.float32)
    return points * scale + np.array(box.pad, dtype=np.float32)


def boxes_to_image(boxes: Tensor, owner: Tensor, shapes: Sequence[Any]) -> Tensor:
    """Turn xyxy in pixels of the input into pixels of the original images, clipped to them.

    Each axis has its own ratio, because the resized image has whole pixels; upstream takes the height's for both.

    Args:
        boxes: float `[n, 4]`, of several images.
        owner: int64 `[n]`, the image of each box.
        shapes: for each image, what `Letterbox.shapes` gives.
    """
    rows = [(*pad, ratio[1], ratio[0], width, height) for (height, width), (ratio, pad) in shapes]
    offset, ratio, limit = (
        sent(torch.tensor(rows, dtype=boxes.dtype), boxes.device)[owner].view(-1, 3, 2).repeat(1, 1, 2).unbind(1)
    )
    return ((boxes - offset) / ratio).clamp(min=torch.zeros_like(limit), max=limit)


def rectangular_shapes(
    sizes: Sequence[tuple[int, int]], imgsz: int, stride: int, pad: float = 0.5
) -> list[tuple[int, int]]:
    """Input shapes for rectangular inference, those that `val.py --batch-size 32` chooses.

    Upstream gives each batch, of images sorted by aspect ratio, the smallest shape that holds them. Here groups are
    always of val.py's default size, 32, so that AP does not depend on the batch size.

    Args:
        sizes: (width, height) of each image.
        imgsz: the longer side, in pixels.
        stride: shapes are multiples of it.
        pad: extra border, in strides; val.py has 0.5.

    Returns:
        (height, width) for each image.
    """
    group = 32
    ratios = np.array([height / width for width, height in sizes])
    order = ratios.argsort()  # the default sort, as upstream: it decides which of equal ratios share a group
    shapes = [(0, 0)] * len(sizes)
    for start in range(0, len(order), group):
        members = order[start : start + group]
        low, high = ratios[members].min(), ratios[members].max()
        relative = np.array([high, 1.0] if high < 1 else [1.0, 1 / low] if low > 1 else [1.0, 1.0])
        height, width = np.ceil(relative * imgsz / stride + pad).astype(int) * stride
        for member in members:
            shapes[member] = (int(height), int(width))
    return shapes
