"""AP of boxes and masks, the one number of both, AP of resampled images, and the standard errors that follow."""

import statistics

import pytest

from utils.core.score import Difference, Resampled, Score, difference_error, standard_errors
from utils.core.split_counts import SplitCounts

KEY = "0123456789abcdef" * 2


def test_text_and_back():
    one = Resampled.of(KEY, [0.7123456789, 1.0, 0.0])
    assert one.ap == (0.7123457, 1.0, 0.0)
    assert one.to_text() == f"{KEY} 0.7123457 1.0000000 0.0000000"
    assert Resampled.from_text(one.to_text()) == one
    grouped = Resampled.of(KEY, [0.5, 0.25], 13)
    assert grouped.to_text() == f"{KEY}/13 0.5000000 0.2500000"
    assert Resampled.from_text(grouped.to_text()) == grouped
    assert grouped.scaled(3).ap == (1.0, 0.75)
    assert grouped.scaled(3).units == 13


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


@pytest.mark.parametrize("units", [None, 30, 500])
def test_many_images_take_two_standard_errors(units):
    assert standard_errors(units) == 2


@pytest.mark.parametrize(("units", "quantile"), [(13, 2.179), (5, 2.776), (2, 12.706)])
def test_few_groups_take_students_quantile(units, quantile):
    """The quantiles are those of printed tables of Student's t, two-sided, 95 %."""
    assert standard_errors(units) == pytest.approx(quantile * (units / (units - 1)) ** 0.5, abs=2e-3)


def test_a_difference_of_few_groups_has_to_be_larger():
    assert Difference(0.021, 0.01).significant
    assert not Difference(0.021, 0.01, 13).significant
    assert Difference(0.023, 0.01, 13).significant


@pytest.mark.parametrize(
    ("value", "error", "lost"), [(-0.002, 0.001, 0.004), (0.001, 0.001, 0.001), (0.01, 0.001, 0.0), (0.0, None, None)]
)
def test_the_largest_loss_that_a_measurement_leaves_possible(value, error, lost):
    assert Difference(value, error).most_lost == (lost if lost is None else pytest.approx(lost))


def test_a_difference_knows_what_it_was_measured_on():
    one, other = (Resampled.of(KEY, ap, 13) for ap in ([0.70, 0.72, 0.69], [0.69, 0.715, 0.68]))
    difference = Difference.between(0.69, 0.70, other, one)
    assert difference == Difference(pytest.approx(-0.01), difference_error(other, one), 13)
    assert Difference.between(0.69, 0.70, None, one) == Difference(pytest.approx(-0.01), None, None)


def test_shares_of_a_split():
    numbers = {"objects": 0, "backgrounds": 0, "without_a_label_file": 0, "bad_label_lines": 0, "clipped_labels": 0}
    counts = SplitCounts(name="val", images=18, left_out=2, boxes_among_polygons=0, first={}, **numbers)
    assert counts.left_out_share == pytest.approx(0.1)
    shared = [counts.model_copy(update={"also_in_train": number}).is_all_in_train for number in (0, 17, 18)]
    assert shared == [False, False, True]
    assert "also in train" not in str(counts)
    assert "also in train 17 (first: a.jpg)" in str(
        counts.model_copy(update={"also_in_train": 17, "first": {"also_in_train": "a.jpg"}})
    )


def test_a_score():
    boxes, masks = Score(0.52014), Score(0.52, 0.42)
    assert (boxes.decides, masks.decides) == (0.52014, pytest.approx(0.47))
    assert (str(boxes), str(masks)) == ("AP 0.5201", "AP 0.5200, mask AP 0.4200")
    assert (boxes.in_name, masks.in_name) == ("ap_0.5201", "ap_0.5200_mask_0.4200")
    for score, entries in ((boxes, {"ap": 0.52014}), (masks, {"ap": 0.52, "mask_ap": 0.42}), (None, {"mask_ap": None})):
        assert Score.from_dict({**entries, "epoch": 3}) == score
        assert score is None or score.to_dict() == entries
