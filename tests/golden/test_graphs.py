"""Exported graphs of quantized networks: operators, attributes, constants, wiring, inputs, outputs, as 1.0 wrote them.

Every number of a network is known on any CPU: weights are fractions with a denominator of 512 and ranges with one of
64, so that no sum of them depends on its order. `UPDATE_GOLDEN=1` writes graphs-weak.json and graphs-strong.json anew;
a change there is a change of what users' engines compute.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from golden import golden
from graph_signature import signature
from torch import nn

from models.quantize import placement
from models.quantize.modules import quantized_weights
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.input_spec import InputSpec
from utils.onnx_graph import export, output_formats
from utils.onnx_graph.export import ExportConfig, export_forms

DEMO = {"demo": "gelan-digits", "demo-masks": "gelan-digits-seg"}
DETECTORS = ("gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e", "yolov7-af")
FORMS = {
    "plain": output_formats.plain(),
    "nms": output_formats.end2end(output_formats.NmsSettings()),
    "nms-onnx": output_formats.end2end(output_formats.NmsSettings(kind="onnx", topk=50)),
    "deepstream": output_formats.deepstream(),
}


def quantized(name: str) -> nn.Module:
    """A network of `DEMO` or `DETECTORS`, fused, placed by the default recipe, with known weights and ranges."""
    if name in DEMO:
        model = upstream.load_float(f"data/demo/{DEMO[name]}.pt").model
    else:
        model = upstream.build_model(yaml.safe_load(Path(f"models/detect/{name}.yaml").read_text()))
        model.names = {index: f"class {index}" for index in range(model.model[-1].nc)}
    model = upstream.fuse(model)
    rng = np.random.default_rng(0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and not path.endswith("dfl.conv"):  # whose weights are the bins' numbers
            for parameter in module.parameters(recurse=False):
                parameter.data = _fractions(rng, parameter.shape, 512)
    placement.apply(model, placement.plan(model, Recipe()))
    for convolution, quantizer in quantized_weights(model).values():
        quantizer.set_weight_amax(convolution.weight)
    for quantizer in model.activation_quantizers.values():
        quantizer.set_amax(1 + _fractions(rng, quantizer.amax.shape, 64).abs())
    return model


def _fractions(rng: Any, shape: tuple[int, ...], denominator: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-64, 65, tuple(shape)).astype(np.float32)) / denominator


def signatures(model: nn.Module, typing: Any, folder: Path) -> dict[str, Any]:
    """What is exported of a network in every form, from one trace; graphs are looked at where they are saved."""
    config = ExportConfig(imgsz=(64, 96), typing=typing, dynamic="batch")
    traced, found = export.trace(model, config.resolved(True)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "trace", lambda *_: traced)
        patch.setattr(onnx, "save", lambda graph, _: found.append(signature(graph)))
        export_forms(model, config, {folder / form: made for form, made in FORMS.items()}, {})
        as_bytes = replace(config, input=InputSpec("uint8", "nhwc"))
        export_forms(model, as_bytes, {folder / "uint8": FORMS["plain"]}, {})
    return dict(zip([*FORMS, "uint8"], found, strict=True))


@pytest.mark.parametrize("name", [*reversed(DETECTORS), *DEMO])
def test_graphs_are_those_of_1_0(name, tmp_path):
    model = quantized(name)
    for typing in ("weak", "strong"):
        found = signatures(model, typing, tmp_path)
        assert found == golden(f"graphs-{typing}.json", name, found), typing
