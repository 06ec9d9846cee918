"""Units of sensitivity analysis: parts of a network that can be in float while the rest is quantized.

layer       a top-level layer (`model.4`), as in the layer list of a model's YAML
module      a convolution with its activation (`model.4.cv1`), which run as one kernel

"In float" is what a recipe's `float: [model.4]` does, read off the same placement: the unit's convolutions are not
quantized, and neither is a tensor that nothing else reads as INT8. A tensor that others read as INT8 stays quantized,
for it has one quantizer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
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
    """The quantizers that are on.

    Attributes:
        tensors: names of quantized tensors, as in `Plan.tensors`, and `{convolution}.input` of `Plan.fallback`.
        weights: paths of convolutions whose weights are quantized.
    """

    tensors: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: Plan) -> State:
        """Return the state of a network whose placement is `plan`."""
        tensors = [tensor.name for tensor in plan.tensors]
        tensors += [f"{path}.input" for path in plan.fallback]
        weights = [path for path, reason in plan.convolutions.items() if reason == "int8"]
        return cls(frozenset(tensors), frozenset(weights))


class Switches:
    """A placed and calibrated network (`placement.apply`), every quantizer of which is a switch of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._points = placement.points(model)
        self._weights = {}
        for path, (_, quantizer) in quantized_weights(model).items():
            self._weights[path] = quantizer

    def network_in(self, state: State) -> nn.Module:
        """Return the network, in `state` until it is turned to another one."""
        for name, point in self._points.items():
            point.on = name in state.tensors
        for path, quantizer in self._weights.items():
            quantizer.on = path in state.weights
        return self.model

    def predict(self, images: Tensor, state: State) -> Prediction:
        """Return the predictions of the network in `state` for float images `[B, 3, H, W]` in 0..1."""
        return Prediction(*predicted(self.network_in(state)(images)))


@dataclass(frozen=True)
class Unit:
    """A part of a network.

    Attributes:
        name: the unit's name for the user.
        convolutions: the convolutions that run in float when a recipe keeps the unit in float, by path.
        patterns: the entries of such a recipe's `float`.
        in_float: the quantizers that are on while this unit alone is in float.
    """

    name: str
    convolutions: tuple[str, ...]
    patterns: tuple[str, ...]
    in_float: State


class Units:
    """The units of a network, and the states and recipes that keep some of them in float.

    Attributes:
        all: the units, in the order of the network.
        everything: the state in which all quantizers are on.
    """

    def __init__(self, model: Any, plan: Plan, recipe: Recipe, granularity: str) -> None:
        """Find the layers or modules of `model`, the fused FP32 model that `plan` was made for, with `recipe`."""
        self._model = model
        self._plan = plan
        self._needs = placement.needs(model, recipe)
        self.everything = State.of(plan)
        groups: dict[str, list[str]] = defaultdict(list)
        for path in plan.convolutions:
            if path in self._needs:
                name = _layer(path) if granularity == "layer" else self._operation(path)
                groups[name].append(path)
        self.all = tuple(self._unit(name, tuple(paths), (name,)) for name, paths in groups.items())

    def in_float(self, convolutions: Iterable[str]) -> State:
        """Return the state in which these convolutions are in float, as a recipe that names them has it."""
        weights = frozenset(self._needs.keys() - set(convolutions))
        tensors: set[str] = set()
        for path in weights:
            tensors |= self._needs[path]
        return State(frozenset(tensors), weights)

    def shared(self) -> list[Unit]:
        """Return a set for each scale that several units read: all convolutions that read it.

        The scale's quantizer goes only when all of them are in float.
        """
        sets: dict[tuple[str, ...], Unit] = {}
        for name in self._plan.scale_names:
            readers = self._readers(name)
            units = [unit for unit in self.all if not set(readers).isdisjoint(unit.convolutions)]
            if len(units) > 1 and readers not in sets:
                patterns = tuple(self._operation(path) for path in readers)
                sets[readers] = self._unit(f"readers of {name}", readers, patterns)
        return list(sets.values())

    def _readers(self, scale: str) -> tuple[str, ...]:
        """Return the paths of the convolutions that read a tensor with this scale."""
        tensors = frozenset(self._plan.scales.get(scale, (scale,)))
        return tuple(path for path, needed in self._needs.items() if needed & tensors)

    def _unit(self, name: str, paths: tuple[str, ...], patterns: tuple[str, ...]) -> Unit:
        """Return the unit of these convolutions."""
        return Unit(name, paths, patterns, self.in_float(paths))

    def _operation(self, path: str) -> str:
        """Return the path by which a recipe names a convolution: that of upstream's Conv around it, if there is one."""
        parent, _, last = path.rpartition(".")
        if not parent or last != "conv":
            return path
        rule = rules.find(self._model.get_submodule(parent))
        return parent if rule is not None and rule.kind == "conv" else path


