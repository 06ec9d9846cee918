"""The deployed network of a training network: its description, its tensors, and whether it computes the same.

Nothing is trained or rounded: tensors move.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.reparam.variants import HEADS, Variant
from utils import upstream
from utils.core.errors import CheckpointError, InputError, QatError
from utils.core.files import save_torch
from utils.core.tasks import predicted

CHECK_SIDE = 64  # pixels of the image on which both networks are compared
TOLERANCE = 1e-3  # pixels, and score: float arithmetic in another order


def deploy_description(training: Mapping[str, Any], variant: Variant, nc: int) -> dict[str, Any]:
    """The deployed network's model description, from the training network's.

    Raises:
        InputError: the main branch reads a layer that the variant leaves out.
        CheckpointError: the description is not of as many layers.
    """
    layers = [*training["backbone"], *training["head"]]
    if len(layers) != variant.head + 1:
        raise CheckpointError(f"the checkpoint describes {len(layers)} layers and holds {variant.head + 1}")
    deployed = {source: index for index, source in variant.sources.items()}
    rows = []
    for index, source in variant.sources.items():
        sources, count, kind, arguments = layers[source]
        inputs = [sources] if isinstance(sources, int) else list(sources)
        if source == variant.head:
            inputs, kind = HEADS[variant.kind].inputs(inputs), HEADS[variant.kind].deployed
        inputs = [_deployed_input(one, index, source, deployed, layers) for one in inputs]
        rows.append([inputs[0] if isinstance(sources, int) else inputs, count, kind, copy.deepcopy(arguments)])
    backbone = sum(source < len(training["backbone"]) for source in variant.sources.values())
    return {**copy.deepcopy(dict(training)), "nc": nc, "backbone": rows[:backbone], "head": rows[backbone:]}


def _deployed_input(reference: int, index: int, source: int, deployed: Mapping[int, int], layers: list[Any]) -> int:
    """What deployed layer `index` reads, where training layer `source` reads `reference` (-1: the layer before)."""
    absolute = source + reference if reference < 0 else reference
    if absolute >= 0 and absolute not in deployed and layers[absolute][2] == "Silence":
        absolute = -1  # it only passes the image on
    if absolute < 0 and index == 0:
        return -1
    if absolute not in deployed:
        raise InputError(f"layer {source} of the training network reads layer {absolute}, which is not deployed")
    return -1 if deployed[absolute] == index - 1 else deployed[absolute]


def check_description(found: Mapping[str, Any], expected: Mapping[str, Any], where: str | Path, own: str = "") -> None:
    """Raises `InputError` at the first layer in which a deployed model's YAML differs from the checkpoint's branch.

    Args:
        own: what is known about such a difference, see `Variant.own`.
    """
    for key in ("depth_multiple", "width_multiple", "activation"):
        if found.get(key) != expected.get(key):
            raise InputError(f"--cfg {where} has {key} {found.get(key)}, the checkpoint {expected.get(key)}")
    ours, theirs = ([*one["backbone"], *one["head"]] for one in (expected, found))
    for index in range(max(len(ours), len(theirs))):
        mine, other = (_normalized(rows[index], index) if index < len(rows) else "none" for rows in (ours, theirs))
        if mine != other:
            raise InputError(
                f"--cfg {where} is not what this checkpoint becomes: its layer {index} is {other}, "
                f"the checkpoint's main branch has {mine} there{own and f' ({own})'}"
            )


def _normalized(row: list[Any], index: int) -> str:
    sources, count, kind, arguments = row
    inputs = [index - 1 if one == -1 else one for one in ([sources] if isinstance(sources, int) else sources)]
    return f"{kind} {arguments} x {count} reading {', '.join('the image' if i < 0 else str(i) for i in inputs)}"


def tensor_map(variant: Variant, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensor of the deployed network → tensor of the training network.

    Every target has exactly one source of its own shape, and what is left of the source is the auxiliary branch.

    Raises:
        CheckpointError: one of these does not hold.
    """
    found: dict[str, str] = {}
    for name, tensor in target.items():
        _, index, rest = name.split(".", 2)
        layer = variant.sources[int(index)]
        if layer == variant.head:
            part, _, inner = rest.partition(".")
            rest = f"{HEADS[variant.kind].main[part]}.{inner}"
        found[name] = f"model.{layer}.{rest}"
        if found[name] not in source:
            raise CheckpointError(f"the training network lacks {found[name]}, which {name} is filled with")
        if source[found[name]].shape != tensor.shape:
            shapes = f"{list(source[found[name]].shape)}, and {name} {list(tensor.shape)}"
            raise CheckpointError(f"{found[name]} of the training network is {shapes}")
    used = set(found.values())
    if len(used) < len(found):
        raise CheckpointError("two tensors of the deployed network would be filled with the same one")
    left = [name for name in source if name not in used and not _is_auxiliary(name, variant)]
    if left:
        raise CheckpointError(f"{len(left)} tensors of the main branch would be lost, such as {left[0]}")
    return found


