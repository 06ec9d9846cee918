"""The one door to quantizers: modules that round a tensor to INT8 and back ("fake quantization").

The default, `torch`, is a small module of our own (`fake_quantize.py`) on torch's operators. pytorch-quantization is
there for users whose own code works on NVIDIA's modules: its `TensorQuantizer` holds amax and the switches, and the
arithmetic is that of `fake_quantize.py` too, so that checkpoints and results are the same bit for bit.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from models.quantize.fake_quantize import TensorQuantizer, representable, rounded_by
from models.quantize.recipe import QUANTIZERS
from utils.core.errors import DependencyError, InputError

SMALLEST_AMAX = 1e-4  # a tensor or channel of zeros still needs a positive, finite scale


def create(channels: int | None = None, library: str = "torch") -> nn.Module:
    """Create a quantizer with amax 1.

    Args:
        channels: number of output channels for a weight `[channels, ...]` (one scale each); None: one scale for all.
        library: one of `QUANTIZERS`.

    Raises:
        DependencyError: the library is not installed.
    """
    if library not in QUANTIZERS:
        raise InputError(f"--quantizer {library!r} is none of {', '.join(QUANTIZERS)}")
    make = TensorQuantizer if library == "torch" else _pytorch_quantization()
    quantizer = make(None if channels is None else 0)
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


def set_weight_amax(quantizer: nn.Module, weight: Tensor) -> None:
    """Set amax of each output channel of a weight `[channels, ...]` to its largest magnitude, so that none is clipped.

    Raises:
        ValueError: a weight is not finite.
    """
    set_amax(quantizer, weight.detach().abs().amax((1, 2, 3), keepdim=True))


def get_amax(quantizer: Any) -> Tensor:
    """The magnitude that maps to the largest quantized value, float32."""
    return quantizer._amax


def quantizers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every quantizer of a network, of whichever library, each once."""
    return ((name, module) for name, module in model.named_modules() if type(module).__name__ == "TensorQuantizer")


@cache
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
            "pip install pytorch-quantization==2.1.3, or leave --quantizer out: the default does not need it"
        ) from error
    finally:
        logging.getLogger().handlers[:] = handlers  # absl, which it imports, adds one that prints every line again

    class FusedTensorQuantizer(TensorQuantizer):
        """TensorQuantizer with our arithmetic instead of the library's CUDA extension."""

        def _quant_forward(self, inputs: Tensor) -> Tensor:
            return rounded_by(self, inputs)

    FusedTensorQuantizer.__name__ = "TensorQuantizer"

    def make(axis: int | None) -> nn.Module:
        return FusedTensorQuantizer(QuantDescriptor(num_bits=8, axis=axis, narrow_range=False))

    return make


def enable(quantizer: Any, on: bool = True) -> None:
    """Switch a quantizer on or off; off, it returns its input itself."""
    if on:
        quantizer.enable()
    else:
        quantizer.disable()
