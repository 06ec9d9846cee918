"""From a YOLOv9 network as it is trained, with an auxiliary branch, to the GELAN network that is deployed.

Training networks end in a head of two halves: the first reads the auxiliary branch, the second the main branch. The
deployed network is the main branch, renumbered: layers move as they are, pruned ones too. Which layers these are is
read off the network's own description, from the second half of its head to the image.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils import upstream
from utils.core.errors import CheckpointError, InputError, QatError
from utils.core.files import save_torch
from utils.core.input_spec import channels_of
from utils.core.tasks import predicted
from utils.core.text import plural

CHECK_SIDE = 64  # pixels of the image on which both networks are compared
TOLERANCE = 1e-3  # pixels, and score: float arithmetic in another order


@dataclass(frozen=True)
class Head:
    """A training network's head."""

    deployed: str  # class of the head that is its second half
    main: Mapping[str, str]  # part of that head → the same part of the training network's head
    prototypes: int = 0  # how many of its last inputs are for the prototypes of masks: one for each half, or none

    def inputs(self, sources: Sequence[int]) -> list[int]:
        """Those of the head's inputs that its second half reads."""
        levels = len(sources) - self.prototypes
        return [*sources[levels // 2 : levels], *sources[levels + self.prototypes // 2 :]]


HEADS = {
    "DualDDetect": Head("DDetect", {"cv2": "cv4", "cv3": "cv5", "dfl": "dfl2"}),
    "DualDSegment": Head(
        "DSegment", {"cv2": "cv4", "cv3": "cv5", "cv4": "cv7", "proto": "proto2", "dfl": "dfl2"}, prototypes=2
    ),
}


def main_branch(training: Mapping[str, Any]) -> dict[int, list[int]]:
    """The layers of a training network that are deployed, in order, each with the layers that it reads (-1: the image).

    A Silence hands the image to both branches. Deployed it stays where several layers read it, as in gelan-e; where one
    does, that layer reads the image itself.
    """
    layers = [*training["backbone"], *training["head"]]
    found: dict[int, list[int]] = {}
    waiting = [len(layers) - 1]
    while waiting:
        index = waiting.pop()
        if index < 0 or index in found:
            continue
        sources = [layers[index][0]] if isinstance(layers[index][0], int) else list(layers[index][0])
        if index == len(layers) - 1:
            sources = HEADS[layers[index][2]].inputs(sources)
        found[index] = [index + one if one < 0 else one for one in sources]
        waiting += found[index]
    for index in [index for index in found if layers[index][2] == "Silence"]:
        readers = [reader for reader, sources in found.items() if index in sources]
        if found[index] == [-1] and len(readers) == 1:
            found[readers[0]] = [-1 if one == index else one for one in found[readers[0]]]
            del found[index]
    return {index: found[index] for index in sorted(found)}


def deploy_description(training: Mapping[str, Any], nc: int) -> dict[str, Any]:
    """The deployed network's model description, from the training network's."""
    layers = [*training["backbone"], *training["head"]]
    branch = main_branch(training)
    deployed = {-1: -1} | {source: index for index, source in enumerate(branch)}
    rows = []
    for index, (source, sources) in enumerate(branch.items()):
        before, count, kind, arguments = layers[source]
        kind = HEADS[kind].deployed if source == len(layers) - 1 else kind
        inputs = [-1 if deployed[one] == index - 1 else deployed[one] for one in sources]
        rows.append([inputs[0] if isinstance(before, int) else inputs, count, kind, copy.deepcopy(arguments)])
    backbone = sum(source < len(training["backbone"]) for source in branch)
    return {**copy.deepcopy(dict(training)), "nc": nc, "backbone": rows[:backbone], "head": rows[backbone:]}


def convert(training: upstream.FloatCheckpoint) -> upstream.FloatCheckpoint:
    """The deployed network of a training checkpoint, float32, not fused, with copies of the main branch's layers.

    Raises:
        CheckpointError: the network has other layers than its description.
    """
    model: Any = upstream.build_model(deploy_description(training.yaml, training.nc))
    source: Any = training.model
    branch = list(main_branch(training.yaml))
    if len(source.model) <= branch[-1]:
        raise CheckpointError(
            f"the checkpoint has {plural(len(source.model), 'layer')}, and its description {branch[-1] + 1}"
        )
    for index, layer in enumerate(branch[:-1]):
        placed, moved = model.model[index], copy.deepcopy(source.model[layer])
        moved.i, moved.f = placed.i, placed.f
        model.model[index] = moved
    for part, original in HEADS[type(source.model[-1]).__name__].main.items():
        setattr(model.model[-1], part, copy.deepcopy(getattr(source.model[-1], original)))
    model.names = dict(training.names)
    model.nc = training.nc
    model.stride = model.model[-1].stride = torch.as_tensor(training.model.stride).clone()
    weights_hash = upstream.hash_of_weights(model)
    return replace(training, model=model, names=dict(training.names), yaml=dict(model.yaml), weights_hash=weights_hash)


def check_same_network(description: Mapping[str, Any], deployed: upstream.FloatCheckpoint, where: str | Path) -> None:
    """Raises `InputError` if a model's YAML gives other tensors than the deployed network, of as many channels, has."""
    named = upstream.build_model({**description, "ch": channels_of(deployed.model)}, deployed.nc)
    models = (named, deployed.model)
    theirs, ours = ({name: list(one.shape) for name, one in model.state_dict().items()} for model in models)
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise InputError(
                f"--cfg {where} is not what this checkpoint becomes: its {name} is {theirs.get(name)}, that of the "
                f"checkpoint's main branch {ours.get(name)}; the checkpoint knows its layers, so leave --cfg out"
            )


def largest_difference(training: nn.Module, deployed: nn.Module, device: torch.device) -> float:
    """How far the deployed network's outputs, with prototypes, are from the main branch's, on one random image.

    Raises:
        QatError: by more than float arithmetic explains.
    """
    shape = 1, channels_of(deployed), CHECK_SIDE, CHECK_SIDE
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for model in (training, deployed):
        with torch.no_grad():  # of copies: a head remembers the anchors of the last image's size
            result = copy.deepcopy(model).to(device)(image)
        branches = isinstance(result[0], (list, tuple))  # both, of a detector; a segment head returns the second one's
        results.append(predicted(result[0][1] if branches else result))
    difference = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
    if not difference <= TOLERANCE:
        raise QatError(f"the converted network's output differs by {difference:g} from the training network's")
    return difference


def save_converted(path: str | Path, deployed: upstream.FloatCheckpoint) -> None:
    """Write a network as upstream's `train.py` leaves its best one: half precision, without optimizer.

    Upstream's scripts load it. Of the training's options it keeps the image size and the dataset. The network itself is
    turned to half precision.

    Raises:
        CheckpointError: a value is beyond half precision.
    """
    model = deployed.model.cpu().half()
    if large := [name for name, value in model.state_dict().items() if not bool(value.isfinite().all())]:
        raise CheckpointError(
            f"{large[0]} holds values above {torch.finfo(torch.float16).max:g}, which half precision cannot hold, and "
            "converted networks are written in it, as upstream's are"
        )
    for parameter in model.parameters():
        parameter.requires_grad = False
    keys = ("best_fitness", "ema", "updates", "optimizer", "git", "date")
    opt = {"imgsz": deployed.imgsz, "data": deployed.data}
    save_torch({"epoch": -1, "model": model, "opt": opt, **dict.fromkeys(keys)}, path)
