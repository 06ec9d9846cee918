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


@dataclass(frozen=True)
class Letterbox:
    """How an image was placed: pixel `x` of the original lies at `x * ratio[1] + pad[0]` of the input.

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
        return self.resized[0] / self.original[0], self.resized[1] / self.original[1]

    @classmethod
    def of(cls, original: tuple[int, int], fit: tuple[int, int], shape: tuple[int, int]) -> Letterbox:
        """Where an image, resized to fit into `fit`, lies in an input of `shape`; all (height, width) in pixels.

        An image that `shape` was not made for, since its file says another size than its pixels have, fits into both.
        """
        ratio = min(fit[0] / original[0], fit[1] / original[1])
        height, width = (max(int(side * ratio), 1) for side in original)  # upstream truncates here
        if height > shape[0] or width > shape[1]:
            return cls.of(original, shape, shape)
        return cls(original, (height, width), ((shape[1] - width) / 2, (shape[0] - height) / 2))


def letterboxed_planes(image: np.ndarray, fit: tuple[int, int], shape: tuple[int, int]) -> tuple[np.ndarray, Letterbox]:
    """Resize uint8 `[H, W, 3]` BGR to fit into `fit`, keeping the aspect ratio, and pad to `shape`, see `Letterbox.of`.

    The image as networks take it is uint8 `[3, *shape]` RGB, centred on grey.
    """
    box = Letterbox.of((image.shape[0], image.shape[1]), fit, shape)
    (height, width), (left, top) = box.resized, (round(pad - 0.1) for pad in box.pad)
    bottom, right = top + height, left + width
    planes: np.ndarray = np.empty((3, *shape), np.uint8)
    planes[:, :top] = planes[:, bottom:] = FILL
    planes[:, top:bottom, :left] = planes[:, top:bottom, right:] = FILL
    if box.resized != box.original:
        enlarged = height > box.original[0] or width > box.original[1]
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR if enlarged else cv2.INTER_AREA)
    planes[:, top:bottom, left:right] = image[..., ::-1].transpose(2, 0, 1)
    return planes, box


def points_to_input(points: np.ndarray, box: Letterbox) -> np.ndarray:
    """Turn x, y as fractions of the image, float32 `[n, 2]`, into pixels of the input."""
    return points * np.array(box.resized[::-1], np.float32) + np.array(box.pad, np.float32)


def boxes_to_image(boxes: Tensor, owner: Tensor, letterboxes: Sequence[Letterbox]) -> Tensor:
    """Turn xyxy in pixels of the input into pixels of the original images, clipped to them.

    Each axis has its own ratio, because the resized image has whole pixels; upstream takes the height's for both.

    `boxes` are float `[n, 4]`, and `owner`, int64 `[n]`, says which of the `letterboxes` each is of.
    """
    rows = [(*box.pad, *box.ratio[::-1], *box.original[::-1]) for box in letterboxes]
    offset, ratio, limit = (
        sent(torch.tensor(rows, dtype=boxes.dtype), boxes.device)[owner].view(-1, 3, 2).repeat(1, 1, 2).unbind(1)
    )
    return ((boxes - offset) / ratio).clamp(min=torch.zeros_like(limit), max=limit)


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
    for start in range(0, len(order), 32):
        members = order[start : start + 32]
        low, high = ratios[members].min(), ratios[members].max()
        relative = np.array([high, 1.0] if high < 1 else [1.0, 1 / low] if low > 1 else [1.0, 1.0])
        height, width = np.ceil(relative * imgsz / stride + 0.5).astype(int) * stride
        for member in members:
            shapes[member] = (int(height), int(width))
    return shapes
