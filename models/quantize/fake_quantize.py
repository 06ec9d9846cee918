"""Quantizers: the module, and its arithmetic, rounding to quantized values and back, also with a scale that is trained.

Symmetric, zero point 0, scale = amax / 127. Scales are float16 numbers, so that a strongly typed file, whose scales are
FP16, rounds to the same integers as a weakly typed one and as torch.

`fake_quantize` is what a quantizer computes outside of training, and what torch's exporter writes as QuantizeLinear and
DequantizeLinear. `trained_fake_quantize` computes the same values, and passes gradients to the tensor (straight through
where it is not clipped) and to the scale (Esser et al., "Learned Step Size Quantization", ICLR 2020).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.quantize import fused_cuda

INT8 = torch.iinfo(torch.int8)  # what quantizers round to
LARGEST_SCALE = torch.finfo(torch.float16).max
SMALLEST_AMAX = 1e-4  # a tensor or channel of zeros still needs a positive, finite scale


def representable(amax: Tensor) -> Tensor:
    """The smallest amax, not below the given one (float32), whose scale is a float16 number.

    It is larger by 0.1 % at most for normal numbers; below, a step of float16 is 6e-8.
    """
    return float16_scale(amax / INT8.max) * INT8.max


def float16_scale(scale: Tensor) -> Tensor:
    """The smallest float16 number that is not below a positive scale (float32), as float32.

    >>> [float(float16_scale(torch.tensor(scale))) for scale in (0.5, 0.5001)]  # steps of float16 are 2^-11 there
    [0.5, 0.50048828125]
    """
    scale = scale.clamp(max=LARGEST_SCALE)
    half = scale.to(torch.float16)
    is_below = (half.float() < scale).to(torch.int16)
    above = (half.view(torch.int16) + is_below).view(torch.float16)  # the next bit pattern is the next number
    return above.float()


def fake_quantize(x: Tensor, amax: Tensor) -> Tensor:
    """Round to quantized values and back.

    Args:
        x: float tensor; half precision is computed in float32, as TensorRT's scales are.
        amax: scalar, or `[channels, 1, 1, 1]` for a weight.

    >>> fake_quantize(torch.tensor([0.4, -1.3, 2.5, 300.0, -300.0]), torch.tensor(127.0)).tolist()  # the scale is 1
    [0.0, -1.0, 2.0, 127.0, -128.0]
    """
    scale = amax / INT8.max
    if x.dtype != torch.float32:
        x = x.float()
    only_values = not torch.is_grad_enabled() and not torch.jit.is_tracing()
    if only_values and (x.device.type == "cpu" or amax.dim()):
        return _rounded(x, scale)
    scale = scale.reshape(-1)
    if amax.dim() == 0:
        zero = torch.zeros(1, dtype=torch.int32, device=x.device)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, INT8.min, INT8.max)
    zero = torch.zeros(scale.numel(), dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, INT8.min, INT8.max)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Round as torch's operators do, but without the mask for their gradient: a tenth of the time on a CPU.

    On a GPU torch's operator for a scale per channel checks its zero points on the CPU, and so waits for all kernels
    that were launched.
    """
    return x.mul(1 / scale).round_().clamp_(INT8.min, INT8.max).mul_(scale)


