"""The gradients of rounding with a trained scale, against elementwise autograd in float64."""

import pytest
import torch
from rounding_gradients import MOST, case, compare

from models.quantize import fused_cuda
from models.quantize.fake_quantize import fake_quantize, trained_fake_quantize

SHAPES = [((2, 5, 7, 9), False), ((1000,), False), ((6, 3, 3, 3), True), ((4, 1, 1, 1), True), ((1, 2, 3, 3), True)]


@pytest.mark.parametrize(("shape", "per_channel"), SHAPES)
def test_gradients(shape, per_channel):
    compare(trained_fake_quantize, case(shape, per_channel=per_channel))


def test_the_result_is_what_it_is_outside_of_training():
    given = case((6, 3, 3, 3), per_channel=True)
    assert torch.equal(trained_fake_quantize(given.x, given.scale), fake_quantize(given.x, given.scale * MOST))


def test_half_precision_stays_half_precision_and_empty_stays_empty():
    given = case((3, 50)).to(dtype=torch.float16)
    assert compare(trained_fake_quantize, given).dtype == torch.float16
    x, scale = torch.zeros(0, 3, 2, 2, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    trained_fake_quantize(x, scale).sum().backward()
    assert (x.grad.numel(), float(scale.grad)) == (0, 0.0)


def of_scale_times(factor):
    return lambda x, scale: trained_fake_quantize(x, scale * factor - (scale * (factor - 1)).detach())


def of_x_times(factor):
    return lambda x, scale: trained_fake_quantize(x * factor - (x * (factor - 1)).detach(), scale)


def border_excluded(x, scale):
    outside = (x.detach() <= -128 * scale.detach()) | (x.detach() >= 127 * scale.detach())
    return trained_fake_quantize(torch.where(outside, x.detach() * 2, x), scale)


def scale_forgotten(x, scale):
    return trained_fake_quantize(x, scale.detach()) + 0 * scale.sum()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    "wrong", [of_scale_times(1.01), of_scale_times(-1), of_x_times(1.01), border_excluded, scale_forgotten]
)
def test_the_comparison_sees_a_wrong_gradient(wrong, per_channel):
    with pytest.raises(AssertionError):
        compare(wrong, case((6, 3, 3, 3), per_channel=per_channel))


def test_the_kernels_are_not_for_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not fused_cuda.usable(torch.zeros(1))
