"""Run a network on tensors that have a shape and no values, without the seconds that torch takes to get ready for it.

torch computes the shapes of many operations in Python, for which it imports its compiler and sympy: that takes a
process longer than all else that it imports. The shapes of the ordinary ones that detectors are made of are computed
here; anything else goes to torch, which computes it or says what is wrong with it. Results are contiguous, also where
torch would keep the order of a transposed tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
IN_PLACE = frozenset({aten.silu_.default, aten.relu_.default, aten.leaky_relu_.default, aten.hardtanh_.default})
ELEMENTWISE = frozenset(
    {
        *(aten.silu.default, aten.relu.default, aten.leaky_relu.default, aten.hardtanh.default, aten.sigmoid.default),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    }
)
LARGEST = 2**40  # numbers of a tensor; one that has more is torch's business


class ShapesOnly(TorchDispatchMode):
    """Within it, operations on the device `meta` give what torch gives for them: a shape, or an exception."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, to tell it to leave this class alone

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = answer(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if found is None else found


def answer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives, as tensors without values; None where torch is to be asked."""
    if func in IN_PLACE:
        return args[0] if _on_meta(args[0]) else None
    if func in ELEMENTWISE:
        return _elementwise(*args)
    if func is aten.arange.default:
        return _range(*args, **kwargs)
    return RULES[func](*args) if func in RULES and not kwargs else None


def _elementwise(*args: Any) -> Tensor | None:
    """Of one or two tensors that have the same shape, but for sides of 1; None for any other."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    if not _on_meta(*tensors):
        return None
    rank = max(one.ndim for one in tensors)
    shapes = [(1,) * (rank - one.ndim) + tuple(one.shape) for one in tensors]
    shape = [max(sides) for sides in zip(*shapes, strict=True)]
    if any(side not in (1, most) for found in shapes for side, most in zip(found, shape, strict=True)):
        return None
    return _empty(tensors[0], shape)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor | None:
    """Of a 2-D convolution whose sizes fit one another; None for any other."""
    pairs = (stride, padding, dilation, output_padding)
    if not _on_meta(x, weight, bias) or x.ndim != 4 or weight.ndim != 4 or any(len(pair) != 2 for pair in pairs):
        return None
    if min(*stride, *dilation, groups, *x.shape, *weight.shape) < 1 or min(*padding, *output_padding) < 0:
        return None
    came, made = weight.shape[1] * groups, weight.shape[0]  # channels
    if transposed:
        came, made = made, came
    if x.shape[1] != came or came % groups or made % groups or (bias is not None and tuple(bias.shape) != (made,)):
        return None
    sides = []
    for side, kernel, step, edge, spread, more in zip(x.shape[2:], weight.shape[2:], *pairs, strict=True):
        reach = spread * (kernel - 1) + 1
        if transposed and more >= max(step, spread):
            return None
        sides.append(
            (side - 1) * step - 2 * edge + reach + more if transposed else (side + 2 * edge - reach) // step + 1
        )
    return _empty(x, (x.shape[0], made, *sides))


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of one with stored statistics, in evaluation mode, whose sizes fit one another; None for any other."""
    given = (weight, bias, mean, variance)
    if training or mean is None or variance is None or not _on_meta(x, *given) or x.ndim < 2:
        return None
    if any(one is not None and tuple(one.shape) != (x.shape[1],) for one in given):
        return None
    return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0)


def _average_pool(
    x: Tensor, kernel: list[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0), ceil: bool = False,
    *_: Any,
) -> Tensor | None:  # fmt: skip
    """Of 2-D maps, whose sides are rounded down; None for any other."""
    return _pooled(x, kernel, stride, padding, (1, 1), ceil)


def _largest_pool(
    x: Tensor, kernel: list[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1), ceil: bool = False,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The same, and where each largest value was."""
    found = _pooled(x, kernel, stride, padding, dilation, ceil)
    return None if found is None else (found, found.new_empty(found.shape, dtype=torch.int64))


def _pooled(x: Tensor, *settings: Any) -> Tensor | None:
    *pairs, ceil = settings
    pairs[1] = pairs[1] or pairs[0]
    if not _on_meta(x) or x.ndim != 4 or ceil or any(len(pair) != 2 for pair in pairs):
        return None
    sides = []
    for side, kernel, step, edge, spread in zip(x.shape[2:], *pairs, strict=True):
        if min(kernel, step, spread) < 1 or not 0 <= 2 * edge <= kernel:
            return None
        sides.append((side + 2 * edge - spread * (kernel - 1) - 1) // step + 1)
    return _empty(x, (*x.shape[:2], *sides))


def _concatenation(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Of tensors with the same shape but for one side; None for any other."""
    rank = tensors[0].ndim if tensors else 0
    if not rank or not -rank <= dim < rank or not _on_meta(*tensors) or any(one.ndim != rank for one in tensors):
        return None
    others = {tuple(one.shape[place] for place in range(rank) if place != dim % rank) for one in tensors}
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    return _empty(tensors[0], shape) if len(others) == 1 else None


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Of tensors with the same shape; None for any other."""
    shapes = {tuple(one.shape) for one in tensors}
    if len(shapes) != 1 or not _on_meta(*tensors) or not -tensors[0].ndim - 1 <= dim <= tensors[0].ndim:
        return None
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return _empty(tensors[0], shape)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor | None:
    """Along one of the sides; None for any other."""
    return _empty(x, x.shape) if _on_meta(x) and -x.ndim <= dim < x.ndim and not half_to_float else None


def _upsample(x: Tensor, size: Sequence[int], *_: Any) -> Tensor | None:
    """Of 2-D maps to a size; None for any other."""
    return _empty(x, (*x.shape[:2], *size)) if _on_meta(x) and x.ndim == 4 and len(size) == 2 else None


def _range(end: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> Tensor | None:
    """Of whole numbers from 0, in float32; None for any other."""
    usual = type(end) is int and 0 < end <= LARGEST and dtype == torch.float32 and not any(others.values())
    return torch.empty(end, device="meta") if usual and str(device) == "meta" else None


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor | None:
    return like.new_empty(shape) if min(shape, default=1) > 0 and math.prod(shape) <= LARGEST else None


def _on_meta(*tensors: Tensor | None) -> bool:
    return all(one is None or (one.device.type == "meta" and one.dtype == torch.float32) for one in tensors)


RULES: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.native_batch_norm.default: _batch_norm,
    aten.avg_pool2d.default: _average_pool,
    aten.max_pool2d_with_indices.default: _largest_pool,
    aten.upsample_nearest2d.default: _upsample,
    aten._softmax.default: _softmax,
    aten.cat.default: _concatenation,
    aten.stack.default: _stack,
}
