"""What a calibration sweep says: the best method first, differences with standard errors, and no gain that is none."""

from __future__ import annotations

from models.quantize.recipe import Calibration
from utils.jobs.calibrate import Sweep

METHODS = {"max": 0.700, "mse": 0.712, "percentile 99.9": 0.7115}


def test_differences_to_the_best_method_and_which_are_within_their_error():
    found = Sweep(Calibration(method="mse"), 0.712, 200, METHODS, errors={"max": 0.002, "percentile 99.9": 0.001})
    assert found.lines() == [
        "calibration sweep, AP on 200 images: "
        "mse 0.7120, percentile 99.9 0.7115 (-0.0005 ± 0.0010), max 0.7000 (-0.0120 ± 0.0020)",
        "chosen: mse, AP 0.7120; no measurable difference (two standard errors) to percentile 99.9",
    ]


def test_a_method_that_is_better_by_more_than_the_error_is_said_to_be_chosen_and_no_more():
    found = Sweep(Calibration(method="mse"), 0.712, 200, METHODS, errors={"max": 0.002, "percentile 99.9": 0.0002})
    assert found.lines()[-1] == "chosen: mse, AP 0.7120"


def test_without_errors_no_difference_is_called_one():
    lines = Sweep(Calibration(method="mse"), 0.712, 1, METHODS).lines()
    assert lines[0].endswith("mse 0.7120, percentile 99.9 0.7115 (-0.0005), max 0.7000 (-0.0120)")
    assert lines[1].endswith("to percentile 99.9, max")


def test_what_is_measured_is_said_where_it_is_not_ap_itself():
    both = Sweep(Calibration(method="mse"), 0.712, 200, METHODS, measure="the mean of box and mask AP")
    assert both.lines()[0].startswith("calibration sweep, the mean of box and mask AP on 200 images: ")
