"""The network as operations on tensors, read with symbols instead of tensors along the statements of rules.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from models.quantize import flow, rules
from utils.core.errors import QatError
from utils.core.tasks import IMAGES


@dataclass(eq=False)
class Value:
    """A tensor of the network, by the place that computes it."""

    name: str  # 'model.4.cv1', or 'model.4.z' for a variable of a flow
    owner: str  # path of the module that computes it; '' for the image
    variable: str = ""  # the flow's variable, '' for a module's result
    opaque: bool = False  # computed by a module that no rule describes


@dataclass(eq=False)
class Operation:
    """What turns tensors into tensors."""

    kind: rules.Kind
    path: str  # path of the module, or of the flow that the statement stands in
    inputs: list[Value]
    outputs: list[Value]
    same: bool = False  # the result is the input itself


@dataclass
class Graph:
    """The network as operations in the order of computation."""

    operations: list[Operation] = field(default_factory=list)
    flows: dict[str, rules.Flow] = field(default_factory=dict)  # modules to replace by a FlowModule
    unknown: dict[str, str] = field(default_factory=dict)  # path → class of modules that no rule describes
    results: list[Any] = field(default_factory=list)  # of each top-level layer: its value, None for a head
    unused: frozenset[str] = frozenset()  # paths of top-level layers that nothing leads from to the last one

    @cached_property
    def ends(self) -> frozenset[str]:
        """Paths of the convolutions whose results nothing in the network reads; asked for when it is whole."""
        read = {value for operation in self.operations for value in operation.inputs}
        convolutions = [operation for operation in self.operations if operation.kind == "conv"]
        return frozenset(one.path for one in convolutions if read.isdisjoint(one.outputs))


def read(model: Any) -> Graph:
    """Read a fused network of upstream's (a module whose `model` is a list of layers with `f`) with symbols."""
    graph = Graph()
    reader = _Reader(graph)
    results = graph.results
    value: Any = Value(IMAGES, "")
    for index, layer in enumerate(model.model):
        sources = layer.f
        if sources != -1:
            pick = [
                value if source == -1 else results[source]
                for source in ([sources] if isinstance(sources, int) else sources)
            ]
            value = pick[0] if isinstance(sources, int) else pick
        value = reader.module(layer, f"model.{index}", value)
        results.append(value)
    graph.unused = _unused(model)
    return graph


def _unused(model: Any) -> frozenset[str]:
    """Layers that an exporter leaves out; a head that was cut down to fewer levels has some in front of it."""
    used = {len(model.model) - 1}
    for index in range(len(model.model) - 1, -1, -1):
        if index in used:
            sources = model.model[index].f
            used |= {one if one >= 0 else index + one for one in ([sources] if isinstance(sources, int) else sources)}
    return frozenset(f"model.{index}" for index in range(len(model.model)) if index not in used)


class _Reader:
    """Interprets modules with symbols and appends their operations to a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def module(self, module: nn.Module, path: str, x: Any) -> Any:
        rule = rules.find(module)
        if rule is None:
            self.graph.unknown[path] = type(module).__name__
            return self._operation("float", path, _flat(x), Value(path, path, opaque=True))
        if rule.kind == "flow" or rule.kind == "head":
            return self._flow(module, path, x, rule)
        if rule.kind == "conv" and hasattr(module, "bn"):
            raise QatError(f"{path} still has its batch norm; fuse the network before planning")
        return self._operation(rule.kind, path, _flat(x), Value(path, path))

    def _flow(self, module: nn.Module, path: str, x: Any, rule: rules.Rule) -> Any:
        statements = rule.statements(module)
        steps = flow.parse(statements)
        if any(step.is_operation for step in steps):
            self.graph.flows[path] = statements
        values: dict[str, Any] = {"x": x}
        for step in steps:
            arguments = step.arguments(values, module)
            if step.is_operation:
                result = self._statement(step, path, module, arguments)
            else:
                result = self.module(module.get_submodule(step.call), f"{path}.{step.call}", arguments[0])
            if len(step.targets) == 1:
                result = [result]
            values.update(zip(step.targets, result, strict=True))
        return values.get("out")

    def _statement(self, step: flow.Step, path: str, module: nn.Module, arguments: list[Any]) -> Any:
        kind = rules.OPS[step.call]
        inputs = [item for item in arguments if isinstance(item, Value)]
        if step.call == "resize_like":
            inputs = inputs[:1]  # the second only gives the size
        names = list(step.targets)
        listed = step.call == "split" and len(names) == 1  # one variable holds a list of tensors
        if listed:
            names = [f"{names[0]}[{index}]" for index in range(len(arguments[1]))]
        outputs = [Value(f"{path}.{name}", path, name) for name in names]
        self.graph.operations.append(Operation(kind, path, inputs, outputs, same=step.call == "identity"))
        return outputs if listed or len(outputs) > 1 else outputs[0]

    def _operation(self, kind: rules.Kind, path: str, inputs: list[Value], output: Value) -> Value:
        self.graph.operations.append(Operation(kind, path, inputs, [output]))
        return output


def _flat(x: Any) -> list[Value]:
    return [x] if isinstance(x, Value) else [value for item in x for value in _flat(item)]
