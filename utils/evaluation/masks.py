"""Masks of detections, and their overlap with the labels' masks.

A mask is the sigmoid of a sum of prototypes, or a mask that a network with NMS inside gives; it is cropped to its box.
As in upstream, masks are compared on the prototypes' grid; for COCO's JSON they are resized to the input, then cropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from torch.nn.functional import grid_sample, interpolate

from utils.core.device import disable_tf32
from utils.core.errors import InputError
from utils.evaluation.batch import MASK_STRIDE
from utils.evaluation.letterbox import Letterbox, boxes_to_image

if TYPE_CHECKING:
    from torch import Tensor

    from utils.core.tasks import Prediction

LARGEST = {"cuda": 256 << 20, "cpu": 32 << 20}  # bytes of masks at a time; 300 of them at 640 pixels take 30 MB
RESIZED_TOGETHER = 16  # masks


@dataclass(frozen=True)
class Masks:
    """Masks of a batch's detections.

    Attributes:
        source: prototypes `[B, nm, h, w]`; or masks in 0..1 of a network with NMS inside, on the prototypes' grid
            `[B, K, h, w]`, or in the boxes' frames `[B, K, R, R]`.
        picks: for each image the coefficients of prototypes, float32 `[n, nm]`; or the indices of its detections
            among the K, int64 `[n]`.
        boxes: for each image float32 `[n, 4]`, xyxy in pixels of the input.
        size: (height, width) of the input.
        framed: the source lies in the boxes' frames.
    """

    source: Tensor
    picks: Sequence[Tensor]
    boxes: Sequence[Tensor]
    size: tuple[int, int]
    framed: bool = False

    @classmethod
    def of(cls, prediction: Prediction, rows: Sequence[Tensor], size: tuple[int, int]) -> Masks | None:
        """Masks of the detections that NMS gave, `[n, 7]`, whose last column is the anchor; None for a detector's."""
        if prediction.prototypes is None:
            return None
        picks: list[Tensor] = []
        boxes: list[Tensor] = []
        for coefficients, detections in zip(prediction.coefficients, rows, strict=True):
            anchors = detections[:, 6].long()
            picks.append(coefficients[:, anchors].T.float())
            boxes.append(detections[:, :4])
        return cls(prediction.prototypes, picks, boxes, size)

    @classmethod
    def from_model(
        cls,
        output: Tensor,
        picks: Sequence[Tensor],
        boxes: Sequence[Tensor],
        size: tuple[int, int],
    ) -> Masks:
        """A network's own masks, `[B, K, R * R]` in the boxes' frames, or `[B, K, h, w]`; `InputError` for others."""
        framed = output.ndim == 3
        if framed:
            side = math.isqrt(output.shape[2])
            if side * side != output.shape[2] or not side:
                raise InputError(f"the model's masks are {list(output.shape)}; expected [batch, detections, R * R]")
            output = output.unflatten(2, (side, side))
        return cls(output, picks, boxes, size, framed)

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the prototypes' grid, on which masks are compared."""
        if self.framed:
            return self.size[0] // MASK_STRIDE, self.size[1] // MASK_STRIDE
        return self.source.shape[2], self.source.shape[3]

    @property
    def at_a_time(self) -> int:
        """Number of masks that may be computed together; a mask in a frame also needs x and y of every pixel."""
        kind = "cuda" if self.source.device.type == "cuda" else "cpu"
        height, width = self.grid
        numbers = 3 if self.framed else 1  # for each pixel, of 4 bytes
        return max(LARGEST[kind] // (4 * height * width * numbers), 1)

    def shares(self, image: int, rows: Tensor) -> Tensor:
        """Masks of some detections of an image, int64 `[n]`, as the network gives them: 0..1, float32 `[n, h, w]`."""
        picks = self.picks[image][rows]
        source = self.source[image]
        if not picks.is_floating_point():
            return source[picks].float()
        with disable_tf32():
            sums = picks @ source.float().flatten(1)
        return sums.sigmoid_().unflatten(1, source.shape[1:])

    def pixels(self, image: int, rows: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Masks of some detections of an image, int64 `[n]`, cropped to their boxes: bool `[n, *grid]`.

        Args:
            grid: (height, width) of the input; None for the prototypes' grid.
        """
        shares = self.shares(image, rows)
        boxes = self.boxes[image][rows]
        height, width = grid or self.grid
        if self.framed:
            shares = pasted(shares, boxes, self.size, (height, width))
        elif grid:
            shares = interpolate(shares[None], grid, mode="bilinear", align_corners=False)[0]
        scale = boxes.new_tensor([width / self.size[1], height / self.size[0]] * 2)
        x1, y1, x2, y2 = (boxes * scale).unbind(1)
        columns = between(x1, x2, width)[:, None, :]
        rows_inside = between(y1, y2, height)[:, :, None]
        return (shares > 0.5) & columns & rows_inside


def between(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Mask of the places 0 to `count` - 1 that lie in [low, high): bool `[..., count]`."""
    places = torch.arange(count, device=low.device, dtype=low.dtype)
    return (places >= low[..., None]) & (places < high[..., None])


def pasted(
    shares: Tensor,
    boxes: Tensor,
    size: tuple[float, float],
    grid: tuple[int, int],
) -> Tensor:
    """Resample masks `[n, R, R]` in the frames of `boxes` `[n, 4]` to a grid over an input: `[n, *grid]`.

    The middle of each cell of the grid reads the frame bilinearly; outside of the frame it reads the border.
    """
    x = _places_in_frames(boxes[:, 0], boxes[:, 2], size[1], grid[1])
    y = _places_in_frames(boxes[:, 1], boxes[:, 3], size[0], grid[0])
    columns = x[:, None].expand(-1, grid[0], -1)
    rows = y[:, :, None].expand(-1, -1, grid[1])
    places = torch.stack([columns, rows], 3)
    return grid_sample(shares[:, None], places, padding_mode="border", align_corners=False)[:, 0]


def _places_in_frames(
    low: Tensor,
    high: Tensor,
    pixels: float,
    cells: int,
) -> Tensor:
    """Coordinates of the cells' middles along an axis, -1 at `low` `[n]` and 1 at `high` `[n]`: `[n, cells]`."""
    middles = torch.arange(cells, device=low.device, dtype=low.dtype) + 0.5
    middles = middles * (pixels / max(cells, 1))
    length = (high - low).clamp(min=1e-6)
    return (middles - low[:, None]) / length[:, None] * 2 - 1


def mask_overlaps(
    masks: Masks,
    truth: Tensor,
    detections: Sequence[Tensor],
    labels: Sequence[Tensor],
) -> list[Tensor]:
    """IoU of the masks of labels and of detections, for each image float32 `[m, n]`; 0 where no label has the class.

    Args:
        masks: of the detections.
        truth: of all labels, in the order of the images, bool `[sum of m, H / 4, W / 4]`.
        detections: for each image `[n, 6]`.
        labels: for each image `[m, 5]`, the class first.

    Raises:
        InputError: the prototypes are of another size than the labels' masks.
    """
    if tuple(truth.shape[1:]) != masks.grid:
        problem = "prototypes of {}x{} do not fit an input of {}x{}".format(*masks.grid, *masks.size)
        raise InputError(f"{problem}; expected one of {MASK_STRIDE} pixels in each direction")
    counts = [len(image_labels) for image_labels in labels]
    truths = truth.to(masks.source.device).flatten(1).float().split(counts)
    overlaps = []
    for image, (rows, image_labels, image_truth) in enumerate(zip(detections, labels, truths, strict=True)):
        overlap = rows.new_zeros((len(image_labels), len(rows)))
        has_labels = torch.isin(rows[:, 5], image_labels[:, 0])
        for chosen in _parts(has_labels.nonzero()[:, 0], masks.at_a_time):
            detected = masks.pixels(image, chosen).flatten(1).float()
            overlap[:, chosen] = _mask_iou(image_truth, detected)
        overlaps.append(overlap)
    return overlaps


def _mask_iou(labels: Tensor, detections: Tensor) -> Tensor:
    """IoU of masks of 0 and 1, float32 `[m, pixels]` and `[n, pixels]`: `[m, n]`."""
    shared = labels @ detections.T
    union = labels.sum(1)[:, None] + detections.sum(1)[None] - shared
    return shared / (union + 1e-7)


def _parts(numbers: Tensor, size: int) -> Sequence[Tensor]:
    """Numbers `[n]` in parts of at most `size`; no part where there are none."""
    return numbers.split(size) if len(numbers) else ()


def run_lengths(masks: Masks, image: int, letterbox: Letterbox) -> list[dict[str, Any]]:
    """COCO's `segmentation` of each detection of an image: `size` (height, width) and `counts`, a text."""
    from pycocotools import mask as coco_mask

    segmentations = []
    for pixels in image_pixels(masks, image, letterbox):
        planes = np.asfortranarray(pixels.transpose(1, 2, 0))
        for encoded in coco_mask.encode(planes):
            segmentations.append({"size": list(encoded["size"]), "counts": encoded["counts"].decode("ascii")})
    return segmentations


def image_pixels(masks: Masks, image: int, letterbox: Letterbox) -> Iterator[np.ndarray]:
    """Masks of an image's detections in its own pixels, a few at a time: uint8 `[n, H, W]` of 0 and 1.

    As upstream does it: made at the input's size, without the padding, then resized bilinearly.
    """
    height, width = letterbox.original
    left, top = letterbox.pad
    rows = slice(int(top), int(masks.size[0] - top))
    columns = slice(int(left), int(masks.size[1] - left))
    numbers = torch.arange(len(masks.boxes[image]), device=masks.source.device)
    for part in _parts(numbers, RESIZED_TOGETHER):
        inside = masks.pixels(image, part, masks.size)[:, rows, columns]
        planes = np.ascontiguousarray(inside.permute(1, 2, 0).to(torch.uint8).cpu().numpy())
        resized = cv2.resize(planes, (width, height)).reshape(height, width, len(part))
        yield resized.transpose(2, 0, 1)


@dataclass(frozen=True)
class Patch:
    """A part of an image.

    Attributes:
        left, top: its first pixel.
        inside: the pixels that belong to a mask, bool `[h, w]`.
    """

    left: int
    top: int
    inside: np.ndarray


def patches(
    masks: Masks,
    image: int,
    chosen: Tensor,
    letterbox: Letterbox,
) -> Iterator[Patch]:
    """Masks of some of an image's detections for drawing, one after the other, each within its box.

    The mask's values are resized bilinearly to the pixels of its box in the image, and only there compared with one
    half: so edges are smooth also in an image that is larger than the input. The box is without its second corner, as
    on the grid.

    Args:
        chosen: indices of the image's detections, int64 `[n]`.
    """
    ratio_y, ratio_x = letterbox.ratio
    pad_x, pad_y = letterbox.pad
    boxes = masks.boxes[image][chosen]
    owner = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
    places = boxes_to_image(boxes, owner, [letterbox]).ceil().int().tolist()
    whole_input = boxes.new_tensor([0, 0, masks.size[1], masks.size[0]])
    for number, box, (left, top, right, bottom) in zip(chosen, boxes, places, strict=True):
        height = max(bottom - top, 0)
        width = max(right - left, 0)
        origin = boxes.new_tensor([left * ratio_x + int(pad_x), top * ratio_y + int(pad_y)] * 2)
        # the patch in coordinates of the input, with its first pixel at 0; the frame is the place of the mask's values
        frame = (box if masks.framed else whole_input) - origin
        size = (height * ratio_y, width * ratio_x)
        shares = pasted(masks.shares(image, number[None]), frame[None], size, (height, width))
        yield Patch(left, top, (shares[0] > 0.5).cpu().numpy())