def trained_fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Round to quantized values and back, with gradients for `x` and, where it asks for one, for `scale`.

    The gradient of the scale is that of elementwise autograd through clip((x / scale), -128, 127), rounded
    straight through, times scale: `round(x / scale) - x / scale` where nothing is clipped, and -128 or
    127 where it is. A value that lies exactly on a border counts as not clipped.

    Args:
        x: float tensor. Under autocast the result has autocast's type, which the convolution reads; else that of `x`.
        scale: float32, float16 numbers as `float16_scale` gives them: scalar, or `[channels, 1, 1, 1]` for a weight.
    """
    if fused_cuda.usable(x):
        return fused_cuda.fused_fake_quantize(x, scale, _type_of_result(x))
    return _TrainedFakeQuantize.apply(x, scale, _type_of_result(x))


def _type_of_result(x: Tensor) -> torch.dtype:
    cuda = x.device.type == "cuda"
    if cuda and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return x.dtype


class _TrainedFakeQuantize(torch.autograd.Function):
    """See `trained_fake_quantize`. The products of scales and quantized values are exact in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        rounded = _rounded(x.float(), scale).to(dtype)
        ctx.save_for_backward(x, scale, rounded if dtype == torch.float32 else None)  # what reads it keeps it, too
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, rounded = ctx.saved_tensors
        values = x.float()
        gradient = gradient.float()
        # borders are inside; NaN where zero times the gradient is NaN
        inside = (values >= scale * INT8.min) & (values <= scale * INT8.max)
        passed = gradient * inside
        scale_gradient = None
        if ctx.needs_input_grad[1]:
            if rounded is None:
                rounded = _rounded(values, scale)
            each = (gradient * rounded).addcmul_(passed, values, value=-1)  # times scale: of the scale's logarithm
            total = each.sum() if scale.dim() == 0 else each.sum((1, 2, 3), keepdim=True)
            scale_gradient = total / scale
        return passed.to(x.dtype), scale_gradient, None


class TensorQuantizer(nn.Module):
    """Module that rounds a tensor to quantized values and back; switched off it returns its input. At first amax is 1.

    Attributes:
        on: whether it rounds.
        trained_scale: while the network is trained, the scale (float32, see `float16_scale`) in place of that of amax,
            as a part of the step's computation; it is no part of the module's state.

    Args:
        channels: number of output channels for a weight `[channels, ...]` (one scale each); None: one scale for all.
    """

    _amax: Tensor  # float32, scalar or [channels, 1, 1, 1]; checkpoints have it by this name, NVIDIA's

    def __init__(self, channels: int | None = None) -> None:
        super().__init__()
        self.on = True
        self.trained_scale: Tensor | None = None
        shape = () if channels is None else (channels, 1, 1, 1)
        self.register_buffer("_amax", torch.ones(shape))
        self.set_amax(self._amax)

    @property
    def amax(self) -> Tensor:
        """The magnitude that maps to the largest quantized value, float32."""
        return self._amax

    def set_amax(self, amax: Tensor) -> None:
        """Set the magnitude of the largest quantized value, a scalar or `[channels, 1, 1, 1]`; see `representable`.

        Raises:
            ValueError: amax is not finite.
        """
        if not bool(torch.isfinite(amax).all()):
            raise ValueError("amax is not finite: the tensor it was measured on holds NaN or infinity")
        amax = amax.detach().to(torch.float32).clamp(min=SMALLEST_AMAX)
        self._amax = representable(amax).to(self._amax.device)

    def set_weight_amax(self, weight: Tensor) -> None:
        """Set amax of each output channel of a weight `[channels, ...]` to its largest magnitude: none is clipped.

        Raises:
            ValueError: a weight is not finite.
        """
        self.set_amax(weight.detach().abs().amax((1, 2, 3), keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        """Round a tensor of any shape; of a weight the first dimension is the channel."""
        if not self.on:
            return x
        if self.trained_scale is not None:
            return trained_fake_quantize(x, self.trained_scale)
        return fake_quantize(x, self._amax)

    def can_fuse_silu(self, x: Tensor) -> bool:
        """Return whether `after_silu` may stand for SiLU of `x` and then this quantizer.

        In training on a GPU it may, unless a hook reads the tensor between the two, which then is never computed.
        """
        has_hooks = self._forward_hooks or self._forward_pre_hooks
        is_trained = self.on and self.trained_scale is not None and torch.is_grad_enabled()
        return is_trained and not has_hooks and fused_cuda.usable(x)

    def after_silu(self, x: Tensor) -> Tensor:
        """SiLU of a tensor, rounded with the trained scale, see `can_fuse_silu`.

        One operation, which keeps `x` for backward and not its SiLU, and computes SiLU in float32 without rounding:
        results are those of a float32 network, also for `x` in half precision.
        """
        assert self.trained_scale is not None
        return fused_cuda.fused_fake_quantize(x, self.trained_scale, _type_of_result(x), silu=True)


def quantizers(model: nn.Module) -> dict[str, TensorQuantizer]:
    """The quantizers of a network by name, each once."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, TensorQuantizer)}
