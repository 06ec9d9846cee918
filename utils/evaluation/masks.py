"""Masks of detections: from prototypes and coefficients to pixels, and to their overlap with the labels' masks.

A mask is a sum of prototypes, cropped to its box. By default it is compared on the prototypes' grid, as upstream's
evaluation does: a pixel belongs to it where the sum is above zero, which is where its sigmoid is above one half. With
`upsampled`, upstream's other definition, the sigmoid is resized to the input first, and cropped there.

Sums take much memory: 300 of them at 640 pixels 30 MB an image. They are computed for a few detections at a time, of
several images together on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from utils.core.device import full_float32

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction
    from utils.evaluation.mask_truth import PackedMasks

LARGEST = {"cuda": 256 << 20, "cpu": 32 << 20}  # bytes of sums at a time


class AnyMasks(Protocol):
    """Masks of a batch's detections: sums of prototypes here, or given by a network, see `given_masks.py`."""

    @property
    def boxes(self) -> tuple[Tensor, ...]:
        """Of each image float32 `[n, 4]`, xyxy in pixels of the input."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the input."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) that masks are compared at."""

    def at_input_size(self) -> AnyMasks:
        """The same, compared at the input's size."""

    def pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Masks of some detections of several images: bool `[G, N, *grid]`, see `Masks.pixels`."""

    def share(self, image: int, number: int) -> tuple[Tensor, tuple[float, ...]]:
        """One mask in 0..1, float32 `[h, w]`, and over which pixels of the input it lies, xyxy."""

    def at_a_time(self) -> int:
        """How many masks fit into what is computed together."""


@dataclass(frozen=True)
class Masks:
    """What the masks of a batch's detections are made of.

    Attributes:
        prototypes: `[B, nm, h, w]`.
        coefficients: of each image float32 `[n, nm]`.
        boxes: of each image float32 `[n, 4]`, xyxy in pixels of the input.
        size: (height, width) of the input.
        upsampled: compared at the input's size.
    """

    prototypes: Tensor
    coefficients: tuple[Tensor, ...]
    boxes: tuple[Tensor, ...]
    size: tuple[int, int]
    upsampled: bool = False

    @classmethod
    def of(
        cls, prediction: Prediction, rows: Sequence[Tensor], size: tuple[int, int], *, upsampled: bool = False
    ) -> Masks | None:
        """Of the detections that NMS gave, `[n, 7]`, whose last column is the anchor; None for a detector's."""
        if prediction.prototypes is None:
            return None
        coefficients = [
            one[:, found[:, 6].long()].T.float() for one, found in zip(prediction.coefficients, rows, strict=True)
        ]
        boxes = tuple(found[:, :4] for found in rows)
        return cls(prediction.prototypes, tuple(coefficients), boxes, size, upsampled)

    @property
    def device(self) -> torch.device:
        """Where the prototypes are."""
        return self.prototypes.device

    def at_input_size(self) -> Masks:
        """The same, compared at the input's size."""
        return replace(self, upsampled=True)

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) that masks are compared at."""
        return self.size if self.upsampled else (self.prototypes.shape[2], self.prototypes.shape[3])

    def pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Masks of some detections of several images: bool `[G, N, *grid]`.

        Args:
            images: int64 `[G]`.
            rows: int64 `[G, N]`, their detections; -1 for none, whose mask is empty.
        """
        index = rows.clamp(min=0)
        coefficients, boxes = (
            torch.stack([parts[image][chosen] for image, chosen in zip(images.tolist(), index, strict=True)])
            for parts in (self.coefficients, self.boxes)
        )
        prototypes = self.prototypes[images].float()
        with full_float32():
            sums = (coefficients @ prototypes.flatten(2)).unflatten(2, prototypes.shape[2:])
        if self.upsampled:
            wide = torch.nn.functional.interpolate(sums.sigmoid_(), self.size, mode="bilinear", align_corners=False)
            inside = wide > 0.5
        else:
            inside = sums > 0
        return crop(inside, boxes.masked_fill(rows[..., None] < 0, 0.0), self.size)

    def share(self, image: int, number: int) -> tuple[Tensor, tuple[float, ...]]:
        """The sigmoid of one detection's sum, float32 `[h, w]`, and over which pixels of the input it lies, xyxy."""
        prototypes = self.prototypes[image].float()
        with full_float32():
            sums = self.coefficients[image][number] @ prototypes.flatten(1)
        return sums.sigmoid_().unflatten(0, prototypes.shape[1:]), (0.0, 0.0, float(self.size[1]), float(self.size[0]))

    def at_a_time(self) -> int:
        """How many masks fit into what is computed together."""
        return at_a_time(self.grid, self.device)


