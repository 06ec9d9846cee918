"""The statements of rules.py: parsed, what their operations compute on tensors, and the network read along them.

The same statements are read twice: `read` interprets them with symbols instead of tensors, which gives the network as
operations on tensors, and `modules.FlowModule` runs them on tensors.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.quantize import rules
from models.quantize.rules import OPS
from utils.core.errors import QatError
from utils.core.tasks import IMAGES


class _Export:
    active = False


@contextmanager
def export_mode() -> Iterator[None]:
    """While active, networks compute in PyTorch what they compute while they are exported, see `exporting`."""
    before = _Export.active
    _Export.active = True
    try:
        yield
    finally:
        _Export.active = before


def exporting() -> bool:
    """Return whether torch's exporter is tracing the network.

    Then redundant points quantize too, so that the graph holds every Q/DQ pair, and operations are written in the form
    that suits a graph.
    """
    return _Export.active or torch.onnx.is_in_onnx_export()


def _resize_like(x: Tensor, like: Tensor) -> Tensor:
    """`[B, C, h, w]` → `[B, C, H, W]` by nearest neighbour; of equal size, the same tensor.

    An exported graph has a constant factor, so that no size is computed in it: the network's strides are powers of 2.
    """
    if x.shape[2:] == like.shape[2:]:
        return x
    factors = [int(whole) / int(part) for whole, part in zip(like.shape[2:], x.shape[2:], strict=True)]
    if exporting() and all(factor.is_integer() for factor in factors):
        return F.interpolate(x, scale_factor=factors, mode="nearest")
    return F.interpolate(x, size=like.shape[2:], mode="nearest")


def _sum(*tensors: Tensor) -> Tensor:
    """Add up tensors of one shape as upstream does; in an exported graph by Adds, which need no stacked copy."""
    if exporting():
        return functools.reduce(operator.add, tensors)
    return torch.sum(torch.stack(tensors), dim=0)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "chunk": lambda x, n, dim=1: x.chunk(n, dim),
    "split": lambda x, sizes, dim=1: x.split(sizes, dim),
    "concat": lambda *xs, dim=1: torch.cat(xs, dim),
    "identity": lambda x: x,
    "max_pool": F.max_pool2d,
    "avg_pool": F.avg_pool2d,
    "resize_like": _resize_like,
    "add": lambda x, y: x + y,
    "sum": _sum,
}


@dataclass(frozen=True)
class Step:
    """One statement of a flow, `targets = call(args, options)`, parsed."""

    targets: tuple[str, ...]
    call: str  # an operation, or the dotted path of a submodule
    args: tuple[ast.expr, ...]
    keywords: tuple[tuple[str, ast.expr], ...]

    @property
    def is_operation(self) -> bool:
        """Return whether an operation is called, not a submodule."""
        return self.call in OPS

    def arguments(self, values: dict[str, Any], module: Any) -> list[Any]:
        """Positional arguments; several arguments of a submodule become the one list that upstream passes."""
        arguments: list[Any] = []
        for node in self.args:
            if isinstance(node, ast.Starred):
                arguments.extend(_evaluate(node.value, values, module))
            else:
                arguments.append(_evaluate(node, values, module))
        if self.is_operation or len(arguments) == 1:
            return arguments
        return [arguments]

    def options(self, module: Any) -> dict[str, Any]:
        """Keyword arguments."""
        return {name: _evaluate(node, {}, module) for name, node in self.keywords}


@functools.cache
def parse(flow: rules.Flow) -> tuple[Step, ...]:
    """Parse the statements of a flow.

    Raises:
        SyntaxError: a statement is not of the form `name[, name] = call(...)`.
    """
    steps = []
    for node in ast.parse(flow).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            raise SyntaxError(f"a flow statement reads 'name = call(...)', not {ast.unparse(node)!r}")
        target = node.targets[0]
        call = node.value
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        names = tuple(ast.unparse(name) for name in targets)
        keywords = tuple((keyword.arg or "", keyword.value) for keyword in call.keywords)
        path = ast.unparse(call.func).replace("[", ".").replace("]", "")  # cv2[0].m → cv2.0.m
        steps.append(Step(names, path.removeprefix("self."), tuple(call.args), keywords))
    return tuple(steps)


def _evaluate(node: ast.expr, values: dict[str, Any], module: Any) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return getattr(module, node.attr)
    if isinstance(node, ast.Subscript):
        container = _evaluate(node.value, values, module)
        index = _evaluate(node.slice, values, module)
        return container[index]
    return ast.literal_eval(node)


@dataclass(eq=False)
class Value:
    """A tensor of the network, by the place that computes it."""

    name: str  # 'model.4.cv1', or 'model.4.z' for a variable of a flow
    owner: str  # path of the module that computes it; '' for the image
    variable: str = ""  # the flow's variable, '' for a module's result
    opaque: bool = False  # computed by a module that no rule describes

    @property
    def is_image(self) -> bool:
        """Return whether nothing in the network computes it."""
        return not self.owner


@dataclass(eq=False)
class Operation:
    """Computation that turns tensors into tensors."""

    kind: rules.Kind
    path: str  # of the module, of a convolution's nn.Conv2d, or of the flow that the statement stands in
    inputs: list[Value]
    outputs: list[Value]
    same: bool = False  # the result is the input itself


@dataclass
class Graph:
    """The network as operations in the order of computation."""

    operations: list[Operation] = field(default_factory=list)  # also each convolution inside a module without a rule
    flows: dict[str, rules.Flow] = field(default_factory=dict)  # modules to replace by a FlowModule
    unknown: dict[str, str] = field(default_factory=dict)  # path → class of modules that no rule describes
    unused: frozenset[str] = frozenset()  # paths of top-level layers that nothing leads from to the last one, as those
    # in front of a head that was cut down to fewer levels: an exporter leaves them out

    @cached_property
    def reads(self) -> Counter[Value]:
        """Number of operations that read each value; read it only when the graph is whole."""
        return Counter(value for operation in self.operations for value in operation.inputs)

    @cached_property
    def convolutions(self) -> dict[str, Operation]:
        """The convolutions by path."""
        return {operation.path: operation for operation in self.operations if operation.kind == "conv"}

    @cached_property
    def ends(self) -> frozenset[str]:
        """Paths of the convolutions whose results nothing in the network reads, as far as these are known."""
        paths: set[str] = set()
        for path, convolution in self.convolutions.items():
            is_read = any(self.reads[value] for value in convolution.outputs)
            if convolution.outputs and not is_read:
                paths.add(path)
        return frozenset(paths)

    def add(self, module: nn.Module, path: str, x: Any) -> Any:
        """Append what a module computes, interpreted with symbols; returns its result, None of a head."""
        rule = rules.find(module)
        if rule is None:
            self.unknown[path] = type(module).__name__
            for name, inner in module.named_modules(prefix=path):
                if isinstance(inner, nn.Conv2d):
                    self.operations.append(Operation("conv", name, [Value(name, name, opaque=True)], []))
            return self._operation("float", path, _flat(x), Value(path, path, opaque=True))
        if rule.kind == "flow" or rule.kind == "head":
            return self._flow(module, path, x, rule)
        if rule.kind == "conv" and hasattr(module, "bn"):
            raise QatError(f"{path} still has its batch norm; fuse the network before planning")
        is_block = rule.kind == "conv" and not isinstance(module, nn.Conv2d)
        operation_path = f"{path}.conv" if is_block else path
        return self._operation(rule.kind, operation_path, _flat(x), Value(path, path))

    def _flow(self, module: nn.Module, path: str, x: Any, rule: rules.Rule) -> Any:
        statements = rule.statements(module)
        steps = parse(statements)
        if any(step.is_operation for step in steps):
            self.flows[path] = statements
        values: dict[str, Any] = {"x": x}
        for step in steps:
            arguments = step.arguments(values, module)
            if step.is_operation:
                result = self._statement(step, path, module, arguments)
            else:
                result = self.add(module.get_submodule(step.call), f"{path}.{step.call}", arguments[0])
            if len(step.targets) == 1:
                result = [result]
            values.update(zip(step.targets, result, strict=True))
        return values.get("out")

    def _statement(self, step: Step, path: str, module: nn.Module, arguments: list[Any]) -> Any:
        kind = rules.OPS[step.call]
        inputs = [item for item in arguments if isinstance(item, Value)]
        if step.call == "resize_like":
            inputs = inputs[:1]  # the second only gives the size
        names = list(step.targets)
        listed = step.call == "split" and len(names) == 1  # one variable holds a list of tensors
        if listed:
            names = [f"{names[0]}[{index}]" for index in range(len(arguments[1]))]
        outputs = [Value(f"{path}.{name}", path, name) for name in names]
        self.operations.append(Operation(kind, path, inputs, outputs, same=step.call == "identity"))
        if listed or len(outputs) > 1:
            return outputs
        return outputs[0]

    def _operation(self, kind: rules.Kind, path: str, inputs: list[Value], output: Value) -> Value:
        self.operations.append(Operation(kind, path, inputs, [output]))
        return output


def read(model: Any) -> Graph:
    """Read a fused network of upstream's (a module whose `model` is a list of layers with `f`) with symbols."""
    graph = Graph()
    results: list[Any] = []  # of each top-level layer: its value, None for a head
    value: Any = Value(IMAGES, "")
    for index, layer in enumerate(model.model):
        if layer.f != -1:
            pick = [value if source == -1 else results[source] for source in _sources(layer)]
            value = pick[0] if isinstance(layer.f, int) else pick
        value = graph.add(layer, f"model.{index}", value)
        results.append(value)
    used = {len(model.model) - 1}
    for index in reversed(range(len(model.model))):
        if index in used:
            for source in _sources(model.model[index]):
                used.add(source if source >= 0 else index + source)
    graph.unused = frozenset(f"model.{index}" for index in range(len(model.model)) if index not in used)
    return graph


def _sources(layer: Any) -> list[int]:
    return [layer.f] if isinstance(layer.f, int) else list(layer.f)


def _flat(x: Any) -> list[Value]:
    if isinstance(x, Value):
        return [x]
    return [value for item in x for value in _flat(item)]
