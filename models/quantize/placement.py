"""Placement of quantizers: `plan(model, recipe)` decides, `apply(model, plan)` replaces modules, `describe` explains.

The network is read once with symbols instead of tensors, along the statements of `rules.py`, into a list of operations
in order. A convolution in INT8 needs its input quantized. From the last operation to the first, operations pass this
need on to their own inputs (see rules.py), and union-find gives tensors that an operation only moves one scale.

A convolution has the path of its nn.Conv2d. In upstream's Conv, which adds an activation, that path ends in `.conv`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from models.quantize import modules, rules
from models.quantize.fake_quantize import TensorQuantizer, quantizers
from models.quantize.flow import Graph, Operation, Value, read
from models.quantize.recipe import Recipe
from utils.core.errors import RecipeError
from utils.core.tasks import IMAGES
from utils.core.text import plural, short_repr
from utils.upstream.structure import describe_modules

logger = logging.getLogger(__name__)

# heads the list of all scales in `describe`
SCALES = (
    "scales of activations; a tensor has the name of the module that computes it, or MODULE.variable; "
    "weights have a scale for each output channel"
)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor that the plan quantizes."""

    name: str
    owner: str
    variable: str
    scale: str  # name of the scale it shares
    redundant: bool  # a rearrangement of tensors that have this scale already


@dataclass(frozen=True)
class Plan:
    """Placement of quantizers: the tensors and weights that are quantized, and those that share a scale."""

    tensors: tuple[QuantizedTensor, ...]  # in order of computation
    convolutions: dict[str, str]  # path of each nn.Conv2d → 'int8', or the reason why it stays in float
    image_consumers: tuple[str, ...]  # modules that quantize the image, which no module computes
    fallback: tuple[str, ...]  # convolutions whose input no rule describes, each with an input scale of its own
    flows: dict[str, rules.Flow]  # modules that run as flows → their statements
    unknown: dict[str, str]  # modules without a rule → their class

    @property
    def scales(self) -> dict[str, tuple[str, ...]]:
        """Each activation scale → the tensors that share it."""
        shared: dict[str, list[str]] = defaultdict(list)
        for tensor in self.tensors:
            shared[tensor.scale].append(tensor.name)
        return {name: tuple(tensors) for name, tensors in shared.items()}

    @property
    def scale_names(self) -> list[str]:
        """Names of all activation scales, those of inputs that no rule describes too."""
        return [*self.scales, *(f"{path}.input" for path in self.fallback)]

    @property
    def float_convolutions(self) -> dict[str, str]:
        """Convolutions that the recipe leaves in float → why.

        An exported file lists them; the verifier reports any other convolution in float as a mistake.
        """
        return {path: why for path, why in self.convolutions.items() if why != "int8"}


def plan(model: nn.Module, recipe: Recipe) -> Plan:
    """Decide the placement for a fused FP32 model of upstream's.

    Raises:
        RecipeError: a pattern of the recipe's `float` matches no convolution.
        QatError: the network is not fused.
    """
    graph = read(model)
    convolutions = _choose_convolutions(model, graph, recipe)
    int8_values = _int8_values(graph, convolutions, recipe.add)
    image_consumers = _image_consumers(graph, convolutions, int8_values)
    fallback = []
    for path, convolution in graph.convolutions.items():
        if convolutions[path] == "int8" and convolution.inputs[0].opaque:
            fallback.append(path)
    return Plan(
        tensors=tuple(_quantized_tensors(graph, int8_values, image_consumers)),
        convolutions=convolutions,
        image_consumers=tuple(operation.path for operation in image_consumers),
        fallback=tuple(fallback),
        flows=graph.flows,
        unknown=graph.unknown,
    )


def _quantized_tensors(
    graph: Graph, int8_values: set[Value], image_consumers: list[Operation]
) -> Iterator[QuantizedTensor]:
    """The quantized tensors in order of computation, the image first, if something reads it as INT8."""
    scales = _shared_scales(graph, int8_values)
    if image_consumers:
        image = next(value for value in image_consumers[0].inputs if value.is_image)
        yield QuantizedTensor(IMAGES, "", "", scales[image].name, False)
    for operation in graph.operations:
        inputs_are_rounded = all(value.owner and not value.opaque for value in operation.inputs)
        redundant = operation.kind == "move" and (inputs_are_rounded or operation in image_consumers)
        for value in operation.outputs:
            if value in int8_values and not value.opaque:
                yield QuantizedTensor(value.name, value.owner, value.variable, scales[value].name, redundant)