def at_a_time(grid: tuple[int, int], device: torch.device) -> int:
    """How many float32 masks of this size may be computed together."""
    return max(LARGEST["cuda" if device.type == "cuda" else "cpu"] // (4 * grid[0] * grid[1]), 1)


def crop(inside: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks bool `[G, N, h, w]` without what is outside of their boxes `[G, N, 4]`, in pixels of an input of `size`."""
    height, width = inside.shape[2:]
    boxes = boxes * boxes.new_tensor([width / size[1], height / size[0]] * 2)
    inside &= between(boxes[..., 0], boxes[..., 2], width)[:, :, None, :]
    inside &= between(boxes[..., 1], boxes[..., 3], height)[:, :, :, None]
    return inside


def between(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Which of `count` places lie in [low, high): `[..., count]`."""
    places = torch.arange(count, device=low.device, dtype=low.dtype)
    return (places >= low[..., None]) & (places < high[..., None])


def mask_overlaps(
    masks: AnyMasks, truth: PackedMasks, found: Sequence[Tensor], labels: Sequence[Tensor]
) -> list[Tensor]:
    """IoU of the masks of labels and of detections, for each image float32 `[m, n]`.

    Detections of a class that no label of their image has stand for no label whatever they look like: theirs is 0, and
    is not computed.

    Args:
        masks: of the detections.
        truth: of all labels, in the order of the images.
        found: detections of each image, `[n, 6]`.
        labels: labels of each image, `[m, 5]`, the class first.

    Raises:
        ValueError: the masks of labels and of detections are of different sizes.
    """
    if truth.shape != masks.grid:
        raise ValueError(f"the labels' masks are {truth.shape} and the network's {masks.grid}")
    device = masks.device
    limit = masks.at_a_time()
    pixels = truth.unpacked(device) if len(truth) <= limit else None
    first = [0]
    for one in labels:
        first.append(first[-1] + len(one))
    overlaps = [one.new_zeros((len(theirs), len(one))) for one, theirs in zip(found, labels, strict=True)]
    wanted = [torch.isin(one[:, 5], theirs[:, 0]).nonzero()[:, 0] for one, theirs in zip(found, labels, strict=True)]
    for images, rows in _groups(wanted, limit, device):
        inside = masks.pixels(images, rows).flatten(2).float()
        for image, chosen, one in zip(images.tolist(), rows, inside, strict=True):
            chosen = chosen[chosen >= 0]
            for begin in range(first[image], first[image + 1], limit):
                part = slice(begin, min(begin + limit, first[image + 1]))
                theirs = (truth.unpacked(device, part) if pixels is None else pixels[part]).float()
                rows_of_part = slice(begin - first[image], part.stop - first[image])
                overlaps[image][rows_of_part][:, chosen] = _iou(theirs, one[: len(chosen)])
    return overlaps


def _iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU of masks of 0 and 1, float32 `[m, pixels]` and `[n, pixels]` → `[m, n]`."""
    shared = a @ b.T
    return shared / (a.sum(1)[:, None] + b.sum(1)[None] - shared + 1e-7)


def _groups(wanted: Sequence[Tensor], limit: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Detections that are looked at together: images `[G]`, and rows of each `[G, N]`, -1 where there are fewer.

    On a CPU a group is of one image, since filling up costs as much as what is there.
    """
    together: list[tuple[int, Tensor]] = []
    for image, rows in enumerate(wanted):
        for part in rows.split(limit) if len(rows) else ():
            longest = max(len(part), *(len(one) for _, one in together)) if together else len(part)
            if together and (device.type == "cpu" or (len(together) + 1) * longest > limit):
                yield _together(together, device)
                together = []
            together.append((image, part))
    if together:
        yield _together(together, device)


def _together(parts: Sequence[tuple[int, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    from torch.nn.utils.rnn import pad_sequence

    images = torch.tensor([image for image, _ in parts], device=device)
    return images, pad_sequence([rows for _, rows in parts], batch_first=True, padding_value=-1)
