"""Quantization-aware training: the FP32 model teaches the model with fake quantizers.

No labels are used. Student and teacher see the same images, and the student's weights and ranges move so that its
detections come closer to the teacher's (`distillation.py`). Gradients pass the rounding straight through, and reach the
ranges as in LSQ (`fake_quantize.py`, `LearnedRanges`).

    tuner = Finetuner(student, teacher, Recipe().finetune, device=device)
    tuner.run_epoch(batches, lambda step: learning_rate(step, steps, tuner.settings.highest_rate))

Batch norm is fused into the convolutions before this starts, so both models run in eval mode; only the last layer (the
head) gives what it gives in training: raw maps `[B, no, H, W]` per stride, and coefficients and prototypes of masks.

Several processes begin with the same network. The loss is relative to the whole batch, so that their parts add up, and
so do their gradients, which are summed in one collective after the backward. Forward and backward wait for nobody, so
that a GPU can replay them as a CUDA graph, which saves more than DistributedDataParallel's overlap would. A process
without images of a batch takes part with a placeholder that counts for nothing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.quantize.distillation import SMALLEST_WEIGHT, placeholder, raw_head, task_terms
from models.quantize.fake_quantize import INT8, SMALLEST_AMAX, float16_scale, quantizers
from models.quantize.modules import quantized_weights, rounded_weights
from models.quantize.recipe import Finetune
from models.quantize.step_graph import StepGraph
from utils.core import distributed
from utils.core.device import disable_tf32
from utils.core.input_spec import channels_of, with_channels
from utils.core.score import Difference

CONSTANT_MODULE = "DFL"  # upstream's class, whose weights are the bin numbers 0..15
SYNCHRONIZED = 20  # steps between two looks at the loss on a GPU: each of them waits for all that was launched
WARM_UP = 0.05  # share of the steps
REPLICATES = 1000  # of a bootstrap: its standard error is known to 2 %


class DivergedError(ArithmeticError):
    """The supervision loss became NaN or infinite; the weights since the last good state are not to be used."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The task loss of a network on images that decide and do not train."""

    terms: Tensor  # distance from the teacher and weight of each image, float64 [images, 2], on the CPU

    @property
    def value(self) -> float:
        """The loss of all images together."""
        return float(_ratio(self.terms.sum(0)))

    def difference(self, other: HeldOutLoss) -> Difference:
        """This loss minus that of another network on the same images, with a standard error by a paired bootstrap."""
        generator = torch.Generator().manual_seed(0)
        number = len(self.terms)
        draws = torch.randint(number, (REPLICATES, number), generator=generator)
        losses = _ratio(self.terms[draws].sum(1).T)
        other_losses = _ratio(other.terms[draws].sum(1).T)
        error = float((losses - other_losses).std())
        return Difference(self.value - other.value, error, number)


def held_out_loss(student: Any, teacher: nn.Module, batches: Iterable[Tensor], device: torch.device) -> HeldOutLoss:
    """Task loss of the student as it is saved and exported, on images `[B, 3, H, W]` that decide.

    Several processes each give their part of every batch, and get the terms of all images in the same order.

    Raises:
        DivergedError: the loss is not finite.
        ValueError: there is no batch at all.
    """
    parts: list[Tensor] = []  # float64 [images of a batch, 2]; zeros for images of other processes
    classes = int(student.model[-1].nc)
    rank = distributed.world().rank
    channels = channels_of(student)
    with raw_head(student), raw_head(teacher), rounded_weights(student), torch.no_grad(), disable_tf32():
        for images in batches:
            counts = distributed.gather(len(images))
            part = torch.zeros(sum(counts), 2, dtype=torch.float64, device=device)
            if len(images):
                x = as_input(images, device, channels)
                terms = task_terms(student(x), teacher(x), classes, by_image=True)
                first = sum(counts[:rank])
                part[first : first + len(images)] = torch.stack(terms, 1).double()
            parts.append(part)
    if not any(len(part) for part in parts):
        raise ValueError("no images to measure the loss on")
    loss = HeldOutLoss(distributed.all_sum(torch.cat(parts)).cpu())
    _finite(loss.value, "the loss on held-out images")
    return loss


def _ratio(terms: Tensor) -> Tensor:
    return terms[0] / terms[1].clamp(min=SMALLEST_WEIGHT)


class EpochResult(NamedTuple):
    """Loss and duration of one epoch of finetuning."""

    loss: float  # the mean over iterations
    iterations: int
    seconds: float  # of wall time


