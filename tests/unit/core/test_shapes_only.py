"""Shapes and refusals without values: those that the operations have on values."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from utils.core import shapes_only
from utils.core.shapes_only import ShapesOnly


class TorchIsAsked(Exception):
    """No shape was computed here."""


class OursOnly(ShapesOnly):
    """Refuses what `ShapesOnly` hands on to torch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty.memory_format:  # batch normalization makes one on its way
            return func(*args, **kwargs)
        found = shapes_only.answer(func, args, kwargs or {})
        if found is None:
            raise TorchIsAsked(str(func))
        return found


def on_meta(work, *tensors):
    """The shapes and types of what an operation gives without values; None where torch is asked."""
    empty = [None if one is None else one.to("meta") for one in tensors]
    try:
        with torch.no_grad(), OursOnly():
            return described(work(*empty))
    except (TorchIsAsked, RuntimeError, ValueError):  # torch refuses some before there is an operation
        return None


def described(found):
    return [(tuple(one.shape), one.dtype) for one in (found if isinstance(found, tuple) else (found,))]


def on_values(work, *tensors):
    try:
        with torch.no_grad():
            return described(work(*tensors))
    except (RuntimeError, IndexError, ValueError):
        return None


def some(choose, rank, most=6):
    return torch.zeros([choose.randint(1, most) for _ in range(rank)])


def convolution(choose):
    groups, transposed = choose.choice([1, 1, 2, 3]), choose.random() < 0.4
    ins, outs = (choose.choice([groups, 2 * groups, 3]) for _ in range(2))
    kernel = [choose.randint(1, 4) for _ in range(2)]
    weight = torch.zeros(*((ins, max(outs // groups, 1)) if transposed else (outs, max(ins // groups, 1))), *kernel)
    bias = choose.choice([None, torch.zeros(outs), torch.zeros(outs + 1)])
    settings = {name: tuple(choose.randint(low, 3) for _ in range(2))
                for name, low in (("stride", choose.choice([0, 1, 1])), ("padding", 0), ("dilation", 1))}  # fmt: skip
    channels = choose.choice([ins, ins, ins, ins + 1])
    x = torch.zeros(choose.randint(1, 2), channels, *(choose.randint(1, 7) for _ in range(2)))
    if transposed:
        settings["output_padding"] = tuple(choose.choice([0, 0, 1, 2]) for _ in range(2))
        return (lambda *given: functional.conv_transpose2d(*given, groups=groups, **settings)), (x, weight, bias)
    return (lambda *given: functional.conv2d(*given, groups=groups, **settings)), (x, weight, bias)


def batch_norm(choose):
    x = some(choose, choose.choice([2, 3, 4]), 3)
    statistics = [torch.ones(choose.choice([x.shape[1], x.shape[1], x.shape[1], 3])) for _ in range(4)]
    return (lambda x, mean, var, *affine: functional.batch_norm(x, mean, var, *affine)), (x, *statistics)


def pool(choose):
    settings = [choose.randint(1, 4), choose.choice([None, 1, 2]), choose.choice([0, 0, 1, 2])]
    kind = choose.choice([functional.avg_pool2d, functional.max_pool2d])
    ceil = choose.random() < 0.2
    return (lambda x: kind(x, *settings, ceil_mode=ceil)), (some(choose, 4),)


def elementwise(choose):
    work = choose.choice([torch.add, torch.sub, torch.mul, torch.div])
    return work, tuple(some(choose, choose.randint(1, 4), 2) for _ in range(2))


def in_place(choose):
    work = choose.choice([functional.silu, functional.relu, functional.leaky_relu])
    return (lambda x: work(x, inplace=True)), (some(choose, 3),)


def joined(choose):
    first = some(choose, 3, 2)
    others = [choose.choice([torch.zeros(first.shape), some(choose, choose.choice([2, 3, 3]), 2)]) for _ in range(2)]
    dim, work = choose.randint(-4, 3), choose.choice([torch.cat, torch.stack])
    return (lambda *given: work(list(given), dim)), (first, *others)


def upsampled(choose):
    scale = choose.choice([0.1, 0.5, 1.5, 2, 3])
    return (lambda x: functional.interpolate(x, scale_factor=scale, mode="nearest")), (some(choose, 4),)


def softmax(choose):
    dim = choose.randint(-4, 4)
    return (lambda x: torch.softmax(x, dim)), (some(choose, 3),)


MAKERS = [convolution, batch_norm, pool, elementwise, in_place, joined, upsampled, softmax]


@pytest.mark.parametrize("make", MAKERS, ids=lambda one: one.__name__)
def test_what_is_answered_here_is_what_values_give(make):
    """A shape that values have, and none where they are refused: that is left to torch, with its words."""
    choose = random.Random(1)
    answered = 0
    for _ in range(400):
        work, tensors = make(choose)
        found, expected = on_meta(work, *tensors), on_values(work, *tensors)
        assert found in (None, expected), [one if one is None else one.shape for one in tensors]
        answered += found is not None
    assert answered >= 50


def test_a_range_is_what_torch_makes():
    with OursOnly():
        found = torch.arange(end=7, device="meta", dtype=torch.float32)
    assert (found.shape, found.dtype, found.device.type) == ((7,), torch.float32, "meta")
    for other in ({"end": 7}, {"end": 7.5, "dtype": torch.float32}, {"end": -1, "dtype": torch.float32}):
        with OursOnly(), pytest.raises(TorchIsAsked):
            torch.arange(**other, device="meta")


@pytest.mark.parametrize("side", [2**21, 2**62])
def test_what_nobody_could_compute_is_torchs_business(side):
    x, weight = torch.empty(1, 1, 4, 4, device="meta"), torch.empty(1, 1, 1, 1, device="meta")
    with OursOnly(), pytest.raises(TorchIsAsked):
        functional.conv2d(x, weight, padding=side)


def test_values_are_left_alone():
    x = torch.rand(1, 2, 5, 5)
    with OursOnly(), pytest.raises(TorchIsAsked):
        functional.silu(x)
    with ShapesOnly():
        found = functional.silu(x)
    torch.testing.assert_close(found, x / (1 + (-x).exp()))


def test_torch_refuses_in_its_own_words():
    x, weight = torch.empty(1, 3, 4, 4, device="meta"), torch.empty(8, 2, 1, 1, device="meta")
    with ShapesOnly(), pytest.raises(RuntimeError, match="channel"):
        functional.conv2d(x, weight)
