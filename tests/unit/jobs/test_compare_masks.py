"""Masks of two predictions: what differs, against plain loops over pixels."""

import math

import pytest
import torch

from utils.core.tasks import Layout, Prediction
from utils.jobs.compare_tensors import BEST, MaskAgreement, compare_masks, topk_anchors

SIZE = (48, 64)  # height, width of the input: a grid of 12x16


def predicted(seed=0, anchors=30, images=2, nm=5):
    random = torch.Generator().manual_seed(seed)
    centres = torch.rand(images, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    sides = torch.rand(images, 2, anchors, generator=random) * 30 + 4
    scores = torch.rand(images, 3, anchors, generator=random)
    coefficients = torch.randn(images, nm, anchors, generator=random)
    prototypes = torch.randn(images, nm, 12, 16, generator=random)
    return Prediction(torch.cat([centres, sides, scores, coefficients], 1), Layout(3, nm), prototypes)


def changed(one, **parts):
    raw = one.raw.clone()
    if "coefficients" in parts:
        raw[:, 7:] = parts["coefficients"]
    if "boxes" in parts:
        raw[:, :4] = parts["boxes"]
    return Prediction(raw, one.layout, parts.get("prototypes", one.prototypes))


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
    assert compare_masks(one, one, topk_anchors(one), SIZE) == MaskAgreement(0.0, 0.0, 0.0)


@pytest.mark.parametrize("part", ["coefficients", "prototypes"])
def test_a_share_of_the_largest_and_of_the_pixels(part):
    one = predicted()
    noise = torch.randn(getattr(one, part).shape, generator=torch.Generator().manual_seed(9)) * 0.3
    other = changed(one, **{part: getattr(one, part) + noise})
    anchors = topk_anchors(one)[:, :11]
    found = compare_masks(other, one, anchors, SIZE)
    if part == "coefficients":
        of_anchors = [torch.stack([v[i][:, anchors[i]] for i in range(2)]) for v in (noise, one.coefficients)]
        expected = (float(of_anchors[0].abs().max() / of_anchors[1].abs().max()), 0.0)
    else:
        expected = (0.0, float(noise.abs().max() / one.prototypes.abs().max()))
    assert (found.coefficients, found.prototypes) == pytest.approx(expected, rel=1e-5)
    assert found.pixels == pytest.approx(pixels_apart(other, one, anchors), rel=1e-6)
    assert found.pixels > 0.01


def test_both_are_cropped_to_the_same_boxes():
    one = predicted()
    assert compare_masks(changed(one, boxes=one.boxes * 0.5), one, topk_anchors(one), SIZE).pixels == 0


def test_opposite_masks_differ_everywhere():
    one = predicted()
    assert compare_masks(changed(one, prototypes=-one.prototypes), one, topk_anchors(one), SIZE).pixels == 1


def test_the_best_anchors_are_those_of_the_highest_scores():
    one = predicted(anchors=130)
    for image, chosen in enumerate(topk_anchors(one).tolist()):
        highest = [max(column) for column in one.scores[image].T.tolist()]
        assert sorted(chosen) == sorted(sorted(range(130), key=highest.__getitem__)[-BEST:])


def test_nan_stays_nan_and_zeros_are_no_division():
    one = predicted()
    spoiled = one.prototypes.clone()
    spoiled[1, 2, 3, 4] = math.nan
    found = compare_masks(changed(one, prototypes=spoiled), one, topk_anchors(one), SIZE)
    assert math.isnan(found.prototypes)
    assert math.isnan(MaskAgreement.together([MaskAgreement(0, 0, 0), found]).prototypes)
    dark = changed(one, prototypes=torch.zeros_like(one.prototypes))
    assert compare_masks(dark, dark, topk_anchors(one), SIZE).prototypes == 0


def test_parts_together():
    parts = [MaskAgreement(0.1, 0.4, 0.2), None, MaskAgreement(0.3, 0.2, 0.4)]
    assert MaskAgreement.together(parts) == MaskAgreement(0.3, 0.4, pytest.approx(0.3))
    assert MaskAgreement.together([None]) is None
    assert str(MaskAgreement(0.01, 0.002, 0.0005)) == (
        "mask coefficients by up to 1 %, prototypes by up to 0.2 % of the largest, and masks in 0.05 % of their pixels"
    )


def test_a_detector_has_none():
    one = Prediction.of_boxes(torch.rand(1, 7, 20))
    assert compare_masks(one, one, topk_anchors(one), SIZE) is None
