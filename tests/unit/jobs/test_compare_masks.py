"""Masks of two predictions: what differs, against plain loops over pixels."""

import math

import pytest
import torch

from utils.core.tasks import Prediction
from utils.jobs import compare_tensors
from utils.jobs.compare_tensors import BEST, COEFFICIENTS, PIXELS, PROTOTYPES, STEPPED, compare_predictions, together

SIZE = (48, 64)  # height, width of the input: a grid of 12x16


def predicted(seed=0, anchors=30, images=2, nm=5):
    random = torch.Generator().manual_seed(seed)
    centres = torch.rand(images, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    sides = torch.rand(images, 2, anchors, generator=random) * 30 + 4
    scores = torch.rand(images, 3, anchors, generator=random)
    coefficients = torch.randn(images, nm, anchors, generator=random)
    prototypes = torch.randn(images, nm, 12, 16, generator=random)
    return Prediction(torch.cat([centres, sides, scores, coefficients], 1), prototypes)


def changed(one, **parts):
    raw = one.raw.clone()
    if "coefficients" in parts:
        raw[:, 7:] = parts["coefficients"]
    if "boxes" in parts:
        raw[:, :4] = parts["boxes"]
    return Prediction(raw, parts.get("prototypes", one.prototypes))


def pixels_apart(given, expected, anchors):
    """The share of grid pixels in the boxes where the signs of two sums differ, pixel by pixel."""
    different = total = 0
    for image, chosen in enumerate(anchors.tolist()):
        for anchor in chosen:
            x, y, width, height = expected.boxes[image, :, anchor].tolist()
            for row in range(12):
                for column in range(16):
                    if not (x - width / 2 <= 4 * column < x + width / 2 and y - height / 2 <= 4 * row < y + height / 2):
                        continue
                    sums = [
                        float(one.coefficients[image, :, anchor] @ one.prototypes[image, :, row, column])
                        for one in (given, expected)
                    ]
                    different += (sums[0] > 0) != (sums[1] > 0)
                    total += 1
    return different / total


def test_equal_ones():
    one = predicted()
    assert compare_predictions(one, one, SIZE) == dict.fromkeys(("box", "score", COEFFICIENTS, PROTOTYPES, PIXELS), 0.0)
    detector = Prediction(torch.rand(1, 7, 20))
    assert compare_predictions(detector, detector, SIZE) == {"box": 0.0, "score": 0.0}


@pytest.mark.parametrize("part", ["coefficients", "prototypes"])
def test_a_share_of_the_largest_and_of_the_pixels(part, monkeypatch):
    """Of the anchors with the highest scores."""
    monkeypatch.setattr(compare_tensors, "BEST", 11)
    one = predicted()
    noise = torch.randn(getattr(one, part).shape, generator=torch.Generator().manual_seed(9)) * 0.3
    other = changed(one, **{part: getattr(one, part) + noise})
    anchors = one.scores.numpy().max(1).argsort(1)[:, :-12:-1].copy()
    found = compare_predictions(other, one, SIZE)
    if part == "coefficients":
        of_anchors = [torch.stack([v[i][:, anchors[i]] for i in range(2)]) for v in (noise, one.coefficients)]
        expected = (float(of_anchors[0].abs().max() / of_anchors[1].abs().max()), 0.0)
    else:
        expected = (0.0, float(noise.abs().max() / one.prototypes.abs().max()))
    assert (found[COEFFICIENTS], found[PROTOTYPES]) == pytest.approx(expected, rel=1e-5)
    assert found[PIXELS] == pytest.approx(pixels_apart(other, one, anchors), rel=1e-6)
    assert found[PIXELS] > 0.01


def test_both_are_cropped_to_the_same_boxes_and_opposite_masks_differ_everywhere():
    one = predicted(anchors=BEST)
    smaller = compare_predictions(changed(one, boxes=one.boxes * 0.5), one, SIZE)
    assert (smaller["box"], smaller[PIXELS]) == (one.boxes.max() / 2, 0)
    assert compare_predictions(changed(one, prototypes=-one.prototypes), one, SIZE)[PIXELS] == 1


def test_nan_stays_nan_and_zeros_are_no_division():
    one = predicted()
    spoiled = one.prototypes.clone()
    spoiled[1, 2, 3, 4] = math.nan
    found = compare_predictions(changed(one, prototypes=spoiled), one, SIZE)
    assert math.isnan(found[PROTOTYPES])
    assert math.isnan(together([{PROTOTYPES: 0.0}, found])[PROTOTYPES])
    dark = changed(one, prototypes=torch.zeros_like(one.prototypes))
    assert compare_predictions(dark, dark, SIZE)[PROTOTYPES] == 0


def test_shares_of_parts_are_averaged():
    parts = [{"box": 0.1, PIXELS: 0.2, STEPPED: 0.0}, {"box": 0.4, PIXELS: 0.4, STEPPED: 0.2}]
    assert together(parts) == {"box": 0.4, PIXELS: pytest.approx(0.3), STEPPED: 0.1}
    assert together([]) == {}
