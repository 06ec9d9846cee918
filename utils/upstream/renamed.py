"""YOLOv9 of MultimediaTechLab/YOLO and of LibreYOLO: their checkpoints, read as networks of upstream's blocks.

Both hold tensors by name, and no modules. Their networks yolov9-t, -s, -m and -c are upstream's gelan-t, -s, -m and -c
with an auxiliary branch, which is left out here. So a table renames the tensors, and the network is built from
upstream's gelan YAML, with the tensors' channels.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from utils.core.errors import CheckpointError
from utils.upstream.checkout import CHECKOUT

logger = logging.getLogger(__name__)

TECHLAB, LIBRE = "MultimediaTechLab/YOLO", "LibreYOLO"
TRAININGS = ("ema.model.", "model.model.")  # prefixes in checkpoints of MultimediaTechLab's trainings, the EMA first
HEAD = "22"
# LibreYOLO's modules → layers; MultimediaTechLab's names begin with the number of the layer.
LAYERS = {
    "backbone.conv0": "0",
    "backbone.conv1": "1",
    "backbone.elan1": "2",
    "backbone.down2": "3",
    "backbone.elan2": "4",
    "backbone.down3": "5",
    "backbone.elan3": "6",
    "backbone.down4": "7",
    "backbone.elan4": "8",
    "backbone.spp": "9",
    "neck.elan_up1": "12",
    "neck.elan_up2": "15",
    "neck.down1": "16",
    "neck.elan_down1": "18",
    "neck.down2": "19",
    "neck.elan_down2": "21",
    "head": HEAD,
}
# Names within a layer → upstream's, one after another; LibreYOLO's are upstream's, but for the second.
WITHIN = {
    r"^conv\.(conv|bn)\.": r"cv1.\1.",  # AConv
    r"^cv\.": r"cv1.",  # LibreYOLO's AConv
    r"^conv(\d)\.": r"cv\1.",
    r"^(cv[23]\.0)\.conv(\d)\.": r"\1.cv\2.",
    r"\.bottleneck\.(\d+)\.conv(\d)\.": r".m.\1.cv\2.",
    r"^heads\.(\d)\.anchor_conv\.": r"cv2.\1.",
    r"^heads\.(\d)\.class_conv\.": r"cv3.\1.",
}
CONSTANTS = re.compile(r"\b(anc2vec|dfl)\.")  # the distances that a box's bins stand for
COUNTERS = "num_batches_tracked"


def origin_of(content: Any) -> str:
    """Name the project that wrote a checkpoint, if it was one of both; empty for others."""
    if not isinstance(content, Mapping):
        return ""
    if "libreyolo_version" in content:
        return LIBRE
    names = {str(name) for name in tensors_of(content)}
    if any(re.match(r"\d+\.(detect\.)?heads\.\d\.", name) for name in names):
        return TECHLAB
    if {"backbone.conv0.conv.weight", "head.cv2.0.0.conv.weight"} <= names:
        return LIBRE
    return ""


def tensors_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of a checkpoint's network by their names in it."""
    state = content
    for key in ("state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            state = content[key]
    for prefix in TRAININGS:
        tensors = {name.removeprefix(prefix): value for name, value in state.items() if str(name).startswith(prefix)}
        if tensors:
            return tensors
    return state


def read_renamed(
    path: str | Path, content: Mapping[str, Any], build: Callable[[Path, int], Any], resize: Callable[[Any, Any], None]
) -> dict[str, Any]:
    """Read a checkpoint of MultimediaTechLab/YOLO or LibreYOLO in the form of upstream's: `model`, `opt`, `origin`.

    Args:
        build: makes a network of upstream's with random weights from a YAML and a number of classes.
        resize: gives a network the channels of a state_dict, as `network.resize`.

    Raises:
        CheckpointError: the network is not a YOLOv9 detector of upstream's blocks; it names the first tensor.
    """
    origin = origin_of(content)
    where = f"{path} is a checkpoint of {origin}"
    _check_metadata(where, content)
    tensors = tensors_of(content)
    if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()):
        raise CheckpointError(f"{where} that holds something else than tensors by their names; it was not loaded")
    state = {_renamed(name): value for name, value in tensors.items()}
    state.pop("", None)
    last = state.get(f"model.{HEAD}.cv3.0.2.weight")
    if last is None:
        raise CheckpointError(
            f"{where} without the class branch of a YOLOv9 detector; its detectors yolov9-t, -s, -m and -c are taken"
        )
    classes = len(last)
    model = build(CHECKOUT / f"models/detect/gelan-{_variant(state)}.yaml", classes)
    resize(model, state)
    _check_shapes(where, model, state)
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    model.names = content.get("names")
    if model.names is None:
        logger.info("%s names no classes: their names are numbers", path)
        model.names = {number: str(number) for number in range(classes)}
    origin = f"{origin} {content.get('libreyolo_version', '')}".strip()
    return {"model": model, "ema": None, "opt": {"imgsz": content.get("imgsz")}, "origin": origin}


def _check_shapes(where: str, model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` for the first tensor that is not the same in the network and in a checkpoint."""
    expected = {name: value.shape for name, value in model.state_dict().items() if not CONSTANTS.search(name)}
    shapes = {name: value.shape for name, value in state.items()}
    for name in sorted({*expected, *shapes}):
        if expected.get(name) != shapes.get(name) and not name.endswith(COUNTERS):
            raise CheckpointError(f"{where}, whose network is not upstream's (first: {name[:100]}); it is not taken")


def _check_metadata(where: str, content: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if LibreYOLO's entries name another network than a YOLOv9 detector."""
    family = content.get("model_family", "yolo9")
    task = content.get("task", "detect")
    if (family, task) != ("yolo9", "detect"):
        raise CheckpointError(f"{where} of the family {family!s:.40} for {task!s:.40}; expected a yolo9 detector")
    if content.get("quant"):
        raise CheckpointError(f"{where} that is quantized; give the FP32 weights that it was made from")


def _variant(state: Mapping[str, torch.Tensor]) -> str:
    """The size of the network, t, s, m or c, by what its layers are made of; t and s differ in channels alone."""
    if "model.3.cv2.conv.weight" in state:
        return "c"
    if "model.2.cv2.conv.weight" not in state:
        return "m"
    return "s" if len(state["model.2.cv2.conv.weight"]) > 16 else "t"


def _renamed(name: str) -> str:
    """Upstream's name of a tensor; empty for the auxiliary branch and constants.

    >>> _renamed("backbone.conv0.conv.weight")  # of LibreYOLO
    'model.0.conv.weight'
    >>> _renamed("22.heads.1.class_conv.2.bias")  # of MultimediaTechLab
    'model.22.cv3.1.2.bias'
    """
    if CONSTANTS.search(name) or name.startswith(("aux.", "aux_head.")):
        return ""
    parts = re.fullmatch(r"(\d+|head|(?:backbone|neck)\.\w+)\.(.+)", name)
    if parts is None:
        return name
    layer, rest = LAYERS.get(parts[1], parts[1]), parts[2]
    if layer.isdigit() and int(layer) > int(HEAD):
        return ""
    for pattern, replacement in WITHIN.items():
        rest = re.sub(pattern, replacement, rest)
    return f"model.{layer}.{rest}"
