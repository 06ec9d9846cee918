"""A placed network with every quantizer as a switch of its own, run layer by layer from results that are known already.

    with Layerwise(model) as network:
        whole = network.run(images, network.everything)
        other = network.run(images, state, known=whole)   # only layers that read or compute something else

Sensitivity analysis asks for hundreds of states of one network on the same images, each differing from a known one in
a few switches. A layer whose inputs are the very tensors of the known run, and whose switches stand as they did there,
is not run again. The tensor that a layer gives to others is kept before it is rounded, so that switching its
quantizer costs no more than rounding it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.quantize import backend
from models.quantize.modules import QuantPoint
from models.quantize.placement import Plan, point_of
from utils.core.device import disable_tf32
from utils.core.tasks import Prediction, Task, prediction_of, task_of_head


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
        tensors = [tensor.name for tensor in plan.tensors] + [fallback_input(path) for path in plan.fallback]
        weights = [path for path, state in plan.convolutions.items() if state == "int8"]
        return cls(frozenset(tensors), frozenset(weights))

    def __and__(self, other: State) -> State:
        return State(self.tensors & other.tensors, self.weights & other.weights)

    def __sub__(self, other: State) -> State:
        return State(self.tensors - other.tensors, self.weights - other.weights)


def fallback_input(path: str) -> str:
    """Name of the tensor that a convolution without a described input reads."""
    return f"{path}.input"


@dataclass(frozen=True)
class Run:
    """Results of all top-level layers.

    Attributes:
        raw: before the quantizer of the layer's result.
        results: what other layers read; the last is the head's output.
        layers: how many layers were run for it.
        task: of the network.
    """

    images: Tensor
    state: State
    raw: tuple[Any, ...]
    results: tuple[Any, ...]
    layers: int
    task: Task

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images."""
        return self.images.shape[2], self.images.shape[3]

    @property
    def prediction(self) -> Prediction:
        """The head's."""
        return prediction_of(self.task, self.results[-1])


@dataclass(frozen=True)
class _Switch:
    """The point of one tensor, which is the switch; `at` are the paths of the modules that it acts in."""

    point: QuantPoint
    at: tuple[str, ...]


class Layerwise:
    """A placed network that runs only the layers whose state has changed; see the module's docstring.

    It is a context manager: while it is open the model itself must not be called.

    Attributes:
        model: the network.
        everything: the state in which all quantizers are on.
    """

    def __init__(self, model: Any) -> None:
        """Take a network and leave it as it is until the context is entered.

        Args:
            model: upstream's network with quantizers (`placement.apply`), calibrated, in evaluation mode.
        """
        self.model = model
        self.everything = State.of(model.quantization_plan)
        self._layers = list(model.model)
        self._task = task_of_head(self._layers[-1])
        plan: Plan = model.quantization_plan
        self._switches: dict[str, _Switch] = {}  # by the tensor's name
        for tensor in plan.tensors:
            paths = (tensor.owner,) if tensor.owner else plan.image_consumers
            self._switches[tensor.name] = _Switch(point_of(model, tensor), paths)
        for path in plan.fallback:
            self._switches[fallback_input(path)] = _Switch(model.get_submodule(path).input_point, (path,))
        self._result = plan.results
        self._inner = [self._inside(index) for index in range(len(self._layers))]

    def __enter__(self) -> Layerwise:
        self._stack = ExitStack()
        self._stack.enter_context(disable_tf32())
        for name in filter(self._switches.__contains__, self._result):
            self._switches[name].point.on = False
        return self

    def __exit__(self, *exc: object) -> None:
        self._set(self.everything, range(len(self._layers)))
        for name in filter(self._switches.__contains__, self._result):
            self._switches[name].point.on = True
        self._stack.close()

    def run(self, images: Tensor, state: State, known: Run | None = None) -> Run:
        """Results of all layers in `state`.

        Args:
            images: float `[B, 3, H, W]` in 0..1.
            known: a run on the same `images`; its results are used wherever they hold.
        """
        if known is not None and known.images is not images:
            known = None
        raw: list[Any] = []
        results: list[Any] = []
        count = 0
        for index, layer in enumerate(self._layers):
            inputs = self._inputs(layer, results, images)
            same = known is not None and self._holds(index, layer, inputs, known, state, images)
            if known is not None and same:
                raw.append(known.raw[index])
            else:
                self._set(state, [index])
                raw.append(layer(list(inputs) if isinstance(inputs, list) else inputs))
                count += 1
            name = self._result[index]
            kept = known is not None and (name in state.tensors) == (name in known.state.tensors)
            if known is not None and same and kept:
                results.append(known.results[index])
            else:
                rounds = name in state.tensors and name in self._switches
                results.append(self._switches[name].point.rounded(raw[-1]) if rounds else raw[-1])
        return Run(images, state, tuple(raw), tuple(results), count, self._task)

    def _holds(self, index: int, layer: Any, inputs: Any, known: Run, state: State, images: Tensor) -> bool:
        """Whether a layer computes in `state` what it computed in a known run."""
        inner = self._inner[index]
        if inner & state != inner & known.state:
            return False
        before = self._inputs(layer, known.results[:index], images)
        if isinstance(inputs, list):
            return all(ours is theirs for ours, theirs in zip(inputs, before, strict=True))
        return inputs is before

    def _inputs(self, layer: Any, results: Any, images: Tensor) -> Any:
        """What a layer reads, as upstream's loop over layers finds it."""
        before = results[-1] if results else images
        if layer.f == -1:
            return before
        if isinstance(layer.f, int):
            return results[layer.f]
        return [before if source == -1 else results[source] for source in layer.f]

    def _inside(self, index: int) -> State:
        """The quantizers that act while a layer runs."""
        prefix = f"model.{index}."
        names = [name for name, switch in self._switches.items() if any(f"{p}.".startswith(prefix) for p in switch.at)]
        weights = [path for path in self.everything.weights if f"{path}.".startswith(prefix)]
        return State(frozenset(names) - {self._result[index]}, frozenset(weights))

    def _set(self, state: State, layers: Iterable[int]) -> None:
        for index in layers:
            for name in self._inner[index].tensors:
                self._switches[name].point.on = name in state.tensors
            for path in self._inner[index].weights:
                backend.enable(self.model.get_submodule(path).weight_quantizer, path in state.weights)
