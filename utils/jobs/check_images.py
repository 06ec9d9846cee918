"""Images on which two ways to run a network are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from utils.evaluation.data_yaml import DataConfig


def check_images(count: int, size: tuple[int, int], data: DataConfig | None) -> Tensor:
    """`[count, 3, height, width]` in 0..1: a dataset's images, or without one soft coloured patches and noise."""
    if data is not None:
        from utils.evaluation.dataset import make_loader

        split = "val" if "val" in data.splits else "train"
        images = next(iter(make_loader(data, split, imgsz=size, batch_size=count, workers=0, limit=count))).images
        if len(images):
            return images.float() / 255
    random = torch.Generator().manual_seed(0)
    patches = torch.rand(count, 3, 12, 12, generator=random)
    soft = torch.nn.functional.interpolate(patches, size=size, mode="bilinear")
    return soft * 0.9 + torch.rand(count, 3, *size, generator=random) * 0.1


def pixels(images: Tensor) -> Tensor:
    """Images in 0..1 → bytes."""
    return (images * 255).round().to(torch.uint8)
