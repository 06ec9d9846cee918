"""What sensitivity analysis asks about: parts of a network that can be in float while the rest is quantized.

layer       a top-level layer (`model.4`), as in the layer list of a model's YAML
module      a convolution with its activation (`model.4.cv1`): what runs as one kernel
quantizer   one scale: of the activations that share it (`model.4.cv1`), or of one weight (`model.4.cv1.weight`)

For layers and modules, "in float" is what a recipe's `float: [model.4]` does, read off the same placement: their
convolutions are not quantized, and neither is a tensor that nothing else reads as INT8. A tensor that others read as
INT8 stays quantized, for it has one quantizer. A single scale cannot be left out of an engine; a recipe that wants it
gone keeps all convolutions in float that ask for it, and `patterns` names these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from models.quantize import placement, rules
from models.quantize.partial_forward import State
from models.quantize.placement import Plan
from models.quantize.recipe import Recipe


@dataclass(frozen=True)
class Unit:
    """A part of a network.

    Attributes:
        name: for the user.
        convolutions: the convolutions that run in float when a recipe keeps the unit in float, by path.
        patterns: what such a recipe's `float` says.
        in_float: the quantizers that are on while this unit alone is in float.
        alone: the quantizers that are on while this unit alone is quantized.
    """

    name: str
    convolutions: tuple[str, ...]
    patterns: tuple[str, ...]
    in_float: State
    alone: State


class Units:
    """The units of a network, and what a recipe has to say to keep some of them in float."""

    def __init__(self, model: Any, plan: Plan, recipe: Recipe, granularity: str) -> None:
        """Find the units of a network.

        Args:
            model: the fused float network that `plan` was made for, with `recipe`.
            granularity: one of `options.GRANULARITIES`.
        """
        self._model, self._plan, self._granularity = model, plan, granularity
        self._needs = placement.needs(model, recipe)
        self._everything = State.of(plan)
        self.all = tuple(self._scales() if granularity == "quantizer" else self._groups())

    def in_float(self, convolutions: Iterable[str]) -> State:
        """The quantizers that are on while these convolutions are in float, as a recipe that names them has it."""
        gone = set(convolutions)
        left = [path for path in self._needs if path not in gone]
        return State(frozenset().union(*(self._needs[path] for path in left)), frozenset(left))

    def shared(self) -> list[Unit]:
        """For each scale that several units read, find all convolutions that read it.

        The scale's quantizer goes only when all of them are in float.
        """
        found: dict[tuple[str, ...], Unit] = {}
        for name, tensors in self._scale_tensors().items():
            consumers = self._consumers(tensors)
            if sum(not set(consumers).isdisjoint(unit.convolutions) for unit in self.all) > 1:
                found.setdefault(consumers, self._group(f"what reads {name}", consumers, self._operations(consumers)))
        return list(found.values())

    def union(self, units: Sequence[Unit]) -> Unit:
        """All of these units as one, what they have in common taken once."""
        paths = dict.fromkeys(path for unit in units for path in unit.convolutions)
        patterns = dict.fromkeys(pattern for unit in units for pattern in unit.patterns)
        return self._group("+".join(unit.name for unit in units), tuple(paths), tuple(patterns))

    def _groups(self) -> Iterable[Unit]:
        """Layers, or modules: each a set of convolutions."""
        groups: dict[str, list[str]] = {}
        for path in self._plan.convolutions:
            if path in self._needs:
                name = ".".join(path.split(".")[:2]) if self._granularity == "layer" else self._operation(path)
                groups.setdefault(name, []).append(path)
        for name, paths in groups.items():
            yield self._group(name, tuple(paths), (name,))

    def _group(self, name: str, paths: tuple[str, ...], patterns: tuple[str, ...]) -> Unit:
        alone = State(frozenset().union(*(self._needs[path] for path in paths)), frozenset(paths))
        return Unit(name, paths, patterns, self.in_float(paths), alone)

    def _scales(self) -> Iterable[Unit]:
        """Single quantizers: activation scales in the order of the network, then weights."""
        for name, tensors in self._scale_tensors().items():
            state, consumers = State(tensors), self._consumers(tensors)
            yield Unit(name, consumers, self._operations(consumers), self._everything - state, state)
        for path in self._needs:
            state = State(weights=frozenset({path}))
            yield Unit(f"{path}.weight", (path,), self._operations([path]), self._everything - state, state)

    def _scale_tensors(self) -> dict[str, frozenset[str]]:
        return {name: frozenset(self._plan.scales.get(name, (name,))) for name in self._plan.scale_names}

    def _consumers(self, tensors: frozenset[str]) -> tuple[str, ...]:
        return tuple(path for path, needed in self._needs.items() if needed & tensors)

    def _operations(self, paths: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self._operation, paths))

    def _operation(self, path: str) -> str:
        """The path by which a recipe names a convolution: of upstream's Conv around it, where there is one."""
        parent, _, last = path.rpartition(".")
        if last != "conv" or not parent:
            return path
        rule = rules.find(self._model.get_submodule(parent))
        return parent if rule is not None and rule.kind == "conv" else path


def macs(model: nn.Module, images: Any) -> dict[str, int]:
    """Multiply-adds of each convolution for one image, by path, counted while the network runs once.

    Args:
        images: `[B, 3, H, W]` as the network takes them.
    """
    import torch

    counts: dict[str, int] = {}

    def counter(path: str) -> Any:
        def count(module: nn.Conv2d, _inputs: Any, output: Any) -> None:
            counts[path] = output[0].numel() * module.weight[0].numel()

        return count

    convolutions = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    handles = [module.register_forward_hook(counter(path)) for path, module in convolutions]
    try:
        with torch.inference_mode():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return counts
