"""Letterboxing, and boxes on the way there and back."""

import numpy as np
import pytest
import torch
from known_images import MIXED

from utils.evaluation.letterbox import Letterbox, boxes_to_image, letterboxed_planes, rectangular_shapes


@pytest.mark.parametrize("size", [*MIXED, (640, 427), (333, 500)])
def test_letterbox_centres_the_image_on_grey(size):
    image = np.full((size[1], size[0], 3), 255, np.uint8)
    planes, box = letterboxed_planes(image, (64, 64), (96, 64))
    assert planes.shape == (3, 96, 64)
    assert planes.flags.c_contiguous
    rows, columns = np.where((planes != 114).all(0))
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == box.resized
    assert (columns.min(), rows.min()) == tuple(np.ceil(np.array(box.pad) - 0.5))  # halves further left and up
    assert max(box.resized) == pytest.approx(64, abs=1)


def test_letterbox_keeps_the_pixels_of_a_image_that_fits():
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    planes, box = letterboxed_planes(image, (64, 64), (64, 64))
    np.testing.assert_array_equal(planes[:, 8:56], image[..., ::-1].transpose(2, 0, 1))
    assert box == Letterbox((48, 64), (48, 64), (0.0, 8.0))


def test_letterbox_into_a_rectangle_that_the_network_prescribes():
    """A static 32×64 input: the height decides for this image, and not the longer side."""
    box = Letterbox.of((50, 62), (32, 64), (32, 64))
    assert box == Letterbox((50, 62), (32, 39), (12.5, 0.0))  # 39.68, truncated
    assert box.ratio == (0.64, 39 / 62)
    assert Letterbox.of((2, 4000), (64, 64), (64, 64)).resized == (1, 64)


def test_boxes_to_the_image_by_hand():
    """Two images of other ratios for height and width; what lies outside of an image is clipped."""
    boxes = torch.tensor([[-5.0, 0, 50, 100], [7, 16, 23, 32], [4, 8, 5, 10]])
    letterboxes = [Letterbox((20, 40), (20, 40), (0.0, 10.0)), Letterbox((10, 20), (20, 60), (2.0, 6.0))]
    found = boxes_to_image(boxes, torch.tensor([0, 0, 1]), letterboxes)
    np.testing.assert_allclose(found, [[0, 0, 40, 20], [7, 6, 23, 20], [2 / 3, 1, 1, 2]], rtol=1e-6)


def test_rectangular_shapes_are_the_smallest_that_hold_the_group():
    """With half a stride of 32 as a border."""
    assert rectangular_shapes([(640, 480)] * 3, 640, 32) == [(512, 672)] * 3
    assert rectangular_shapes([(100, 50), (50, 100)], 64, 32) == [(96, 96)] * 2  # wide and tall in one group
    wide, tall = [(100, 50)] * 32, [(50, 100)] * 32
    assert rectangular_shapes(tall + wide, 64, 32) == [(96, 64)] * 32 + [(64, 96)] * 32
    for (width, height), shape in zip(MIXED, rectangular_shapes(MIXED, 64, 32), strict=True):
        assert shape[0] >= int(height * 64 / max(width, height))
        assert shape[1] >= int(width * 64 / max(width, height))
