"""YOLOv9 as Ultralytics trains it: their checkpoints, read as networks of upstream's blocks.

Their detectors yolov9t to yolov9e are upstream's GELAN networks with the head `Detect`: modules of the same names and
shapes, in other classes. So the weights alone are taken, by name, into a network that upstream's classes make of the
description in the checkpoint; of Ultralytics nothing is imported. Channels are the checkpoint's own: those of the class
branch and of pruned layers are not in the description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from utils.core.checkpoints import GETATTR, NotAllowed, read_torch_file
from utils.core.errors import CheckpointError, InputError

PREFIX = "ultralytics."
THEIR_NAMES = {"nn.Identity": "Silence"}  # blocks that upstream calls otherwise
BLOCKS = (
    "ADown",
    "AConv",
    "CBFuse",
    "CBLinear",
    "Concat",
    "Conv",
    "ELAN1",
    "RepNCSPELAN4",
    "SPPELAN",
    "nn.Identity",
    "nn.Upsample",
)
HEAD = "Detect"
TAKEN = (
    "of their networks the detectors yolov9t to yolov9e are taken (head Detect); train others by upstream's train.py"
)
MASKS = (
    "whose head is Segment: a ConvTranspose2d enlarges its mask prototypes, and an Upsample those of upstream, so its "
    "weights do not fit; train masks by upstream's segment/train.py"
)
SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode", "eps", "mode", "scale_factor", "negative_slope")
TRAINING_STATE = ("optimizer", "scaler", "train_metrics", "train_results")


class _AnyModule(Mapping[str, type[nn.Module]]):
    """Module classes of torch and of Ultralytics, by their names in a pickle: each an empty module of that name."""

    PACKAGES = ("ultralytics.nn.", "torch.nn.modules.")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.startswith(self.PACKAGES)

    def __getitem__(self, name: str) -> type[nn.Module]:
        if name not in self:
            raise KeyError(name)
        return _empty_module(name.rpartition(".")[2])

    def __iter__(self) -> Iterator[str]:
        return iter(self.PACKAGES)

    def __len__(self) -> int:
        return len(self.PACKAGES)


@cache
def _empty_module(name: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {})


def is_theirs(error: NotAllowed) -> bool:
    """Return whether a checkpoint was refused since it names a class of Ultralytics."""
    return error.name.startswith(PREFIX)


def read_theirs(
    path: str | Path, build: Callable[[Mapping[str, Any]], Any], resize: Callable[[Any, Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Read a checkpoint of Ultralytics in the form of upstream's: `model`, `opt`, and `origin` in words.

    No code of the file is run.

    Args:
        build: makes a network of upstream's with random weights from a description, as `build_model`.
        resize: gives a network the channels of a state_dict, as `network.resize`.

    Raises:
        CheckpointError: the network is not a YOLOv9 detector, or its weights are not those of its description.
    """
    try:
        content = read_torch_file(path, _AnyModule(), needed=("model", "ema"), skip=TRAINING_STATE)
    except NotAllowed as error:
        if GETATTR in error.name:
            raise CheckpointError(
                f"{_named(path)} that was fused; give weights/best.pt as the training left it"
            ) from error
        raise CheckpointError(f"{_named(path)} that holds {error.name}; {TAKEN}") from error
    network = content.get("ema")
    if network is None:
        network = content.get("model")
    if not isinstance(network, nn.Module) or not isinstance(getattr(network, "yaml", None), Mapping):
        raise CheckpointError(f"{_named(path)} without a network under 'ema' or 'model'; give weights/best.pt")
    description = described(path, network.yaml)
    layers = getattr(network, "model", None)
    if isinstance(layers, nn.Module) and len([*layers.children()]):
        *_, head = layers.children()
        description["nc"] = getattr(head, "nc", description["nc"])
    try:
        model = build(description)
    except InputError as error:
        raise CheckpointError(f"{_named(path)}: {error}") from error
    resize(model, network.state_dict())
    _take_weights(path, model, network)
    model.nc = description["nc"]
    model.names = getattr(network, "names", model.names)
    arguments = content.get("train_args")
    options = {}
    if isinstance(arguments, Mapping):
        options = {key: arguments.get(key) for key in ("imgsz", "data")}
    origin = f"Ultralytics {content.get('version', '')}".strip()
    return {"model": model, "ema": None, "opt": options, "origin": origin}


