"""Masks of detections in the pixels of their images, and as COCO's run lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
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
    device = masks.device
    numbers = torch.arange(len(masks.boxes[image]), device=device)
    together = max(min(wide.at_a_time(), CHANNELS, LARGEST // (height * width)), 1)
    for part in numbers.split(together) if len(numbers) else ():
        inside = wide.pixels(torch.tensor([image], device=device), part[None])[0, :, rows, columns]
        planes = np.ascontiguousarray(inside.permute(1, 2, 0).to(torch.uint8).cpu().numpy())
        resized = cv2.resize(planes, (width, height))
        yield resized.reshape(height, width, len(part)).transpose(2, 0, 1)
