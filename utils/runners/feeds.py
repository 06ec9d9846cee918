"""Images as bytes → what a network takes, see `utils/core/input_form.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.core.input_form import InputForm


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
    return images.to(getattr(torch, dtype)).div_(255)
