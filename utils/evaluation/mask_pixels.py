"""Masks of detections in the pixels of their images: as COCO's tools compare them, and as they are drawn."""

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

CHANNELS = 128  # OpenCV 5 resizes no more at a time
LARGEST = 64 << 20  # pixels of masks of an image's own size at a time, a byte each


def run_lengths(masks: AnyMasks, image: int, shapes: Any) -> list[dict[str, Any]]:
    """COCO's `segmentation` of each detection of an image: `size` (height, width) and `counts`, a text."""
    from pycocotools import mask as coco_mask

    found = []
    for pixels in image_pixels(masks, image, shapes):
        for rle in coco_mask.encode(np.asfortranarray(pixels.transpose(1, 2, 0))):
            found.append({"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")})
    return found


def image_pixels(masks: AnyMasks, image: int, shapes: Any) -> Iterator[np.ndarray]:
    """Masks of an image's detections in its own pixels, a few at a time: uint8 `[n, H, W]` of 0 and 1.

    As upstream does it: made at the input's size, without the padding, then resized bilinearly.

    Args:
        shapes: where the image lies in the input.
    """
    import cv2

    wide = masks.at_input_size()
    (height, width), (_, (left, top)) = shapes
    rows = slice(int(top), int(masks.size[0] - top))
    columns = slice(int(left), int(masks.size[1] - left))
    numbers = torch.arange(len(masks.boxes[image]), device=masks.device)
    together = max(min(wide.at_a_time(), CHANNELS, LARGEST // (height * width)), 1)
    for part in numbers.split(together) if len(numbers) else ():
        inside = wide.pixels(torch.tensor([image], device=masks.device), part[None])[0, :, rows, columns]
        planes = np.ascontiguousarray(inside.permute(1, 2, 0).to(torch.uint8).cpu().numpy())
        resized = cv2.resize(planes, (width, height))
        yield resized.reshape(height, width, len(part)).transpose(2, 0, 1)


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
    """Masks of some of an image's detections for drawing, one after the other, and of each what lies in its box.

    The sigmoid of the sum of prototypes, or what the network gives, is resized bilinearly to the image, and only there
    compared with one half, which gives smooth edges where an image is larger than the input. A box reaches from its
    first corner up to the second, which does not belong to it, as on the grid.

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