def apply(model: Any, plan: Plan) -> None:
    """Replace modules by their quantized stand-ins, in place; weights get their amax, activations an amax of 1.

    Before that, `fp32_modules` gets a description of the FP32 model's modules; a checkpoint rebuilds the model from it.
    """
    model.fp32_modules = describe_modules(model)
    _replace_modules(model, plan)
    scales = nn.ModuleDict({scale_key(name): TensorQuantizer() for name in plan.scales})
    for tensor in plan.tensors:
        if tensor.owner:
            _set_point(model, tensor, modules.QuantPoint(scales[scale_key(tensor.scale)], tensor.redundant))
    if plan.image_consumers:
        image_point = modules.QuantPoint(scales[scale_key(IMAGES)])
        for path in plan.image_consumers:
            model.get_submodule(path).input_point = image_point
    for path in plan.fallback:
        key = scale_key(f"{path}.input")
        scales[key] = TensorQuantizer()
        model.get_submodule(path).input_point = modules.QuantPoint(scales[key])
    model.activation_quantizers = scales
    model.quantization_plan = plan
    for path, class_name in plan.unknown.items():
        logger.warning(
            "%s is a %s, which has no row in models/quantize/rules.py: only its convolutions run in INT8",
            path,
            class_name,
        )


def _replace_modules(model: nn.Module, plan: Plan) -> None:
    """Put the stand-ins for convolution blocks, flows and convolutions in place, with quantizers for the weights."""
    for path, module in list(model.named_modules()):
        if _is_conv_block(module):
            _replace(model, path, modules.ConvBlock.from_float(module))
    for path, statements in plan.flows.items():
        _replace(model, path, modules.FlowModule.from_float(model.get_submodule(path), statements))
    for path, state in plan.convolutions.items():
        convolution = model.get_submodule(path)
        weight_quantizer = None
        if state == "int8":
            weight_quantizer = TensorQuantizer(convolution.out_channels)
            weight_quantizer.set_weight_amax(convolution.weight)
        _replace(model, path, modules.QuantConv2d.from_float(convolution, weight_quantizer))


def _set_point(model: nn.Module, tensor: QuantizedTensor, point: modules.QuantPoint) -> None:
    """Let the module that computes `tensor` round it at `point`."""
    owner = model.get_submodule(tensor.owner)
    if tensor.variable:
        owner.points[tensor.variable] = point
        return
    if not isinstance(owner, (modules.QuantConv2d, modules.ConvBlock, modules.PassThrough)):
        owner = modules.PassThrough(owner)
        _replace(model, tensor.owner, owner)
    owner.output_point = point


def check(plan: Plan, recipe: Recipe) -> None:
    """Raise `RecipeError` if a recipe quantizes nothing."""
    if len(plan.float_convolutions) == len(plan.convolutions):
        raise RecipeError(
            f"the recipe (float: {short_repr(list(recipe.float))}, head: {recipe.head}) keeps all "
            f"{plural(len(plan.convolutions), 'convolution')} in float; quantize at least one"
        )


@contextmanager
def quantizers_off(model: nn.Module) -> Iterator[None]:
    """Switch all quantizers off: the network computes in float."""
    switched = list(quantizers(model).values())
    for module in switched:
        module.on = False
    try:
        yield
    finally:
        for module in switched:
            module.on = True


def describe(plan: Plan) -> str:
    """List in a text what is quantized, which tensors share a scale, what stays in float and why."""
    total = len(plan.convolutions)
    float_count = len(plan.float_convolutions)
    scales = plan.scales
    lines = [
        f"{total - float_count} of {plural(total, 'convolution')} in INT8; "
        f"{plural(len(plan.tensors), 'tensor')}, {plural(len(scales), 'scale')}"
    ]
    for path, why in plan.float_convolutions.items():
        lines.append(f"  float: {path}: {why}")
    for path, class_name in plan.unknown.items():
        lines.append(f"  no rule: {path} ({class_name}): its convolutions have input scales of their own")
    lines.append(SCALES)
    for tensors in scales.values():
        label = "own scale" if len(tensors) == 1 else "one scale"
        lines.append(f"  {label}: {', '.join(tensors)}")
    for path in plan.fallback:
        lines.append(f"  own scale: {path}.input")
    return "\n".join(lines)


def needs(model: nn.Module, recipe: Recipe) -> dict[str, frozenset[str]]:
    """Path of each convolution that `recipe` puts in INT8 → names of the tensors that it needs quantized.

    A plan quantizes the union over its convolutions. Names are those of `Plan.tensors`, and `{path}.input` for
    an input that no rule describes.
    """
    graph = read(model)
    tensors_of: dict[str, frozenset[str]] = {}
    for path, state in _choose_convolutions(model, graph, recipe).items():
        if state != "int8":
            continue
        int8_values = _int8_values(graph, {path: "int8"}, recipe.add)
        names = {value.name for value in int8_values if not value.opaque}
        if graph.convolutions[path].inputs[0].opaque:
            names.add(f"{path}.input")
        tensors_of[path] = frozenset(names)
    return tensors_of


def _choose_convolutions(model: Any, graph: Graph, recipe: Recipe) -> dict[str, str]:
    """Path of each convolution of the graph → 'int8' or why it stays in float.

    Raises:
        RecipeError: a pattern of the recipe's `float` matches no convolution.
    """
    states = {path: _why_float(model, graph, path, recipe) or "int8" for path in graph.convolutions}
    for pattern in recipe.float:
        if not any(matches(pattern, path) for path in states):
            example = next(iter(states), "model.0")
            raise RecipeError(
                f"the recipe's float pattern {pattern!r} matches no convolution of the model; "
                f"use paths such as {example}, or glob patterns of them"
            )
    return states


