"""Masks of detections and their overlaps, against NumPy, detection by detection, and pycocotools."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask

from utils.core.errors import InputError
from utils.core.tasks import Prediction
from utils.evaluation import masks as masks_module
from utils.evaluation import nms
from utils.evaluation.masks import Masks, image_pixels, mask_overlaps, run_lengths
from utils.evaluation.nms import non_max_suppression

SIZE, GRID, CLASSES, COEFFICIENTS = (48, 64), (12, 16), 3, 6
SHAPES = ((96, 128), ((0.5, 0.5), (0.0, 0.0)))  # the original has twice the input's pixels


def prediction(batch=3, anchors=40, seed=0):
    random = torch.Generator().manual_seed(seed)
    middle = torch.rand(batch, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    size = torch.rand(batch, 2, anchors, generator=random) * 30 + 8
    scores = torch.rand(batch, CLASSES, anchors, generator=random) ** 2
    coefficients = torch.randn(batch, COEFFICIENTS, anchors, generator=random)
    raw = torch.cat([middle, size, scores, coefficients], 1)
    return Prediction(raw, torch.randn(batch, COEFFICIENTS, *GRID, generator=random))


def detected(batch=3):
    found = prediction(batch)
    rows = non_max_suppression(found, 0.3, 0.6)
    return found, rows, Masks.of(found, rows, SIZE)


def plain_mask(found, image, row, upsampled=False):
    """The mask of one row of NMS, without any batching: sum, sigmoid, then cropped."""
    sums = np.einsum("k,khw->hw", found.coefficients[image, :, int(row[6])].numpy(), found.prototypes[image].numpy())
    share = torch.from_numpy(1 / (1 + np.exp(-sums.astype(np.float64))))
    scale = 1 if upsampled else 4
    if upsampled:
        share = torch.nn.functional.interpolate(share[None, None], SIZE, mode="bilinear", align_corners=False)[0, 0]
    x1, y1, x2, y2 = (float(value) / scale for value in row[:4])
    y, x = np.mgrid[: share.shape[0], : share.shape[1]]
    return (share.numpy() > 0.5) & (x1 <= x) & (x < x2) & (y1 <= y) & (y < y2)


def test_nms_says_which_anchor_a_detection_comes_from():
    found, rows, _ = detected()
    for image, one in enumerate(rows):
        assert one.shape[1] == 7
        assert len(one) > 5
        for x1, y1, x2, y2, score, label, anchor in one.tolist():
            cx, cy, w, h = found.boxes[image, :, int(anchor)].tolist()
            assert [x1, y1, x2, y2] == pytest.approx([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], abs=1e-4)
            assert score == pytest.approx(float(found.scores[image, int(label), int(anchor)]))


def test_a_detectors_rows_have_no_anchor_and_are_the_same():
    found = prediction()
    plain = Prediction(torch.cat([found.boxes, found.scores], 1))
    assert Masks.of(plain, [], SIZE) is None
    for one, other in zip(non_max_suppression(plain, 0.3, 0.6), non_max_suppression(found, 0.3, 0.6), strict=True):
        assert torch.equal(one, other[:, :6])


def test_all_images_at_once_have_the_same_anchors():
    found = prediction(5)
    expected = non_max_suppression(found, 0.2, 0.5, max_det=7)
    assert all(map(torch.equal, nms.suppress_together(found, 0.2, 0.5, 7, False), expected))


@pytest.mark.parametrize("upsampled", [False, True])
def test_pixels_are_those_of_each_mask_by_itself(upsampled):
    found, rows, masks = detected()
    masks = replace(masks, upsampled=upsampled)
    assert masks.grid == (SIZE if upsampled else GRID)
    for image, one in enumerate(rows):
        inside = masks.pixels(image, torch.arange(len(one)))
        for mask, row in zip(inside, one, strict=True):
            np.testing.assert_array_equal(mask, plain_mask(found, image, row, upsampled))
        assert 0.01 < inside.float().mean() < 0.5


def truth_of(masks, rows, seed=1):
    """Labels of each image, and their masks: those of some detections with errors, and some of a class of no one."""
    random = np.random.default_rng(seed)
    labels, planes = [], []
    for image, one in enumerate(rows):
        chosen = torch.arange(0, len(one), 3) if image != 1 else torch.arange(0)  # the second image shows nothing
        inside = masks.pixels(image, chosen).numpy()
        planes += [mask ^ (random.random(mask.shape) < 0.05) for mask in inside]
        labels.append(torch.cat([one[chosen, 5:6], one[chosen, :4]], 1))
    return labels, planes


@pytest.mark.parametrize("largest", [None, 1, 5000])  # bytes of masks at a time
def test_overlaps_are_pycocotools(monkeypatch, largest):
    monkeypatch.setitem(masks_module.LARGEST, "cpu", largest or masks_module.LARGEST["cpu"])
    found, rows, masks = detected()
    labels, planes = truth_of(masks, rows)
    labels[2] = labels[2][:1].clone()  # detections of other classes are skipped there
    planes = planes[: len(labels[0]) + 1]
    whole = mask_overlaps(masks, torch.from_numpy(np.stack(planes)), rows, labels)
    first = 0
    for image, (one, theirs, overlap) in enumerate(zip(rows, labels, whole, strict=True)):
        assert overlap.shape == (len(theirs), len(one))
        encoded = [
            coco_mask.encode(np.asfortranarray(np.stack(parts, 2).astype(np.uint8))) if len(parts) else []
            for parts in (planes[first : first + len(theirs)], [plain_mask(found, image, row) for row in one])
        ]
        expected = np.zeros(overlap.shape)
        if len(theirs):
            expected = coco_mask.iou(encoded[0], encoded[1], [0] * len(one))
            expected[:, ~np.isin(one[:, 5], theirs[:, 0])] = 0
        np.testing.assert_allclose(overlap, expected, atol=1e-6)
        first += len(theirs)
    assert sum(float(overlap.sum()) for overlap in whole) > 3
    assert float(whole[2].sum()) > 0


def test_masks_of_another_size_are_refused():
    _, rows, masks = detected()
    with pytest.raises(InputError, match="prototypes of 12x16 do not fit an input of 48x64"):
        mask_overlaps(masks, torch.zeros(0, 6, 8, dtype=torch.bool), rows, [torch.zeros(0, 5)] * 3)


def test_run_lengths_are_those_of_the_images_pixels():
    raw, rows, masks = detected()
    pixels = np.concatenate(list(image_pixels(masks, 0, SHAPES)))
    wide = [plain_mask(raw, 0, row, upsampled=True).astype(np.uint8) for row in rows[0]]
    np.testing.assert_array_equal(pixels, np.stack([cv2.resize(mask, (128, 96)) for mask in wide]))
    found = run_lengths(masks, 0, SHAPES)
    np.testing.assert_array_equal(coco_mask.decode(found).transpose(2, 0, 1), pixels)
    assert all(isinstance(one["counts"], str) for one in found)
    nothing = Masks(masks.source, (masks.picks[0][:0],), (masks.boxes[0][:0],), SIZE)
    assert run_lengths(nothing, 0, SHAPES) == []
