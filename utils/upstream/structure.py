"""A network as data: the class, attributes and shapes of its modules, and the network built from these again.

A model description (YAML) does not tell what became of a network after it was built: pruned channels, folded batch
norms, replaced blocks and activations, another number of classes. Its modules do. No constructor is called and no code
is stored: classes are looked up in a table, as for a checkpoint (`utils/core/checkpoints.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.core.checkpoints import ATOMS, KEPT_AS, KEPT_FORWARDS, PRIVATE_DATA
from utils.core.errors import CheckpointError

TORCHS_ATTRIBUTES = frozenset(vars(nn.Module())) - {*PRIVATE_DATA}  # that every module has
OWN_KEYS = ("yaml", "names")  # attributes of the network that a checkpoint has beside its modules
FORWARD = "forward"  # upstream's fuse() leaves a bound method, which quantized modules drop

Described = dict[str, dict[str, Any] | None]


def describe_modules(model: nn.Module) -> Described:
    """Describe each module by its path: class, attributes, buffers, and shapes of parameters; in the network's order.

    Tensors among the attributes, such as the strides of a head, are kept.

    Raises:
        CheckpointError: an attribute is not data, or a module with parameters is in two places; the message names it.
    """
    described: Described = {}
    paths: dict[int, str] = {}

    def add(module: nn.Module | None, path: str) -> None:
        if module is None:
            described[path] = None
            return
        if id(module) in paths and next(module.parameters(), None) is not None:
            raise CheckpointError(f"{path} is the same module as {paths[id(module)]}; give each a copy of its own")
        paths[id(module)] = path
        described[path] = _describe(module, path)
        for name, child in module._modules.items():
            add(child, f"{path}.{name}" if path else name)

    add(model, "")
    return described


def _describe(module: nn.Module, path: str) -> dict[str, Any]:
    cls = type(module)
    left_out = {*TORCHS_ATTRIBUTES, FORWARD}
    if not path:
        left_out.update(OWN_KEYS)
    if cls.__name__ in KEPT_FORWARDS:
        left_out.add(KEPT_AS)  # a forward, which `_rebuild` sets again
    attributes = {key: value for key, value in vars(module).items() if key not in left_out}
    shapes: dict[str, list[int] | None] = {}
    for name, parameter in module._parameters.items():
        shapes[name] = None if parameter is None else list(parameter.shape)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "attributes": _all_data(attributes, path),
        "parameters": shapes,
        "buffers": _all_data(module._buffers, path),
    }


def _all_data(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Copy a module's named values with `_data`."""
    return {name: _data(value, f"{path}.{name}") for name, value in values.items()}


def _data(value: Any, where: str) -> Any:
    """Copy an attribute, with tensors on the CPU; `CheckpointError` if it is neither data nor a tensor."""
    if type(value) in ATOMS or isinstance(value, (torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_data(key, where): _data(item, where) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_data(item, where) for item in value)
    if isinstance(value, torch.Size):
        return tuple(value)
    raise CheckpointError(f"{where} is of type {type(value).__name__}, and only numbers, texts and tensors are kept")


def rebuild_modules(described: Mapping[str, Any], classes: Mapping[str, type[nn.Module]]) -> nn.Module:
    """Build a network of the described modules with parameters of ones, in evaluation mode.

    Args:
        classes: the module classes that it may have, by name; see `module_classes`.

    Raises:
        ValueError: a module's class is not listed, or an attribute is one of torch's own.
    """
    modules: dict[str, nn.Module | None] = {}
    for path, entry in described.items():
        modules[path] = None if entry is None else _rebuild(path, entry, classes)
        parent, _, name = path.rpartition(".")
        if path:
            owner: Any = modules[parent]
            owner._modules[name] = modules[path]
    model = modules[""]
    if model is None:
        raise ValueError("the network has no modules")
    return model.eval()


def _rebuild(path: str, entry: Mapping[str, Any], classes: Mapping[str, type[nn.Module]]) -> nn.Module:
    name = entry["class"]
    if name not in classes:
        raise ValueError(f"{path or 'the network'} is a {name}, a class that a checkpoint may not hold")
    reserved = TORCHS_ATTRIBUTES & {*entry["attributes"]}
    if reserved:
        raise ValueError(f"{path} has the attribute {min(reserved)}, which is torch's own")
    cls = classes[name]
    module: nn.Module = object.__new__(cls)
    nn.Module.__init__(module)
    vars(module).update(entry["attributes"])
    if cls.__name__ in KEPT_FORWARDS:
        below = getattr(sys.modules[cls.__module__], KEPT_FORWARDS[cls.__name__])
        vars(module)[KEPT_AS] = below.forward
    for key, shape in entry["parameters"].items():
        module._parameters[key] = None if shape is None else nn.Parameter(torch.ones(shape))
    module._buffers.update(entry["buffers"])
    return module
