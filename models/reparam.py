"""From a YOLOv9 network as it is trained, with an auxiliary branch, to the GELAN network that is deployed.

Training networks end in a head of two halves: the first reads the auxiliary branch, the second the main branch. The
deployed network is the main branch, renumbered: nothing is trained or rounded, tensors move. `VARIANTS` says for each
of upstream's six which training layers these are, read off its two model YAMLs (yolov9-X.yaml and gelan-X.yaml).
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
    """A training network's head.

    Attributes:
        deployed: class of the head that is its second half.
        main: part of that head → the same part of the training network's head.
        auxiliary: the parts of its first half.
        prototypes: how many of its last inputs are for the prototypes of masks: one for each half, or none.
    """

    deployed: str
    main: Mapping[str, str]
    auxiliary: tuple[str, ...]
    prototypes: int = 0

    def inputs(self, sources: Sequence[int]) -> list[int]:
        """Those of the head's inputs that its second half reads."""
        levels = len(sources) - self.prototypes
        return [*sources[levels // 2 : levels], *sources[levels + self.prototypes // 2 :]]


HEADS = {
    "DualDDetect": Head("DDetect", {"cv2": "cv4", "cv3": "cv5", "dfl": "dfl2"}, ("cv2", "cv3", "dfl")),
    "DualDSegment": Head(
        "DSegment",
        {"cv2": "cv4", "cv3": "cv5", "cv4": "cv7", "proto": "proto2", "dfl": "dfl2"},
        ("cv2", "cv3", "cv6", "proto", "dfl"),
        prototypes=2,
    ),
}


@dataclass(frozen=True)
class Variant:
    """One of upstream's networks.

    Attributes:
        layers: (first, last, source): deployed layers first to last are the training layers from source on.
        head: the training network's head; the deployed head follows the last of `layers`.
        auxiliary: (first, last) training layers that only the auxiliary branch needs.
        stem: output channels of the first convolution.
        down: class of the first layer that halves the image with anything but a plain strided convolution.
        kind: class of the training network's head, one of HEADS.
        own: in what the deployed network is not the one of upstream's YAML; empty for nothing.
    """

    name: str
    layers: tuple[tuple[int, int, int], ...]
    head: int
    auxiliary: tuple[tuple[int, int], ...]
    stem: int
    down: str
    kind: str = "DualDDetect"
    own: str = ""

    @property
    def sources(self) -> dict[int, int]:
        """Deployed layer → training layer, the head included."""
        found = {i: source + i - first for first, last, source in self.layers for i in range(first, last + 1)}
        return found | {len(found): self.head}

    def is_auxiliary(self, layer: int) -> bool:
        """Whether the deployed network does without a training layer."""
        return any(first <= layer <= last for first, last in self.auxiliary)

    def __str__(self) -> str:
        facts = f"{plural(self.head + 1, 'layer')}, {self.stem} channels first, {self.down}"
        return f"{self.name} ({facts})" if self.kind == "DualDDetect" else f"{self.name} ({facts}, {self.kind})"


# fmt: off
VARIANTS = {variant.name: variant for variant in (
    # name, deployed layers ← training layers, training head, auxiliary layers, what tells it from the others
    Variant("t", ((0, 21, 0),), 29, ((22, 28),), 16, "AConv"),
    Variant("s", ((0, 21, 0),), 29, ((22, 28),), 32, "AConv"),
    # layer 0 passes the image on, to both branches: deployed, the first convolution reads it itself
    Variant("m", ((0, 21, 1),), 38, ((0, 0), (23, 37)), 32, "AConv"),
    Variant("c", ((0, 21, 1),), 38, ((0, 0), (23, 37)), 64, "ADown"),
    # two backbones, both deployed; the auxiliary branch is the neck of the first
    Variant("e", ((0, 28, 0), (29, 41, 36)), 49, ((29, 35),), 64, "ADown"),
    # with masks: layers 41 to 43 make the prototypes
    Variant("c-dseg", ((0, 21, 1), (22, 24, 41)), 44, ((0, 0), (23, 40)), 64, "ADown", "DualDSegment",
            "layer 41 of yolov9-c-dseg has two repeats where layer 22 of gelan-c-dseg.yaml has one, so that the "
            "description comes from the checkpoint; leave --cfg out"),
)}
# fmt: on


def choose_variant(model: Any, name: str | None, where: str | Path) -> Variant:
    """The variant by which to convert: the one that the checkpoint is, and that was asked for, if one was.

    Raises:
        InputError: these are two different ones, or the network is none of upstream's and has other layers than the
            one that was asked for.
    """
    kinds = [type(layer).__name__ for layer in model.model]
    layers, kind = len(kinds), kinds[-1]
    stem = next((module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 0)
    down = next((name for name in kinds if name in ("AConv", "ADown")), "no AConv or ADown")
    facts = layers, stem, down, kind
    found = next((v for v in VARIANTS.values() if (v.head + 1, v.stem, v.down, v.kind) == facts), None)
    if found is not None:
        if name not in (None, found.name):
            raise InputError(f"--model {name} is {VARIANTS[name or '']}, and {where} is {found}; leave --model out")
        return found
    own = f"{where} has {plural(layers, 'layer')}, {stem} channels first and {down}, and ends in {kind}"
    if name is None:
        raise InputError(
            f"{own}: none of {', '.join(map(str, VARIANTS.values()))}; "
            "if it has the layers of one of them and other widths, name that one with --model"
        )
    if (layers, kind) != (VARIANTS[name].head + 1, VARIANTS[name].kind):
        raise InputError(f"{own}; --model {name} is {VARIANTS[name]}")
    return VARIANTS[name]


def derive(description: Mapping[str, Any]) -> Variant:
    """The map for any network with an auxiliary branch, also of somebody's own: walk from its second half to the image.

    Where a variant of upstream's is meant, `VARIANTS` is what has been checked against its two YAMLs.
    """
    layers = [*description["backbone"], *description["head"]]
    needed: set[int] = set()
    head = len(layers) - 1
    kind = str(layers[head][2])
    stack = [head + one if one < 0 else one for one in HEADS[kind].inputs(layers[head][0])]
    while stack:
        index = stack.pop()
        if index < 0 or index in needed:
            continue
        needed.add(index)
        sources = [layers[index][0]] if isinstance(layers[index][0], int) else layers[index][0]
        stack += [index + one if one < 0 else one for one in sources]
    spans = tuple((index, index, source) for index, source in enumerate(sorted(needed)))
    auxiliary = tuple((index, index) for index in range(head) if index not in needed)
    return Variant("main branch", spans, head, auxiliary, 0, "", kind)


def deploy_description(training: Mapping[str, Any], variant: Variant, nc: int) -> dict[str, Any]:
    """The deployed network's model description, from the training network's.

    Raises:
        InputError: the main branch reads a layer that the variant leaves out.
        CheckpointError: the description is not of as many layers.
    """
    layers = [*training["backbone"], *training["head"]]
    if len(layers) != variant.head + 1:
        raise CheckpointError(f"the checkpoint describes {plural(len(layers), 'layer')} and holds {variant.head + 1}")
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


def check_same_network(found: Mapping[str, Any], expected: Mapping[str, Any], where: str | Path, own: str = "") -> None:
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
    left = []
    for name in (name for name in source if name not in used):
        _, index, part, *_ = name.split(".")
        in_auxiliary_half = int(index) == variant.head and part in HEADS[variant.kind].auxiliary
        if not (in_auxiliary_half or variant.is_auxiliary(int(index))):
            left.append(name)
    if left:
        raise CheckpointError(f"{plural(len(left), 'tensor')} of the main branch would be lost, such as {left[0]}")
    return found


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
    return replace(training, model=model, names=dict(training.names), yaml=dict(model.yaml))


def largest_difference(training: nn.Module, deployed: nn.Module, device: torch.device) -> float:
    """How far the deployed network's outputs are from the training network's main branch, on one random image.

    Both the predictions and, of a segmentation network, the prototypes are compared.

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


def is_rounded_by_half(model: nn.Module, where: str | Path) -> bool:
    """Whether half precision, in which `save_converted` writes a network, changes any of its values.

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


def save_converted(path: str | Path, deployed: upstream.FloatCheckpoint) -> None:
    """Write a network as upstream's `train.py` leaves its best one: half precision, without optimizer.

    Upstream's scripts load it. Of the training's options it keeps the image size and the dataset. The network itself is
    turned to half precision.
    """
    model = deployed.model.cpu().half()
    for parameter in model.parameters():
        parameter.requires_grad = False
    keys = ("best_fitness", "ema", "updates", "optimizer", "git", "date")
    opt = {"imgsz": deployed.imgsz, "data": deployed.data}
    save_torch({"epoch": -1, "model": model, "opt": opt, **dict.fromkeys(keys)}, path)
