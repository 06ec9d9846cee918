"""`--check` of files with masks: good ones pass in every typing, and broken prototypes or coefficients fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exported_files import export_onnx
from onnx import ModelProto, numpy_helper
from random_networks import random_network, save_float, save_quantized, tiny_with
from torch import nn

from utils.jobs import compare_outputs
from utils.jobs.open import Network, load_network
from utils.onnx_graph.export import ExportConfig

SIDE = 64
IMAGES = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
HEAD = "model.11"


def contrasting(model: nn.Module) -> nn.Module:
    """Masks that change from pixel to pixel; those of a random network hardly do."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.constant_(layer.weight, 2)
    for branch in model.model[-1].cv4:
        nn.init.normal_(branch[-1].weight, std=1)
    return model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("masks")
    torch.manual_seed(3)
    floating = save_float(folder / "tiny.pt", contrasting(random_network(tiny_with("DSegment"))))
    return {"float": floating, "quantized": save_quantized(folder / "tiny-int8.pt", floating)}


@pytest.fixture(scope="module")
def networks(weights: dict[str, Path]) -> dict[str, Network]:
    return {kind: load_network(path, torch.device("cpu")) for kind, path in weights.items()}


def exported(network: Network, path: Path, **options):
    config = ExportConfig(**{"imgsz": (SIDE, SIDE), "batch_size": 2, **options})
    return export_onnx(network.model, config, path, network.metadata()), config


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize(
    "options", [{}, {"typing": "strong"}, {"dynamic": "all", "simplify": True}, {"opset": 13, "int8_weights": True}]
)
def test_good_files_pass(kind, options, networks, tmp_path):
    network = networks[kind]
    result, config = exported(network, tmp_path / "a.onnx", **options)
    limits = compare_outputs.HALF if config.half else compare_outputs.FULL
    found = compare_outputs.check_onnx(result.path, network.model, IMAGES, result.quantizers, limits)
    assert found.problems == ()
    masks = found.masks if kind == "float" else found.stretches.masks
    assert masks.coefficients < limits.masks / 4
    assert masks.pixels < limits.pixels / 2
    assert "prototypes by up to" in str(found)
    assert ("; there mask coefficients" in str(found)) == (kind == "quantized")


def scaled(graph: ModelProto, name: str, factor: object) -> None:
    tensor = next(item for item in graph.graph.initializer if item.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((value * np.asarray(factor, value.dtype)).astype(value.dtype), name))


def other_order(graph: ModelProto, prefix: str) -> None:
    """The channels of a convolution, weight and bias, the other way round: sizes and statistics stay."""
    for name in (f"{prefix}.weight", f"{prefix}.bias"):
        tensor = next(item for item in graph.graph.initializer if item.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(tensor)[::-1]), name))


def dead_channel(graph: ModelProto, name: str) -> None:
    scaled(graph, name, [0.0] + [1.0] * 7)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("float", lambda graph: scaled(graph, f"{HEAD}.proto.conv.weight", 1.05), "prototype: "),
        ("float", lambda graph: dead_channel(graph, f"{HEAD}.proto.conv.bias"), "prototype: "),
        ("float", lambda graph: other_order(graph, f"{HEAD}.proto.conv"), "share of the masks' pixels: "),
        ("float", lambda graph: scaled(graph, f"{HEAD}.cv4.0.2.weight", 0.9), "mask coefficient: "),
        ("float", lambda graph: scaled(graph, f"{HEAD}.cv4.0.2.weight", -1), "share of the masks' pixels: "),
        ("float", lambda graph: scaled(graph, f"{HEAD}.proto.conv.weight", np.nan), "prototype: nan of the largest"),
        ("quantized", lambda graph: scaled(graph, f"{HEAD}.proto.conv.bias", 1.3), "prototype: "),
        ("quantized", lambda graph: scaled(graph, f"{HEAD}.cv4.1.2.bias", 3.0), "mask coefficient: "),
        ("quantized", lambda graph: other_order(graph, f"{HEAD}.proto.conv"), "share of the masks' pixels: "),
    ],
)  # fmt: skip
def test_broken_masks_are_found_and_nothing_else(kind, change, message, networks, tmp_path):
    network = networks[kind]
    result, _ = exported(network, tmp_path / "a.onnx", for_int8_kernels=False)
    graph = onnx.load(result.path)
    change(graph)
    onnx.save(graph, tmp_path / "changed.onnx")
    problems = compare_outputs.check_onnx(tmp_path / "changed.onnx", network.model, IMAGES, result.quantizers).problems
    assert any(problem.startswith(message) for problem in problems), problems
    assert all(problem.startswith(("prototype: ", "mask coefficient: ", "share of the masks'")) for problem in problems)
