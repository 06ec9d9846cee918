"""Quantized stand-ins for upstream modules. Instances are replaced; upstream's classes are never changed.

A stand-in takes over the attributes of the module that it replaces (submodules, `i`, `f`, `type`, ...), so that names
in the state dict and upstream's own loop over layers stay as they are. With its quantizers off it computes what the
original computed, bit for bit.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.quantize.rules import OPS


class Site:
    """Where a tensor is quantized: right after it is computed, once, for all who read it.

    The quantizer belongs to the network (several sites share one); a site only refers to it.

    Args:
        quantizer: shared by all tensors of one scale.
        redundant: the tensor is a rearrangement of tensors already rounded with this scale. Rounding again changes
            nothing, so it is left out, except in an exported graph, where TensorRT wants to see Q/DQ on both sides.
    """

    def __init__(self, quantizer: nn.Module, redundant: bool = False) -> None:
        self.quantizer = quantizer
        self.redundant = redundant

    def __call__(self, x: Tensor) -> Tensor:
        if self.redundant and not _export.active:
            return x
        return self.quantizer(x)


class _Export:
    active = False


_export = _Export()


@contextmanager
def export_mode() -> Iterator[None]:
    """While active, redundant sites quantize as well, so that the traced graph holds every Q/DQ pair."""
    before, _export.active = _export.active, True
    try:
        yield
    finally:
        _export.active = before


class QuantConv2d(nn.Conv2d):
    """A convolution whose weight, and where asked its input and result, are quantized.

    `input_site` is set where the input has no quantized producer: the picture, or a module that no rule describes.
    """

    weight_quantizer: nn.Module
    input_site: Site | None
    output_site: Site | None

    @classmethod
    def take_over(cls, original: nn.Conv2d, weight_quantizer: nn.Module | None) -> QuantConv2d:
        """A stand-in with the parameters of `original`; without a weight quantizer it stays a float convolution."""
        stand_in = _take_over(cls, original)
        stand_in.input_site = stand_in.output_site = None
        if weight_quantizer is not None:
            stand_in.weight_quantizer = weight_quantizer
        return stand_in

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `[B, C_in, H, W]`."""
        if self.input_site is not None:
            x = self.input_site(x)
        weight = self.weight_quantizer(self.weight) if "weight_quantizer" in self._modules else self.weight
        x = self._conv_forward(x, weight, self.bias)
        return x if self.output_site is None else self.output_site(x)


class ConvUnit(nn.Module):
    """Convolution and activation (upstream's Conv, DWConv or RepConvN after fusing), then the site of its result."""

    conv: nn.Module
    act: nn.Module
    output_site: Site | None

    @classmethod
    def take_over(cls, original: nn.Module) -> ConvUnit:
        """A stand-in with the submodules of `original`."""
        stand_in = _take_over(cls, original)
        stand_in.output_site = None
        return stand_in

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C_in, H, W]` → `[B, C_out, H', W']`."""
        x = self.act(self.conv(x))
        return x if self.output_site is None else self.output_site(x)


class MoveUnit(nn.Module):
    """A module that only moves values (MaxPool2d, Upsample), and the site of its result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.output_site: Site | None = None
        for name in ("i", "f", "type", "np"):  # what upstream's loop over layers reads
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module, then the site."""
        x = self.inner(x)
        return x if self.output_site is None else self.output_site(x)


class FlowModule(nn.Module):
    """Runs the statements of a rule on tensors."""

    steps: tuple[Step, ...]
    sites: dict[str, Site]

    @classmethod
    def take_over(cls, original: nn.Module, statements: Sequence[str]) -> FlowModule:
        """A stand-in with the submodules and attributes of `original`."""
        stand_in = _take_over(cls, original)
        stand_in.steps = parse(tuple(statements))
        stand_in.sites = {}
        return stand_in

    def forward(self, x: Any) -> Any:
        """Run the statements; `x` is a tensor, or a list of them where the layer reads several."""
        values: dict[str, Any] = {"x": x}
        for step in self.steps:
            function = OPERATIONS[step.call] if step.is_operation else self.get_submodule(step.call)
            result = function(*step.arguments(values, self), **step.options(self))
            if len(step.targets) == 1:
                result = (result,)
            for name, value in zip(step.targets, result, strict=True):
                values[name] = self._at_site(name, value)
        return values["out"]

    def _at_site(self, name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [self._at_site(f"{name}[{index}]", item) for index, item in enumerate(value)]
        site = self.sites.get(name)
        return value if site is None else site(value)

    def extra_repr(self) -> str:
        return "; ".join(step.text for step in self.steps)


def _resize_like(x: Tensor, like: Tensor) -> Tensor:
    """`[B, C, h, w]` → `[B, C, H, W]` by nearest neighbour; of equal size, the same tensor.

    In an exported graph by a constant factor, so that no size is computed in it: the network's strides are powers of 2.
    """
    if x.shape[2:] == like.shape[2:]:
        return x
    factors = [int(whole) / int(part) for whole, part in zip(like.shape[2:], x.shape[2:], strict=True)]
    if _export.active and all(factor.is_integer() for factor in factors):
        return F.interpolate(x, scale_factor=factors, mode="nearest")
    return F.interpolate(x, size=like.shape[2:], mode="nearest")


def _sum(*xs: Tensor) -> Tensor:
    """The sum as upstream writes it; in an exported graph a chain of Adds, which need no stacked copy."""
    return functools.reduce(operator.add, xs) if _export.active else torch.sum(torch.stack(xs), dim=0)


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

    text: str
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
    return Step(
        text, tuple(ast.unparse(name) for name in names), _path(node.value.func), tuple(node.value.args), keywords
    )


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


def _take_over(cls: Any, original: nn.Module) -> Any:
    stand_in = cls.__new__(cls)
    stand_in.__dict__.update(original.__dict__)
    stand_in.__dict__.pop("forward", None)  # upstream's fuse() leaves a bound method, which would win over ours
    stand_in._modules = dict(original._modules)
    return stand_in
