"""Which calibration method `auto` takes, and which `qat.py calibrate` chooses, from known results."""

from types import SimpleNamespace

import pytest
import torch
from report_examples import resampled

from models.quantize.finetune import HeldOutLoss
from utils.core.score import Score
from utils.jobs.calibrate import CANDIDATES, METHODS, USUAL, Sweep, auto_method, why_auto

IMAGES = 100


def loss(value: float, spread: float, seed: int = 0) -> HeldOutLoss:
    """A loss whose difference to that of another value has a standard error of about spread / 10."""
    noise = torch.randn(IMAGES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distances = value + spread * (noise - noise.mean())
    return HeldOutLoss(torch.stack([distances, torch.ones(IMAGES, dtype=torch.float64)], 1))


@pytest.mark.parametrize(
    ("values", "spread", "chosen"),
    [
        ((0.030, 0.031, 0.032), 0.001, USUAL),
        ((0.030, 0.029, 0.032), 0.02, USUAL),  # half a standard error
        ((0.030, 0.025, 0.032), 0.01, "percentile 99.99"),
        ((0.030, 0.025, 0.024), 0.01, "mse"),  # both are lower, and mse is the lowest
        ((0.030, 0.035, 0.024), 0.01, "mse"),
    ],
)
def test_auto_takes_the_usual_method_unless_another_loss_is_lower_by_two_standard_errors(values, spread, chosen):
    losses = {
        name: loss(value, spread, seed) for seed, (name, value) in enumerate(zip(CANDIDATES, values, strict=True))
    }
    assert auto_method(losses) == chosen
    why = why_auto(losses)
    assert chosen in why.partition(", by")[0]
    assert f"{IMAGES} held-out training images" in why
    assert all(f"{name} {values[place]:.4g}" in why for place, name in enumerate(CANDIDATES))


def test_with_nothing_held_out_auto_compares_nothing():
    assert auto_method({}) == USUAL
    assert USUAL in why_auto({})


def result(ap: float, agreement: float | None, error: float = 0.001):
    """An evaluation of three resamplings with a difference of this standard error to any other."""
    spread = (0.0, error, -error) if agreement is not None else (0.0, 0.0, 0.0)
    of_ap = resampled(*(ap + part for part in spread))
    return SimpleNamespace(
        score=Score(ap),
        agreement=agreement,
        agreement_resampled=agreement and resampled(*(agreement - part for part in spread)),
        statistics=SimpleNamespace(score_resampled=lambda: of_ap),
        images=200,
    )


def sweep(**changes) -> Sweep:
    results = {name: result(0.70, 0.97, 0.0) for name in METHODS}
    return Sweep({**results, **changes}, USUAL, "why auto")


def test_calibrate_takes_the_method_of_auto_where_no_other_agrees_measurably_more():
    found = sweep(mse=result(0.72, 0.9703, 0.001))  # a gain of AP is no merit
    assert found.chosen == USUAL
    *_, why, choice = found.lines(unlabelled=False)
    assert why == "why auto"
    assert choice.startswith(f"chosen: {USUAL}, the one that auto takes")


def test_calibrate_takes_another_one_that_agrees_measurably_more_and_says_how_much():
    found = sweep(mse=result(0.70, 0.98, 0.001), max=result(0.70, 0.975, 0.001))
    assert found.chosen == "mse"
    assert "percentile 99.999, which auto takes, by +0.0100 ± 0.0010 on 200 validation images" in found.lines(False)[-1]


def test_a_method_that_agrees_more_and_loses_ap_is_not_taken():
    assert sweep(mse=result(0.69, 0.98, 0.001)).chosen == USUAL


def test_methods_stand_best_first_with_their_differences_to_that_of_auto():
    found = sweep(mse=result(0.71, 0.97, 0.001), max=result(0.69, 0.97, 0.001))
    line = found.lines(unlabelled=False)[0]
    assert "AP on 200 validation images" in line
    names = [line.index(f" {name} 0.") for name in ("mse", USUAL, "max")]
    assert names == sorted(names)
    assert "mse 0.7100 (+0.0100 ± 0.0010)" in line
    assert f"{USUAL} 0.7000," in line
    assert found.lines(unlabelled=True)[0].startswith("calibration sweep, agreement on")


def test_without_agreement_the_method_of_auto_stays():
    assert Sweep({name: result(0.7, None) for name in METHODS}, "mse", "").chosen == "mse"