def described(path: str | Path, yaml: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the description in a checkpoint of Ultralytics to upstream's.

    Raises:
        CheckpointError: the network is not a YOLOv9 detector.
    """
    name = Path(str(yaml.get("yaml_file", "a network without a name"))).stem
    backbone = yaml.get("backbone")
    head = yaml.get("head")
    if not (_is_rows(backbone) and _is_rows(head)):
        raise CheckpointError(f"{_named(path)}: {name}, whose description has no backbone and head of layers")
    _check_blocks(f"{_named(path)}: {name}", [row[2] for row in (*backbone, *head)])
    return {
        "nc": yaml.get("nc"),
        "ch": yaml.get("channels", yaml.get("ch", 3)),
        "depth_multiple": yaml.get("depth_multiple", 1.0),
        "width_multiple": yaml.get("width_multiple", 1.0),
        "anchors": 3,
        "backbone": _in_upstreams_names(backbone),
        "head": _in_upstreams_names(head),
    }


def _check_blocks(where: str, blocks: Sequence[Any]) -> None:
    """Raise `CheckpointError` unless the blocks, with the head at the end, are those of a YOLOv9 detector."""
    for block in blocks[:-1]:
        if block not in BLOCKS:
            raise CheckpointError(f"{where}, which is not YOLOv9 (it has the block {block!s:.40}); {TAKEN}")
    head = blocks[-1] if blocks else "no layers"
    if head == "Segment":
        raise CheckpointError(f"{where}, {MASKS}")
    if head != HEAD:
        raise CheckpointError(f"{where}, whose head is {head!s:.40}; {TAKEN}")


def _in_upstreams_names(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Layers with the names that upstream has for their blocks."""
    return [[source, number, THEIR_NAMES.get(block, block), arguments] for source, number, block, arguments in rows]


def _is_rows(part: Any) -> TypeGuard[list[list[Any]]]:
    """Return whether a part of a description is a list of layers: from, number, block, arguments."""
    return isinstance(part, list) and all(isinstance(row, (list, tuple)) and len(row) == 4 for row in part)


def _take_weights(path: str | Path, model: nn.Module, network: nn.Module) -> None:
    """Copy all weights of a network of Ultralytics by name into `model`.

    Raises:
        CheckpointError: a weight, or a module of torch's, is not the same in both networks; it names the first.
    """
    state = network.state_dict()
    different = [*_different_weights(model.state_dict(), state), *_different_modules(model, network)]
    if different:
        raise CheckpointError(
            f"{_named(path)}, whose network is not that of its description (first: {different[0][:100]}); a network "
            "that was fused, or in which blocks were replaced, is not taken"
        )
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.to(types[name]) for name, tensor in state.items()})


def _different_weights(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of tensors that only one of two states has, or that have other shapes."""
    for name in sorted({*first, *second}):
        if name not in first or name not in second or first[name].shape != second[name].shape:
            yield name


def _different_modules(model: nn.Module, network: nn.Module) -> Iterator[str]:
    """Yield the paths of torch's modules that compute something else, with equal weights, than those of `network`."""
    modules = dict(network.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__module__.startswith("torch.") and name in modules and _differs(module, modules[name]):
            yield name


def _differs(module: nn.Module, other: nn.Module) -> bool:
    """Return whether a module of torch's has another class or other settings than another one."""
    if type(module).__name__ != type(other).__name__:
        return True
    return any(getattr(module, key, None) != getattr(other, key, None) for key in SETTINGS)


def _named(path: str | Path) -> str:
    return f"{path} is a checkpoint of Ultralytics"
