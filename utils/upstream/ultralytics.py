"""YOLOv9 as Ultralytics trains it: their checkpoints, read as networks of upstream's blocks.

Their detectors yolov9t to yolov9e are upstream's GELAN networks with the head `Detect`: modules of the same names and
shapes, in other classes. So the weights alone are taken, by name, into a network that upstream's classes make of the
description in the checkpoint; of Ultralytics nothing is imported. Channels are the checkpoint's own: those of the class
branch and of pruned layers are not in the description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from utils.core.checkpoints import GETATTR, NotAllowed, read_torch_file
from utils.core.errors import CheckpointError, InputError

PREFIX = "ultralytics."
THEIR_NAMES = {"nn.Identity": "Silence"}  # blocks that upstream calls otherwise
BLOCKS = (
    "ADown", "AConv", "CBFuse", "CBLinear", "Concat", "Conv", "ELAN1", "RepNCSPELAN4", "SPPELAN", "nn.Identity",
    "nn.Upsample",
)  # fmt: skip
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
    """Whether a checkpoint was refused since it names a class of Ultralytics."""
    return error.name.startswith(PREFIX)


def read_theirs(
    path: str | Path, build: Callable[[Mapping[str, Any]], Any], resize: Callable[[Any, Mapping[str, Any]], None]
) -> dict[str, Any]:
    """A checkpoint of Ultralytics in the form of upstream's: `model`, `opt`, and `origin` in words.

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
    theirs = content.get("model") if content.get("ema") is None else content["ema"]
    if not isinstance(theirs, nn.Module) or not isinstance(getattr(theirs, "yaml", None), Mapping):
        raise CheckpointError(f"{_named(path)} without a network under 'ema' or 'model'; give weights/best.pt")
    description = described(path, theirs.yaml)
    layers = getattr(theirs, "model", None)
    for head in [*layers.children()][-1:] if isinstance(layers, nn.Module) else []:
        description["nc"] = getattr(head, "nc", description["nc"])
    try:
        model = build(description)
    except InputError as error:
        raise CheckpointError(f"{_named(path)}: {error}") from error
    resize(model, theirs.state_dict())
    _take_weights(path, model, theirs)
    model.nc, model.names = description["nc"], getattr(theirs, "names", model.names)
    arguments = content.get("train_args")
    options = {key: arguments.get(key) for key in ("imgsz", "data")} if isinstance(arguments, Mapping) else {}
    origin = f"Ultralytics {content.get('version', '')}".strip()
    return {"model": model, "ema": None, "opt": options, "origin": origin}


def described(path: str | Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Upstream's description of a network of Ultralytics, from the description in its checkpoint.

    Raises:
        CheckpointError: it is another one than a YOLOv9 detector.
    """
    name = Path(str(theirs.get("yaml_file", "a network without a name"))).stem
    backbone, head_rows = (theirs.get(part) for part in ("backbone", "head"))
    if not (_is_rows(backbone) and _is_rows(head_rows)):
        raise CheckpointError(f"{_named(path)}: {name}, whose description has no backbone and head of layers")
    rows = [[*row] for row in (*backbone, *head_rows)]
    for row in rows[:-1]:
        if row[2] not in BLOCKS:
            raise CheckpointError(
                f"{_named(path)}: {name}, which is not YOLOv9 (it has the block {row[2]!s:.40}); {TAKEN}"
            )
    if not rows or rows[-1][2] != HEAD:
        head = rows[-1][2] if rows else "no layers"
        if head == "Segment":
            raise CheckpointError(f"{_named(path)}: {name}, {MASKS}")
        raise CheckpointError(f"{_named(path)}: {name}, whose head is {head!s:.40}; {TAKEN}")
    for row in rows:
        row[2] = THEIR_NAMES.get(row[2], row[2])
    split = len(backbone)
    return {
        "nc": theirs.get("nc"),
        "ch": theirs.get("channels", theirs.get("ch", 3)),
        "depth_multiple": theirs.get("depth_multiple", 1.0),
        "width_multiple": theirs.get("width_multiple", 1.0),
        "anchors": 3,
        "backbone": rows[:split],
        "head": rows[split:],
    }


def _is_rows(part: Any) -> TypeGuard[list[list[Any]]]:
    """Whether a part of a description is a list of layers: from, number, block, arguments."""
    return isinstance(part, list) and all(isinstance(row, (list, tuple)) and len(row) == 4 for row in part)


def _take_weights(path: str | Path, model: nn.Module, theirs: nn.Module) -> None:
    """Copy all weights by name.

    Raises:
        CheckpointError: a weight, or a module of torch's, is not the same in both networks; it names the first.
    """
    ours, found = model.state_dict(), theirs.state_dict()
    different = [
        name
        for name in sorted({*ours, *found})
        if name not in ours or name not in found or ours[name].shape != found[name].shape
    ]
    modules = dict(theirs.named_modules(remove_duplicate=False))
    different += [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).__module__.startswith("torch.") and name in modules and _differs(module, modules[name])
    ]
    if different:
        raise CheckpointError(
            f"{_named(path)}, whose network is not that of its description (first: {different[0][:100]}); a network "
            "that was fused, or in which blocks were replaced, is not taken"
        )
    model.load_state_dict({name: value.to(ours[name].dtype) for name, value in found.items()})


def _differs(module: nn.Module, theirs: nn.Module) -> bool:
    """Whether a module of torch's computes something else than theirs of the same weights."""
    same = type(module).__name__ == type(theirs).__name__
    return not same or any(getattr(module, key, None) != getattr(theirs, key, None) for key in SETTINGS)


def _named(path: str | Path) -> str:
    return f"{path} is a checkpoint of Ultralytics"
