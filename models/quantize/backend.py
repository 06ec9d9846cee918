"""The one door to the quantizer library.

A quantizer is a module that rounds a tensor to INT8 and back ("fake quantization"): symmetric, zero point 0, quantized
values -128..127, scale = amax / 127, gradient passed straight through where the input is in range. It is the library's
`TensorQuantizer`, which carries amax and its switches; the rounding itself is torch's fused `fake_quantize` operator,
which both libraries can call: it needs no compiled extension, is several times faster than elementwise code on a CPU,
and torch's exporter writes it as QuantizeLinear + DequantizeLinear.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from models.quantize.recipe import QUANTIZERS
from utils.core.errors import DependencyError, InputError
from utils.core.number_types import INT8, IntegerType

SMALLEST_AMAX = 1e-4  # a tensor or channel of zeros still needs a positive, finite scale
LARGEST_SCALE = torch.finfo(torch.float16).max


def create(channels: int | None = None, library: str = "modelopt") -> nn.Module:
    """Create a quantizer with amax 1.

    Args:
        channels: number of output channels for a weight `[channels, ...]` (one scale each); None: one scale for all.
        library: one of `QUANTIZERS`.

    Raises:
        DependencyError: the library is not installed.
    """
    if library not in QUANTIZERS:
        raise InputError(f"--quantizer {library!r} is none of {', '.join(QUANTIZERS)}")
    quantizer = _factory(library)(None if channels is None else 0)
    set_amax(quantizer, torch.ones(()) if channels is None else torch.ones(channels, 1, 1, 1))
    return quantizer


def set_amax(quantizer: nn.Module, amax: Tensor) -> None:
    """Set the magnitude of the largest quantized value, a scalar or `[channels, 1, 1, 1]`; see `representable`.

    Raises:
        ValueError: amax is not finite.
    """
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("amax is not finite: the tensor it was measured on holds NaN or infinity")
    amax = representable(amax.detach().to(torch.float32).clamp(min=SMALLEST_AMAX))
    if hasattr(quantizer, "_amax"):
        quantizer._amax = amax.to(quantizer._amax.device)
    else:
        quantizer.register_buffer("_amax", amax)


def representable(amax: Tensor, kind: IntegerType = INT8) -> Tensor:
    """The smallest amax, not below the given one (float32), whose scale is a float16 number.

    So that a strongly typed file, whose scales are FP16, rounds to the same integers as a weakly typed one and as
    torch. It is larger by 0.1 % at most for normal numbers; below, a step of float16 is 6e-8.
    """
    scale = (amax / kind.quant_max).clamp(max=LARGEST_SCALE)
    half = scale.to(torch.float16)
    above = (half.view(torch.int16) + (half.float() < scale).to(torch.int16)).view(torch.float16)
    return above.float() * kind.quant_max


def get_amax(quantizer: Any) -> Tensor:
    """The magnitude that maps to the largest quantized value, float32."""
    return quantizer._amax


def is_quantizer(module: nn.Module) -> bool:
    """Whether a module is a quantizer of either library."""
    return type(module).__name__ == "TensorQuantizer"


def quantizers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every quantizer of a network, each once."""
    return ((name, module) for name, module in model.named_modules() if is_quantizer(module))


def fake_quantize(x: Tensor, amax: Tensor, kind: IntegerType = INT8) -> Tensor:
    """Round to quantized values and back.

    Args:
        x: float tensor; half precision is computed in float32, as TensorRT's scales are.
        amax: scalar, or `[channels, 1, 1, 1]` for a weight.
    """
    scale = amax / kind.quant_max
    if x.dtype != torch.float32:
        x = x.float()
    if x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.jit.is_tracing():
        return _rounded(x, scale, kind)
    scale = scale.reshape(-1)
    if amax.dim() == 0:
        zero = torch.zeros(1, dtype=torch.int32, device=x.device)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, kind.quant_min, kind.quant_max)
    zero = torch.zeros(scale.numel(), dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, kind.quant_min, kind.quant_max)


def _rounded(x: Tensor, scale: Tensor, kind: IntegerType) -> Tensor:
    """What torch's operator computes, without the mask for its gradient: on a CPU a tenth of the time."""
    return x.mul(1 / scale).round_().clamp_(kind.quant_min, kind.quant_max).mul_(scale)


@cache
def _factory(library: str) -> Callable[[int | None], nn.Module]:
    return _modelopt() if library == "modelopt" else _pytorch_quantization()


def _modelopt() -> Callable[[int | None], nn.Module]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optional plugins
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
            from modelopt.torch.quantization.config import QuantizerAttributeConfig
            from modelopt.torch.quantization.nn import TensorQuantizer, register_quant_backend
    except ImportError as error:
        raise DependencyError(
            f"the quantizer library nvidia-modelopt cannot be imported ({error}); run install_dependencies.sh, where "
            "this overlay was cloned"
        ) from error
    name = "torch-fake-quantize"
    register_quant_backend(name, lambda inputs, quantizer: fake_quantize(inputs, quantizer._amax))

    def make(axis: int | None) -> nn.Module:
        return TensorQuantizer(
            QuantizerAttributeConfig(num_bits=INT8.bits, axis=axis, narrow_range=False, backend=name)
        )

    return make


def _pytorch_quantization() -> Callable[[int | None], nn.Module]:
    handlers = logging.getLogger().handlers[:]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in its sources
            from pytorch_quantization.nn import TensorQuantizer
            from pytorch_quantization.tensor_quant import QuantDescriptor
    except ImportError as error:
        raise DependencyError(
            f"--quantizer pytorch-quantization cannot be imported ({error}); "
            "pip install pytorch-quantization==2.1.3, or use modelopt"
        ) from error
    finally:
        logging.getLogger().handlers[:] = handlers  # absl, which it imports, adds one that prints every line again

    class FusedTensorQuantizer(TensorQuantizer):
        """TensorQuantizer with torch's fused operator instead of the library's CUDA extension."""

        def _quant_forward(self, inputs: Tensor) -> Tensor:
            return fake_quantize(inputs, self._amax)

    FusedTensorQuantizer.__name__ = "TensorQuantizer"

    def make(axis: int | None) -> nn.Module:
        return FusedTensorQuantizer(QuantDescriptor(num_bits=INT8.bits, axis=axis, narrow_range=False))

    return make


def enable(quantizer: Any, on: bool = True) -> None:
    """Switch a quantizer on or off; off, it returns its input itself."""
    if on:
        quantizer.enable()
    else:
        quantizer.disable()
