"""Which classes are taken for which others, which images differ most from a reference's, and curves."""

import numpy as np
import pytest
import torch

from utils.core.curves import POINTS, Curves
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.confusion import ConfusionMatrix
from utils.evaluation.metrics import SELF_AP, EvalStatistics


def detection(x: float, score: float, label: int) -> list[float]:
    """A box of 10 by 10 pixels at x."""
    return [x, 0.0, x + 10, 10.0, score, label]


def label(x: float, of_class: int) -> list[float]:
    return [of_class, x, 0.0, x + 10, 10.0]


def test_pairs_are_counted_whatever_their_classes_and_the_rest_is_background():
    detections = torch.tensor([
        detection(0, 0.9, 0),  # right
        detection(52, 0.8, 1),  # class 1 on an object of class 0
        detection(100, 0.7, 1),  # nothing there
        detection(200, 0.2, 0),  # too little confidence
        detection(0, 0.6, 0),  # a second one on the first object
    ])  # fmt: skip
    labels = torch.tensor([label(0, 0), label(50, 0), label(200, 1)])
    matrix = ConfusionMatrix(2)
    matrix.add([detections, detections[:0]], [labels, labels[:1]])
    assert matrix.counts.tolist() == [
        [1, 0, 1],  # found as class 0: an object of class 0, and nothing (the second one)
        [1, 0, 1],
        [1, 1, 0],  # missed: the object of the second image, and the one of class 1
    ]


def test_the_pair_that_overlaps_most_comes_first():
    detections = torch.tensor([detection(3, 0.9, 0), detection(0, 0.3, 1)])
    matrix = ConfusionMatrix(2)
    matrix.add([detections], [torch.tensor([label(0, 1)])])
    assert matrix.counts.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 0]]


def statistics(detections: list, labels: list, **changes) -> EvalStatistics:
    taken = EvalStatistics(**changes)
    rows = [torch.tensor(rows).reshape(-1, 6) for rows in detections]
    truth = [torch.tensor(rows).reshape(-1, 5) for rows in labels]
    taken.add(RaggedBatch.of(rows), RaggedBatch.of(truth), [f"{number}.jpg" for number in range(len(rows))])
    return taken


def test_disagreements_count_what_has_no_partner_on_either_side():
    detections = [
        [detection(0, 0.9, 0), detection(50, 0.3, 0), detection(90, 0.1, 0)],  # one right, one alone, one too weak
        [],
        [detection(0, 0.9, 0)],
        [detection(0, 0.9, 1)],  # another class
    ]
    labels = [[label(0, 0)], [label(0, 0), label(50, 0)], [label(0, 0)], [label(0, 0)]]
    counts = statistics(detections, labels).disagreements(0.25)
    assert counts == {"0.jpg": 1, "1.jpg": 2, "2.jpg": 0, "3.jpg": 2}


def test_a_network_agrees_with_itself_by_one():
    detections = [[detection(0, 0.9, 0), detection(50, 0.6, 1)], [detection(0, 0.5, 0)]]
    labels = [[label(0, 0), label(50, 1)], [label(0, 0)]]
    plain, agreeing = (statistics(detections, labels, agreement=flag) for flag in (False, True))
    assert plain.class_scores().mean().ap == pytest.approx(SELF_AP) == pytest.approx(0.995)
    assert agreeing.class_scores().mean().ap == 1
    assert (set(plain.resampled().ap), set(agreeing.resampled().ap)) == ({0.995}, {1.0})
    half = statistics([*detections[:1], []], labels, agreement=True)
    expected = statistics([*detections[:1], []], labels).class_scores().mean().ap / SELF_AP
    assert half.class_scores().mean().ap == pytest.approx(expected)
    assert half.class_scores().mean().ap < 0.9


def test_curves_are_those_that_ap_is_computed_from():
    generator = np.random.default_rng(0)
    detections = [
        [detection(10 * n + 4 * generator.random(), generator.random(), n % 2) for n in range(12)] for _ in range(20)
    ]
    labels = [[label(10 * n, n % 2) for n in range(0, 12, 1 + number % 2)] for number in range(20)]
    taken = statistics(detections, labels)
    matrix = np.zeros((4, 4), np.int64)
    curves = taken.class_curves({0: "cat", 1: "dog"}, ["cat", "dog", "owl"], matrix)
    scores = taken.class_scores()
    assert (curves.names, curves.classes) == (["cat", "dog"], ["cat", "dog", "owl"])
    assert curves.ap50 == pytest.approx(scores.ap[:, 0])
    assert {len(line) for line in (*curves.precision, *curves.f1)} == {POINTS}
    area = [np.trapezoid(line, dx=1 / (POINTS - 1)) for line in curves.precision]
    assert area == pytest.approx(curves.ap50, abs=0.01)
    mean = np.mean(curves.f1, axis=0)
    expected = np.interp(np.linspace(0, 1, POINTS), np.linspace(0, 1, 1000), scores.f1)
    assert mean == pytest.approx(expected, abs=0.02)
    assert Curves.from_dict(curves.to_dict()) == curves


def test_a_class_that_is_never_found_has_an_empty_curve():
    curves = statistics([[detection(0, 0.9, 0)]], [[label(0, 0), label(50, 1)]]).class_curves(
        {0: "cat", 1: "dog"}, ["cat", "dog"], np.zeros((3, 3), np.int64)
    )
    assert (curves.ap50[0], set(curves.f1[1])) == (pytest.approx(0.995), {0.0})
