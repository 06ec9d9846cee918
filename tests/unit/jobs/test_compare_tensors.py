"""Which anchors a file chose, beside those that it should have."""

import math

import pytest
import torch

from utils.core.tasks import Prediction
from utils.jobs.compare_tensors import missed

SCORES = torch.tensor([[[0.1, 0.9, 0.3, 0.5], [0.2, 0.1, 0.8, 0.5]], [[0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 0.0, 0.7]]])
PREDICTION = Prediction.of_boxes(torch.cat([torch.zeros(2, 4, 4), SCORES], 1))


@pytest.mark.parametrize(
    ("anchors", "expected"),
    [
        (None, 0.0),
        ([[0, 1, 2, 3], [3, 2, 1, 0]], 0.0),
        ([[1, 2], [0, 3]], 0.0),
        ([[2], [3]], 0.1),  # 0.9 is left for 0.8
        ([[1, 2], [1, 3]], 0.1),
        ([[0, 3], [0, 3]], 0.7),
        ([[1, 1], [0, 3]], math.inf),
    ],
)
def test_how_much_better_an_anchor_is_that_was_left_out(anchors, expected):
    assert missed(PREDICTION, None if anchors is None else torch.tensor(anchors)) == pytest.approx(expected)


def test_scores_that_are_no_numbers_are_not_good():
    raw = PREDICTION.raw.clone()
    raw[1, 5, 2] = math.nan
    for anchors in ([[1, 2], [0, 3]], [[1, 2], [2, 3]]):
        assert math.isnan(missed(Prediction.of_boxes(raw), torch.tensor(anchors)))
