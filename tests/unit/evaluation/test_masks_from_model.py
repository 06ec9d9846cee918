"""Masks as a network with NMS inside gives them: pasted pixel by pixel in NumPy, and beside sums of prototypes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torchvision

from utils.core.errors import InputError
from utils.core.tasks import Layout, Prediction
from utils.evaluation.batch import PackedMasks
from utils.evaluation.masks import Masks, MasksFromModel, image_pixels, mask_overlaps, pasted
from utils.evaluation.nms import non_max_suppression

SIZE, GRID, SIDE = (48, 64), (12, 16), 10
BOXES = torch.tensor([[3.0, 5, 40, 30], [-9, -4, 20, 60], [30.2, 10.1, 30.9, 45], [12, 12, 12, 12], [50, 40, 90, 70]])


def looked_up(share: np.ndarray, box: list[float], size: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """One mask, a pixel of the grid after the other."""
    found = np.zeros(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            place = []
            for index, cells, pixels, low, high in (
                (row, grid[0], size[0], box[1], box[3]), (column, grid[1], size[1], box[0], box[2])
            ):  # fmt: skip
                middle = (index + 0.5) * pixels / cells
                place.append(min(max((middle - low) / (high - low) * len(share) - 0.5, 0), len(share) - 1))
            top, left = (min(math.floor(value), len(share) - 2) for value in place)
            down, right = place[0] - top, place[1] - left
            found[row, column] = (
                share[top, left] * (1 - down) * (1 - right) + share[top, left + 1] * (1 - down) * right
                + share[top + 1, left] * down * (1 - right) + share[top + 1, left + 1] * down * right
            )  # fmt: skip
    return found


def shares(count: int = 5, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, count, SIDE * SIDE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grid", [GRID, SIZE])
def test_masks_in_boxes_are_pasted_pixel_by_pixel(grid: tuple[int, int]):
    found = pasted(shares()[0].unflatten(1, (SIDE, SIDE)), BOXES, SIZE, grid)
    assert found.shape == (5, *grid)
    for index, box in enumerate(BOXES.tolist()):
        if box[0] < box[2]:
            expected = looked_up(shares()[0, index].view(SIDE, SIDE).double().numpy(), box, SIZE, grid)
            np.testing.assert_allclose(found[index], expected, atol=1e-4)
    assert found.isfinite().all()


@pytest.mark.parametrize("upsampled", [False, True])
def test_pixels_are_above_a_half_and_inside_the_box(upsampled: bool):
    given = MasksFromModel.of(shares(), [torch.tensor([4, 0, 2])], [BOXES[[4, 0, 2]]], SIZE, upsampled=upsampled)
    assert given.framed
    assert given.grid == (SIZE if upsampled else GRID)
    found = given.pixels(torch.tensor([0]), torch.tensor([[1, 2, 0, -1]]))[0].numpy()
    for mask, index in zip(found, (0, 2, 4), strict=False):
        box = BOXES[index].tolist()
        whole = looked_up(shares()[0, index].view(SIDE, SIDE).double().numpy(), box, SIZE, given.grid) > 0.5
        rows, columns = np.indices(given.grid)
        scale = SIZE[0] / given.grid[0]
        whole &= (rows >= box[1] / scale) & (rows < box[3] / scale)
        whole &= (columns >= box[0] / scale) & (columns < box[2] / scale)
        assert (mask != whole).mean() < 0.002  # at one half itself
    assert found[0].any()
    assert not found[3].any()


def predicted() -> tuple[Prediction, list[torch.Tensor]]:
    """Smooth prototypes, for one image and another that shows nothing."""
    random = torch.Generator().manual_seed(3)
    middle = torch.rand(2, 2, 30, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    size = torch.rand(2, 2, 30, generator=random) * 30 + 8
    scores = torch.rand(2, 3, 30, generator=random) ** 2
    raw = torch.cat([middle, size, scores, torch.randn(2, 6, 30, generator=random)], 1)
    raw[1, 4:7] = 0
    maps = torch.nn.functional.interpolate(torch.randn(2, 6, 4, 5, generator=random), GRID, mode="bicubic")
    found = Prediction(raw, Layout(3, 6), maps)
    return found, non_max_suppression(found, 0.3, 0.6)


def framed_by_roi_align(found: Prediction, rows: list[torch.Tensor], side: int) -> torch.Tensor:
    """What a network with these predictions gives, in another order than best first."""
    masks = torch.zeros(2, 40, side * side)
    maps = torchvision.ops.roi_align(found.prototypes[:1], [rows[0][:, :4]], side, 0.25, 1, aligned=True)
    sums = torch.einsum("nk,nkhw->nhw", found.coefficients[0][:, rows[0][:, 6].long()].T, maps)
    masks[0, torch.arange(len(rows[0])).flip(0)] = sums.sigmoid().flatten(1)
    return masks


def test_masks_in_boxes_are_nearly_the_sums_of_prototypes():
    found, rows = predicted()
    numbers = [torch.arange(len(one)).flip(0) for one in rows]
    boxes = [one[:, :4] for one in rows]
    given = MasksFromModel.of(framed_by_roi_align(found, rows, 64), numbers, boxes, SIZE, upsampled=False)
    sums = Masks.of(found, rows, SIZE)
    everything = torch.arange(len(rows[0]))[None]
    one, other = (masks.pixels(torch.tensor([0]), everything) for masks in (given, sums))
    assert len(rows[0]) > 8
    assert other.float().mean() > 0.05
    assert (one != other).float().mean() < 0.01
    pictures = [
        np.concatenate(list(image_pixels(masks, 0, ((96, 128), ((0.5, 0.5), (0.0, 0.0)))))) for masks in (given, sums)
    ]
    assert pictures[0].shape == (len(rows[0]), 96, 128)
    assert (pictures[0] != pictures[1]).mean() < 0.01


def test_masks_on_the_grid_are_the_sums_of_prototypes():
    found, rows = predicted()
    numbers = [torch.arange(len(one)).flip(0) for one in rows]
    sums = torch.einsum("nk,khw->nhw", found.coefficients[0][:, rows[0][:, 6].long()].T, found.prototypes[0])
    whole = torch.zeros(2, 40, *GRID)
    whole[0, numbers[0]] = sums.sigmoid()  # not cropped: the loop crops
    given = MasksFromModel.of(whole, numbers, [one[:, :4] for one in rows], SIZE, upsampled=False)
    assert not given.framed
    assert given.grid == GRID
    masks = Masks.of(found, rows, SIZE)
    everything = torch.arange(len(rows[0]))[None]
    assert torch.equal(*(one.pixels(torch.tensor([0]), everything) for one in (given, masks)))
    labels = [rows[0][::2, [5, 0, 1, 2, 3]], torch.zeros(0, 5)]
    truth = PackedMasks.pack(masks.pixels(torch.tensor([0]), everything[:, ::2])[0].numpy())
    expected = mask_overlaps(masks, truth, rows, labels)
    for one, other in zip(mask_overlaps(given, truth, rows, labels), expected, strict=True):
        torch.testing.assert_close(one, other)
    wide = given.at_input_size()
    assert wide.grid == SIZE
    pixels = wide.pixels(torch.tensor([0]), everything)
    assert (pixels != masks.at_input_size().pixels(torch.tensor([0]), everything)).float().mean() < 0.02


@pytest.mark.parametrize("count", [0, 99])
def test_masks_that_are_no_square(count: int):
    with pytest.raises(InputError, match=rf"masks are \[1, 5, {count}\]; expected \[batch, detections, R \* R\]"):
        MasksFromModel.of(torch.zeros(1, 5, count), [torch.arange(5)], [BOXES], SIZE, upsampled=False)
