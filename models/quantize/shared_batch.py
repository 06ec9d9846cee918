"""Losses of a batch that several processes share, and the network that they train in step.

Both losses are ratios. What they are relative to is that of the whole batch, so that the processes' parts add up to the
loss that one process computes, and so do their gradients. A process without images of a batch takes part with a
placeholder that counts for nothing: the others wait for its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models.quantize.supervision import SMALLEST_VARIANCE, SMALLEST_WEIGHT, layer_loss, task_loss, task_terms
from utils.core import distributed


def in_step(module: nn.Module) -> nn.Module:
    """The module with gradients that are the mean over all processes, and with the main one's parameters.

    The graph is the same in every step, so that parameters that take no part in it are known after the first one.
    """
    if distributed.world().size == 1:
        return module
    return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True)


def placeholder(images: Tensor) -> tuple[Tensor, bool]:
    """The images, or a black one in the place of none, and whether they count."""
    if len(images):
        return images, True
    return images.new_zeros((1, *images.shape[1:])), False


def part_of_task_loss(student: Any, teacher: Any, classes: int, *, counts: bool) -> Tensor:
    """What this process's images add to `supervision.task_loss` of the whole batch, a float32 scalar."""
    if distributed.world().size == 1:
        return task_loss(student, teacher, classes)
    distance, weight = task_terms(student, teacher, classes)
    whole = distributed.all_sum(weight.detach() * counts)
    return distance * counts / whole.clamp(min=SMALLEST_WEIGHT)


def part_of_layer_loss(
    student: Sequence[Sequence[Tensor]], teacher: Sequence[Sequence[Tensor]], *, counts: bool
) -> Tensor:
    """What this process's images add to `supervision.layer_loss` of the whole batch, a float32 scalar."""
    if distributed.world().size == 1:
        return layer_loss(student, teacher)
    pairs = [
        (a.float(), b.float())
        for ours, theirs in zip(student, teacher, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    number, spread = _spread([target for _, target in pairs], counts=counts)
    errors = torch.stack([(a - b).square().sum() for a, b in pairs])
    return (errors * counts / number / spread).sum()


def _spread(tensors: Sequence[Tensor], *, counts: bool) -> tuple[Tensor, Tensor]:
    """Of each tensor over all processes the number of values and their variance, float32 `[n]`.

    The variance is put together from the parts' (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances", 1979).
    """
    world = distributed.world()
    own = [(*torch.var_mean(one, correction=0), one.new_tensor(one.numel() * counts)) for one in tensors]
    mine = torch.stack([torch.stack(one) for one in own]).double()
    parts = mine.new_zeros(world.size, *mine.shape)
    parts[world.rank] = mine
    variance, mean, number = distributed.all_sum(parts).unbind(2)  # each [processes, n]
    total = number.sum(0)
    middle = (number * mean).sum(0) / total
    whole = (number * (variance + (mean - middle).square())).sum(0) / total
    return total.float(), whole.float().clamp(min=SMALLEST_VARIANCE)
