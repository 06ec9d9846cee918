"""Masks that a network with NMS inside gives, as pixels: in the boxes' frames, or on the prototypes' grid.

A mask in its box's frame is pasted: each pixel of the grid looks up the place of its middle in the frame, bilinearly.
It belongs to the mask where that is above one half, and inside the box as for `masks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from utils.core.errors import InputError
from utils.evaluation.mask_truth import USUAL_STRIDE
from utils.evaluation.masks import at_a_time, crop

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GivenMasks:
    """Masks of a batch's detections, as a network gives them.

    Attributes:
        shares: in 0..1, float `[B, K, R, R]` in the boxes' frames, or `[B, K, h, w]` on the grid.
        rows: of each image int64 `[n]`: which of the K its detections are.
        boxes: of each image float32 `[n, 4]`, xyxy in pixels of the input.
        size: (height, width) of the input.
        framed: whether they lie in the boxes' frames.
        upsampled: compared at the input's size.
    """

    shares: Tensor
    rows: tuple[Tensor, ...]
    boxes: tuple[Tensor, ...]
    size: tuple[int, int]
    framed: bool
    upsampled: bool = False

    @classmethod
    def of(
        cls, given: Tensor, rows: Sequence[Tensor], boxes: Sequence[Tensor], size: tuple[int, int], *, upsampled: bool
    ) -> GivenMasks:
        """Of the output of a network, `[B, K, R * R]` or `[B, K, h, w]`.

        Raises:
            InputError: it has another shape.
        """
        framed = given.ndim == 3
        if framed:
            side = math.isqrt(given.shape[2])
            if side * side != given.shape[2] or not side:
                raise InputError(f"the network's masks are {list(given.shape)}; expected [batch, detections, R * R]")
            given = given.unflatten(2, (side, side))
        return cls(given, tuple(rows), tuple(boxes), size, framed, upsampled)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.shares.device

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) that masks are compared at."""
        if self.upsampled:
            return self.size
        if self.framed:
            return self.size[0] // USUAL_STRIDE, self.size[1] // USUAL_STRIDE
        return self.shares.shape[2], self.shares.shape[3]

    def at_input_size(self) -> GivenMasks:
        """The same, compared at the input's size."""
        return replace(self, upsampled=True)

    def pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Masks of some detections of several images: bool `[G, N, *grid]`, see `Masks.pixels`."""
        index = rows.clamp(min=0)
        numbers, boxes = (
            torch.stack([parts[image][chosen] for image, chosen in zip(images.tolist(), index, strict=True)])
            for parts in (self.rows, self.boxes)
        )
        shares = self.shares[images[:, None], numbers].float()
        if self.framed:
            shares = pasted(shares.flatten(0, 1), boxes.flatten(0, 1), self.size, self.grid).unflatten(0, rows.shape)
        elif self.upsampled:
            shares = torch.nn.functional.interpolate(shares, self.size, mode="bilinear", align_corners=False)
        return crop(shares > 0.5, boxes.masked_fill(rows[..., None] < 0, 0.0), self.size)

    def share(self, image: int, number: int) -> tuple[Tensor, tuple[float, ...]]:
        """One mask in 0..1, float32 `[h, w]`, and over which pixels of the input it lies, xyxy; see `Masks.share`."""
        whole = (0.0, 0.0, float(self.size[1]), float(self.size[0]))
        place = tuple(self.boxes[image][number].tolist()) if self.framed else whole
        return self.shares[image, self.rows[image][number]].float(), place

    def at_a_time(self) -> int:
        """How many masks fit into what is computed together: each takes two coordinates of every pixel, too."""
        return max(at_a_time(self.grid, self.device) // 3, 1)


def pasted(shares: Tensor, boxes: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Masks `[n, R, R]` in the frames of `boxes` `[n, 4]`, on a grid over an input: `[n, *grid]`.

    Outside of a box lies what is at its border.
    """
    places = []
    for low, high, pixels, cells in ((0, 2, size[1], grid[1]), (1, 3, size[0], grid[0])):
        middles = (torch.arange(cells, device=boxes.device, dtype=boxes.dtype) + 0.5) * (pixels / cells)
        length = (boxes[:, high] - boxes[:, low]).clamp(min=1e-6)
        places.append((middles - boxes[:, low, None]) / length[:, None] * 2 - 1)
    x, y = places
    wanted = torch.stack([x[:, None].expand(-1, grid[0], -1), y[:, :, None].expand(-1, -1, grid[1])], 3)
    found = torch.nn.functional.grid_sample(shares[:, None], wanted, padding_mode="border", align_corners=False)
    return found[:, 0]