def learning_rate(step: int, steps: int, highest: float) -> float:
    """The rate of a step, counted from 0: linear warm-up over 5 % of the steps, then half a cosine down to zero.

    Loshchilov and Hutter, "SGDR", ICLR 2017.

    >>> [round(learning_rate(step, 40, 1.0), 2) for step in (0, 1, 2, 20, 39)]
    [0.5, 1.0, 1.0, 0.52, 0.0]
    """
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return highest * (step + 1) / warm
    progress = (step - warm + 1) / (steps - warm + 1)
    return highest * 0.5 * (1 + math.cos(math.pi * progress))


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Switch on gradients for every weight and bias except architectural constants, and return them in module order.

    Checkpoints and BN fusing leave `requires_grad` off everywhere, so the flag as loaded says nothing.
    """
    frozen: set[int] = set()
    for module in model.modules():
        if type(module).__name__ == CONSTANT_MODULE:
            frozen.update(map(id, module.parameters()))
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in frozen)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and random: upstream's augmentation draws from the last two."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Finetuner:
    """One student, its teacher and the optimizer; `run_epoch` may be called as often as wanted.

    Adam trains weights, biases and ranges, each at a rate of its own. On CUDA both models run under FP16 autocast with
    loss scaling, and not under BF16, because BF16's 8 bits of significand are as coarse as the INT8 steps that training
    has to tell apart.

    Args:
        student: calibrated; between epochs its quantizers have the trained ranges as amax.
        teacher: an FP32 network with the same head and classes.
        settings: rates, and what trains.
        graph: on CUDA, replay a step's kernels (`step_graph.py`).
    """

    def __init__(
        self, student: Any, teacher: nn.Module, settings: Finetune, *, device: torch.device, graph: bool = True
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.device = device
        self.settings = settings
        self._channels = channels_of(student)
        self.ranges = LearnedRanges(student).to(device)
        groups = self._groups(trainable_parameters(student))
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._amp = device.type == "cuda"
        self.optimizer = torch.optim.Adam(groups, lr=0.0, fused=self._amp)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._amp)
        self._side = torch.cuda.Stream(device) if self._amp else None
        self._graph: StepGraph | None = None
        if self._amp and graph:
            self._graph = StepGraph(self._gradients, self._parameters)
        teacher.eval().requires_grad_(False)

    def _groups(self, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        """Adam's parameter groups, each with the factor by which its rate is higher than that of the weights."""
        ranges = {"params": [self.ranges.log_amax], "factor": self.settings.range_rate}
        if self.settings.train != "all":
            self.student.requires_grad_(False)
            return [ranges]
        weights = [parameter for parameter in parameters if parameter.dim() > 1]
        biases = [parameter for parameter in parameters if parameter.dim() <= 1]
        groups = [
            {"params": weights, "factor": 1.0},
            {"params": biases, "factor": self.settings.bias_rate},
            ranges,
        ]
        return [group for group in groups if group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, loss scaler, and the ranges before they are snapped; the weights are the checkpoint's business."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "log_amax": self.ranges.log_amax.detach().cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave for the same network; the run may go on on another device."""
        groups = [{**group, "fused": self._amp} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        if state["scaler"] and self._amp:  # empty where the run was on a CPU
            self.scaler.load_state_dict(state["scaler"])
        self.ranges.log_amax.data.copy_(state["log_amax"])

    def run_epoch(
        self, batches: Iterable[Tensor], rate: Callable[[int], float], on_step: Callable[[float], None] | None = None
    ) -> EpochResult:
        """Train on `batches` of images, uint8 or float 0..1 `[B, 3, H, W]`, at the learning rate of each step.

        `on_step` is called with the mean loss so far: after every step, on a GPU after every `SYNCHRONIZED` of them.
        Of several processes each gives its part of every batch, which may be empty; the loss is that of whole batches.

        Raises:
            DivergedError: the loss is not finite, or what the last step left.
            ValueError: there is no batch at all.
        """
        start = time.perf_counter()
        count = 0
        total = torch.zeros((), device=self.device)
        with ExitStack() as stack:
            stack.enter_context(raw_head(self.student))
            stack.enter_context(raw_head(self.teacher))
            stack.enter_context(self.ranges.in_use())
            for batch in batches:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate(count) * group["factor"]
                total += self._step(as_input(batch, self.device, self._channels))
                count += 1
                if not self._amp or count % SYNCHRONIZED == 0:
                    mean = _finite(total) / count
                    if on_step:
                        on_step(mean)
            if not self._is_finite():  # no later step would catch it
                raise DivergedError("weights or ranges are not finite after the last step")
        self.optimizer.zero_grad(set_to_none=True)
        if not count:
            raise ValueError("no images to finetune on")
        return EpochResult(loss=_finite(total) / count, iterations=count, seconds=time.perf_counter() - start)

    def _is_finite(self) -> bool:
        """Return whether the ranges and all parameters are finite."""
        weights_are_finite = all(bool(parameter.isfinite().all()) for parameter in self._parameters)
        return weights_are_finite and self.ranges.is_finite()

    def _step(self, images: Tensor) -> Tensor:
        """One optimizer step on float images `[B, 3, H, W]`; returns the loss of the whole batch, float32 scalar."""
        images, counts = placeholder(images)
        if self._graph is not None:
            loss, weight = self._graph(images)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            loss, weight = self._gradients(images)
        loss = add_gradients(self._parameters, loss, weight, counts=counts)
        if not self._amp:
            _finite(loss)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._parameters, self.settings.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _gradients(self, images: Tensor) -> Tensor:
        """Forward and backward; returns loss and weight as `add_gradients` takes them, float32 `[2]`.

        On a GPU the teacher runs on a stream of its own, beside the student's forward.
        """
        if self._side is not None:  # its tensors are freed before the next step, for which it waits: none is used early
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.autocast(self.device.type, dtype=torch.float16, enabled=self._amp):
            # without a stream `torch.cuda.stream` does nothing; not inference_mode: the loss's backward needs the maps
            with torch.cuda.stream(self._side), torch.no_grad():
                maps = self.teacher(images)
            self.ranges.put_in()
            student = self.student(images)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        distance, weight = task_terms(student, maps, int(self.student.model[-1].nc))
        loss = distance / weight.clamp(min=SMALLEST_WEIGHT)
        self.scaler.scale(loss).backward()
        return torch.stack((loss.detach(), weight))


def _finite(loss: Tensor | float, name: str = "the supervision loss") -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise DivergedError(f"{name} is {value}")
    return max(value, 0.0)  # rounding takes it a hair below zero where student and teacher agree


def as_input(images: Tensor, device: torch.device, channels: int = 3) -> Tensor:
    """Images as the network takes them: float32 `[B, channels, H, W]` in 0..1 on `device`; of bytes 1 makes grey."""
    moved = images.to(device, non_blocking=True)
    if moved.is_floating_point():
        return moved
    return with_channels(moved, channels).float() / 255


def add_gradients(parameters: Sequence[nn.Parameter], loss: Tensor, weight: Tensor, *, counts: bool) -> Tensor:
    """Give all parameters the gradient of the whole batch; returns its loss, a float32 scalar.

    Args:
        parameters: with the gradients that this process's images have left there; one without a gradient has none in
            any process.
        loss: of this process's images, float32 scalar.
        weight: float32 scalar: loss and gradients are relative to it, or to `SMALLEST_WEIGHT` if it is smaller, and
            are to be relative to the sum of all weights.
        counts: False for a placeholder, whose loss and gradients are left out.
    """
    if distributed.world().size == 1:
        return loss
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad.flatten() for parameter in trained]
    values = torch.cat([*gradients, loss.view(1)]) * weight.clamp(min=SMALLEST_WEIGHT)
    sums = distributed.all_sum(torch.cat([values, weight.view(1)]) * counts)
    means = sums[:-1] / sums[-1].clamp(min=SMALLEST_WEIGHT)
    sizes = [parameter.numel() for parameter in trained]
    for parameter, gradient in zip(trained, means[:-1].split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)
    return means[-1]


BELOW = 1 - 2**-20  # exp(log(amax)) may be a hair above amax, whose scale would then be rounded up to the next float16


class LearnedRanges(nn.Module):
    """The ranges of a network's quantizers during training: those of activations are trained.

    Those of weights stay during an epoch. At its end they are set anew to the largest magnitudes of the weights as they
    are then: otherwise what grew would be clipped.

    Every forward rounds with scales that are float16 numbers, as evaluation, checkpoints and files do; the parameters
    keep what lies between them.

    Attributes:
        log_amax: parameter float32 `[n]`, one entry for each activation's range.
    """

    def __init__(self, network: nn.Module) -> None:
        """Take the ranges that the quantizers of `network` have now."""
        super().__init__()
        self._weights = list(quantized_weights(network).values())
        self._fixed = [quantizer for _, quantizer in self._weights]
        self._trained = [quantizer for quantizer in quantizers(network).values() if quantizer not in self._fixed]
        self._fixed_scales: list[Tensor] = []  # the same tensors in every epoch: a CUDA graph reads them
        self.log_amax = nn.Parameter(torch.stack([quantizer.amax.log() for quantizer in self._trained]))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the quantizers round with these ranges; afterwards they have them as their amax, unless it failed."""
        scales = [quantizer.amax / INT8.max for quantizer in self._fixed]
        self._fixed_scales = self._fixed_scales or scales
        for quantizer, buffer, scale in zip(self._fixed, self._fixed_scales, scales, strict=True):
            quantizer.trained_scale = buffer.copy_(scale)
        try:
            yield
        finally:
            for quantizer in (*self._trained, *self._fixed):
                quantizer.trained_scale = None
        self.settle()

    def put_in(self) -> None:
        """Compute the trained scales anew, once for each forward."""
        scale = self._amax(self.log_amax) / INT8.max
        exact = scale.detach()
        snapped = float16_scale(exact) * (scale / exact)  # the factor is 1 and carries the gradient
        for quantizer, trained_scale in zip(self._trained, snapped.unbind(), strict=True):
            quantizer.trained_scale = trained_scale

    def settle(self) -> None:
        """Give the quantizers these ranges as their amax, snapped to float16 scales, and weights' theirs anew."""
        for convolution, quantizer in self._weights:
            quantizer.set_weight_amax(convolution.weight)
        ranges = self._amax(self.log_amax.detach())
        for quantizer, amax in zip(self._trained, ranges.unbind(), strict=True):
            quantizer.set_amax(amax)

    def is_finite(self) -> bool:
        """Return whether `settle` can give the quantizers these ranges."""
        return bool(self._amax(self.log_amax.detach()).isfinite().all())

    @staticmethod
    def _amax(log_amax: Tensor) -> Tensor:
        return (log_amax.exp() * BELOW).clamp(min=SMALLEST_AMAX)
