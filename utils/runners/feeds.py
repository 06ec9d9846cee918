"""Images as bytes → what a network takes, see `utils/core/input_form.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.core.input_form import InputForm
from utils.core.number_types import INT8


def as_feed(images: Tensor, form: InputForm, dtype: str) -> Tensor:
    """Images in a network's form, on their own device.

    Args:
        images: uint8 `[B, 3, H, W]` RGB.
        dtype: of the network's input, torch's name for it.

    Returns:
        `[B, 3, H, W]`, of a network that takes them so `[B, H, W, 3]`; bytes are not copied.
    """
    if form.kind == "uint8":
        return images.permute(0, 2, 3, 1) if form.layout == "nhwc" else images
    if form.kind == "int8":
        return quantized(images, form.scale)
    return images.to(getattr(torch, dtype)).div_(255)


def quantized(images: Tensor, scale: float) -> Tensor:
    """What QuantizeLinear makes of `images / 255`: round(pixel / 255 / scale), clipped to INT8.

    Two passes over the images where nothing is clipped: the sum with a half, whose fraction the conversion drops. (No
    pixel lies halfway between two integers, since scales are float16 numbers, whose multiples of 255 have odd factors.)
    """
    steps = torch.add(torch.tensor(0.5), images, alpha=1 / (255 * scale))  # float32
    if 1 / scale + 0.5 >= INT8.quant_max + 1:
        steps.clamp_(max=INT8.quant_max)
    return steps.to(getattr(torch, INT8.dtype))
