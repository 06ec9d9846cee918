"""Masks of detections, and their overlap with the labels' masks.

A network gives prototypes and coefficients (`Masks`), or, with NMS inside, masks (`MasksFromModel`).

A mask of the first kind is a sum of prototypes, cropped to its box. By default it is compared on the prototypes' grid,
as upstream's evaluation does: a pixel belongs to it where the sum is above zero, which is where its sigmoid is above
one half. With `upsampled`, upstream's other definition, the sigmoid is resized to the input first, and cropped there.

Sums take much memory: 300 of them at 640 pixels 30 MB an image. They are computed for a few detections at a time, of
several images together on a GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import grid_sample, interpolate
from torch.nn.utils.rnn import pad_sequence

from utils.core.device import disable_tf32
from utils.core.errors import InputError
from utils.evaluation.batch import USUAL_STRIDE
from utils.evaluation.letterbox import boxes_to_image

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction
    from utils.evaluation.batch import PackedMasks

LARGEST = {"cuda": 256 << 20, "cpu": 32 << 20}  # bytes of sums at a time


class AnyMasks(ABC):
    """Masks of a batch's detections.

    Attributes:
        boxes: of each image float32 `[n, 4]`, xyxy in pixels of the input.
        size: (height, width) of the input.
        upsampled: compared at the input's size.
    """

    boxes: tuple[Tensor, ...]
    size: tuple[int, int]
    upsampled: bool

    @property
    def device(self) -> torch.device:
        """Where they are, with their boxes."""
        return self.boxes[0].device

    @property
    @abstractmethod
    def grid(self) -> tuple[int, int]:
        """(height, width) that masks are compared at."""

    @abstractmethod
    def pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Masks of some detections of several images: bool `[G, N, *grid]`.

        Args:
            images: int64 `[G]`.
            rows: int64 `[G, N]`, their detections; -1 for none, whose mask is empty.
        """

    @abstractmethod
    def share(self, image: int, number: int) -> tuple[Tensor, tuple[float, ...]]:
        """One mask in 0..1, float32 `[h, w]`, and over which pixels of the input it lies, xyxy."""

    def at_input_size(self) -> AnyMasks:
        """The same, compared at the input's size."""
        return replace(self, upsampled=True)  # type: ignore[type-var]  # both kinds are dataclasses

    def at_a_time(self) -> int:
        """How many float32 masks may be computed together."""
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        return max(LARGEST[kind] // (4 * self.grid[0] * self.grid[1]), 1)

    def _cropped(self, inside: Tensor, images: Tensor, rows: Tensor) -> Tensor:
        """Masks bool `[G, N, *grid]` without what is outside of their boxes."""
        boxes = _chosen(self.boxes, images, rows).masked_fill(rows[..., None] < 0, 0.0)
        height, width = self.grid
        boxes = boxes * boxes.new_tensor([width / self.size[1], height / self.size[0]] * 2)
        inside &= between(boxes[..., 0], boxes[..., 2], width)[:, :, None, :]
        inside &= between(boxes[..., 1], boxes[..., 3], height)[:, :, :, None]
        return inside


def _chosen(parts: Sequence[Tensor], images: Tensor, rows: Tensor) -> Tensor:
    """Of each image `[n, ...]` these rows: `[G, N, ...]`."""
    return torch.stack([parts[image][some] for image, some in zip(images.tolist(), rows.clamp(min=0), strict=True)])


def between(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Which of `count` places lie in [low, high): `[..., count]`."""
    places = torch.arange(count, device=low.device, dtype=low.dtype)
    return (places >= low[..., None]) & (places < high[..., None])


@dataclass(frozen=True)
class Masks(AnyMasks):
    """Sums of prototypes.

    Attributes:
        prototypes: `[B, nm, h, w]`.
        coefficients: of each image float32 `[n, nm]`.
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
    def grid(self) -> tuple[int, int]:
        """(height, width) that masks are compared at."""
        return self.size if self.upsampled else (self.prototypes.shape[2], self.prototypes.shape[3])

    def pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Masks of some detections of several images: bool `[G, N, *grid]`, see `AnyMasks.pixels`."""
        prototypes = self.prototypes[images].float()
        with disable_tf32():
            sums = _chosen(self.coefficients, images, rows) @ prototypes.flatten(2)
        sums = sums.unflatten(2, prototypes.shape[2:])
        if not self.upsampled:
            return self._cropped(sums > 0, images, rows)
        wide = interpolate(sums.sigmoid_(), self.size, mode="bilinear", align_corners=False)
        return self._cropped(wide > 0.5, images, rows)

    def share(self, image: int, number: int) -> tuple[Tensor, tuple[float, ...]]:
        """The sigmoid of one detection's sum, float32 `[h, w]`, and over which pixels of the input it lies, xyxy."""
        prototypes = self.prototypes[image].float()
        with disable_tf32():
            sums = self.coefficients[image][number] @ prototypes.flatten(1)
        return sums.sigmoid_().unflatten(0, prototypes.shape[1:]), (0.0, 0.0, float(self.size[1]), float(self.size[0]))


@dataclass(frozen=True)
class MasksFromModel(AnyMasks):
    """Masks that a network with NMS inside gives, in the boxes' frames or on the prototypes' grid.

    Attributes:
        shares: in 0..1, float `[B, K, R, R]` in the boxes' frames, or `[B, K, h, w]` on the grid.
        rows: of each image int64 `[n]`: which of the K its detections are.
        framed: whether they lie in the boxes' frames.
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
    ) -> MasksFromModel:
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
    def grid(self) -> tuple[int, int]:
        """(height, width) that masks are compared at."""
        if self.upsampled:
            return self.size
        if self.framed:
            return self.size[0] // USUAL_STRIDE, self.size[1] // USUAL_STRIDE
        return self.shares.shape[2], self.shares.shape[3]

    def pixels(self, images: Tensor, rows: Tensor) -> Tensor:
        """Masks of some detections of several images: bool `[G, N, *grid]`, see `AnyMasks.pixels`."""
        shares = self.shares[images[:, None], _chosen(self.rows, images, rows)].float()
        if self.framed:
            boxes = _chosen(self.boxes, images, rows).flatten(0, 1)
            shares = pasted(shares.flatten(0, 1), boxes, self.size, self.grid).unflatten(0, rows.shape)
        elif self.upsampled:
            shares = interpolate(shares, self.size, mode="bilinear", align_corners=False)
        return self._cropped(shares > 0.5, images, rows)

    def share(self, image: int, number: int) -> tuple[Tensor, tuple[float, ...]]:
        """One mask in 0..1, float32 `[h, w]`, and over which pixels of the input it lies, xyxy."""
        whole = (0.0, 0.0, float(self.size[1]), float(self.size[0]))
        place = tuple(self.boxes[image][number].tolist()) if self.framed else whole
        return self.shares[image, self.rows[image][number]].float(), place

    def at_a_time(self) -> int:
        """How many masks may be computed together: each takes two coordinates of every pixel, too."""
        return max(super().at_a_time() // 3, 1)


def pasted(shares: Tensor, boxes: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Masks `[n, R, R]` in the frames of `boxes` `[n, 4]`, on a grid over an input: `[n, *grid]`.

    Each pixel of the grid looks up the place of its middle in the frame, bilinearly. Outside of a box lies what is at
    its border.
    """
    places = []
    for low, high, pixels, cells in ((0, 2, size[1], grid[1]), (1, 3, size[0], grid[0])):
        middles = (torch.arange(cells, device=boxes.device, dtype=boxes.dtype) + 0.5) * (pixels / cells)
        length = (boxes[:, high] - boxes[:, low]).clamp(min=1e-6)
        places.append((middles - boxes[:, low, None]) / length[:, None] * 2 - 1)
    x, y = places
    wanted = torch.stack([x[:, None].expand(-1, grid[0], -1), y[:, :, None].expand(-1, -1, grid[1])], 3)
    return grid_sample(shares[:, None], wanted, padding_mode="border", align_corners=False)[:, 0]


def mask_overlaps(
    masks: AnyMasks, truth: PackedMasks, detections: Sequence[Tensor], labels: Sequence[Tensor]
) -> list[Tensor]:
    """IoU of the masks of labels and of detections, for each image float32 `[m, n]`.

    Detections of a class that no label of their image has stand for no label whatever they look like: theirs is 0, and
    is not computed.

    Args:
        masks: of the detections.
        truth: of all labels, in the order of the images.
        detections: of each image, `[n, 6]`.
        labels: of each image `[m, 5]`, the class first.

    Raises:
        ValueError: the masks of labels and of detections are of different sizes.
    """
    if truth.shape != masks.grid:
        raise ValueError(f"the labels' masks are {truth.shape} and the network's {masks.grid}")
    truth = truth.to(masks.device)
    first = [0, *accumulate(map(len, labels))]
    pairs = list(zip(detections, labels, strict=True))
    overlaps = [rows.new_zeros((len(of_image), len(rows))) for rows, of_image in pairs]
    wanted = [torch.isin(rows[:, 5], of_image[:, 0]).nonzero()[:, 0] for rows, of_image in pairs]
    for images, rows in _groups(wanted, masks.at_a_time(), masks.device):
        inside = masks.pixels(images, rows).flatten(2).float()
        for image, chosen, detected in zip(images.tolist(), rows, inside, strict=True):
            chosen = chosen[chosen >= 0]
            detected = detected[: len(chosen)]
            labelled = truth.unpacked(slice(first[image], first[image + 1])).float()
            shared = labelled @ detected.T
            union = labelled.sum(1)[:, None] + detected.sum(1)[None] - shared
            overlaps[image][:, chosen] = shared / (union + 1e-7)
    return overlaps


def _groups(wanted: Sequence[Tensor], limit: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Detections that are looked at together: images `[G]`, and rows of each `[G, N]`, -1 where there are fewer.

    On a CPU a group is of one image, since filling up costs as much as what is there.
    """
    groups: list[list[tuple[int, Tensor]]] = []
    for image, rows in enumerate(wanted):
        for part in rows.split(limit) if len(rows) else ():
            together = [*groups[-1], (image, part)] if groups and device.type != "cpu" else []
            if together and len(together) * max(len(rows) for _, rows in together) <= limit:
                groups[-1] = together
            else:
                groups.append([(image, part)])
    for group in groups:
        images = torch.tensor([image for image, _ in group], device=device)
        yield images, pad_sequence([rows for _, rows in group], batch_first=True, padding_value=-1)


CHANNELS = 128  # OpenCV 5 resizes no more at a time
LARGEST_PIXELS = 64 << 20  # pixels of masks of an image's own size at a time, a byte each


def run_lengths(masks: AnyMasks, image: int, shapes: Any) -> list[dict[str, Any]]:
    """COCO's `segmentation` of each detection of an image: `size` (height, width) and `counts`, a text."""
    from pycocotools import mask as coco_mask

    found = []
    for pixels in image_pixels(masks, image, shapes):
        for rle in coco_mask.encode(np.asfortranarray(pixels.transpose(1, 2, 0))):
            found.append({"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")})
    return found


def image_pixels(masks: AnyMasks, image: int, shapes: Any) -> Iterator[np.ndarray]:
    """Masks of an image's detections in its own pixels, a few at a time: uint8 `[n, H, W]` of 0 and 1.

    As upstream does it: made at the input's size, without the padding, then resized bilinearly.

    Args:
        shapes: where the image lies in the input.
    """
    import cv2

    wide = masks.at_input_size()
    (height, width), (_, (left, top)) = shapes
    rows = slice(int(top), int(masks.size[0] - top))
    columns = slice(int(left), int(masks.size[1] - left))
    numbers = torch.arange(len(masks.boxes[image]), device=masks.device)
    together = max(min(wide.at_a_time(), CHANNELS, LARGEST_PIXELS // (height * width)), 1)
    for part in numbers.split(together) if len(numbers) else ():
        inside = wide.pixels(torch.tensor([image], device=masks.device), part[None])[0, :, rows, columns]
        planes = np.ascontiguousarray(inside.permute(1, 2, 0).to(torch.uint8).cpu().numpy())
        resized = cv2.resize(planes, (width, height))
        yield resized.reshape(height, width, len(part)).transpose(2, 0, 1)


@dataclass(frozen=True)
class Patch:
    """The part of an image that holds a mask.

    Attributes:
        left, top: its first pixel.
        inside: bool `[h, w]`: which of its pixels belong to the mask; there may be none.
    """

    left: int
    top: int
    inside: np.ndarray


def patches(masks: AnyMasks, image: int, chosen: Tensor, shapes: Any) -> Iterator[Patch]:
    """Masks of some of an image's detections for drawing, one after the other, and of each what lies in its box.

    The sigmoid of the sum of prototypes, or what the network gives, is resized bilinearly to the image, and only there
    compared with one half, which gives smooth edges where an image is larger than the input. A box reaches from its
    first corner up to the second, which does not belong to it, as on the grid.

    Args:
        image: its place in the batch.
        chosen: int64 `[n]`, which of its detections.
        shapes: where the image lies in the input.
    """
    _, ((ratio_y, ratio_x), (pad_x, pad_y)) = shapes
    boxes = masks.boxes[image][chosen]
    boxes = boxes_to_image(boxes, torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device), [shapes])
    for number, box in zip(chosen.tolist(), boxes.ceil().int().tolist(), strict=True):
        share, (x1, y1, x2, y2) = masks.share(image, number)
        across = (np.arange(box[0], box[2]) + 0.5) * ratio_x + int(pad_x)  # middles of pixels, in those of the input
        down = (np.arange(box[1], box[3]) + 0.5) * ratio_y + int(pad_y)
        wide = _resized(share.cpu().numpy(), (across - x1) / (x2 - x1))
        yield Patch(box[0], box[1], _resized(wide.T, (down - y1) / (y2 - y1)).T > 0.5)


def _resized(values: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """Columns of float32 `[rows, columns]` where, as fractions of its width, these middles lie: `[rows, middles]`."""
    places = (middles * values.shape[1] - 0.5).clip(0, values.shape[1] - 1)
    low: np.ndarray = places.astype(np.int64)
    part = (places - low).astype(np.float32)
    high = np.minimum(low + 1, values.shape[1] - 1)
    return values[:, low] * (1 - part) + values[:, high] * part
