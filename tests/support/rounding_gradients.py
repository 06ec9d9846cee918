"""Gradients of rounding with a trained scale: elementwise autograd in float64, and a comparison with it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.quantize.fake_quantize import float16_scale

LEAST, MOST = -128, 127


@dataclass(frozen=True)
class Case:
    """A tensor, its scale (scalar or one for each row) and the gradient of the result."""

    x: Tensor
    scale: Tensor
    gradient: Tensor
    silu: bool = False

    def to(self, device: str = "cpu", dtype: torch.dtype = torch.float32):
        """The same on a device; x and the gradient as this type, in which the case must hold exactly."""
        x, gradient = (tensor.to(device, dtype) for tensor in (self.x, self.gradient))
        return Case(x, self.scale.to(device), gradient, self.silu)


def case(shape: tuple[int, ...], *, per_channel: bool = False, silu: bool = False, seed: int = 0) -> Case:
    """Float16 numbers, no value so near to the middle between two steps that its rounding depends on the arithmetic.

    Without SiLU scales are powers of 2, and every kind of value is there: zeros, exactly on both borders, beyond them.
    """
    g = torch.Generator().manual_seed(seed)
    scale = torch.tensor(2.0**-6)
    if per_channel:
        scale = 2.0 ** -torch.randint(4, 8, (shape[0], *[1] * (len(shape) - 1)), generator=g).float()
    gradient = torch.randn(shape, generator=g).half().float()
    if silu:
        scale = float16_scale(scale * 1.23)
        x = (torch.randn(shape, generator=g) * 100 * scale).half().float()
        steps = torch.nn.functional.silu(x.double()) / scale.double()
        unclear = ((steps - steps.floor() - 0.5).abs() < 0.01) | ((steps - MOST).abs() < 0.01)
        return Case(x.masked_fill(unclear, 0), scale, gradient, silu)
    steps = torch.randint(-160, 161, shape, generator=g) + torch.randint(-3, 4, shape, generator=g) / 8
    flat = steps.reshape(-1)
    for place, value in enumerate((0.0, LEAST, MOST, LEAST - 0.25, MOST + 0.25)):
        flat[place::11] = value
    return Case((steps * scale).half().float(), scale, gradient)


def reference(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, the gradient of x and of the scale, and the sum of the magnitudes that the latter is computed from.

    Without SiLU these are its terms; with it each term is a small difference of what float32 holds rounded.
    """
    x = case.x.cpu().double().requires_grad_()
    scales = case.scale.cpu().double().expand(x.shape).clone().requires_grad_()
    steps = (torch.nn.functional.silu(x) if case.silu else x) / scales
    clipped = torch.where(steps < LEAST, torch.full_like(steps, LEAST), steps)
    clipped = torch.where(clipped > MOST, torch.full_like(steps, MOST), clipped)
    y = (clipped + (clipped.round() - clipped).detach()) * scales
    y.backward(case.gradient.cpu().double())
    dims = tuple(range(1, x.dim())) if case.scale.dim() else tuple(range(x.dim()))
    sizes = scales.grad.abs() + (case.gradient.cpu().double() * clipped.detach()).abs() * case.silu
    sums = [each.sum(dims).reshape(case.scale.shape) for each in (scales.grad, sizes)]
    return y.detach(), x.grad, *sums


def compare(operation: Callable[[Tensor, Tensor], Tensor], case: Case) -> Tensor:
    """Run an operation forward and backward; fail where it differs from the reference. Returns its result."""
    x = case.x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    scale = case.scale.clone().requires_grad_()
    y = operation(x, scale)
    y.backward(case.gradient.to(y.dtype))
    expected, of_x, of_scale, size = reference(case)
    assert x.grad.dtype == x.dtype
    assert scale.grad.shape == scale.shape
    torch.testing.assert_close(
        y.detach().cpu().double(), expected, rtol=1e-3 if y.dtype != torch.float32 else 0, atol=0
    )
    half = x.dtype != torch.float32  # which holds the gradient of SiLU rounded
    torch.testing.assert_close(x.grad.cpu().double(), of_x, rtol=1e-3 if half else 1e-5, atol=2e-6)
    torch.testing.assert_close(scale.grad.cpu().double() / size, of_scale / size, rtol=0, atol=1e-5, equal_nan=True)
    return y.detach()
