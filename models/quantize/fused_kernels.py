"""Triton kernels of `fused_cuda.py`: rounding with a trained scale, with or without SiLU in front, and its gradients.

This module imports Triton, so nothing but `fused_cuda.py` imports it, and only where it is used. With the environment
variable TRITON_INTERPRET=1 the kernels compute on NumPy arrays, which is how they are tested without a GPU.

A tensor is seen as `rows` of `length` elements, one scale each: one row for a scale per tensor, a row for each output
channel of a weight. A program computes up to BLOCK elements of one row; programs are numbered row by row. Places are
64-bit numbers. All arithmetic is float32, in the order in which `fake_quantize.py` has it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(length: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """This program's row, the places of its elements in the whole tensor, and which of them the row has."""
    blocks = (length - 1) // BLOCK + 1  # length + BLOCK may have no place in 32 bits
    program = tl.program_id(0)
    row = program // blocks
    within = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, row.to(tl.int64) * length + within, within < length


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _quantized(values: tl.tensor, scale: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """clip(rint(values / scale)); NaN stays NaN.

    Bounds are whole, so clipping may come first. Then 1.5 * 2^23 added and taken away again leaves the nearest whole
    number, the even one of two, because float32 has no fraction there.
    """
    steps = values * tl.div_rn(1.0, scale)
    steps = tl.where(steps < LEAST, LEAST, steps)
    steps = tl.where(steps > MOST, MOST, steps)
    return (steps + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["scales"])
def forward(
    x: tl.tensor, scales: tl.tensor, y: tl.tensor, length: tl.tensor,
    LEAST: tl.constexpr, MOST: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write x, or SiLU of x, rounded, to y."""
    row, places, real = _places(length, BLOCK)
    scale = tl.load(scales + row)
    values = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    if SILU:
        values = values * _sigmoid(values)
    rounded = _quantized(values, scale, LEAST, MOST) * scale
    tl.store(y + places, rounded.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["scales"])
def backward(
    gradient: tl.tensor, x: tl.tensor, scales: tl.tensor, of_x: tl.tensor, of_scales: tl.tensor, length: tl.tensor,
    LEAST: tl.constexpr, MOST: tl.constexpr, SILU: tl.constexpr, LEARNED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of x, and with LEARNED each program's part of the gradient of its row's scale."""
    row, places, real = _places(length, BLOCK)
    scale = tl.load(scales + row)
    upper = tl.load(gradient + places, mask=real, other=0.0).to(tl.float32)  # the gradient of the result
    raw = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    values = raw
    if SILU:
        sigmoid = _sigmoid(raw)
        values = raw * sigmoid
    inside = (values >= scale * LEAST) & (values <= scale * MOST)
    passed = upper * inside.to(tl.float32)  # a product: an infinite gradient leaves NaN, which the loss scaler sees
    if LEARNED:
        rounded = _quantized(values, scale, LEAST, MOST) * scale
        part = tl.sum(upper * rounded - passed * values, axis=0) / scale
        tl.store(of_scales + tl.program_id(0), part)
    if SILU:
        passed = passed * (sigmoid * (1.0 + raw * (1.0 - sigmoid)))
    tl.store(of_x + places, passed.to(of_x.dtype.element_ty), mask=real)
