"""Recipes in the programs: refused before any work; a file and --verify agree on what stays in float."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from exported_files import export_onnx
from random_networks import TINY, narrow, random_network, save_float, save_quantized

from models.quantize.recipe import Recipe
from utils.jobs.open import Network, load_network
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import metadata_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float(tmp_path_factory.mktemp("weights") / "tiny.pt", random_network(TINY))


def exported(tiny: Path, recipe: Recipe, tmp_path: Path) -> tuple[Network, onnx.ModelProto]:
    network = load_network(save_quantized(tmp_path / "some.pt", tiny, recipe), torch.device("cpu"))
    config = ExportConfig((64, 64), 1, typing="weak")
    return network, onnx.load(export_onnx(network.model, config, tmp_path / "some.onnx", network.metadata()).path)


@pytest.mark.parametrize("head", ["last-conv-float", "float"])
def test_the_metadata_names_what_the_head_leaves_in_float(head: str, tiny: Path, tmp_path: Path):
    network, model = exported(tiny, Recipe(head=head), tmp_path)
    named = json.loads(metadata_of(model)["float_modules"])
    assert named == list(network.model.quantization_plan.float_convolutions)
    assert len(named) == {"last-conv-float": 6, "float": 18}[head]
    report = verify(model)
    assert report.ok, report.findings
    assert report.counts["float_convolutions"] == len(named)


@pytest.mark.parametrize("recipe", [Recipe(add="residual"), Recipe(float=("model.17",))], ids=["residual", "float"])
def test_sums_of_several_layers_hold_with_an_input_or_a_reader_in_float(
    recipe: Recipe, upstream_yaml: Callable[[str], Path], tmp_path: Path
):
    """gelan-e adds up to five layers, in model.16 for instance: the first four are enlarged before."""
    float_weights = save_float(tmp_path / "gelan-e.pt", random_network(narrow(upstream_yaml("gelan-e"))))
    _, model = exported(float_weights, recipe, tmp_path)
    report = verify(model)
    assert report.ok, report.findings
    assert report.counts["float_convolutions"] == len(recipe.float)