def _layer(path: str) -> str:
    """Return the layer that a module lies in: 'model.4.cv1.conv' → 'model.4'."""
    return ".".join(path.split(".")[:2])


def cost_shares(model: nn.Module, images: Tensor, profile: Profile | None) -> dict[str, float]:
    """Return the share of the network's cost of modules by their paths, 0..1: of multiply-adds, or of engine time.

    Args:
        images: `[1, 3, H, W]`; their multiply-adds are counted.
        profile: the layers of an engine; None to count multiply-adds.
    """
    return _shares_of_flops(model, images) if profile is None else _shares_of_time(profile)


def _shares_of_flops(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return the share of the multiply-adds of each convolution, 0..1, by its path."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    flops = {}
    for name, count in counter.get_flop_counts().items():
        flops[name.partition(".")[2]] = sum(count.values())
    counts = {path: flops.get(path, 0) for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    total = sum(counts.values())
    return {path: count / total for path, count in counts.items()}


def _shares_of_time(profile: Profile) -> dict[str, float]:
    """Return the share of an engine's time of each module that the name of a kernel mentions, 0..1, by its path.

    Such a name is `/model.4/cv1/conv/Conv`, of the module `model.4.cv1`. If TensorRT fused several modules, they count
    in equal parts, however often the name mentions each. A kernel that mentions none, such as a conversion of formats,
    counts only in the total.
    """
    total = sum(ms for _, ms in profile)
    shares = defaultdict[str, float](float)
    for name, ms in profile:
        mentioned = {_module_path(match) for match in re.findall(r"model\.\d+[\w./]*", name)}
        for path in mentioned:
            shares[path] += ms / total / len(mentioned)
    return shares


def unit_kinds(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, str]:
    """Return the class and the stride of modules by their paths, such as 'RepNCSPELAN4 /16'.

    Of a head, which has maps of several strides, the first and the last; of a module without maps, the class alone.

    Args:
        model: the FP32 model.
        names: paths of modules; others, such as sets of units, are left out.
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

    with ExitStack() as stack:
        for name in strides:
            hook = modules[name].register_forward_hook(lambda _, __, output, name=name: record(name, output))
            stack.callback(hook.remove)
        with torch.no_grad():
            model(images)
    return {name: _kind(modules[name], strides[name]) for name in strides}


def _kind(module: nn.Module, strides: Collection[int]) -> str:
    """Return the class of a module and its strides, such as 'Conv /2' or 'DDetect /8-32'."""
    name = type(module).__name__
    if not strides:
        return name
    first, last = min(strides), max(strides)
    return f"{name} /{first}" if first == last else f"{name} /{first}-{last}"


def cost_of(patterns: Sequence[str], shares: Mapping[str, float]) -> float:
    """Return the share of the cost of everything below these modules, 0..1."""
    inside = tuple(f"{pattern}." for pattern in patterns)
    return sum(share for path, share in shares.items() if f"{path}.".startswith(inside))


def _module_path(scope: str) -> str:
    """Return the module that a recipe names for the name of a node or a weight.

    `model.3/cv2/cv2.0/m/m.0/conv/Conv` → `model.3.cv2.0.m.0`
    """
    parts: list[str] = []
    for part in scope.strip("/").split("/"):
        if parts and part.startswith(f"{parts[-1]}."):  # an element of a list is called after the list
            parts.pop()
        parts.append(part)
    module: list[str] = []
    for name in ".".join(parts).split("."):
        if name in ("conv", "act", "weight", "bias") or name[:1].isupper():
            break
        module.append(name)
    return ".".join(module)
