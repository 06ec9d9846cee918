"""What a calibration sweep says: the best method first, differences with standard errors, and no gain that is none."""

import pytest

from utils.core.score import Resampled
from utils.jobs.calibrate import no_measurable_loss, sweep_lines

METHODS = {"max": 0.700, "mse": 0.712, "percentile 99.9": 0.7115}


def lines(**changes) -> list[str]:
    return sweep_lines({"images": 200, "methods": METHODS, "name": "mse", "measure": "AP", "errors": {},
                        "agreement": {}, **changes})  # fmt: skip


def test_differences_to_the_best_method_and_what_decided():
    errors = {"max": 0.002, "percentile 99.9": 0.001}
    first, second = lines(errors=errors, equal=("mse", "percentile 99.9"), agreement={"mse": 0.98})
    assert first.endswith("mse 0.7120, percentile 99.9 0.7115 (-0.0005 ± 0.0010), max 0.7000 (-0.0120 ± 0.0020)")
    assert second.startswith("chosen: mse, AP 0.7120, with the highest agreement (0.9800)")
    assert second.endswith(": mse, percentile 99.9")
    assert lines(errors=errors, equal=("mse",), measure="X")[1] == "chosen: mse, X 0.7120"


@pytest.mark.parametrize(
    ("of_float", "equal"),
    [
        (0.8, ["mse", "percentile 99.9"]),  # against mse: -0.0005 ± 0.0007, and -0.0120 ± 0
        (0.69, ["mse", "percentile 99.9", "max"]),  # all above float, so none has lost anything
        (0.7114, ["mse", "percentile 99.9"]),  # max is 0.0114 ± 0 below float
    ],
)
def test_a_loss_counts_against_the_best_method_and_a_gain_over_float_does_not(of_float, equal):
    ap = {**METHODS, "float": of_float}
    resampled = {name: Resampled.of("a" * 32, (value, value - 0.01)) for name, value in ap.items()}
    resampled["percentile 99.9"] = Resampled.of("a" * 32, (0.7115, 0.7025))
    assert no_measurable_loss(ap, resampled) == equal
    assert no_measurable_loss(ap, {}) == ["mse", "percentile 99.9", "max"]  # no error is known
