"""Polygons of labels as masks, on the grid that a network's masks have, packed to bits.

The workers of the loader make them: filling polygons takes longer than all else that is done with a label, and bits are
what fits through to the main process. At 640 pixels a mask on the prototypes' grid takes 3,200 bytes.

The definition is that of upstream's evaluation: a polygon is filled at the input's size, and of the result, resized to
the grid bilinearly, what is above one half belongs to the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.evaluation.letterbox import Letterbox, points_to_input

USUAL_STRIDE = 4  # pixels of the input in one of the grid, in each direction
ENOUGH = 3  # of the inner four pixels of a block of 4x4, whose mean is what bilinear interpolation gives


@dataclass(frozen=True)
class PackedMasks:
    """Masks as bits.

    Attributes:
        bits: uint8 `[n, ceil(height * width / 8)]`, the highest bit first.
        shape: (height, width) of each.
    """

    bits: Tensor
    shape: tuple[int, int]

    @classmethod
    def pack(cls, masks: np.ndarray) -> PackedMasks:
        """Pack bool `[n, height, width]`."""
        height, width = masks.shape[1:]
        return cls(torch.from_numpy(np.packbits(masks.reshape(len(masks), height * width), axis=1)), (height, width))

    @classmethod
    def together(cls, parts: Sequence[PackedMasks]) -> PackedMasks:
        """Masks of one shape as one."""
        return cls(torch.cat([part.bits for part in parts]), parts[0].shape)

    def __len__(self) -> int:
        return len(self.bits)

    def to(self, device: torch.device) -> PackedMasks:
        """The same on a device."""
        return PackedMasks(self.bits.to(device), self.shape)

    def unpacked(self, rows: slice = slice(None)) -> Tensor:
        """All of them or some, bool `[n, height * width]`."""
        bits = self.bits[rows]
        weights = 1 << torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
        found = bits[:, :, None].bitwise_and(weights).bool().flatten(1)
        return found[:, : self.shape[0] * self.shape[1]]


def packed_truth(
    polygons: Sequence[np.ndarray], box: Letterbox, shape: tuple[int, int], stride: int = USUAL_STRIDE
) -> PackedMasks:
    """Masks of an image's polygons.

    Args:
        polygons: float32 `[points, 2]` each: x, y as fractions of the image.
        box: where the image lies in the input.
        shape: (height, width) of the input.
        stride: of the grid, pixels of the input; 1 for masks of the input's size.
    """
    none = PackedMasks.pack(np.zeros((0, shape[0] // stride, shape[1] // stride), bool))
    masks = (on_grid(filled(points_to_input(one, box), shape), stride) for one in polygons)
    return PackedMasks.together([none, *(PackedMasks.pack(mask[None]) for mask in masks)])


def filled(points: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """A polygon of `[points, 2]` x, y in pixels, truncated to whole ones, as uint8 `shape` of 0 and 1."""
    import cv2

    mask: np.ndarray = np.zeros(shape, np.uint8)
    cv2.fillPoly(mask, [points.astype(np.int32)], 1)
    return mask


def on_grid(mask: np.ndarray, stride: int) -> np.ndarray:
    """A mask uint8 `[H, W]` of 0 and 1 on a coarser grid: bool `[H / stride, W / stride]`."""
    if stride == 1:
        return mask.astype(bool)
    if stride == USUAL_STRIDE:
        top, bottom = mask[1::stride], mask[2::stride]
        inner = top[:, 1::stride] + top[:, 2::stride] + bottom[:, 1::stride] + bottom[:, 2::stride]
        return inner >= ENOUGH
    size = (mask.shape[0] // stride, mask.shape[1] // stride)
    wide = torch.from_numpy(mask).float()[None, None]
    return (torch.nn.functional.interpolate(wide, size, mode="bilinear", align_corners=False)[0, 0] > 0.5).numpy()
