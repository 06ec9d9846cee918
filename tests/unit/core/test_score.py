"""AP of boxes and masks, and the one number of both."""

from __future__ import annotations

import pytest

from utils.core.score import Score


@pytest.mark.parametrize(
    ("score", "decides", "text", "name", "what", "entries"),
    [
        (Score(0.52014), 0.52014, "AP 0.5201", "ap_0.5201", "AP", {"ap": 0.52014}),
        (
            Score(0.52, 0.42), 0.47, "AP 0.5200, mask AP 0.4200", "ap_0.5200_mask_0.4200",
            "the mean of box and mask AP", {"ap": 0.52, "mask_ap": 0.42},
        ),
    ],
)  # fmt: skip
def test_a_score(score, decides, text, name, what, entries):
    assert score.decides == pytest.approx(decides)
    assert (str(score), score.in_name, score.what, score.to_dict()) == (text, name, what, entries)
    assert Score.from_dict({**entries, "epoch": 3}) == score


def test_no_score():
    assert Score.from_dict({}) is Score.from_dict({"ap": None, "mask_ap": None}) is None
    assert Score.from_dict({"ap": 0.0}) == Score(0.0)
