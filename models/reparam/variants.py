"""Which training layers each of upstream's deployed networks is made of, and which of them a training network is.

Training networks end in a head of two halves: the first reads the auxiliary branch, the second the main branch. The
deployed network is the main branch, renumbered. `VARIANTS` says for each of upstream's six which training layers these
are, read off its two model YAMLs (yolov9-X.yaml and gelan-X.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from utils.core.errors import InputError


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
        facts = f"{self.head + 1} layers, {self.stem} channels first, {self.down}"
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


def identify(model: Any) -> Variant | None:
    """Which of upstream's variants a training network is; None for a network of somebody's own."""
    facts = _facts(model)
    return next((v for v in VARIANTS.values() if (v.head + 1, v.stem, v.down, v.kind) == facts), None)


def choose(model: Any, name: str | None, where: str | Path) -> Variant:
    """The variant by which to convert: the one that the checkpoint is, and that was asked for, if one was.

    Raises:
        InputError: these are two different ones, or the network is none of upstream's and has other layers than the
            one that was asked for.
    """
    found = identify(model)
    layers, stem, down, kind = _facts(model)
    if found is not None:
        if name not in (None, found.name):
            raise InputError(f"--model {name} is {VARIANTS[name or '']}, and {where} is {found}; leave --model out")
        return found
    own = f"{where} has {layers} layers, {stem} channels first and {down}, and ends in {kind}"
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


def _facts(model: Any) -> tuple[int, int, str, str]:
    """Number of layers, channels of the first convolution, class of the first down-sampling block, that of the head."""
    stem = next((module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 0)
    kinds = [type(layer).__name__ for layer in model.model]
    down = next((kind for kind in kinds if kind in ("AConv", "ADown")), "no AConv or ADown")
    return len(model.model), stem, down, kinds[-1]
