"""AP of boxes and masks, the one number of both, AP of resampled images, and the standard errors that follow."""

import statistics

import pytest

from utils.core.score import Difference, Resampled, Score, difference_error

KEY = "0123456789abcdef" * 2


def test_text_and_back():
    one = Resampled.of(KEY, [0.7123456789, 1.0, 0.0])
    assert one.ap == (0.7123457, 1.0, 0.0)
    assert one.to_text() == f"{KEY} 0.7123457 1.0000000 0.0000000"
    assert Resampled.from_text(one.to_text()) == one


@pytest.mark.parametrize("text", [f"{KEY} 0.5000000", f"{KEY} 0.5000000 1.0000001", f"{KEY} 0.5000000 0.5"])
def test_other_texts_are_refused(text):
    """Among them one resampling, which has no spread."""
    with pytest.raises(ValueError, match="seven digits"):
        Resampled.from_text(text)


def test_the_error_of_a_difference_is_that_of_the_differences():
    one, other = Resampled.of(KEY, [0.70, 0.72, 0.69]), Resampled.of(KEY, [0.69, 0.715, 0.68])
    assert one.error == pytest.approx(statistics.stdev([0.70, 0.72, 0.69]))
    assert difference_error(other, one) == pytest.approx(statistics.stdev([0.01, 0.005, 0.01]))
    assert difference_error(one, one) == 0
    assert difference_error(one, Resampled.of(KEY[::-1], [0.70, 0.72, 0.69])) is None  # of other images
    assert difference_error(one, Resampled.of(KEY, [0.70, 0.72])) is None


@pytest.mark.parametrize(
    ("value", "error", "text", "significant"),
    [
        (-0.00182, 0.00091, "-0.0018 ± 0.0009", True),
        (-0.00181, 0.00091, "-0.0018 ± 0.0009", False),
        (0.0005, None, "+0.0005", False),
        (0.0005, 0.0, "+0.0005 ± 0.0000", True),
        (0.0, 0.0, "+0.0000 ± 0.0000", False),
    ],
)
def test_a_difference_is_one_from_two_standard_errors_on(value, error, text, significant):
    assert str(Difference(value, error)) == text
    assert Difference(value, error).significant is significant


def test_a_score():
    boxes, masks = Score(0.52014), Score(0.52, 0.42)
    assert (boxes.decides, masks.decides) == (0.52014, pytest.approx(0.47))
    assert (str(boxes), str(masks)) == ("AP 0.5201", "AP 0.5200, mask AP 0.4200")
    assert (boxes.in_name, masks.in_name) == ("ap_0.5201", "ap_0.5200_mask_0.4200")
    for score, entries in ((boxes, {"ap": 0.52014}), (masks, {"ap": 0.52, "mask_ap": 0.42}), (None, {"mask_ap": None})):
        assert Score.from_dict({**entries, "epoch": 3}) == score
        assert score is None or score.to_dict() == entries
