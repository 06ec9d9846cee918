"""Checkpoints of upstream networks with random weights, float and quantized, without training."""

import re
from pathlib import Path
from typing import Any

import onnx
import torch
import yaml
from torch import nn

from models.quantize import checkpoint, placement
from models.quantize.calibration import calibrate
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.input_spec import channels_of
from utils.jobs.cpu_speed import random_network  # noqa: F401  (tests take it from here)
from utils.onnx_graph.qdq_view import QdqGraph

# Every construct of the demo network, in a few layers: 10 classes, strides 8, 16 and 32.
TINY: dict[str, Any] = {
    "nc": 10,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": 3,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "AConv", [16]],
        [-1, 1, "ADown", [16]],
        [-1, 1, "RepNCSPELAN4", [16, 16, 8, 1]],  # 3: stride 8
        [-1, 1, "ADown", [24]],  # 4: stride 16
    ],
    "head": [
        [-1, 1, "AConv", [16]],
        [-1, 1, "SPPELAN", [16, 8]],  # 6: stride 32
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 4], 1, "Concat", [1]],  # 8: stride 16
        [[3, 8, 6], 1, "DDetect", ["nc"]],
    ],
}

_ENLARGED = [[3, 1, "nn.Upsample", [None, 2, "nearest"]], [-1, 1, "Conv", [16, 3, 1]]]  # 10: stride 4


def tiny_with(head: str) -> dict[str, Any]:
    """TINY with another of upstream's heads; those for masks have eight coefficients."""
    rows = {
        "DDetect": [TINY["head"][-1]],
        "DualDDetect": [[[3, 8, 6, 3, 8, 6], 1, "DualDDetect", ["nc"]]],
        "Segment": [[[3, 8, 6], 1, "Segment", ["nc", 8, 16]]],
        "Panoptic": [[[3, 8, 6], 1, "Panoptic", ["nc", 5, 8, 16]]],
        "DSegment": [*_ENLARGED, [[3, 8, 6, 10], 1, "DSegment", ["nc", 8, 16]]],
        "DualDSegment": [*_ENLARGED, [[3, 8, 6, 3, 8, 6, 10, 10], 1, "DualDSegment", ["nc", 8, 16]]],
    }
    return {**TINY, "head": [*TINY["head"][:-1], *rows[head]]}


def narrow(file: Path, by: int = 4) -> dict[str, Any]:
    """An upstream network with a fraction of its channels: every layer and every connection, in less time."""

    def less(argument: Any) -> Any:
        if isinstance(argument, list):
            return [less(one) for one in argument]
        channels = type(argument) is int and argument >= 32  # upstream rounds some of them to multiples of 8
        return max(argument // by // 8, 1) * 8 if channels else argument

    content = yaml.safe_load(file.read_text())
    for layer in [*content["backbone"], *content["head"]][:-1]:  # the last one's numbers are of masks and classes
        layer[3] = less(layer[3])
    return content


def save_float(path: Path, model: nn.Module) -> Path:
    """A checkpoint as upstream's train.py writes it."""
    torch.save({"epoch": -1, "model": model.half(), "ema": None}, path)
    return path


def save_quantized(path: Path, weights: Path, recipe: Recipe | None = None, imgsz: int = 96) -> Path:
    """A checkpoint as `qat.py quantize` writes it, calibrated on two random images."""
    recipe = recipe or Recipe()
    source = upstream.load_float(weights)
    model = upstream.fuse(source.model)
    placement.apply(model, placement.plan(model, recipe))
    torch.manual_seed(1)
    settings = recipe.replace(calibration_method="max").calibration
    calibrate(model, [torch.rand(2, channels_of(model), imgsz, imgsz)], settings)
    content = (model, recipe, source.names, source.nc, source.stride, source.yaml, {"imgsz": imgsz})
    checkpoint.save(path, checkpoint.QuantizedCheckpoint(*content))
    return path


def convolutions_in(path: Path) -> set[str]:
    """The modules that a file's convolutions come from; one may have become several, for the parts of its result.

    Average pools that became convolutions are left out.
    """
    context = QdqGraph(onnx.load(path))
    paths = [context.path(node) for node in context.convolutions if "AveragePool" not in node.name]
    assert len(paths) == len(set(paths))
    return {re.sub(r"\.conv\.\d+$", ".conv", path) for path in paths}
