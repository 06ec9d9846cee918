"""Conversion of a YOLOv9 network as it is trained, with an auxiliary branch, to the GELAN network that is deployed.

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
from torch import Tensor, nn

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
        """Select those of the head's inputs that its second half reads.

        >>> Head("DDetect", {}).inputs([31, 34, 37, 16, 19, 22])
        [16, 19, 22]
        """
        levels = len(sources) - self.prototypes
        main_levels = sources[levels // 2 : levels]
        main_prototypes = sources[levels + self.prototypes // 2 :]
        return [*main_levels, *main_prototypes]


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
    last = len(layers) - 1
    sources_of: dict[int, list[int]] = {}
    waiting = [last]
    while waiting:
        index = waiting.pop()
        if index < 0 or index in sources_of:
            continue
        source, _, kind, _ = layers[index]
        sources = [source] if isinstance(source, int) else list(source)
        if index == last:
            sources = HEADS[kind].inputs(sources)
        sources_of[index] = [index + source if source < 0 else source for source in sources]
        waiting += sources_of[index]
    _skip_silences(sources_of, layers)
    return dict(sorted(sources_of.items()))


def _skip_silences(sources_of: dict[int, list[int]], layers: Sequence[Any]) -> None:
    """Remove each Silence that hands the image to one layer only; that layer then reads the image itself."""
    silences = [index for index in sources_of if layers[index][2] == "Silence"]
    for silence in silences:
        readers = [index for index, sources in sources_of.items() if silence in sources]
        if sources_of[silence] == [-1] and len(readers) == 1:
            reader = readers[0]
            sources_of[reader] = [-1 if source == silence else source for source in sources_of[reader]]
            del sources_of[silence]


def deploy_description(training: Mapping[str, Any], nc: int) -> dict[str, Any]:
    """The deployed network's model description, from the training network's."""
    layers = [*training["backbone"], *training["head"]]
    branch = main_branch(training)
    deployed_index = {-1: -1}  # of a layer of the training network
    for index, layer in enumerate(branch):
        deployed_index[layer] = index
    backbone = []
    head = []
    for index, (layer, sources) in enumerate(branch.items()):
        source, count, kind, arguments = layers[layer]
        if layer == len(layers) - 1:
            kind = HEADS[kind].deployed
        inputs = [deployed_index[source] for source in sources]
        inputs = [-1 if number == index - 1 else number for number in inputs]  # upstream writes -1 for the layer before
        row = [inputs[0] if isinstance(source, int) else inputs, count, kind, copy.deepcopy(arguments)]
        if layer < len(training["backbone"]):
            backbone.append(row)
        else:
            head.append(row)
    return {**copy.deepcopy(dict(training)), "nc": nc, "backbone": backbone, "head": head}


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
            f"the checkpoint has {plural(len(source.model), 'layer')}, but its description has {branch[-1] + 1}"
        )
    for index, layer in enumerate(branch[:-1]):
        placed = model.model[index]
        moved = copy.deepcopy(source.model[layer])
        moved.i = placed.i
        moved.f = placed.f
        model.model[index] = moved
    for part, original in HEADS[type(source.model[-1]).__name__].main.items():
        setattr(model.model[-1], part, copy.deepcopy(getattr(source.model[-1], original)))
    model.names = dict(training.names)
    model.nc = training.nc
    model.stride = model.model[-1].stride = torch.as_tensor(training.model.stride).clone()
    weights_hash = upstream.hash_of_weights(model)
    return replace(training, model=model, names=dict(training.names), yaml=dict(model.yaml), weights_hash=weights_hash)


def check_same_network(description: Mapping[str, Any], deployed: upstream.FloatCheckpoint, where: str | Path) -> None:
    """Raise `InputError` if a model's YAML gives other tensors than the deployed network, of as many channels, has."""
    described = upstream.build_model({**description, "ch": channels_of(deployed.model)}, deployed.nc)
    described_shapes = _shapes(described)
    shapes = _shapes(deployed.model)
    for name in shapes | described_shapes:
        if shapes.get(name) != described_shapes.get(name):
            raise InputError(
                f"--cfg {where} does not match the converted model: {name} has shape {described_shapes.get(name)} in "
                f"the YAML and {shapes.get(name)} in the checkpoint's main branch; leave --cfg out, since the "
                "checkpoint describes its layers"
            )


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.state_dict().items()}


def largest_difference(training: nn.Module, deployed: nn.Module, device: torch.device) -> float:
    """Largest difference of the deployed network's outputs, with prototypes, from the main branch's on a random image.

    Raises:
        QatError: by more than float arithmetic explains.
    """
    shape = (1, channels_of(deployed), CHECK_SIDE, CHECK_SIDE)
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
    difference = 0.0
    for expected, output in zip(_outputs(training, image), _outputs(deployed, image), strict=True):
        distance = float((expected - output).abs().max())
        if not distance <= TOLERANCE:  # also where it is NaN
            raise QatError(f"the converted model's output differs by {distance:g} from the training model's")
        difference = max(difference, distance)
    return difference


def _outputs(model: nn.Module, image: Tensor) -> tuple[Tensor, ...]:
    """The deployed outputs of a network, or of the main branch of a training network, on a batch of images."""
    with torch.no_grad():  # a copy, because a head remembers the anchors of the last image's size
        result = copy.deepcopy(model).to(image.device)(image)
    has_both_branches = isinstance(result[0], (list, tuple))  # a segment head returns the main branch alone
    return tuple(predicted(result[0][1] if has_both_branches else result))


def save_converted(path: str | Path, deployed: upstream.FloatCheckpoint) -> None:
    """Write a network as upstream's `train.py` leaves its best one: half precision, without optimizer.

    Upstream's scripts load it. Of the training's options it keeps the image size and the dataset. The network itself is
    turned to half precision.

    Raises:
        CheckpointError: a value is beyond half precision.
    """
    model = deployed.model.cpu().half()
    large = [name for name, value in model.state_dict().items() if not bool(value.isfinite().all())]
    if large:
        raise CheckpointError(
            f"{large[0]} holds values above {torch.finfo(torch.float16).max:g}; converted models are saved in half "
            "precision, as upstream's are, which cannot hold them"
        )
    for parameter in model.parameters():
        parameter.requires_grad = False
    keys = ("best_fitness", "ema", "updates", "optimizer", "git", "date")
    opt = {"imgsz": deployed.imgsz, "data": deployed.data}
    save_torch({"epoch": -1, "model": model, "opt": opt, **dict.fromkeys(keys)}, path)
