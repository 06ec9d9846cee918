"""Ranges of activations as parameters: the logarithm of amax, so that steps are relative."""

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
    """The ranges of a network's quantizers during training: those of activations are trained or stay, of weights stay.

    Every forward rounds with scales that are float16 numbers, as evaluation, checkpoints and files do; the parameters
    keep what lies between them.

    Attributes:
        log_amax: parameter float32 `[n]`, one entry for each trained range; None if none is trained.
    """

    log_amax: nn.Parameter | None

    def __init__(self, network: nn.Module, *, learned: bool) -> None:
        """Take the ranges that the quantizers of `network` have now; `learned` trains those of activations."""
        super().__init__()
        self._trained: list[nn.Module] = []
        self._fixed: list[nn.Module] = []
        for _, quantizer in backend.quantizers(network):
            trains = learned and backend.get_amax(quantizer).dim() == 0
            (self._trained if trains else self._fixed).append(quantizer)
        self._fixed_scales: list[Tensor] = []  # the same tensors in every epoch: a CUDA graph reads them
        self.log_amax = None
        if self._trained:
            self.log_amax = nn.Parameter(torch.stack([backend.get_amax(one).log() for one in self._trained]))

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
        for quantizer, one in zip(self._trained, snapped.unbind(), strict=True):
            put_scale(quantizer, one)

    def settle(self) -> None:
        """Give the quantizers these ranges as their amax, snapped to float16 scales."""
        if self.log_amax is not None:
            for quantizer, amax in zip(self._trained, self._amax(self.log_amax.detach()).unbind(), strict=True):
                backend.set_amax(quantizer, amax)

    def finite(self) -> bool:
        """Whether `settle` can give the quantizers these ranges."""
        return self.log_amax is None or bool(self._amax(self.log_amax.detach()).isfinite().all())

    @staticmethod
    def _amax(log_amax: Tensor) -> Tensor:
        return (log_amax.exp() * BELOW).clamp(min=backend.SMALLEST_AMAX)
