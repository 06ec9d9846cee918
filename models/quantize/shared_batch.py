"""One batch that several processes share: its loss, its gradients, and the parameters that they train.

Both losses are ratios. What they are relative to is that of the whole batch, so that the processes' parts add up to the
loss that one process computes, and so do their gradients. A process without images of a batch takes part with a
placeholder that counts for nothing: the others wait for its gradients.

Gradients are summed in one collective after the backward, and not while it runs, as DistributedDataParallel does. So
forward and backward hold nothing that waits for other processes, and a GPU can replay them as a CUDA graph, which saves
more time than the overlap would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.quantize.supervision import SMALLEST_VARIANCE, SMALLEST_WEIGHT, layer_loss
from utils.core import distributed


def share_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Give all processes the main one's values."""
    if distributed.world().size == 1 or not parameters:
        return
    with torch.no_grad():
        values = torch.cat([one.flatten() for one in parameters])
        values = distributed.all_sum(values if distributed.is_main() else torch.zeros_like(values))
        for one, value in zip(parameters, values.split([one.numel() for one in parameters]), strict=True):
            one.copy_(value.view_as(one))


def add_gradients(parameters: Sequence[nn.Parameter], loss: Tensor, weight: Tensor | None, *, counts: bool) -> Tensor:
    """Give all parameters the gradient of the whole batch; returns its loss, a float32 scalar.

    Args:
        parameters: with the gradients that this process's images have left there; one without a gradient has none in
            any process.
        loss: of this process's images, float32 scalar.
        weight: None if processes' losses add up to the whole one. Otherwise a float32 scalar: loss and gradients are
            relative to it, or to `SMALLEST_WEIGHT` if it is smaller, and are to be relative to the sum of all weights.
        counts: False for a placeholder, whose loss and gradients are left out.
    """
    if distributed.world().size == 1:
        return loss
    trained = [one for one in parameters if one.grad is not None]
    values = torch.cat([*(one.grad.flatten() for one in trained), loss.view(1)])
    if weight is None:
        values = distributed.all_sum(values)
    else:
        values = torch.cat([values * weight.clamp(min=SMALLEST_WEIGHT), weight.view(1)]) * counts
        total = distributed.all_sum(values)[-1].clamp(min=SMALLEST_WEIGHT)
        values = values[:-1].div_(total)
    for one, value in zip(trained, values[:-1].split([one.numel() for one in trained]), strict=True):
        one.grad = value.view_as(one)
    return values[-1]


def placeholder(images: Tensor) -> tuple[Tensor, bool]:
    """The images, or a black one in the place of none, and whether they count."""
    if len(images):
        return images, True
    return images.new_zeros((1, *images.shape[1:])), False


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
