"""Letterboxing, and boxes on the way there and back."""

import numpy as np
import pytest
import torch
from known_images import MIXED

from utils.evaluation.letterbox import (
    boxes_to_image,
    letterboxed_planes,
    placed,
    rectangular_shapes,
)


@pytest.mark.parametrize("size", [*MIXED, (640, 427), (333, 500)])
def test_letterbox_centres_the_image_on_grey(size):
    image = np.full((size[1], size[0], 3), 255, np.uint8)
    planes, box = letterboxed_planes(image, (64, 64), (96, 64))
    assert planes.shape == (3, 96, 64)
    assert planes.flags.c_contiguous
    rows, columns = np.where((planes != 114).all(0))
    assert columns.max() - columns.min() + 1 == round(box.ratio[1] * size[0])
    assert rows.max() - rows.min() + 1 == round(box.ratio[0] * size[1])
    assert abs(columns.min() - box.pad[0]) <= 0.5
    assert abs(rows.min() - box.pad[1]) <= 0.5
    assert max(box.ratio[0] * size[1], box.ratio[1] * size[0]) == pytest.approx(64, abs=1)


def test_letterbox_keeps_the_pixels_of_a_image_that_fits():
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    planes, box = letterboxed_planes(image, (64, 64), (64, 64))
    np.testing.assert_array_equal(planes[:, 8:56], image[..., ::-1].transpose(2, 0, 1))
    assert box.shapes == ((48, 64), ((1.0, 1.0), (0.0, 8.0)))


def test_letterbox_into_a_rectangle_that_the_network_prescribes():
    """A static 32×64 input: the height decides for this image, and not the longer side."""
    image = np.full((50, 60, 3), 255, np.uint8)
    planes, box = letterboxed_planes(image, (32, 64), (32, 64))
    assert planes.shape == (3, 32, 64)
    assert box.ratio == pytest.approx((0.64, 38 / 60))


def test_boxes_to_the_input_and_back():
    rng = np.random.default_rng(0)
    boxes, shapes, owner, expected = [], [], [], []
    for index, (width, height) in enumerate(MIXED):
        box = placed((height, width), (64, 64), (64, 96))
        fractions = np.concatenate([rng.uniform(0.3, 0.7, (3, 2)), rng.uniform(0, 0.3, (3, 2))], 1).astype(np.float32)
        shapes.append(box.shapes)
        owner += [index] * 3
        middle, half = fractions[:, :2], fractions[:, 2:] / 2
        corners = np.concatenate([middle - half, middle + half], 1)
        boxes.append((corners * np.tile([width * box.ratio[1], height * box.ratio[0]], 2) + box.pad * 2).astype("f"))
        expected.append(corners * [width, height, width, height])
    found = boxes_to_image(torch.from_numpy(np.concatenate(boxes)), torch.tensor(owner), shapes)
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), atol=1e-3)


def test_boxes_are_clipped_to_the_image():
    shapes = [((20, 40), ((1.0, 1.0), (0.0, 10.0)))]
    found = boxes_to_image(torch.tensor([[-5.0, 0.0, 50.0, 100.0]]), torch.tensor([0]), shapes)
    assert found.tolist() == [[0, 0, 40, 20]]


def test_rectangular_shapes_are_the_smallest_that_hold_the_group():
    assert rectangular_shapes([(640, 480)] * 3, 640, 32, 0) == [(480, 640)] * 3
    assert rectangular_shapes([(320, 320)], 320, 32, 0.5) == [(352, 352)]  # val.py's border
    assert rectangular_shapes([(100, 50), (50, 100)], 64, 32, 0) == [(64, 64)] * 2  # wide and tall in one group
    wide, tall = [(100, 50)] * 32, [(50, 100)] * 32
    assert set(rectangular_shapes(tall + wide, 64, 32, 0)[:32]) == {(64, 32)}
    for (width, height), shape in zip(MIXED, rectangular_shapes(MIXED, 64, 32, 0.5), strict=True):
        assert shape[0] >= int(height * 64 / max(width, height))
        assert shape[1] >= int(width * 64 / max(width, height))
