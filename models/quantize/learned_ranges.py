"""Ranges of quantizers as parameters: the logarithm of amax, so that steps are relative."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.quantize import backend
from models.quantize.fake_quantize import float16_scale
from models.quantize.quantizer import put_scale
from utils.core.number_types import INT8

BELOW = 1 - 2**-20  # exp(log(amax)) may be a hair above amax, whose scale would then be rounded up to the next float16


class LearnedRanges(nn.Module):
    """The ranges of a network's quantizers during training; some of them are trained, the others stay.

    Every forward rounds with scales that are float16 numbers, as evaluation, checkpoints and files do; the parameters
    keep what lies between them.

    Attributes:
        log_amax: parameter float32 `[n]`, all trained ranges one behind the other; None if none is trained.
    """

    log_amax: nn.Parameter | None

    def __init__(self, network: nn.Module, *, activations: bool, weights: bool) -> None:
        """Take the ranges that the quantizers of `network` have now.

        Args:
            activations: train the one range of each activation quantizer.
            weights: train the range of each output channel of each weight.
        """
        super().__init__()
        self._trained: list[nn.Module] = []
        self._fixed: list[nn.Module] = []
        for _, quantizer in backend.quantizers(network):
            trains = activations if backend.get_amax(quantizer).dim() == 0 else weights
            (self._trained if trains else self._fixed).append(quantizer)
        self._fixed_scales: list[Tensor] = []  # the same tensors in every epoch: a CUDA graph reads them
        self._shapes = [backend.get_amax(one).shape for one in self._trained]
        if self._trained:
            ranges = [backend.get_amax(one).log().flatten() for one in self._trained]
            self.log_amax = nn.Parameter(torch.cat(ranges))
        else:
            self.log_amax = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the quantizers round with these ranges; afterwards they have them as their amax, unless it failed."""
        if not self._fixed_scales:
            self._fixed_scales = [backend.get_amax(quantizer) / INT8.quant_max for quantizer in self._fixed]
        for quantizer, scale in zip(self._fixed, self._fixed_scales, strict=True):
            put_scale(quantizer, scale)
        try:
            yield
        finally:
            for quantizer in (*self._trained, *self._fixed):
                put_scale(quantizer, None)
        self.settle()

    def put_in(self) -> None:
        """Compute the trained scales anew, once for each forward."""
        if self.log_amax is None:
            return
        scale = self._amax(self.log_amax) / INT8.quant_max
        exact = scale.detach()
        snapped = float16_scale(exact) * (scale / exact)  # the factor is 1 and carries the gradient
        for quantizer, one in zip(self._trained, self._each(snapped), strict=True):
            put_scale(quantizer, one)

    def settle(self) -> None:
        """Give the quantizers these ranges as their amax, snapped to float16 scales."""
        if self.log_amax is not None:
            for quantizer, amax in zip(self._trained, self._each(self._amax(self.log_amax.detach())), strict=True):
                backend.set_amax(quantizer, amax)

    def finite(self) -> bool:
        """Whether `settle` can give the quantizers these ranges."""
        return self.log_amax is None or bool(self._amax(self.log_amax.detach()).isfinite().all())

    @staticmethod
    def _amax(log_amax: Tensor) -> Tensor:
        return (log_amax.exp() * BELOW).clamp(min=backend.SMALLEST_AMAX)

    def _each(self, values: Tensor) -> Iterator[Tensor]:
        """A vector of all trained ranges → those of each quantizer, in the shape of its amax."""
        if all(not shape for shape in self._shapes):
            return iter(values.unbind())
        parts = values.split([shape.numel() for shape in self._shapes])
        return (part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True))
