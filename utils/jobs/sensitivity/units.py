"""What sensitivity analysis asks about: parts of a network that can be in float while the rest is quantized.

layer       a top-level layer (`model.4`), as in the layer list of a model's YAML
module      a convolution with its activation (`model.4.cv1`): what runs as one kernel

"In float" is what a recipe's `float: [model.4]` does, read off the same placement: the unit's convolutions are not
quantized, and neither is a tensor that nothing else reads as INT8. A tensor that others read as INT8 stays quantized,
for it has one quantizer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.quantize import placement, rules
from models.quantize.modules import quantized_weights
from models.quantize.placement import Plan
from models.quantize.recipe import Recipe
from utils.core.tasks import Prediction, predicted
from utils.jobs.inputs import Profile


@dataclass(frozen=True)
class State:
    """Which quantizers are on.

    Attributes:
        tensors: names of quantized tensors, as in `Plan.tensors`, and `{convolution}.input` of `Plan.fallback`.
        weights: paths of convolutions whose weights are quantized.
    """

    tensors: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: Plan) -> State:
        """The state in which a network is whose placement is `plan`."""
        tensors = [tensor.name for tensor in plan.tensors] + [f"{path}.input" for path in plan.fallback]
        return cls(frozenset(tensors), frozenset(path for path, why in plan.convolutions.items() if why == "int8"))


class Switches:
    """A placed and calibrated network (`placement.apply`), every quantizer of which is a switch of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._points = placement.points(model)
        self._weights = {path: quantizer for path, (_, quantizer) in quantized_weights(model).items()}

    def network_in(self, state: State) -> nn.Module:
        """The network, in `state` until it is turned to another one."""
        for name, point in self._points.items():
            point.on = name in state.tensors
        for path, quantizer in self._weights.items():
            quantizer.on = path in state.weights
        return self.model

    def predict(self, images: Tensor, state: State) -> Prediction:
        """What the network predicts in `state` for float images `[B, 3, H, W]` in 0..1."""
        return Prediction(*predicted(self.network_in(state)(images)))


@dataclass(frozen=True)
class Unit:
    """A part of a network.

    Attributes:
        name: for the user.
        convolutions: the convolutions that run in float when a recipe keeps the unit in float, by path.
        patterns: what such a recipe's `float` says.
        in_float: the quantizers that are on while this unit alone is in float.
    """

    name: str
    convolutions: tuple[str, ...]
    patterns: tuple[str, ...]
    in_float: State


class Units:
    """The units of a network, and what a recipe has to say to keep some of them in float.

    `all` are the units, in the order of the network; in the state `everything` all quantizers are on.
    """

    def __init__(self, model: Any, plan: Plan, recipe: Recipe, granularity: str) -> None:
        """Find the layers or modules of `model`, the fused float network that `plan` was made for, with `recipe`."""
        self._model, self._plan = model, plan
        self._needs = placement.needs(model, recipe)
        self.everything = State.of(plan)
        groups: dict[str, list[str]] = {}
        for path in self._plan.convolutions:
            if path in self._needs:
                name = ".".join(path.split(".")[:2]) if granularity == "layer" else self._operation(path)
                groups.setdefault(name, []).append(path)
        self.all = tuple(self._unit(name, tuple(paths), (name,)) for name, paths in groups.items())

    def in_float(self, convolutions: Iterable[str]) -> State:
        """The quantizers that are on while these convolutions are in float, as a recipe that names them has it."""
        paths = frozenset(self._needs.keys() - set(convolutions))
        return State(frozenset().union(*(self._needs[path] for path in paths)), paths)

    def shared(self) -> list[Unit]:
        """For each scale that several units read, find all convolutions that read it.

        The scale's quantizer goes only when all of them are in float.
        """
        found: dict[tuple[str, ...], Unit] = {}
        for name in self._plan.scale_names:
            tensors = frozenset(self._plan.scales.get(name, (name,)))
            consumers = tuple(path for path, needed in self._needs.items() if needed & tensors)
            if sum(not set(consumers).isdisjoint(unit.convolutions) for unit in self.all) > 1:
                patterns = tuple(map(self._operation, consumers))
                found.setdefault(consumers, self._unit(f"what reads {name}", consumers, patterns))
        return list(found.values())

    def _unit(self, name: str, paths: tuple[str, ...], patterns: tuple[str, ...]) -> Unit:
        return Unit(name, paths, patterns, self.in_float(paths))

    def _operation(self, path: str) -> str:
        """The path by which a recipe names a convolution: of upstream's Conv around it, where there is one."""
        parent, _, last = path.rpartition(".")
        rule = rules.find(self._model.get_submodule(parent)) if parent and last == "conv" else None
        return parent if rule is not None and rule.kind == "conv" else path


