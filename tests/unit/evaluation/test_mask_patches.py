"""Masks in the pixels of images, against torch's own bilinear sampling and pixel by pixel."""

import numpy as np
import pytest
import torch

from utils.evaluation.letterbox import placed
from utils.evaluation.masks import Masks, patches

SIZE, GRID, COEFFICIENTS = (96, 128), (24, 32), 6
PLACES = [(14.2, 20.7, 80.3, 70.0), (-20.0, -9.0, 60.5, 50.5), (70.1, 40.0, 300.0, 200.0), (3.0, 2.0, 125.0, 90.0)]


def made(boxes, seed=0):
    """Smooth masks of one image: as many detections as there are boxes, in pixels of the input."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, COEFFICIENTS, 7, 9, generator=random) * 2
    prototypes = torch.nn.functional.interpolate(coarse, GRID, mode="bicubic")
    coefficients = torch.randn(len(boxes), COEFFICIENTS, generator=random)
    return Masks(prototypes, (coefficients,), (torch.tensor(boxes, dtype=torch.float32).view(-1, 4),), SIZE)


def probability(masks, number, box):
    """The sigmoid of a mask's sum at the middles of the image's pixels, float64 `[H, W]`, sampled by torch."""
    height, width = box.original
    left, top = (np.floor(pad) for pad in box.pad)  # where it lies
    x = ((np.arange(width) + 0.5) * box.ratio[1] + left) / SIZE[1] * 2 - 1
    y = ((np.arange(height) + 0.5) * box.ratio[0] + top) / SIZE[0] * 2 - 1
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), 2))[None]
    sums = torch.einsum("k,khw->hw", masks.picks[0][number].double(), masks.source[0].double())
    sampled = torch.nn.functional.grid_sample(
        sums.sigmoid()[None, None], grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    return sampled[0, 0].numpy()


@pytest.mark.parametrize("original", [(96, 128), (240, 320), (41, 55), (100, 90), (31, 128), (97, 60)])
def test_masks_are_the_bilinear_sigmoid_above_one_half_in_their_boxes(original):
    masks = made(PLACES)
    height, width = original
    box = placed(original, SIZE, SIZE)
    chosen = torch.tensor([2, 0, 3])
    found = list(patches(masks, 0, chosen, box.shapes))
    assert len(found) == 3
    filled = 0
    for patch, number in zip(found, chosen.tolist(), strict=True):
        ours = np.zeros(original, bool)
        h, w = patch.inside.shape
        assert ours[patch.top : patch.top + h, patch.left : patch.left + w].shape == (h, w)
        ours[patch.top : patch.top + h, patch.left : patch.left + w] = patch.inside
        share = probability(masks, number, box)
        x1, y1, x2, y2 = (
            (value - box.pad[axis % 2]) / box.ratio[1 - axis % 2] for axis, value in enumerate(PLACES[number])
        )
        for y in range(height):
            for x in range(width):
                if abs(share[y, x] - 0.5) > 1e-4:
                    inside = share[y, x] > 0.5 and x1 <= x < x2 and y1 <= y < y2
                    assert ours[y, x] == inside, (number, x, y)
        filled += ours.mean()
    assert 0.1 < filled < 2.0


def test_a_box_between_two_pixels_has_an_empty_mask_and_no_box_has_none():
    masks = made([(10.2, 10.2, 10.8, 40.0), (50.0, 20.0, 50.0, 20.0)])
    shapes = ((96, 128), ((1.0, 1.0), (0.0, 0.0)))
    assert [patch.inside.any() for patch in patches(masks, 0, torch.arange(2), shapes)] == [False, False]
    assert list(patches(made([]), 0, torch.arange(0), shapes)) == []


def test_masks_in_frames_are_stretched_over_their_boxes():
    random = torch.Generator().manual_seed(1)
    shares = torch.nn.functional.interpolate(torch.rand(1, 6, 5, 5, generator=random), (20, 20), mode="bilinear")
    boxes, numbers = torch.tensor(PLACES), torch.tensor([5, 2, 0, 1])
    masks = Masks.from_model(shares.flatten(2), [numbers], [boxes], SIZE)
    shapes = ((192, 256), ((0.5, 0.5), (0.0, 0.0)))
    for place, patch in enumerate(patches(masks, 0, torch.arange(4), shapes)):
        y, x = np.indices(patch.inside.shape) + 0.5
        x, y = (x + patch.left) * 0.5, (y + patch.top) * 0.5  # in the input
        x1, y1, x2, y2 = PLACES[place]
        where = torch.from_numpy(np.stack([(x - x1) / (x2 - x1) * 2 - 1, (y - y1) / (y2 - y1) * 2 - 1], 2))[None]
        values = shares[:, numbers[place], None].double()
        found = torch.nn.functional.grid_sample(values, where, padding_mode="border", align_corners=False)[0, 0].numpy()
        certain = np.abs(found - 0.5) > 1e-4
        np.testing.assert_array_equal(patch.inside[certain], found[certain] > 0.5)
        assert certain.mean() > 0.99
        assert patch.inside.any()
