"""Training and calibration by two processes against one: the same batches, cut into parts that may be empty."""

import pytest
import shared_work
import torch
from together import together

SIZES = [5, 4, 1]  # of a batch of one image the second process has none
FORMS = list(shared_work.FORMS)


@pytest.fixture(scope="module")
def alone():
    return shared_work.everything(SIZES)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return together(shared_work.everything, 2, tmp_path_factory.mktemp("both"), SIZES)


def test_ranges_and_counts_are_those_of_one_process_to_the_last_bit(alone, both):
    for one in both:
        for kind in ("max", "percentile", "mse"):
            assert one["ranges"]["amax"][kind] == alone["ranges"]["amax"][kind]
        for name, counts in alone["ranges"]["counts"].items():
            assert torch.equal(one["ranges"]["counts"][name], counts)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_whole_batch(alone, both, form):
    expected = alone[form]["gradients"]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    assert largest > 0
    for one in both:
        for ours, theirs in zip(one[form]["gradients"], expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=5e-5 * largest)  # differences of near equals


@pytest.mark.parametrize("form", FORMS)
def test_both_train_the_same_network_and_tell_the_same_loss(alone, both, form):
    first, second = (one[form] for one in both)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    for key in ("loss", "held_out", "steps"):
        assert first[key] == second[key]
        # the distance is a difference of sums: what is held out comes out small, with the rounding of large ones
        assert first[key] == pytest.approx(alone[form][key], rel=1e-4, abs=1e-6)


def test_a_loss_of_parts_by_themselves_would_be_another(alone):
    """What the test of gradients would not see if the batch's parts were alike."""
    whole, part = (shared_work.trained([size], {})["gradients"] for size in (5, 3))
    largest = max(float(gradient.abs().max()) for gradient in whole)
    assert any(not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest) for a, b in zip(whole, part, strict=True))
