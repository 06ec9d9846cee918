"""Masks as a network with NMS inside gives them: pasted pixel by pixel in NumPy, and beside sums of prototypes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision

from utils.core.errors import InputError
from utils.core.tasks import Prediction
from utils.evaluation.masks import Masks, image_pixels, pasted
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


def predicted() -> tuple[Prediction, list[torch.Tensor]]:
    """Smooth prototypes, for one image and another that shows nothing."""
    random = torch.Generator().manual_seed(3)
    middle = torch.rand(2, 2, 30, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    size = torch.rand(2, 2, 30, generator=random) * 30 + 8
    scores = torch.rand(2, 3, 30, generator=random) ** 2
    raw = torch.cat([middle, size, scores, torch.randn(2, 6, 30, generator=random)], 1)
    raw[1, 4:7] = 0
    maps = torch.nn.functional.interpolate(torch.randn(2, 6, 4, 5, generator=random), GRID, mode="bicubic")
    found = Prediction(raw, maps)
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
    given = Masks.from_model(framed_by_roi_align(found, rows, 64), numbers, boxes, SIZE)
    sums = Masks.of(found, rows, SIZE)
    everything = torch.arange(len(rows[0]))
    one, other = (masks.pixels(0, everything) for masks in (given, sums))
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
    given = Masks.from_model(whole, numbers, [one[:, :4] for one in rows], SIZE)
    assert not given.framed
    assert given.grid == GRID
    masks = Masks.of(found, rows, SIZE)
    everything = torch.arange(len(rows[0]))
    assert torch.equal(*(one.pixels(0, everything) for one in (given, masks)))
    wide, sums = (replace(one, upsampled=True).pixels(0, everything) for one in (given, masks))
    assert wide.shape[1:] == SIZE
    assert (wide != sums).float().mean() < 0.02


@pytest.mark.parametrize("count", [0, 99])
def test_masks_that_are_no_square(count: int):
    with pytest.raises(InputError, match=rf"masks are \[1, 5, {count}\]; expected \[batch, detections, R \* R\]"):
        Masks.from_model(torch.zeros(1, 5, count), [torch.arange(5)], [BOXES], SIZE)
