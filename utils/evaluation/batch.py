"""Images of one shape with what is known about them, as the loader gives them; rows of all images in one tensor.

The labels' masks are polygons on the grid that a network's masks have, packed to bits. The workers of the loader make
them: filling polygons takes longer than all else that is done with a label, and bits are what fits through to the main
process. At 640 pixels a mask on the prototypes' grid takes 3,200 bytes. The definition is that of upstream's
evaluation: a polygon is filled at the input's size, and of the result, resized to the grid bilinearly, what is above
one half belongs to the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.utils.data import default_collate

from utils.core.device import sent
from utils.evaluation.letterbox import Letterbox, boxes_to_image, points_to_input

USUAL_STRIDE = 4  # pixels of the input in one of the grid, in each direction
ENOUGH = 3  # of the inner four pixels of a block of 4x4, whose mean is what bilinear interpolation gives


@dataclass(frozen=True, eq=False)
class RaggedBatch(Sequence["Tensor"]):
    """As a sequence, the rows of each image, `[n of the image, ...]`: views, which are made when the first is read.

    To start an operator on a GPU takes the CPU as long for the rows of one image as for those of a hundred. So what is
    done with a batch is done with all rows at once.

    Attributes:
        flat: the rows of all images, one image behind the other, `[n, ...]`.
        counts: of the rows of each image; their sum is n.
    """

    flat: Tensor
    counts: list[int]

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> RaggedBatch:
        """The rows of one image or more, which are put together unless they are already."""
        return images if isinstance(images, cls) else cls(torch.cat(list(images)), [len(one) for one in images])

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._images[index]

    @cached_property
    def _images(self) -> tuple[Tensor, ...]:
        return self.flat.split(self.counts)

    def owners(self) -> Tensor:
        """The image of each row, int64 `[n]`, where the rows are."""
        # numpy's: torch's wakes all threads for a few numbers, and waits for those whose cores are busy
        return sent(torch.from_numpy(np.arange(len(self.counts)).repeat(self.counts)), self.flat.device)


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


class Item(NamedTuple):
    """One image of a dataset.

    Attributes:
        image: uint8 `[3, H, W]` RGB, letterboxed; None when it cannot be decoded.
        labels: float32 `[n, 6]`: 0, class, and cxcywh as fractions of the input.
        path: of the image.
        shapes: where the original lies in the input, as `Letterbox.shapes` says it.
        masks: of the labels, where a network for segmentation is evaluated.
    """

    image: Tensor | None
    labels: Tensor
    path: str
    shapes: Any
    masks: PackedMasks | None = None


@dataclass(frozen=True)
class Batch:
    """A batch, which is empty where not one of its images could be decoded.

    Attributes:
        images: uint8 `[B, 3, H, W]` RGB.
        labels: float32 `[n, 6]`: image in the batch, class, cxcywh as fractions of the input; images in their order.
        paths, shapes: of each image, see `Item`.
        masks: of the labels, in their order; None for detection.
        truth: the labels of each image, float32 `[m, 5]`: class, xyxy in pixels of the original; None where an image
            is put together of several, which have no original.
    """

    images: Tensor
    labels: Tensor
    paths: tuple[str, ...] = ()
    shapes: tuple[Any, ...] = ()
    masks: PackedMasks | None = None
    truth: RaggedBatch | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def pin_memory(self) -> Batch:
        """The same in pinned memory; torch's loader asks for it where there is a GPU."""
        truth = None if self.truth is None else RaggedBatch(self.truth.flat.pin_memory(), self.truth.counts)
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory(), truth=truth)


def collate(items: Sequence[Any]) -> Batch:
    """Stack items of one shape; those that could not be decoded are left out, so a batch can be empty (B = 0)."""
    good = [Item(*item) for item in items if item[0] is not None]
    if not good:
        return Batch(torch.zeros((0, 3, 0, 0), dtype=torch.uint8), torch.zeros((0, 6)))
    images, labels, paths, shapes, masks = zip(*good, strict=True)
    for position, of_image in enumerate(labels):
        of_image[:, 0] = position
    pixels = default_collate(images)  # in a loading process right into the memory that it shares
    packed = None if masks[0] is None else PackedMasks.together(masks)
    rows = RaggedBatch.of(labels)
    truth = None
    if None not in shapes:
        size = rows.flat.new_tensor([pixels.shape[3], pixels.shape[2]] * 2)
        boxes = torchvision.ops.box_convert(rows.flat[:, 2:] * size, "cxcywh", "xyxy")
        boxes = boxes_to_image(boxes, rows.owners(), shapes)
        truth = RaggedBatch(torch.cat([rows.flat[:, 1:2], boxes], 1), rows.counts)
    return Batch(pixels, rows.flat, tuple(paths), tuple(shapes), packed, truth)


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
