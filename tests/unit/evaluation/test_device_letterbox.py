"""Letterboxing with torch's operators, beside OpenCV's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from utils.evaluation.letterbox import letterbox, letterbox_on

CPU = torch.device("cpu")


def picture(height, width):
    """Soft and hard edges, another pattern in each channel."""
    generator = np.random.default_rng(height + width)
    image = generator.integers(0, 256, (height, width, 3), np.uint8)
    image[: height // 2] = np.linspace(0, 255, width).astype(np.uint8)[None, :, None] // np.array([1, 2, 3], np.uint8)
    return image


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ((480, 640), (640, 640)),  # as it is, with bars
        ((1080, 1920), (640, 640)),  # smaller, by no whole number
        ((1280, 960), (640, 640)),  # smaller, by two
        ((100, 70), (640, 640)),  # larger
        ((333, 500), (320, 416)),
        ((3, 500), (64, 64)),  # a row is left of it
        ((1, 1), (32, 64)),
    ],
)
def test_pixels_and_places_are_opencvs(size, shape):
    image = picture(*size)
    expected, box = letterbox(image, shape, shape)
    found, same = letterbox_on(image, shape, CPU)
    assert (same, found.shape, found.dtype) == (box, (1, 3, *shape), torch.uint8)
    apart = np.abs(found[0].permute(1, 2, 0).numpy()[..., ::-1].astype(int) - expected)
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.1
    top, left = (round(side - 0.1) for side in box.pad[::-1])
    inside = np.zeros(shape, bool)
    inside[top : top + box.resized[0], left : left + box.resized[1]] = True
    assert (found[0].numpy().transpose(1, 2, 0)[~inside] == 114).all()