def cost_shares(model: nn.Module, images: Tensor, profile: Profile | None) -> dict[str, float]:
    """Path of a module → its share of the network's cost, 0..1: of multiply-adds, or of an engine's time.

    A kernel counts for the modules that its name mentions, such as `model.4.cv1` in `/model.4/cv1/conv/Conv`: in equal
    parts if TensorRT fused several, however often it names each. What mentions none, such as a conversion of formats,
    counts only in the total. Without a `profile`, multiply-adds of `images` `[1, 3, H, W]` are counted.
    """
    if profile is None:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(images)
        flops = {name.partition(".")[2]: sum(count.values()) for name, count in counter.get_flop_counts().items()}
        counts = {path: flops.get(path, 0) for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        return {path: count / sum(counts.values()) for path, count in counts.items()}
    total, shares = sum(ms for _, ms in profile), defaultdict[str, float](float)
    for name, ms in profile:
        mentioned = {_module_path(match) for match in re.findall(r"model\.\d+[\w./]*", name)}
        for path in mentioned:
            shares[path] += ms / total / len(mentioned)
    return shares


def unit_kinds(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, str]:
    """Return the class and the stride of modules by their paths, such as 'RepNCSPELAN4 /16'.

    Of a head, which has maps of several strides, the first and the last; of a module without maps, the class alone.

    Args:
        model: the float network.
        names: paths of modules; others, such as groups of modules, are left out.
        images: `[1, 3, H, W]`.
    """
    modules = dict(model.named_modules())
    strides: dict[str, set[int]] = {name: set() for name in names if name in modules}

    def record(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            strides[name].add(round(images.shape[2] / output.shape[2]))
        elif isinstance(output, (list, tuple)):
            for part in output:
                record(name, part)

    hooks = []
    for name in strides:
        hooks.append(modules[name].register_forward_hook(lambda _, __, output, name=name: record(name, output)))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    kinds = {}
    for name, found in strides.items():
        ends = sorted({min(found), max(found)}) if found else []
        text = f" /{'-'.join(map(str, ends))}" if ends else ""
        kinds[name] = type(modules[name]).__name__ + text
    return kinds


def cost_of(patterns: Sequence[str], shares: Mapping[str, float]) -> float:
    """The share of what lies below these modules, 0..1."""
    inside = tuple(f"{pattern}." for pattern in patterns)
    return sum(share for path, share in shares.items() if f"{path}.".startswith(inside))


def _module_path(scope: str) -> str:
    """A node or weight → the module that a recipe names: `model.3/cv2/cv2.0/m/m.0/conv/Conv` → `model.3.cv2.0.m.0`."""
    parts: list[str] = []
    for part in scope.strip("/").split("/"):
        if parts and part.startswith(f"{parts[-1]}."):  # an element of a list is called after the list
            parts.pop()
        parts.append(part)
    names = ".".join(parts).split(".")
    inside = [name in ("conv", "act", "weight", "bias") or name[:1].isupper() for name in names]
    return ".".join(names[: inside.index(True)] if True in inside else names)
