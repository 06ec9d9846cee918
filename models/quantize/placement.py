"""Where quantizers go: `plan(model, recipe)` decides, `apply(model, plan)` replaces modules, `describe(plan)` explains.

The network is read once with symbols instead of tensors, along the statements of `rules.py`, into a list of operations
in order. A convolution in INT8 asks for its input; going backwards, operations pass that on (rules.py says how), and
tensors that an operation only moves are joined into one scale by union-find.

Convolutions have the path of their nn.Conv2d, which in upstream's with an activation is longer by `.conv`.
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
    "scales of tensors, which are named after the module whose result they are, or MODULE.variable; "
    "weights have one for each output channel"
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
    """Which tensors and weights are quantized, and which share a scale."""

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

        A file names them, and the verifier takes a convolution that something else left in float for a mistake.
        """
        return {path: why for path, why in self.convolutions.items() if why != "int8"}


def plan(model: nn.Module, recipe: Recipe) -> Plan:
    """Decide the placement for a fused float network of upstream's.

    Raises:
        RecipeError: a pattern of the recipe's `float` matches no convolution.
        QatError: the network is not fused.
    """
    graph = read(model)
    convolutions = _choose_convolutions(model, graph, recipe)
    wanted = _wanted(graph, convolutions, recipe.add)
    scale_of = _shared_scales(graph, wanted)
    of_image = _image_consumers(graph, convolutions, wanted)
    tensors = []
    if of_image:
        image = next(value for value in of_image[0].inputs if value.is_image)
        tensors.append(QuantizedTensor(IMAGES, "", "", scale_of[image].name, False))
    for operation in graph.operations:
        rounded = operation in of_image or all(source.owner and not source.opaque for source in operation.inputs)
        redundant = operation.kind == "move" and rounded
        for value in operation.outputs:
            if value in wanted and not value.opaque:
                scale = scale_of[value].name
                tensors.append(QuantizedTensor(value.name, value.owner, value.variable, scale, redundant))
    return Plan(
        tensors=tuple(tensors),
        convolutions=convolutions,
        image_consumers=tuple(one.path for one in of_image),
        fallback=tuple(
            path for path, one in graph.convolutions.items() if convolutions[path] == "int8" and one.inputs[0].opaque
        ),
        flows=graph.flows,
        unknown=graph.unknown,
    )


def apply(model: Any, plan: Plan) -> None:
    """Replace modules by their quantized stand-ins, in place; amax of every weight is set, of activations it is 1.

    Before that the FP32 model's modules are described (`fp32_modules`), from which a checkpoint builds it again.
    """
    model.fp32_modules = describe_modules(model)
    scales = nn.ModuleDict({scale_key(name): TensorQuantizer() for name in plan.scales})
    for path, module in list(model.named_modules()):
        if _is_unit(module):
            _replace(model, path, modules.ConvBlock.from_float(module))
    for path, statements in plan.flows.items():
        _replace(model, path, modules.FlowModule.from_float(model.get_submodule(path), statements))
    for path, state in plan.convolutions.items():
        conv = model.get_submodule(path)
        weight = None
        if state == "int8":
            weight = TensorQuantizer(conv.out_channels)
            weight.set_weight_amax(conv.weight)
        _replace(model, path, modules.QuantConv2d.from_float(conv, weight))
    for tensor in (tensor for tensor in plan.tensors if tensor.owner):
        point = modules.QuantPoint(scales[scale_key(tensor.scale)], tensor.redundant)
        owner = model.get_submodule(tensor.owner)
        if tensor.variable:
            owner.points[tensor.variable] = point
            continue
        if not isinstance(owner, (modules.QuantConv2d, modules.ConvBlock, modules.PassThrough)):
            owner = modules.PassThrough(owner)
            _replace(model, tensor.owner, owner)
        owner.output_point = point
    image = modules.QuantPoint(scales[scale_key(IMAGES)]) if plan.image_consumers else None
    for path in plan.image_consumers:
        model.get_submodule(path).input_point = image
    for path in plan.fallback:
        name = scale_key(f"{path}.input")
        scales[name] = TensorQuantizer()
        model.get_submodule(path).input_point = modules.QuantPoint(scales[name])
    model.activation_quantizers = scales
    model.quantization_plan = plan
    for path, name in plan.unknown.items():
        logger.warning("%s is a %s, without a row in models/quantize/rules.py: only convolutions are INT8", path, name)


