"""Quantization-aware training: the float model teaches the model with fake quantizers.

No labels are used. Student and teacher see the same images, and the student's weights move so that the outputs of its
top-level layers come closer to the teacher's. The quantizers' ranges (amax) stay what calibration found; gradients pass
the rounding by the straight-through estimator of the quantizer library.

Batch norm is fused into the convolutions before this starts, so both models run in eval mode throughout; only the last
layer (the head) is switched to its training output, the raw maps `[B, no, H, W]` per stride, which skips box decoding.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.core.errors import CheckpointError
from utils.core.shown import shown

# Class names whose weights are constants of the architecture: upstream's DFL holds the bin numbers 0..15 in one.
CONSTANT_MODULES = frozenset({"DFL"})
SMALLEST_VARIANCE = 1e-8  # a layer whose output is constant must not divide by zero


class DivergedError(ArithmeticError):
    """The supervision loss became NaN or infinite; the weights since the last good state are not to be used."""


@dataclass(frozen=True)
class EpochResult:
    """What one epoch of finetuning did. `loss` is the mean over iterations, `seconds` is wall time."""

    loss: float
    iterations: int
    seconds: float


def top_layers(model: nn.Module) -> nn.Sequential:
    """The sequence of top-level layers of an upstream model (`model.model`)."""
    layers = getattr(model, "model", None)
    if not isinstance(layers, nn.Sequential) or len(layers) < 2:
        raise TypeError(f"expected a model with two or more layers in .model, got {type(model).__name__}")
    return layers


def supervised_layers(count: int, stride: int) -> list[int]:
    """Indices of the layers whose outputs are compared, for a model of `count` top-level layers, the head included.

    Every `stride`-th layer, the last one before the head, and the head itself, whose raw maps are what AP depends on.

    >>> supervised_layers(6, 3)
    [0, 3, 4, 5]
    """
    if stride < 1:
        raise ValueError(f"supervision stride must be 1 or more, got {stride}")
    return sorted({*range(0, count - 1, stride), count - 2, count - 1})


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Switch on gradients for every weight and bias except architectural constants, and return them in module order.

    Checkpoints and BN fusing leave `requires_grad` off everywhere, so the flag as loaded says nothing.
    """
    frozen = {
        id(p) for m in model.modules() if type(m).__name__ in CONSTANT_MODULES for p in m.parameters(recurse=True)
    }
    parameters = []
    for parameter in model.parameters():
        trains = id(parameter) not in frozen and parameter.is_floating_point()
        parameter.requires_grad_(trains)
        if trains:
            parameters.append(parameter)
    return parameters


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and random: upstream's augmentation draws from the last two."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class LayerTaps:
    """Context manager that collects the outputs of chosen top-level layers during a forward.

    The hooks hold tensors only between a forward and `take`, and leaving the context removes hooks and tensors.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self._modules = [top_layers(model)[i] for i in layers]
        self._outputs: list[Any] = [None] * len(layers)
        self._handles: list[Any] = []

    def __enter__(self) -> LayerTaps:
        for slot, module in enumerate(self._modules):
            self._handles.append(module.register_forward_hook(self._hook(slot)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs = [None] * len(self._modules)

    def _hook(self, slot: int) -> Any:
        def collect(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[slot] = output

        return collect

    def take(self) -> list[list[Tensor]]:
        """The tensors of each tapped layer in the last forward, which are then forgotten."""
        taken, self._outputs = self._outputs, [None] * len(self._modules)
        return [list(_tensors(output)) for output in taken]


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a layer's output: a tensor, or lists and tuples of them (CBLinear, the head)."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)


def supervision_loss(student: Sequence[Sequence[Tensor]], teacher: Sequence[Sequence[Tensor]]) -> Tensor:
    """Sum over tensors of the mean squared error relative to the variance of the teacher's tensor, a float32 scalar.

    The error is relative, because plain errors let the layer with the largest values decide alone: with them, one image
    with one clipped outlier was seen to weigh more than the rest of an epoch. It is computed in float32 also under AMP,
    where squares of small half-precision differences would vanish.
    """
    total = torch.zeros((), device=student[0][0].device)
    for ours, theirs in zip(student, teacher, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            target = b.float()
            spread = target.var(correction=0).clamp(min=SMALLEST_VARIANCE)
            total = total + nn.functional.mse_loss(a.float(), target) / spread
    return total


@contextlib.contextmanager
def raw_head(model: nn.Module) -> Iterator[None]:
    """Everything in eval mode, except that the head itself returns its raw maps; eval mode again afterwards."""
    model.eval()
    head = top_layers(model)[-1]
    head.training = True  # not .train(): that would also reach the head's children
    try:
        yield
    finally:
        model.eval()


class Finetuner:
    """One student, its teacher and the optimizer; `run_epoch` may be called as often as wanted.

    Adam trains all weights. On CUDA both models run under FP16 autocast with loss scaling, and not under BF16, because
    BF16's 8 bits of significand are as coarse as the INT8 steps that training has to tell apart.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, *, stride: int, grad_clip: float, device: torch.device
    ) -> None:
        self.student, self.teacher, self.device = student, teacher, device
        self._layers = supervised_layers(len(top_layers(student)), stride)
        self._clip = grad_clip
        self._parameters = trainable_parameters(student)
        self._amp = device.type == "cuda"
        self.optimizer = torch.optim.Adam(self._parameters, lr=0.0)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._amp)
        teacher.eval().requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and loss-scaler state; the weights are the checkpoint's business."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            CheckpointError: the state belongs to another network, or is damaged.
        """
        problem = self._difference(state["optimizer"])
        if problem:
            raise CheckpointError(f"the optimizer's state does not fit the network: {problem}; start a new run")
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # empty where the run was on a CPU
            self.scaler.load_state_dict(state["scaler"])

    def _difference(self, state: Mapping[str, Any]) -> str:
        """What a saved optimizer's state has that Adam over these parameters has not; empty for nothing."""
        (ours,), (theirs,) = self.optimizer.state_dict()["param_groups"], state["param_groups"]
        for name in sorted({*ours, *theirs} - {"lr"}):
            if shown(theirs.get(name)) != shown(ours.get(name)) or theirs.get(name) != ours.get(name):
                return f"{name} is {shown(theirs.get(name))}, expected {shown(ours.get(name))}"
        for index, entry in state["state"].items():
            if index not in ours["params"]:
                return f"parameter {index} is none of {len(ours['params'])}"
            shape = self._parameters[index].shape
            for name, wanted in (("exp_avg", shape), ("exp_avg_sq", shape), ("step", torch.Size())):
                value = entry.get(name)
                if not isinstance(value, Tensor) or value.shape != wanted or not bool(value.isfinite().all()):
                    return f"{name} of parameter {index} is {shown(value)}, expected finite values {list(wanted)}"
                if name != "exp_avg" and bool((value < 0).any()):
                    return f"{name} of parameter {index} holds a negative value"
        return ""

    def run_epoch(
        self, batches: Iterable[Tensor], lr: float, on_step: Callable[[float], None] | None = None
    ) -> EpochResult:
        """Train on `batches` of images, uint8 or float 0..1 `[B, 3, H, W]`, at learning rate `lr`.

        `on_step` is called after every step with the mean loss so far.

        Raises:
            DivergedError: the loss is not finite.
            ValueError: there is no batch at all.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        start, total, count = time.perf_counter(), 0.0, 0
        with (
            raw_head(self.student),
            raw_head(self.teacher),
            LayerTaps(self.student, self._layers) as student_taps,
            LayerTaps(self.teacher, self._layers) as teacher_taps,
        ):
            for images in batches:
                total += self._step(as_input(images, self.device), student_taps, teacher_taps)
                count += 1
                if on_step:
                    on_step(total / count)
        self.optimizer.zero_grad(set_to_none=True)
        if not count:
            raise ValueError("no images to finetune on")
        return EpochResult(loss=total / count, iterations=count, seconds=time.perf_counter() - start)

    def _step(self, images: Tensor, student_taps: LayerTaps, teacher_taps: LayerTaps) -> float:
        """One forward of both models and one optimizer step; returns the loss."""
        with torch.autocast(self.device.type, dtype=torch.float16, enabled=self._amp):
            # no_grad, not inference_mode: autograd refuses to save inference tensors for the loss's backward
            with torch.no_grad():
                self.teacher(images)
            self.student(images)
        loss = supervision_loss(student_taps.take(), teacher_taps.take())
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DivergedError(f"the supervision loss is {value}")
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return value


def as_input(images: Tensor, device: torch.device) -> Tensor:
    """Images as the network takes them: float32 `[B, 3, H, W]` in 0..1 on `device`."""
    moved = images.to(device, non_blocking=True)
    return moved if moved.is_floating_point() else moved.float() / 255
