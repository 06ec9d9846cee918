"""Which convolutions a recipe puts in INT8, and why others stay in float: its patterns, and what it says of the head.

A convolution of the graph is one of upstream's, or the nn.Conv2d inside upstream's convolution with activation, whose
path is longer by `.conv`; patterns match the latter.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from models.quantize import rules
from models.quantize.graph import Graph
from models.quantize.recipe import Recipe
from utils.core.errors import RecipeError
from utils.core.module_patterns import first_match, matches


def choose_convolutions(model: Any, graph: Graph, recipe: Recipe) -> dict[str, str]:
    """Path of each convolution of the graph → 'int8' or why it stays in float.

    Raises:
        RecipeError: a pattern of the recipe's `float` matches no convolution.
    """
    states = {
        operation.path: why_float(model, graph, weight_path(model, operation.path), recipe) or "int8"
        for operation in graph.operations
        if operation.kind == "conv"
    }
    paths = [*(weight_path(model, path) for path in states), *inside_unknown(model, graph, recipe)]
    for pattern in recipe.float:
        if not any(matches(pattern, path) for path in paths):
            raise RecipeError(
                f"the recipe's float holds {pattern!r}, which matches no convolution of the network; it may hold "
                f"paths such as {next(iter(states), 'model.0')}, and glob patterns of them"
            )
    return states


def why_float(model: Any, graph: Graph, path: str, recipe: Recipe) -> str | None:
    """Why the recipe leaves the convolution whose weight lies at `path` in float; None if it does not.

    A head's last convolutions are those without an activation, and those whose result nothing in the network reads: the
    prototypes of masks come from a convolution with one.
    """
    if ".".join(path.split(".")[:2]) in graph.unused:
        return "nothing leads from it to the head"
    pattern = first_match(recipe.float, path)
    if pattern is not None:
        return f"the recipe's float pattern {pattern}"
    if recipe.head == "int8" or not f"{path}.".startswith(f"model.{len(model.model) - 1}."):
        return None
    around, _, last = path.rpartition(".")
    inner = last == "conv" and is_unit(model.get_submodule(around)) and around not in graph.ends
    return None if inner and recipe.head == "last-conv-float" else f"the recipe's head: {recipe.head}"


def inside_unknown(model: nn.Module, graph: Graph, recipe: Recipe) -> dict[str, str]:
    """Path of each convolution inside a module without a rule → 'int8' or why it stays in float."""
    return {
        name: why_float(model, graph, name, recipe) or "int8"
        for path in graph.unknown
        for name, module in model.get_submodule(path).named_modules(prefix=path)
        if isinstance(module, nn.Conv2d)
    }


def weight_path(model: nn.Module, path: str) -> str:
    """Path of the nn.Conv2d of a convolution of the graph."""
    return path if isinstance(model.get_submodule(path), nn.Conv2d) else f"{path}.conv"


def is_unit(module: nn.Module) -> bool:
    """Whether a module is upstream's fused convolution with activation."""
    rule = rules.find(module)
    return rule is not None and rule.kind == "conv" and not isinstance(module, nn.Conv2d)
