"""Images of one shape with their labels, as the loader gives them; rows of all images in one tensor.

Masks of labels are those of upstream's evaluation: a polygon is filled at the input's size, and of the result, resized
bilinearly to the prototypes' grid, what is above one half belongs to the mask. The loader's workers draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from utils.core.device import sent
from utils.evaluation.letterbox import Letterbox, points_to_input

MASK_STRIDE = 4  # pixels of the input in one of the prototypes' grid, in each direction


@dataclass(frozen=True, eq=False)
class RaggedBatch(Sequence["Tensor"]):
    """Rows of several images; as a sequence, the rows of each image, `[n of the image, ...]`, as views.

    What is done with a batch is done with all rows at once, since each operator on a GPU costs the CPU a start.

    Attributes:
        flat: the rows of all images, one image behind the other, `[n, ...]`.
        counts: number of rows of each image.
    """

    flat: Tensor
    counts: list[int]

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> RaggedBatch:
        """Put the rows of one image or more together."""
        return cls(torch.cat(list(images)), [len(rows) for rows in images])

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: Any) -> Any:
        return self._images[index]

    @cached_property
    def _images(self) -> tuple[Tensor, ...]:
        images: tuple[Tensor, ...] = self.flat.split(self.counts)
        return images

    def to(self, device: torch.device | str) -> RaggedBatch:
        """Copy to a device, see `sent`."""
        return RaggedBatch(sent(self.flat, torch.device(device)), self.counts)

    def owners(self) -> Tensor:
        """The image of each row, int64 `[n]`, on the device of the rows."""
        # NumPy's repeat: torch's wakes all threads for a few numbers, and waits for those whose cores are busy
        owners = np.arange(len(self.counts)).repeat(self.counts)
        return sent(torch.from_numpy(owners), self.flat.device)


NO_LABELS = RaggedBatch(torch.zeros((0, 5)), [])


class Item(NamedTuple):
    """One image of a dataset.

    Attributes:
        image: uint8 `[3, H, W]` RGB, letterboxed; None when it cannot be decoded.
        letterbox: where the original lies in the input; None for an augmented image, which has no original.
        labels: float32 `[m, 5]`: class, xyxy in pixels of the original.
        masks: of the labels, bool `[n, H / 4, W / 4]`, where a network for segmentation is evaluated.
    """

    image: Tensor | None
    path: str
    letterbox: Letterbox | None = None
    labels: Tensor = NO_LABELS.flat
    masks: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """A batch, which is empty where no image of it could be decoded.

    Attributes:
        images: uint8 `[B, 3, H, W]` RGB.
        paths, letterboxes, labels: of each image, see `Item`.
        masks: of the labels, in their order, bool `[n, H / 4, W / 4]`; None for detection.
    """

    images: Tensor
    paths: tuple[str, ...] = ()
    letterboxes: tuple[Letterbox, ...] = ()
    labels: RaggedBatch = NO_LABELS
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, as torch's loader does where there is a GPU."""
        labels = RaggedBatch(self.labels.flat.pin_memory(), self.labels.counts)
        return replace(self, images=self.images.pin_memory(), labels=labels)


def collate(items: Sequence[Item]) -> Batch:
    """Stack items of one shape; those that could not be decoded are left out, so a batch can be empty (B = 0)."""
    decoded = [item for item in items if item.image is not None]
    if not decoded:
        return Batch(torch.zeros((0, 3, 0, 0), dtype=torch.uint8))
    images, paths, letterboxes, labels, masks = zip(*decoded, strict=True)
    stacked = default_collate(images)  # in a loading process right into the memory that it shares
    has_masks = masks[0] is not None
    return Batch(
        stacked,
        paths,
        letterboxes,
        RaggedBatch.of(labels),
        torch.cat(masks) if has_masks else None,
    )


def polygon_masks(polygons: Sequence[np.ndarray], box: Letterbox, shape: tuple[int, int]) -> Tensor:
    """Masks on the prototypes' grid, bool `[n, H / 4, W / 4]`, in an input of `shape` (height, width).

    `polygons` are float32 `[points, 2]` each, x, y as fractions of the image.
    """
    rows = shape[0] // MASK_STRIDE
    columns = shape[1] // MASK_STRIDE
    masks: np.ndarray = np.zeros((len(polygons), rows, columns), bool)
    for mask, polygon in zip(masks, polygons, strict=True):
        points = points_to_input(polygon, box)
        mask[:] = on_grid(filled(points, shape))
    return torch.from_numpy(masks)


def filled(points: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """A polygon of `[points, 2]` x, y in pixels, truncated to whole ones, as uint8 `shape` of 0 and 1."""
    mask: np.ndarray = np.zeros(shape, np.uint8)
    cv2.fillPoly(mask, [points.astype(np.int32)], 1)
    return mask


def on_grid(mask: np.ndarray) -> np.ndarray:
    """A mask uint8 `[H, W]` of 0 and 1 on the prototypes' grid: bool `[H / 4, W / 4]`.

    Bilinear interpolation gives the mean of the inner four pixels of a block of 4x4; three of them are above one half.
    """
    first, second = slice(1, None, MASK_STRIDE), slice(2, None, MASK_STRIDE)  # the inner ones of each four
    count = mask[first, first] + mask[first, second] + mask[second, first] + mask[second, second]
    is_inside: np.ndarray = count >= 3
    return is_inside