def _why_float(model: Any, graph: Graph, path: str, recipe: Recipe) -> str | None:
    """Reason why the recipe leaves the convolution at `path` in float; None if it does not.

    The last convolutions of a head are those without an activation, and those whose result no other module reads. The
    second kind is the one that computes the prototypes of masks: it has an activation.
    """
    layer = ".".join(path.split(".")[:2])
    if layer in graph.unused:
        return "nothing leads from it to the head"
    for pattern in recipe.float:
        if matches(pattern, path):
            return f"the recipe's float pattern {pattern}"
    head = f"model.{len(model.model) - 1}"
    if recipe.head == "int8" or layer != head:
        return None
    block, _, name = path.rpartition(".")
    has_activation = name == "conv" and _is_conv_block(model.get_submodule(block))
    if recipe.head == "last-conv-float" and has_activation and path not in graph.ends:
        return None
    return f"the recipe's head: {recipe.head}"


def _is_conv_block(module: nn.Module) -> bool:
    """Return whether a module is upstream's fused convolution with activation."""
    rule = rules.find(module)
    return rule is not None and rule.kind == "conv" and not isinstance(module, nn.Conv2d)


def _int8_values(graph: Graph, convolutions: dict[str, str], add: str) -> set[Value]:
    """The tensors that a consumer reads as INT8, searched from the last operation to the first."""
    int8_values: set[Value] = set()
    of_convolutions: set[Value] = set()
    for operation in graph.operations:
        if operation.kind == "conv":
            of_convolutions.update(operation.outputs)
    for operation in reversed(graph.operations):
        if operation.kind == "conv" and convolutions.get(operation.path) == "int8":
            int8_values.update(operation.inputs)
        if int8_values.isdisjoint(operation.outputs):
            continue
        if operation.kind in ("move", "average", "add"):
            int8_values.update(operation.inputs)
        if operation.kind == "move":
            int8_values.update(value for value in operation.outputs if graph.reads[value])
        if operation.kind == "add" and add == "residual":
            branches = [value for value in operation.inputs if value in of_convolutions and graph.reads[value] == 1]
            int8_values.difference_update(branches[-1:])
    return int8_values


def _shared_scales(graph: Graph, int8_values: set[Value]) -> dict[Value, Value]:
    """Each INT8 tensor → the first tensor of those that it shares its scale with."""
    shared = {value: {value} for value in int8_values}  # all tensors of a set have that same set
    order: dict[Value, int] = {}
    for operation in graph.operations:
        values = (*operation.inputs, *operation.outputs)
        for value in values:
            order.setdefault(value, len(order))
        if operation.kind != "move" or int8_values.isdisjoint(operation.outputs):
            continue
        joined = [value for value in values if value in int8_values]
        for first, second in itertools.pairwise(joined):
            if shared[first] is not shared[second]:
                shared[first] |= shared[second]
                shared.update(dict.fromkeys(shared[second], shared[first]))
    return {value: min(tensors, key=order.__getitem__) for value, tensors in shared.items()}


def _image_consumers(graph: Graph, convolutions: dict[str, str], int8_values: set[Value]) -> list[Operation]:
    """The operations that read the image as INT8, without those that return it unchanged."""
    consumers = []
    for operation in graph.operations:
        if not any(value.is_image for value in operation.inputs):
            continue
        if operation.kind == "conv":
            reads_int8 = convolutions[operation.path] == "int8"
        else:
            gives_int8 = not int8_values.isdisjoint(operation.outputs)
            reads_int8 = gives_int8 and operation.kind != "float" and not operation.same
        if reads_int8:
            consumers.append(operation)
    return consumers


def points(model: Any) -> dict[str, modules.QuantPoint]:
    """Name of each quantized tensor, and `{convolution}.input` of `Plan.fallback` → the point that rounds it."""
    plan: Plan = model.quantization_plan
    point_of = {f"{path}.input": model.get_submodule(path).input_point for path in plan.fallback}
    for tensor in plan.tensors:
        if not tensor.owner:  # the image: one point for all that read it
            point_of[tensor.name] = model.get_submodule(plan.image_consumers[0]).input_point
            continue
        owner = model.get_submodule(tensor.owner)
        point_of[tensor.name] = owner.points[tensor.variable] if tensor.variable else owner.output_point
    return point_of


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def scale_key(name: str) -> str:
    """Name of a scale → its key in a network's `activation_quantizers`; nn.ModuleDict takes no dots."""
    return name.replace(".", "/")


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern of a recipe's `float` names the convolution whose weight lies at `path`.

    A convolution has two paths: its own, and that of upstream's Conv around it. A pattern that matches either names it.

    >>> matches("model.4.cv?", "model.4.cv1.conv"), matches("model.4.cv?", "model.4.cv2.0.cv1.conv")
    (True, False)
    """
    paths = {path, path.removesuffix(".conv")}
    return path.startswith(f"{pattern}.") or any(fnmatchcase(path, pattern) for path in paths)
