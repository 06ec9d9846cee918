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
    """What QuantizeLinear makes of `images / 255`: round(pixel / 255 / scale), halves to even, clipped to INT8."""
    steps = images * (1 / (255 * scale))  # float32, with one rounding
    return steps.round_().clamp_(INT8.quant_min, INT8.quant_max).to(getattr(torch, INT8.dtype))
