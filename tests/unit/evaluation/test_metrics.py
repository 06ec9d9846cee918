"""Matching and AP against definitions written out plainly; test_loop.py has pycocotools' AP."""

import numpy as np
import pytest
import torch

from utils.evaluation.metrics import (
    IOU_THRESHOLDS,
    ap_per_class,
    average_precision,
    coco_average_precision,
    match,
)


def random_image(rng, labels, detections, classes=3):
    """Labels `[m, 5]` class, xyxy and detections `[n, 6]` xyxy, score, class near them; best score first."""
    corner = rng.uniform(0, 200, (labels, 2))
    truth = np.column_stack([rng.integers(classes, size=labels), corner, corner + rng.uniform(20, 80, (labels, 2))])
    chosen = truth[rng.integers(labels, size=detections)] if labels else np.zeros((detections, 5))
    boxes = chosen[:, 1:] + rng.normal(0, 6, (detections, 4))
    wrong = rng.random(detections) < 0.2
    kinds = np.where(wrong, rng.integers(classes, size=detections), chosen[:, 0])
    scores = np.sort(rng.permutation(np.linspace(0.01, 0.99, detections)))[::-1]
    found = np.column_stack([boxes, scores, kinds])
    return torch.from_numpy(truth.copy()).float(), torch.from_numpy(found.copy()).float()


def plain_iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def plain_match(found, truth, threshold):
    """A detection stands for its best label of its class; the first one to stand for a label is correct."""
    taken, correct = set(), []
    for *box, _, kind in found.tolist():
        overlaps = [(plain_iou(label[1:], box), i) for i, label in enumerate(truth.tolist()) if label[0] == kind]
        best, index = max(overlaps, default=(0.0, -1))
        hit = best >= threshold and index not in taken
        if hit:
            taken.add(index)
        correct.append(hit)
    return correct


@pytest.mark.parametrize("seed", range(3))
def test_match_agrees_with_the_definition_on_a_batch_of_uneven_images(seed):
    rng = np.random.default_rng(seed)
    pairs = [random_image(rng, labels, found) for labels, found in ((4, 30), (1, 5), (0, 6), (7, 0), (12, 60))]
    results, areas = match([found for _, found in pairs], [truth for truth, _ in pairs])
    for (truth, found), correct, area in zip(pairs, results, areas, strict=True):
        for column, threshold in enumerate(IOU_THRESHOLDS):
            assert correct[: len(found), column].tolist() == plain_match(found, truth, threshold)
        assert not correct[len(found) :].any()  # what pads the batch
        for row in correct[:, 0].nonzero()[:, 0]:
            assert area[row] in (truth[:, 3:] - truth[:, 1:3]).prod(1)
    assert results.sum() > 50  # the comparison is not about nothing


def test_match_without_labels_or_detections():
    assert match([torch.zeros(0, 6)], [torch.zeros(0, 5)])[0].shape == (1, 0, 10)
    assert not match([torch.ones(3, 6)], [torch.zeros(0, 5)])[0].any()


def test_average_precision_by_hand():
    perfect = average_precision(np.array([0.5, 1.0]), np.array([1.0, 1.0]))
    assert perfect == pytest.approx(0.995)  # and not 1: as upstream
    assert average_precision(np.array([0.0]), np.array([0.0])) == 0
    # one hit, one false alarm, one hit of two labels: precision 1 up to recall 0.5, 2/3 at 1; linear in between
    values = np.interp(np.linspace(0, 1, 101), [0, 0.499, 0.5, 0.999, 1], [1, 1, 2 / 3, 2 / 3, 0])
    expected = (values[:-1] + values[1:]).sum() / 2 / 100
    assert average_precision(np.array([0.5, 0.5, 1.0]), np.array([1, 0.5, 2 / 3])) == pytest.approx(expected, abs=0.004)


def test_cocos_average_precision_by_hand():
    """A hit, a false alarm and a hit, of four labels: 26 recalls at precision 1, 25 at 2/3, and 50 at 0."""
    recall, precision = np.array([0.25, 0.25, 0.5]), np.array([1, 0.5, 2 / 3])
    assert coco_average_precision(recall, precision) == pytest.approx((26 + 25 * 2 / 3) / 101)
    assert coco_average_precision(np.array([0.5, 1.0]), np.ones(2)) == 1


def test_scores_of_perfect_and_of_absent_detections():
    correct = np.ones((4, 10), bool)
    perfect = ap_per_class(correct, np.full(4, 0.9), np.array([0, 0, 2, 2]), np.array([0, 0, 2, 2]))
    assert (perfect.classes.tolist(), perfect.labels.tolist()) == ([0, 2], [2, 2])
    scores = {"ap": 0.995, "ap50": 0.995, "precision": 1.0, "recall": 1.0, "ap_coco": 1.0, "ap50_coco": 1.0}
    assert all(vars(mean) == pytest.approx(scores) for mean in (perfect.mean(), perfect.mean(1)))
    beside = ap_per_class(correct, np.full(4, 0.9), np.array([2, 2, 2, 2]), np.array([0, 2, 2, 2, 2]))
    assert [scores[0] for scores in beside.ap] == pytest.approx([0, 0.995]), "what follows a class without detections"
    absent = ap_per_class(np.zeros((0, 10), bool), np.zeros(0), np.zeros(0), np.array([1, 1, 2]))
    wrong = ap_per_class(np.zeros((3, 10), bool), np.ones(3), np.zeros(3), np.zeros(1))
    unlabelled = ap_per_class(np.zeros((3, 10), bool), np.ones(3), np.zeros(3), np.zeros(0))
    for nothing in (absent, wrong, unlabelled):
        assert {*vars(nothing.mean()).values(), nothing.threshold, nothing.f1.max()} == {0.0}
    assert absent.labels.tolist() == [2, 1]


def test_precision_and_recall_are_read_where_f1_is_best():
    """9 hits at 0.9, 90 false alarms at 0.1, one label missed: above 0.1, P is 1 and R is 0.9."""
    correct = np.repeat([True, False], [9, 90])[:, None].repeat(10, 1)
    found = ap_per_class(correct, np.repeat([0.9, 0.1], [9, 90]), np.zeros(99), np.zeros(10))
    assert found.precision == pytest.approx([1.0], abs=0.01)
    assert found.recall == pytest.approx([0.9], abs=0.01)
    correct, kinds = np.append(correct, correct[:1], 0), np.append(np.zeros(99), 1)
    found = ap_per_class(
        correct, np.append(np.repeat([0.9, 0.1], [9, 90]), 0.05), kinds, np.append(np.zeros(10), [1, 1, 1])
    )
    assert (found.precision[1], found.recall[1]) == (1, 0)  # of a class with nothing above that confidence


def test_equal_scores_keep_their_order():
    """With an unstable sort the AP of INT8 networks, which give few distinct scores, would differ from run to run."""
    rng = np.random.default_rng(0)
    correct = rng.random((500, 1)) < 0.5
    kinds, labels = np.zeros(500), np.zeros(300)
    equal = ap_per_class(correct, np.full(500, 0.5), kinds, labels).ap
    falling = ap_per_class(correct, np.linspace(0.6, 0.4, 500), kinds, labels).ap
    assert equal == pytest.approx(falling)
