"""Is what a weights file holds a network that can be used? Said when it is loaded, not by the first error of a run.

`ready` looks at a network of upstream's from a float checkpoint: its fields, and whether it computes, which is tried
with tensors that have a shape and no values. `check_state` compares stored tensors with a network that they are
for. Both refuse NaN and infinity by the tensor's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.core.bounds import BOUNDS
from utils.core.errors import CheckpointError
from utils.core.file_schema import Mismatch, Rule, check, damaged, integer, listing, mapping, plain, record, text
from utils.core.head_outputs import predicted
from utils.core.shapes_only import ShapesOnly
from utils.core.shown import shown
from utils.upstream_heads import WITH_MASKS

MOST_MASKS = 1024  # coefficients of a segmentation head; upstream's have 32
MOST_CLASSES = int(BOUNDS["classes_num"].most)
LARGEST_STRIDE = 1024  # pixels; upstream's networks have 32 or 64
LARGEST_WIDTH = 1 << 20  # channels; upstream's networks have 1024 at most
RANGE = "_amax"  # what the quantizer libraries call the buffer of a range
AGAIN = "copy the file again, or export it from the training run again"


def tensor(value: Any, field: str) -> None:
    """An ordinary tensor of real numbers with its values in memory."""
    good = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    if not good or value.is_quantized or value.is_complex():
        raise Mismatch(field, value, "a tensor")


def one_of(names: tuple[str, ...]) -> Rule:
    """A module of a class with one of these names."""

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, nn.Module) or type(value).__name__ not in names:
            found = type(value).__name__ if isinstance(value, nn.Module) else value
            raise Mismatch(field, found, f"one of {', '.join(names)}")

    return rule


def class_names(count: int) -> Rule:
    """Names of classes 0 to count - 1: a mapping, or a list."""
    name = text(r".{1,1000}", "the name of a class")

    def rule(value: Any, field: str) -> None:
        entries = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        mapping(_index(count), lambda one, where: name(str(one) if isinstance(one, (int, float)) else one, where))(
            entries, field
        )
        if len(entries) != count:
            raise Mismatch(field, value, f"names of {count} classes")

    return rule


def _index(count: int) -> Rule:
    def rule(value: Any, field: str) -> None:
        if type(value) is not int or not 0 <= value < count:
            raise Mismatch(field, value, f"an integer from 0 to {count - 1}")

    return rule


def check_state(path: str | Path, state: Mapping[str, Tensor], model: nn.Module, remedy: str) -> None:
    """Compare stored tensors with the network that they are for; names that are not in both are left to the caller.

    Raises:
        CheckpointError: another shape or type, a value that is not finite, or a range that is not positive.
    """
    expected = model.state_dict()
    for name, value in state.items():
        if name not in expected:
            continue
        wanted = expected[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            found = f"{name} is {shown(value)}, expected {shown(wanted)}"
            raise CheckpointError(damaged(path, found, remedy))
        problem = _problem(name, value)
        if problem:
            raise CheckpointError(damaged(path, problem, remedy))


def _problem(name: str, value: Tensor) -> str:
    """What is wrong with the values of a tensor; empty for nothing."""
    if value.is_floating_point() and value.numel() and not bool(value.isfinite().all()):
        return f"{name} holds NaN or infinity"
    if name.endswith(RANGE) and bool((value <= 0).any()):
        return f"{name} holds a range that is not positive"
    if name.endswith("running_var") and bool((value < 0).any()):
        return f"{name} holds a negative variance"
    return ""


def check_layers(path: str | Path, model: Any) -> None:
    """Raises `CheckpointError` for what is no sequence of layers, so that the last one can be asked for."""
    layers = getattr(model, "model", None)
    if not isinstance(model, nn.Module) or not isinstance(layers, nn.Sequential) or not len(layers):
        mismatch = Mismatch("model", layers if layers is None else type(layers).__name__, "a sequence of layers")
        raise CheckpointError(damaged(path, mismatch, AGAIN))


def ready(path: str | Path, model: Any, heads: tuple[str, ...]) -> Any:
    """Check a network of upstream's, and return it in float32 and evaluation mode, as today's torch computes it.

    Args:
        heads: names of the classes that its last layer may have.

    Raises:
        CheckpointError: a field is missing or of another kind, a weight is not finite, or it cannot compute.
    """
    try:
        _check_fields(path, model, heads)
        for name, value in model.state_dict().items():
            tensor(value, name)
            problem = _problem(name, value)
            if problem:
                raise CheckpointError(f"{path}: {problem}; {AGAIN}")
        check_sizes(model)
        model = model.float().eval()
        for module in model.modules():
            if type(module).__name__ == "Upsample" and not hasattr(module, "recompute_scale_factor"):
                module.recompute_scale_factor = None
        _check_computes(model)
        return model
    except (CheckpointError, KeyboardInterrupt):
        raise
    except Mismatch as mismatch:
        raise CheckpointError(damaged(path, mismatch, AGAIN)) from mismatch
    except Exception as error:  # modules whose state is not what their class makes can fail anywhere
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            damaged(path, f"its network does not compute ({type(error).__name__}: {reason})", AGAIN)
        ) from error


def check_sizes(model: nn.Module) -> None:
    """Compare what each layer says of itself with its tensors: fusing makes tensors of the sizes that it says.

    Raises:
        Mismatch: the first tensor of another shape.
    """
    for name, module in model.named_modules():
        _check_layer(name, module)


def _check_layer(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        integer(1, LARGEST_WIDTH)(module.groups, f"{name}.groups")
        integer(1, LARGEST_WIDTH)(module.in_channels, f"{name}.in_channels")
        sizes = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        _same_shape(f"{name}.weight", module.weight, sizes)
        if module.bias is not None:
            _same_shape(f"{name}.bias", module.bias, sizes[:1])
    elif isinstance(module, nn.BatchNorm2d):
        for own in ("weight", "bias", "running_mean", "running_var"):
            _same_shape(f"{name}.{own}", getattr(module, own), (module.num_features,))
    elif type(module).__name__ == "RepConvN" and not hasattr(module, "conv"):
        if module.bn is not None:
            raise Mismatch(f"{name}.bn", type(module.bn).__name__, "none")
        one, two = cast(Any, module.conv1).conv.weight, cast(Any, module.conv2).conv.weight
        _same_shape(f"{name}.conv1.conv.weight", one, (*one.shape[:2], 3, 3))
        _same_shape(f"{name}.conv2.conv.weight", two, (*one.shape[:2], 1, 1))
    elif isinstance(getattr(module, "conv", None), nn.Conv2d) and isinstance(getattr(module, "bn", None), nn.Module):
        _same_shape(f"{name}.bn.weight", cast(Any, module.bn).weight, cast(Any, module.conv).weight.shape[:1])


def _same_shape(field: str, value: Any, shape: Sequence[Any]) -> None:
    tensor(value, field)
    if tuple(value.shape) != tuple(shape):
        raise Mismatch(field, value, f"the shape {shown(list(shape))}")


def _check_fields(path: str | Path, model: Any, heads: tuple[str, ...]) -> None:
    fields = {name: getattr(model, name, None) for name in ("model", "names", "stride", "yaml", "save")}
    layers: Any = fields.pop("model")
    one_of(heads)(layers[-1], f"model.{len(layers) - 1}")
    count = getattr(layers[-1], "nc", None)
    if type(count) is not int or not 1 <= count <= MOST_CLASSES:
        raise Mismatch("nc", count, f"an integer from 1 to {MOST_CLASSES}")
    if type(layers[-1]).__name__ in WITH_MASKS:
        integer(1, MOST_MASKS)(getattr(layers[-1], "nm", None), "nm")
    elif getattr(layers[-1], "nm", None) is not None:  # what is behind the classes is found by it
        raise Mismatch("nm", layers[-1].nm, f"none: a {type(layers[-1]).__name__} has no masks")
    rules = {"names": class_names(count), "stride": _strides, "yaml": mapping(text(), plain),
             "save": listing(_index(len(layers)))}  # fmt: skip
    check(fields, record(rules), path, AGAIN)
    for number, layer in enumerate(layers):
        if getattr(layer, "i", None) != number:
            raise Mismatch(f"model.{number}.i", getattr(layer, "i", None), str(number))
        source = getattr(layer, "f", None)
        listing(_source(number), 1)(source if isinstance(source, list) else [source], f"model.{number}.f")


def _source(number: int) -> Rule:
    """The layer that a layer reads: one before it, or -1 for the last."""

    def rule(value: Any, field: str) -> None:
        if type(value) is not int or not -number - 1 <= value < max(number, 1):
            raise Mismatch(field, value, "a layer before it")

    return rule


def _strides(value: Any, field: str) -> None:
    tensor(value, field)
    good = value.ndim == 1 and 1 <= len(value) <= 8 and value.dtype in (torch.float32, torch.float16, torch.int64)
    if not good or not all(1 <= one <= LARGEST_STRIDE and one == int(one) for one in value.tolist()):
        raise Mismatch(field, value.tolist() if value.numel() <= 8 else value, "pixels, such as [8, 16, 32]")


def _check_computes(model: Any) -> None:
    """Run the network on tensors without values, and compare with what it says of itself: strides, classes, masks."""
    head = model.model[-1]
    side = 2 * max(int(model.stride.max()), 32)
    before = dict(vars(head))
    maps: list[tuple[int, ...]] = []

    def look(_: nn.Module, inputs: Any) -> None:
        maps.extend(tuple(one.shape) for one in inputs[0])

    handle = head.register_forward_pre_hook(look)
    try:
        empty = {name: value.to("meta") for name, value in model.state_dict().items()}
        with torch.no_grad(), ShapesOnly():
            output = torch.func.functional_call(model, empty, (torch.empty(1, 3, side, side, device="meta"),))
    finally:
        handle.remove()
        vars(head).clear()
        vars(head).update(before)
    outputs = predicted(output)
    masks = head.nm if type(head).__name__ in WITH_MASKS else 0
    if outputs[0].ndim != 3 or outputs[0].shape[1] != 4 + head.nc + masks:
        raise Mismatch("the prediction", outputs[0], f"{4 + head.nc + masks} rows")
    if masks and (len(outputs) != 2 or outputs[1].ndim != 4 or outputs[1].shape[1] != masks):
        raise Mismatch("the prototypes", outputs[-1], f"{masks} maps")
    for attribute, owner in (("stride", model), ("stride", head)):
        stride: Any = getattr(owner, attribute, None)
        tensor(stride, attribute)
        found = [side / shape[-1] for shape in maps[: len(stride)]]
        if [float(one) for one in stride] != found:
            raise Mismatch(attribute, [float(one) for one in stride], f"{found}, as its layers have them")