def _is_auxiliary(name: str, variant: Variant) -> bool:
    _, index, rest = name.split(".", 2)
    part = rest.split(".")[0]
    return variant.is_auxiliary(int(index)) or (int(index) == variant.head and part in HEADS[variant.kind].auxiliary)


def convert(training: upstream.FloatCheckpoint, variant: Variant) -> upstream.FloatCheckpoint:
    """The deployed network of a training checkpoint, float32, not fused.

    Raises:
        InputError: the network does not have the variant's layers.
        CheckpointError: its tensors do not fit them.
    """
    description = deploy_description(training.yaml, variant, training.nc)
    model: Any = upstream.build_model(description)
    source = training.model.state_dict()
    names = tensor_map(variant, source, model.state_dict())
    model.load_state_dict({name: source[origin] for name, origin in names.items()})
    model.names = dict(training.names)
    model.nc = training.nc
    model.stride = model.model[-1].stride = torch.as_tensor(training.model.stride).clone()
    return upstream.FloatCheckpoint(model, dict(training.names), training.nc, training.stride, dict(model.yaml))


def largest_difference(training: nn.Module, deployed: nn.Module, device: torch.device) -> float:
    """How far the deployed network's outputs are from the training network's main branch, on one random image.

    Both the predictions and, of a segmentation network, the prototypes are compared.

    Raises:
        QatError: by more than float arithmetic explains.
    """
    image = torch.rand(1, 3, CHECK_SIDE, CHECK_SIDE, generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for model in (training, deployed):
        with torch.no_grad(), _head_as_it_was(model):
            result = model.to(device)(image)
        branches = isinstance(result[0], (list, tuple))  # both, of a detector; a segment head returns the second one's
        results.append(predicted(result[0][1] if branches else result))
    difference = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
    if not difference <= TOLERANCE:
        raise QatError(f"the converted network's output differs by {difference:g} from the training network's")
    return difference


@contextlib.contextmanager
def _head_as_it_was(model: Any) -> Iterator[None]:
    """The head keeps the anchors of the last size that it saw; they would be saved with it."""
    head = model.model[-1]
    before = dict(head.__dict__)
    try:
        yield
    finally:
        head.__dict__.clear()
        head.__dict__.update(before)


def is_rounded_by_half(model: nn.Module, where: str | Path) -> bool:
    """Whether half precision, in which `save` writes a network, changes any of its values.

    Raises:
        CheckpointError: a value is beyond half precision.
    """
    changed = False
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        half = value.half()
        if not bool(half.isfinite().all()):
            raise CheckpointError(
                f"{where}: {name} holds values above {torch.finfo(torch.float16).max:g}, which half precision cannot "
                "hold, and converted networks are written in it, as upstream's are"
            )
        changed = changed or not torch.equal(half.to(value.dtype), value)
    return changed


def save(path: str | Path, model: nn.Module) -> None:
    """Write a network as upstream's `train.py` leaves its best one: half precision, without optimizer.

    Upstream's scripts load it. `model` is turned to half precision.
    """
    model = model.cpu().half()
    for parameter in model.parameters():
        parameter.requires_grad = False
    keys = ("best_fitness", "ema", "updates", "optimizer", "opt", "git", "date")
    save_torch({"epoch": -1, "model": model, **dict.fromkeys(keys)}, path)
