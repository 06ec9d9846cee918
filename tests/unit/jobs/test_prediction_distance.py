"""The distance of predictions, against NumPy and torchvision, anchor by anchor and pixel by pixel."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.ops import box_convert, box_iou

from utils.core.tasks import Prediction
from utils.jobs.sensitivity.prediction_distance import distance, weight

CLASSES, COEFFICIENTS, SIZE = 3, 5, (48, 64)


def prediction(anchors=150, seed=0):
    random = torch.Generator().manual_seed(seed)
    middle = torch.rand(2, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    size = torch.rand(2, 2, anchors, generator=random) * 30 + 4
    scores = torch.rand(2, CLASSES, anchors, generator=random) ** 3
    coefficients = torch.randn(2, COEFFICIENTS, anchors, generator=random)
    raw = torch.cat([middle, size, scores, coefficients], 1)
    return Prediction(raw, torch.randn(2, COEFFICIENTS, 12, 16, generator=random))


def changed(found, rows, by):
    raw = found.raw.clone()
    raw[:, rows] += by
    return replace(found, raw=raw)


def box_distance(reference, other):
    """What boxes and scores differ by, where a score is above 0.001."""
    total = 0.0
    for image in range(len(reference.raw)):
        boxes = [box_convert(one.boxes[image].T, "cxcywh", "xyxy") for one in (reference, other)]
        overlaps = box_iou(*boxes).diagonal().numpy()
        ours, theirs = (one.scores[image].numpy() for one in (reference, other))
        for anchor in range(ours.shape[1]):
            scores = [max(pair) for pair in zip(ours[:, anchor], theirs[:, anchor], strict=True)]
            scores = [score if score > 0.001 else 0.0 for score in scores]
            total += max(scores) ** 3 * (1 - overlaps[anchor])
            total += 0.1 * sum(np.square(scores) * np.abs(ours[:, anchor] - theirs[:, anchor]))
    return total


def mask_distance(reference, other):
    """What the masks of the hundred best anchors of an image differ by inside the float network's boxes."""
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
    other = changed(reference, rows, torch.rand(reference.raw[:, rows].shape, generator=random) * 0.3)
    both = [Prediction(torch.cat([one.boxes, one.scores], 1)) for one in (reference, other)]
    expected = box_distance(*both)
    assert float(distance(*both, SIZE)) == pytest.approx(expected, rel=1e-4, abs=1e-3)
    expected += mask_distance(reference, other)
    assert float(distance(reference, other, SIZE)) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1


def test_its_scale_is_that_of_no_box_in_its_place():
    plain = Prediction(prediction().raw[:, :7])
    assert float(distance(plain, changed(plain, slice(0, 4), 1000), SIZE) / weight(plain)) == pytest.approx(1, abs=0.01)


def test_only_what_lies_in_the_box_counts_and_prototypes_do():
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
