"""The statements of rules.py: parsed, and what their operations compute on tensors.

The same statements are read twice: `graph.py` interprets them with symbols, `modules.FlowModule` runs them on tensors.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.quantize.rules import OPS


class _Export:
    active = False


_export = _Export()


@contextmanager
def export_mode() -> Iterator[None]:
    """While active, networks compute in PyTorch what they compute while they are exported, see `exporting`."""
    before, _export.active = _export.active, True
    try:
        yield
    finally:
        _export.active = before


def exporting() -> bool:
    """Whether torch's exporter is tracing the network.

    Then redundant sites quantize too, so that the graph holds every Q/DQ pair, and operations are written in the form
    that suits a graph.
    """
    return _export.active or torch.onnx.is_in_onnx_export()


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


def _sum(*xs: Tensor) -> Tensor:
    """The sum as upstream writes it; in an exported graph a chain of Adds, which need no stacked copy."""
    return functools.reduce(operator.add, xs) if exporting() else torch.sum(torch.stack(xs), dim=0)


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
        """Whether an operation is called, not a submodule."""
        return self.call in OPS

    def arguments(self, values: dict[str, Any], module: Any) -> list[Any]:
        """Positional arguments; several arguments of a submodule become the one list that upstream passes."""
        found: list[Any] = []
        for node in self.args:
            if isinstance(node, ast.Starred):
                found.extend(_evaluate(node.value, values, module))
            else:
                found.append(_evaluate(node, values, module))
        return found if self.is_operation or len(found) == 1 else [found]

    def options(self, module: Any) -> dict[str, Any]:
        """Keyword arguments."""
        return {name: _evaluate(node, {}, module) for name, node in self.keywords}


_parsed: dict[tuple[str, ...], tuple[Step, ...]] = {}


def parse(statements: tuple[str, ...]) -> tuple[Step, ...]:
    """Parse the statements of a flow.

    Raises:
        SyntaxError: a statement is not of the form `name[, name] = call(...)`.
    """
    if statements not in _parsed:
        _parsed[statements] = tuple(_parse_one(text) for text in statements)
    return _parsed[statements]


def _parse_one(text: str) -> Step:
    node = ast.parse(text).body[0]
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        raise SyntaxError(f"a flow statement reads 'name = call(...)', not {text!r}")
    target = node.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    keywords = tuple((keyword.arg or "", keyword.value) for keyword in node.value.keywords)
    return Step(tuple(ast.unparse(name) for name in names), _path(node.value.func), tuple(node.value.args), keywords)


def _path(node: ast.expr) -> str:
    """`cv2[0].m` → 'cv2.0.m'; `self[3]` → '3'."""
    text = ast.unparse(node).replace("[", ".").replace("]", "")
    return text.removeprefix("self.")


def _evaluate(node: ast.expr, values: dict[str, Any], module: Any) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return getattr(module, node.attr)
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, values, module)[_evaluate(node.slice, values, module)]
    return ast.literal_eval(node)
