"""A quantizer as a module: amax, a switch, and a scale that training can put in.

It has the names that quantizers of NVIDIA's libraries have (`TensorQuantizer`, `_amax`, `enable`, `disable`), so that
networks and checkpoints look the same with all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.quantize import fused_cuda
from models.quantize.fake_quantize import fake_quantize, trained_fake_quantize, trained_silu_fake_quantize


class TensorQuantizer(nn.Module):
    """Rounds a tensor to quantized values and back, or returns it itself while it is switched off.

    Args:
        axis: 0 for one scale for each output channel of a weight `[channels, ...]`, None for one scale for all. It is
            the shape of amax that decides; the argument is that of the libraries.
    """

    _amax: Tensor  # float32, scalar or [channels, 1, 1, 1]; a buffer that backend.set_amax makes

    def __init__(self, axis: int | None = None) -> None:
        super().__init__()
        self.axis = axis
        self._on = True

    def enable(self) -> None:
        """Round from now on."""
        self._on = True

    def disable(self) -> None:
        """Return tensors as they are from now on."""
        self._on = False

    def forward(self, x: Tensor) -> Tensor:
        """Round a tensor of any shape; of a weight the first dimension is the channel."""
        return rounded_by(self, x) if self._on else x


def rounded_by(quantizer: Any, x: Tensor) -> Tensor:
    """What a quantizer of any library computes: with the scale that training has put in, else from amax."""
    scale = quantizer.__dict__.get("trained_scale")
    return fake_quantize(x, quantizer._amax) if scale is None else trained_fake_quantize(x, scale)


def takes_silu(quantizer: Any, x: Tensor) -> bool:
    """Whether `silu_rounded_by` may stand for SiLU of `x` and then `quantizer`.

    In training on a GPU it may, unless something looks at the tensor between the two, which then is never made.
    """
    return (
        type(quantizer) is TensorQuantizer
        and quantizer._on
        and "trained_scale" in quantizer.__dict__
        and not (quantizer._forward_hooks or quantizer._forward_pre_hooks)
        and torch.is_grad_enabled()
        and fused_cuda.usable(x)
    )


def silu_rounded_by(quantizer: Any, x: Tensor) -> Tensor:
    """SiLU of a tensor, rounded with the scale that training has put in, see `takes_silu`."""
    return trained_silu_fake_quantize(x, quantizer.__dict__["trained_scale"])


def put_scale(quantizer: nn.Module, scale: Tensor | None) -> None:
    """Let a quantizer round with a scale that is part of a computation (float32, see `float16_scale`); None: with amax.

    It is no part of the module's state.
    """
    if scale is None:
        quantizer.__dict__.pop("trained_scale", None)
    else:
        quantizer.__dict__["trained_scale"] = scale