def check(plan: Plan, recipe: Recipe) -> None:
    """Raise `RecipeError` if a recipe quantizes nothing."""
    if len(plan.float_convolutions) == len(plan.convolutions):
        raise RecipeError(
            f"the recipe (float: {short_repr(list(recipe.float))}, head: {recipe.head}) leaves all "
            f"{plural(len(plan.convolutions), 'convolution')} in float; leave at least one to INT8"
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
    """Say in a text what is quantized, which tensors share a scale or have their own, what stays in float and why."""
    total, as_float, scales = len(plan.convolutions), plan.float_convolutions, plan.scales
    lines = [
        f"{total - len(as_float)} of {plural(total, 'convolution')} in INT8; "
        f"{plural(len(plan.tensors), 'tensor')}, {plural(len(scales), 'scale')}",
        *(f"  float: {path}: {why}" for path, why in as_float.items()),
        *(
            f"  no rule: {path} ({name}): its convolutions have input scales of their own"
            for path, name in plan.unknown.items()
        ),
        SCALES,
        *(f"  {'one' if tensors[1:] else 'own'} scale: {', '.join(tensors)}" for tensors in scales.values()),
        *(f"  own scale: {path}.input" for path in plan.fallback),
    ]
    return "\n".join(lines)


def needs(model: nn.Module, recipe: Recipe) -> dict[str, frozenset[str]]:
    """Path of each convolution that `recipe` puts in INT8 → names of the tensors that it alone asks to be quantized.

    What a plan quantizes is the union over its convolutions. Names are those of `Plan.tensors`, and `{path}.input` for
    an input that no rule describes.
    """
    graph = read(model)
    found = {}
    for path in (path for path, state in _choose_convolutions(model, graph, recipe).items() if state == "int8"):
        wanted = _wanted(graph, {path: "int8"}, recipe.add)
        own = {f"{path}.input"} if graph.convolutions[path].inputs[0].opaque else set()
        found[path] = frozenset({value.name for value in wanted if not value.opaque} | own)
    return found


def _choose_convolutions(model: Any, graph: Graph, recipe: Recipe) -> dict[str, str]:
    """Path of each convolution of the graph → 'int8' or why it stays in float.

    Raises:
        RecipeError: a pattern of the recipe's `float` matches no convolution.
    """
    states = {path: _why_float(model, graph, path, recipe) or "int8" for path in graph.convolutions}
    for pattern in recipe.float:
        if not any(matches(pattern, path) for path in states):
            raise RecipeError(
                f"the recipe's float holds {pattern!r}, which matches no convolution of the network; it may hold "
                f"paths such as {next(iter(states), 'model.0')}, and glob patterns of them"
            )
    return states


def _why_float(model: Any, graph: Graph, path: str, recipe: Recipe) -> str | None:
    """Why the recipe leaves the convolution at `path` in float; None if it does not.

    A head's last convolutions are those without an activation, and those whose result nothing in the network reads: the
    prototypes of masks come from a convolution with one.
    """
    if ".".join(path.split(".")[:2]) in graph.unused:
        return "nothing leads from it to the head"
    pattern = next((pattern for pattern in recipe.float if matches(pattern, path)), None)
    if pattern is not None:
        return f"the recipe's float pattern {pattern}"
    if recipe.head == "int8" or not f"{path}.".startswith(f"model.{len(model.model) - 1}."):
        return None
    around, _, last = path.rpartition(".")
    inner = last == "conv" and _is_unit(model.get_submodule(around)) and path not in graph.ends
    return None if inner and recipe.head == "last-conv-float" else f"the recipe's head: {recipe.head}"


def _is_unit(module: nn.Module) -> bool:
    """Whether a module is upstream's fused convolution with activation."""
    rule = rules.find(module)
    return rule is not None and rule.kind == "conv" and not isinstance(module, nn.Conv2d)


def _wanted(graph: Graph, convolutions: dict[str, str], add: str) -> set[Value]:
    """The tensors that a consumer reads as INT8, found from the last operation to the first."""
    wanted: set[Value] = set()
    straight = {value for operation in graph.operations if operation.kind == "conv" for value in operation.outputs}
    for operation in reversed(graph.operations):
        if operation.kind == "conv" and convolutions.get(operation.path) == "int8":
            wanted.update(operation.inputs)
        if not any(value in wanted for value in operation.outputs):
            continue
        if operation.kind in ("move", "average", "add"):
            wanted.update(operation.inputs)
        if operation.kind == "move":
            wanted.update(value for value in operation.outputs if graph.reads[value])
        if operation.kind == "add" and add == "residual":
            inside = [value for value in operation.inputs if value in straight and graph.reads[value] == 1]
            wanted.difference_update(inside[-1:])
    return wanted


def _shared_scales(graph: Graph, wanted: set[Value]) -> dict[Value, Value]:
    """Each wanted tensor → the first tensor of those that it shares its scale with."""
    shared = {value: {value} for value in wanted}  # all tensors of a set have that same set
    order: dict[Value, int] = {}
    for operation in graph.operations:
        values = (*operation.inputs, *operation.outputs)
        for value in values:
            order.setdefault(value, len(order))
        if operation.kind == "move" and any(value in wanted for value in operation.outputs):
            for one, other in itertools.pairwise(value for value in values if value in wanted):
                if shared[one] is not shared[other]:
                    shared[one] |= shared[other]
                    shared.update(dict.fromkeys(shared[other], shared[one]))
    return {value: min(tensors, key=order.__getitem__) for value, tensors in shared.items()}


def _image_consumers(graph: Graph, convolutions: dict[str, str], wanted: set[Value]) -> list[Operation]:
    """The operations that read the image as INT8; what only passes it on quantizes its result."""
    found = []
    for operation in graph.operations:
        if operation.kind == "conv":
            reads = convolutions[operation.path] == "int8"
        else:
            reads = operation.kind != "float" and not operation.same and not wanted.isdisjoint(operation.outputs)
        if reads and any(value.is_image for value in operation.inputs):
            found.append(operation)
    return found


def points(model: Any) -> dict[str, modules.QuantPoint]:
    """Name of each quantized tensor, and `{convolution}.input` of `Plan.fallback` → the point that rounds it."""
    plan: Plan = model.quantization_plan
    found = {f"{path}.input": model.get_submodule(path).input_point for path in plan.fallback}
    for tensor in plan.tensors:
        owner = model.get_submodule(tensor.owner or plan.image_consumers[0])
        if tensor.owner:
            found[tensor.name] = owner.points[tensor.variable] if tensor.variable else owner.output_point
        else:  # the image: one point for all that read it
            found[tensor.name] = owner.input_point
    return found


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def scale_key(name: str) -> str:
    """Name of a scale → its key in a network's `activation_quantizers`; nn.ModuleDict takes no dots."""
    return name.replace(".", "/")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of a recipe's `float` names the convolution whose weight lies at `path`.

    A convolution has two paths: its own, and that of upstream's Conv around it. A pattern that matches either names it.

    >>> matches("model.4.cv?", "model.4.cv1.conv"), matches("model.4.cv?", "model.4.cv2.0.cv1.conv")
    (True, False)
    """
    paths = {path, path.removesuffix(".conv")}
    return path.startswith(f"{pattern}.") or any(fnmatchcase(path, pattern) for path in paths)
