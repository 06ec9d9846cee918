"""Masks of detections in the pixels of their images, for drawing: one at a time, and of it what lies in its box.

`mask_files.py` makes masks as COCO's tools compare them, with the threshold at the input's size. Here it is at the
image's own pixels, which gives smooth edges where an image is larger than the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from utils.evaluation.letterbox import boxes_to_image

if TYPE_CHECKING:
    from torch import Tensor

    from utils.evaluation.masks import AnyMasks


@dataclass(frozen=True)
class Patch:
    """The part of an image that holds a mask.

    Attributes:
        left, top: its first pixel.
        inside: bool `[h, w]`: which of its pixels belong to the mask; there may be none.
    """

    left: int
    top: int
    inside: np.ndarray


def patches(masks: AnyMasks, image: int, chosen: Tensor, shapes: Any) -> Iterator[Patch]:
    """Masks of some of an image's detections, one after the other.

    The sigmoid of the sum of prototypes, or what the network gives, is resized bilinearly to the image. A pixel belongs
    to the mask where it is above one half, from the first corner of the box up to the second, which does not belong to
    it, as on the grid.

    Args:
        image: its place in the batch.
        chosen: int64 `[n]`, which of its detections.
        shapes: where the image lies in the input.
    """
    _, ((ratio_y, ratio_x), (pad_x, pad_y)) = shapes
    boxes = masks.boxes[image][chosen]
    boxes = boxes_to_image(boxes, torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device), [shapes])
    for number, box in zip(chosen.tolist(), boxes.ceil().int().tolist(), strict=True):
        share, (x1, y1, x2, y2) = masks.share(image, number)
        across = (np.arange(box[0], box[2]) + 0.5) * ratio_x + int(pad_x)  # middles of pixels, in those of the input
        down = (np.arange(box[1], box[3]) + 0.5) * ratio_y + int(pad_y)
        wide = _resized(share.cpu().numpy(), (across - x1) / (x2 - x1))
        yield Patch(box[0], box[1], _resized(wide.T, (down - y1) / (y2 - y1)).T > 0.5)


def _resized(values: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """Columns of float32 `[rows, columns]` where, as fractions of its width, these middles lie: `[rows, middles]`."""
    places = (middles * values.shape[1] - 0.5).clip(0, values.shape[1] - 1)
    low: np.ndarray = places.astype(np.int64)
    part = (places - low).astype(np.float32)
    high = np.minimum(low + 1, values.shape[1] - 1)
    return values[:, low] * (1 - part) + values[:, high] * part
