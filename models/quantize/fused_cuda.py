"""Rounding with a trained scale on CUDA in one pass forward and one backward, also with SiLU in front.

The same values and gradients as `fake_quantize._TrainedFakeQuantize`, whose dozen operators each read and write a
whole activation. The kernels are Triton's, which comes with torch for CUDA; without it, or where its compiler does not
run, `usable` is False and torch's operators do it. Nothing here waits for the GPU.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

TYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = (256, 1024, 4096)  # elements that one program computes


def usable(x: Tensor) -> bool:
    """Return whether the kernels can compute on a tensor: with Triton on CUDA, or with its interpreter on a CPU."""
    if x.dtype not in TYPES:
        return False
    if x.is_cuda:
        return _compiles(x.device)
    return os.environ.get("TRITON_INTERPRET") == "1" and x.device.type == "cpu"


@cache
def _compiles(device: torch.device) -> bool:
    """Return whether Triton's kernels compile and run on a device, by a trial.

    Triton needs a C compiler, Python's headers and a GPU that is not too old; else it raises errors of many kinds.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(BLOCKS[0], device=device, requires_grad=True)
            scale = torch.ones((), device=device, requires_grad=True)
            _Fused.apply(x, scale, torch.float32, True).sum().backward()
    except Exception as error:  # noqa: BLE001 - see above
        message = " ".join(str(error).split())[:200]
        logger.warning("Triton does not work here, so training takes longer (%s: %s)", type(error).__name__, message)
        return False
    return True


def fused_fake_quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, *, silu: bool = False) -> Tensor:
    """Compute `fake_quantize.trained_fake_quantize`; the result is contiguous and of type `dtype`.

    `silu` applies SiLU first, in float32; backward computes it again instead of storing it.
    """
    return _Fused.apply(x, scale, dtype, silu)


class _Fused(torch.autograd.Function):
    """The kernels as an operation with gradients; `scale` as in `trained_fake_quantize`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, dtype: torch.dtype, silu: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, scale)
        ctx.silu = silu
        y = torch.empty_like(x, dtype=dtype)
        if x.numel():
            _launch("forward", x, scale, (x, _flat(scale), y), ctx)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        x_gradient = torch.empty_like(x)
        is_learned = ctx.needs_input_grad[1]
        rows, length, block = _cut(x, scale)
        parts = torch.empty(rows, -(-length // block), dtype=torch.float32, device=x.device)
        if x.numel():
            tensors = (gradient.contiguous(), x, _flat(scale), x_gradient, parts)
            _launch("backward", x, scale, tensors, ctx, LEARNED=is_learned)
        scale_gradient = parts.sum(1).reshape(scale.shape) if is_learned else None
        return x_gradient, scale_gradient, None, None


def _launch(kernel: str, x: Tensor, scale: Tensor, tensors: tuple[Tensor, ...], ctx: Any, **constants: Any) -> None:
    from models.quantize import fused_kernels

    rows, length, block = _cut(x, scale)
    constants |= {"LEAST": -128.0, "MOST": 127.0, "SILU": ctx.silu}
    where: AbstractContextManager[Any] = torch.cuda.device(x.device) if x.is_cuda else nullcontext()
    programs = rows * -(-length // block)
    launcher = getattr(fused_kernels, kernel)[(programs,)]
    with where:  # Triton launches on the current device
        launcher(*tensors, length, **constants, BLOCK=block, num_warps=block // 512 or 1)


def _cut(x: Tensor, scale: Tensor) -> tuple[int, int, int]:
    """Return the number of rows (one for each scale), the elements of a row, and those of a block."""
    rows = scale.numel() if scale.dim() else 1
    length = x.numel() // max(rows, 1)
    block = next((size for size in BLOCKS if length <= size), BLOCKS[-1])
    return rows, length, block


def _flat(scale: Tensor) -> Tensor:
    return scale.detach().reshape(-1).float().contiguous()
