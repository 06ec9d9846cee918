"""Checkpoints as Ultralytics writes them, of networks of upstream's: same tensors, in classes of their names.

The classes are made here, so that nothing of Ultralytics is needed; they exist while a file is written.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from random_networks import TINY
from torch import nn

from utils import upstream

PLACES = {"Conv": "conv", "Concat": "conv", "RepConv": "conv", "Detect": "head", "DetectionModel": "tasks"}
THEIR_NAMES = {"RepConvN": "RepConv", "RepNBottleneck": "RepBottleneck", "RepNCSP": "RepCSP"}
# A detector as their YAMLs describe one: without depth, width and anchors.
DESCRIPTION: dict[str, Any] = {
    "nc": 3,
    "yaml_file": "yolov9t.yaml",
    "backbone": TINY["backbone"],
    "head": [*TINY["head"][:-1], [[3, 8, 6], 1, "Detect", ["nc"]]],
}
NAMES = {0: "cat", 1: "dog", 2: "owl"}


def network(class_channels: int = 20, seed: int = 0) -> nn.Module:
    """The network of `DESCRIPTION` in upstream's classes, with random weights that a detector could have."""
    torch.manual_seed(seed)
    model = with_class_channels(
        upstream.build_model({**DESCRIPTION, "depth_multiple": 1.0, "width_multiple": 1.0, "anchors": 3}),
        class_channels,
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def with_class_channels(model: Any, channels: int) -> nn.Module:
    """The network with a class branch of so many channels, and new weights there: Ultralytics' has its own width."""
    head = model.model[-1]
    for branch in head.cv3:
        first, second, last = branch
        first.conv = nn.Conv2d(first.conv.in_channels, channels, 3, padding=1, bias=False)
        second.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        first.bn, second.bn = (nn.BatchNorm2d(channels, eps=1e-3).eval() for _ in range(2))
        branch[2] = nn.Conv2d(channels, last.out_channels, 1)
    return model


def write_theirs(path: Path, model: nn.Module, **changes: Any) -> Path:
    """A checkpoint of Ultralytics of `model`, in half precision; `changes` are attributes of the network."""
    made: dict[str, type[nn.Module]] = {}
    theirs = _in_their_classes(model, made)
    vars(theirs).update({"yaml": DESCRIPTION, "names": NAMES, "task": "detect", **changes})
    arguments = {"imgsz": 96, "data": "animals.yaml", "task": "detect"}
    with _importable(made):
        content = {"epoch": -1, "model": theirs.half(), "ema": None, "train_args": arguments, "version": "8.4.190"}
        torch.save(content, path)
    return path


def _in_their_classes(module: nn.Module, made: dict[str, type[nn.Module]]) -> Any:
    """A copy of a network whose modules, but for torch's own, are of classes with Ultralytics' names."""
    kind = type(module)
    if not kind.__module__.startswith("torch."):
        name = THEIR_NAMES.get(kind.__name__, kind.__name__)
        place = f"ultralytics.nn.{'' if name == 'DetectionModel' else 'modules.'}{PLACES.get(name, 'block')}"
        kind = made.setdefault(name, type(name, (nn.Module,), {"__module__": place}))
    copy: Any = object.__new__(kind)
    nn.Module.__init__(copy)
    vars(copy).update({key: value for key, value in vars(module).items() if not key.startswith("_")})
    copy._parameters.update(module._parameters)
    copy._buffers.update(module._buffers)
    copy._modules.update({name: _in_their_classes(child, made) for name, child in module.named_children()})
    return copy


@contextmanager
def _importable(classes: Mapping[str, type[nn.Module]]) -> Iterator[None]:
    """While it is open, the classes can be imported from the modules that they name, as pickling asks for."""
    names = {"ultralytics", "ultralytics.nn", "ultralytics.nn.modules", *(kind.__module__ for kind in classes.values())}
    places = {name: ModuleType(name) for name in names}
    for name, kind in classes.items():
        setattr(places[kind.__module__], name, kind)
    sys.modules.update(places)
    try:
        yield
    finally:
        for place in places:
            del sys.modules[place]
