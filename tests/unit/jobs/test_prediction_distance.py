"""The distance of predictions with masks; that of boxes is tested with the sensitivity analysis that uses it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from utils.core.tasks import DETECT, Layout, Prediction, prediction_of
from utils.jobs.sensitivity import prediction_distance
from utils.jobs.sensitivity.prediction_distance import distance

CLASSES, COEFFICIENTS, SIZE = 3, 5, (48, 64)


def prediction(anchors=150, seed=0):
    random = torch.Generator().manual_seed(seed)
    middle = torch.rand(2, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    size = torch.rand(2, 2, anchors, generator=random) * 30 + 4
    scores = torch.rand(2, CLASSES, anchors, generator=random) ** 3
    coefficients = torch.randn(2, COEFFICIENTS, anchors, generator=random)
    raw = torch.cat([middle, size, scores, coefficients], 1)
    return Prediction(raw, Layout(CLASSES, COEFFICIENTS), torch.randn(2, COEFFICIENTS, 12, 16, generator=random))


def changed(found, rows, by):
    raw = found.raw.clone()
    raw[:, rows] += by
    return replace(found, raw=raw)


def mask_distance(reference, other):
    """In NumPy, anchor by anchor and pixel by pixel."""
    total = 0.0
    for image in range(len(reference.raw)):
        scores = np.maximum(reference.scores[image].numpy(), other.scores[image].numpy()).max(0)
        for anchor in np.argsort(-scores)[:100]:
            cx, cy, w, h = (float(value) for value in reference.boxes[image, :, anchor])
            masks = []
            for one in (reference, other):
                sums = np.einsum("k,khw->hw", one.coefficients[image, :, anchor], one.prototypes[image])
                masks.append(1 / (1 + np.exp(-sums)))
            low = high = 0.0
            for y in range(12):
                for x in range(16):
                    if cx - w / 2 <= 4 * x < cx + w / 2 and cy - h / 2 <= 4 * y < cy + h / 2:
                        low += min(mask[y, x] for mask in masks)
                        high += max(mask[y, x] for mask in masks)
            total += scores[anchor] ** 3 * (1 - (low + 1e-6) / (high + 1e-6))
    return total


@pytest.mark.parametrize("rows", [slice(7, 12), slice(0, 2), slice(4, 7)])  # coefficients, boxes, scores
def test_it_is_that_of_boxes_and_scores_and_what_masks_add(rows):
    reference = prediction()
    random = torch.Generator().manual_seed(3)
    by = torch.rand(reference.raw[:, rows].shape, generator=random) * 0.3
    other = changed(reference, rows, by)
    plain, plain_other = (prediction_of(DETECT, torch.cat([one.boxes, one.scores], 1)) for one in (reference, other))
    expected = float(distance(plain, plain_other, SIZE)) + mask_distance(reference, other)
    assert float(distance(reference, other, SIZE)) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1


def test_only_what_lies_in_the_box_counts_and_prototypes_do(monkeypatch):
    reference = prediction(1)
    reference.raw[:, :4] = torch.tensor([8.0, 8.0, 16.0, 16.0])[:, None]  # the first 4 by 4 pixels of the grid
    reference.raw[:, 4:7] = 0.9
    outside = replace(reference, prototypes=reference.prototypes.clone())
    outside.prototypes[:, :, 4:] += 3.0
    outside.prototypes[:, :, :, 4:] -= 3.0
    assert float(distance(reference, outside, SIZE)) < 1e-5
    inside = replace(reference, prototypes=reference.prototypes.clone())
    inside.prototypes[:, :, :4, :4] += 1.0
    assert float(distance(reference, inside, SIZE)) > 0.05
    monkeypatch.setattr(prediction_distance, "BEST", 0)
    assert float(distance(reference, inside, SIZE)) < 1e-5
