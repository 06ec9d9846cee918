"""Small networks in training: made of a teacher, fed with random images, and looked at in parts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from small_networks import Network
from torch import Tensor

from models.quantize import calibration, placement
from models.quantize.distillation import SMALLEST_WEIGHT, task_terms
from models.quantize.finetune import Finetuner, HeldOutLoss, held_out_loss
from models.quantize.recipe import Calibration, Finetune, Recipe

CPU = torch.device("cpu")


def images(batches: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=generator) for _ in range(batches)]


def constant(rate: float) -> Callable[[int], float]:
    return lambda _step: rate


def quantized(teacher: Network, factor: float = 1.0) -> Network:
    """A copy with quantizers, calibrated; ranges of activations are too large by `factor`."""
    student = copy.deepcopy(teacher)
    placement.apply(student, placement.plan(student, Recipe()))
    calibration.calibrate(student, [one.float() / 255 for one in images(2)], Calibration(method="max"))
    for quantizer in student.activation_quantizers.values():
        quantizer.set_amax(quantizer.amax * factor)
    return student


def make(teacher: Network, factor: float = 1.0, **settings: object) -> Finetuner:
    return Finetuner(quantized(teacher, factor), teacher, Finetune(**settings), device=CPU)


def held_out(tuner: Finetuner, batches: list[Tensor]) -> HeldOutLoss:
    return held_out_loss(tuner.student, tuner.teacher, batches, CPU)


def task_loss(student: Any, teacher: Any, classes: int) -> Tensor:
    """The task loss of a batch, as a training step computes it."""
    distance, weight = task_terms(student, teacher, classes)
    return distance / weight.clamp(min=SMALLEST_WEIGHT)


def parts(tuner: Finetuner) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Copies of weights, of ranges of activations, and of ranges of weights."""
    state = {name: value.clone() for name, value in tuner.student.state_dict().items()}
    amax = {name: value for name, value in state.items() if name.endswith("_amax")}
    return (
        {name: value for name, value in state.items() if name not in amax},
        {name: value for name, value in amax.items() if value.dim() == 0},
        {name: value for name, value in amax.items() if value.dim() > 0},
    )


def moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}
