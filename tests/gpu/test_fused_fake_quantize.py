"""The Triton kernels of quantizers in training, against elementwise autograd in float64.

With TRITON_INTERPRET=1 the tests run without a GPU: tests/unit/quantize/test_fake_quantize.py does that.
"""

import importlib.util
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from rounding_gradients import case, compare
from torch import nn

from models.quantize import fused_cuda
from models.quantize.fake_quantize import TensorQuantizer, _TrainedFakeQuantize, float16_scale, trained_fake_quantize
from models.quantize.modules import ConvBlock, QuantPoint

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="only a GPU has this")
TYPES = [torch.float32, torch.float16]
SHAPES = [((2, 5, 7, 9), False), ((3, 4, 50, 41), False), ((1,), False), ((4096,), False), ((300,), False),
          ((6, 64, 3, 3), True), ((3, 5000), True), ((7, 1, 3, 3), True), ((5, 1, 1, 1), True), ((1, 2, 3, 3), True),
          ((2, 4, 2, 9, 3), False)]  # fmt: skip


def why_not() -> str:
    """Why these tests cannot run here, or ''."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return "" if INTERPRETED or torch.cuda.is_available() else "torch sees no NVIDIA GPU"


def rounded(x, scale, silu=False):
    assert fused_cuda.usable(x)
    return fused_cuda.fused_fake_quantize(x, scale, x.dtype, silu=silu)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "per_channel"), SHAPES)
def test_gradients(shape, per_channel, dtype, silu):
    given = case(shape, per_channel=per_channel, silu=silu).to(DEVICE, dtype)
    compare(partial(rounded, silu=silu), given)


def layouts(x):
    wide = torch.stack([x, x], 2)
    return {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 2).contiguous().transpose(0, 2),
        "rows in another order": x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        "every second": wide[:, :, 1],
        "expanded": x[:, :1].expand(x.shape),
        "a part": torch.cat([x, x], 0)[x.shape[0] :],
    }


@pytest.mark.parametrize("layout", [*layouts(torch.zeros(1, 1, 1, 1))])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_layouts_of_the_tensor_and_of_the_gradient(layout, per_channel, silu):
    given = case((4, 6, 5, 3), per_channel=per_channel, silu=silu).to(DEVICE)
    operation = partial(rounded, silu=silu)
    x = layouts(given.x)[layout]
    compare(operation, replace(given, x=x))
    compare(operation, replace(given, gradient=layouts(given.gradient)[layout]))
    compare(operation, replace(given, x=x, gradient=layouts(given.gradient)[layout]))


@pytest.mark.parametrize("shape", [(0,), (0, 3, 3, 3), (4, 0, 3, 3)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_empty_tensors(shape, per_channel):
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    scale = torch.ones([shape[0], 1, 1, 1] if per_channel else [], device=DEVICE, requires_grad=True)
    rounded(x, scale).sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(scale.grad, torch.zeros_like(scale))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_same_numbers_as_torchs_operators_bit_for_bit(dtype):
    """Also right between two steps, and of what overflowed, which the loss scaler has to see in the gradients."""
    scale = float16_scale(torch.tensor(0.0173)).to(DEVICE)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 6e4, -6e4])
    between = (torch.arange(400) - 199.5) * float(scale)
    values = torch.cat([special, between, torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 2])
    values = values.to(DEVICE, dtype)
    gradient = torch.randn(len(values), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    gradient[6] = float("inf")  # where it is clipped: times zero it is NaN
    found = []
    for operation in (rounded, lambda x, scale: _TrainedFakeQuantize.apply(x, scale, x.dtype)):
        x = values.clone().requires_grad_()
        y = operation(x, scale)
        y.backward(gradient)
        found.append((y.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert bool(found[0][1][6].isnan())


def test_twice_the_same_and_without_a_gradient_of_the_scale():
    given = case((3, 4, 50, 41)).to(DEVICE)
    grads = []
    for learned in (True, True, False):
        x, scale = given.x.clone().requires_grad_(), given.scale.clone().requires_grad_(learned)
        rounded(x, scale).backward(given.gradient)
        grads.append((x.grad, scale.grad))
    assert all(torch.equal(grad, grads[0][0]) for grad, _ in grads)
    assert torch.equal(grads[0][1], grads[1][1])
    assert grads[2][1] is None


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 8, 3, bias=False), nn.SiLU()


@pytest.fixture
def unit():
    torch.manual_seed(0)
    unit = ConvBlock.from_float(Unit().to(DEVICE))
    unit.output_point = QuantPoint(TensorQuantizer())
    unit.output_point.quantizer.trained_scale = float16_scale(torch.tensor(0.01)).to(DEVICE).requires_grad_()
    return unit


@contextmanager
def counted(monkeypatch):
    """The calls that have SiLU in front."""
    calls, original = [], fused_cuda.fused_fake_quantize

    def fused(*given, silu=False):
        calls.extend([1] * silu)
        return original(*given, silu=silu)

    monkeypatch.setattr(fused_cuda, "fused_fake_quantize", fused)
    yield calls


def test_a_unit_in_training_does_both_at_once(unit, monkeypatch):
    images = torch.rand(2, 3, 9, 11, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    scale = unit.output_point.quantizer.trained_scale
    found = []
    for silu in (True, False):
        unit.conv.weight.grad = scale.grad = None
        with counted(monkeypatch) as calls, monkeypatch.context() as patch:
            if not silu:
                patch.setattr(TensorQuantizer, "can_fuse_silu", lambda quantizer, x: False)
            y = unit(images)
            (y * torch.arange(y.numel(), device=DEVICE).reshape(y.shape).cos()).sum().backward()
        assert len(calls) == silu
        found.append((y.detach(), unit.conv.weight.grad.clone(), scale.grad.clone()))
    (y, of_weight, of_scale), (same_y, same_of_weight, same_of_scale) = found
    differs = (y - same_y).abs() > 1e-6  # another last bit of SiLU, right between two steps
    assert differs.float().mean() < 0.002
    torch.testing.assert_close(of_weight, same_of_weight, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(of_scale, same_of_scale, rtol=1e-2, atol=0.1)


def no_scale(unit):
    unit.output_point.quantizer.trained_scale = None
    unit.output_point.quantizer.register_buffer("_amax", torch.tensor(1.27, device=DEVICE))


CHANGES = {
    "switched off": lambda unit: setattr(unit.output_point.quantizer, "on", False),
    "redundant": lambda unit: setattr(unit.output_point, "redundant", True),
    "no scale": no_scale,
    "another activation": lambda unit: setattr(unit, "act", nn.ReLU()),
    "hooked": lambda unit: unit.output_point.quantizer.register_forward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", ["no gradients", *CHANGES])
def test_a_unit_does_one_after_the_other(unit, monkeypatch, change):
    images = torch.rand(2, 3, 9, 11, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    CHANGES.get(change, lambda _: None)(unit)
    with torch.set_grad_enabled(change != "no gradients"), counted(monkeypatch) as calls:
        found = unit(images)
        activation = unit.act(unit.conv(images))
        assert torch.equal(found, unit.output_point(activation))
    assert not calls


def test_the_activation_is_not_kept(unit):
    kept = []
    images = torch.rand(2, 3, 9, 11).to(DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        y = unit(images)
    assert kept.count(y.shape) == 1  # what the convolution computed


@on_a_gpu
def test_under_autocast_in_half_precision_without_waiting_for_the_gpu(unit):
    images = torch.rand(2, 3, 64, 64).to(DEVICE)
    weight, scale = torch.rand(8, 8, 3, 3, device=DEVICE, requires_grad=True), torch.full((8, 1, 1, 1), 2**-7)
    scale = scale.to(DEVICE).requires_grad_()

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            y = unit(images)
            small = trained_fake_quantize(weight, scale)
            z = trained_fake_quantize(nn.functional.conv2d(y, small), scale.detach()[0].reshape(()))
        z.float().mean().backward()
        return y, small, z

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {result.dtype for result in results} == {torch.float16}
    assert (weight.grad.dtype, scale.grad.shape) == (torch.float32, scale.shape)
    assert bool(weight.grad.isfinite().all())


@on_a_gpu
def test_more_elements_than_32_bits_count():
    count = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 6 * 2 * count:
        pytest.skip("needs 26 GB of GPU memory")
    x = torch.full((count,), 0.5, dtype=torch.float16, device=DEVICE)
    x[-3:] = torch.tensor([1.01, -7.0, 300.0])
    x.requires_grad_()
    scale = torch.tensor(2.0**-4, device=DEVICE, requires_grad=True)
    y = rounded(x, scale)
    gradient = torch.zeros_like(y)
    gradient[-3:] = 1
    y.backward(gradient)
    assert y[-3:].tolist() == [1.0, -7.0, 127 / 16]
    assert y[count // 2].item() == 0.5
    assert x.grad[-4:].tolist() == [0, 1, 1, 0]
    expected = (1.0 - float(x[-3].detach())) * 16 + 127
    assert float(scale.grad) == pytest.approx(expected, rel=1e-5)
