"""Files of small networks in several output formats: networks whose answers differ, and runs of programs and files."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from random_networks import TINY, random_network, save_float, save_quantized, tiny_with
from torch import nn

from utils.runners.onnxrt import open_session

SIDE = 64
LOW = 0.5  # score: half of what a random head says is above
FLAGS = ("--conf-thres", LOW, "--iou-thres", 0.6, "--topk-all", 40)
FLAGS_OF = {"onnx": FLAGS, "none": FLAGS[:2] + FLAGS[4:]}  # without suppression there is no overlap to choose
Program = Callable[..., tuple[int, list[str], list[str]]]


def lively(model: nn.Module) -> nn.Module:
    """Let boxes, scores and coefficients differ from anchor to anchor, and depend on every layer.

    Those of random networks hardly do.
    """
    torch.manual_seed(2)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.constant_(layer.weight, 2)
    for name, layer in model.model[-1].named_modules():
        if isinstance(layer, nn.Conv2d) and name.startswith("cv") and name.endswith(".2"):
            coefficients = name.startswith("cv4") and hasattr(model.model[-1], "nm")
            nn.init.normal_(layer.weight, std=0.5 if coefficients else 3)
            small = torch.arange(16).repeat(4) * -0.6  # prefers the first bins of DFL: boxes of about 20 to 80 pixels
            layer.bias.data = small if layer.out_channels == 64 else torch.zeros(layer.out_channels)
    return model


def images(batch: int = 2) -> torch.Tensor:
    """Noise, `[batch, 3, SIDE, SIDE]` in 0..1."""
    return torch.rand(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))


def run(path: Path, images: torch.Tensor) -> dict[str, np.ndarray]:
    """A file's outputs by name, from ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = open_session(str(path), options, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {"images": images.numpy()}), strict=True))


def with_outputs(path: Path, target: Path, names: Sequence[str]) -> Path:
    """The file with float tensors of its own among its outputs."""
    graph = onnx.load(path)
    for name in names:
        graph.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    onnx.save(graph, target)
    return target


def write_networks(folder: Path) -> dict[str, Path]:
    """Checkpoints of small networks by name: with and without masks, float and quantized; and with two branches."""
    branches = [*TINY["head"][:-1], [[3, 4, 5, 3, 8, 6], 1, "DualDDetect", ["nc"]]]  # the first three inputs auxiliary
    dual = save_float(folder / "dual.pt", lively(random_network(copy.deepcopy(TINY) | {"head": branches})))
    files = {"dual": dual}
    for task, network in (("detector", TINY), ("masks", tiny_with("DSegment"))):
        files[f"{task} float"] = save_float(folder / f"{task}.pt", lively(random_network(network)))
        files[f"{task} quantized"] = save_quantized(folder / f"{task}-int8.pt", files[f"{task} float"])
    return files


def documented_commands(heading: str) -> list[str]:
    """The commands of the table below a heading of docs/formats.md."""
    text = (Path(__file__).resolve().parents[2] / "docs/formats.md").read_text(encoding="utf-8")
    section = text[text.index(f"{heading}\n") :]
    rows = [line for line in section[: section.index("\n## ", 1)].splitlines() if line.startswith("|")]
    return [row.rsplit("`", 2)[1] for row in rows if "python export" in row]
