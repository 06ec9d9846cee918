"""Letterboxing with torch's operators, where the network is: one image, uploaded as bytes, becomes the input's pixels.

OpenCV's INTER_AREA and INTER_LINEAR are linear and separable: an image is multiplied by a matrix from each side.
Pixels are those of `letterbox.py` but for the last bit, because OpenCV rounds INTER_LINEAR's weights to 11 bits. The
evaluation keeps OpenCV, since its AP is to be that of upstream's pixels.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from utils.core.device import full_float32
from utils.evaluation.letterbox import FILL, Letterbox, placed


def letterbox_on(image: np.ndarray, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Letterbox]:
    """Resize to fit into `shape`, keeping the aspect ratio, and pad to it.

    Args:
        image: uint8 `[H, W, 3]` BGR, as OpenCV decodes it.
        shape: (height, width) of the result.

    Returns:
        The image uint8 `[1, 3, *shape]` RGB on `device`, centred on grey, and where it lies.
    """
    box = placed((image.shape[0], image.shape[1]), shape, shape)
    pixels = torch.from_numpy(np.ascontiguousarray(image)).to(device, non_blocking=True).flip(2).permute(2, 0, 1)
    (height, width), (top, left) = box.resized, box.corner
    if (height, width) != box.original:
        rows = _weights(box.original[0], height, device)
        columns = _weights(box.original[1], width, device)
        with full_float32():
            resized = rows @ pixels.float() @ columns.T
        pixels = resized.round_().clamp_(0, 255).byte()
    result = torch.full((1, 3, *shape), FILL[0], dtype=torch.uint8, device=device)
    result[0, :, top : top + height, left : left + width] = pixels
    return result, box


@lru_cache(maxsize=16)
def _weights(source: int, target: int, device: torch.device) -> Tensor:
    """How much of each of `source` pixels goes into each of `target` pixels, float32 `[target, source]`."""
    step = source / target
    starts = torch.arange(target, dtype=torch.float64, device=device)[:, None] * step
    pixels = torch.arange(source, dtype=torch.float64, device=device)[None]
    if target < source:  # INTER_AREA: the share of the interval [start, start + step) that each pixel covers
        shares = (torch.minimum(starts + step, pixels + 1) - torch.maximum(starts, pixels)).clamp(min=0)
    else:  # INTER_LINEAR: by the distance from the middle; at the border the last pixel goes on
        middles = (starts + step / 2 - 0.5).clamp(0, source - 1)
        shares = (1 - (middles - pixels).abs()).clamp(min=0)
    return (shares / shares.sum(1, keepdim=True)).float()
