"""Exported graphs of quantized networks: operators, attributes, constants, wiring, inputs, outputs, as 1.0 wrote them.

Every number of a network is known on any CPU: weights are fractions with a denominator of 512 and ranges with one of
64, so that no sum of them depends on its order. `UPDATE_GOLDEN=1` writes graphs-weak.json and graphs-strong.json anew;
a change there is a change of what users' engines compute.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from golden import golden, read_golden
from graph_signature import signature
from planted_faults import activation_scales, change_constant, change_nms_iou, share_scale
from torch import nn

from models.quantize import placement
from models.quantize.modules import quantized_weights
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.input_spec import InputSpec
from utils.onnx_graph import export, output_formats
from utils.onnx_graph.export import export_forms
from utils.onnx_graph.export_config import ExportConfig

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


def exported(
    model: nn.Module, typing: Any, folder: Path, look: Callable[[onnx.ModelProto], Any] = signature
) -> dict[str, Any]:
    """Export a network in every form, from one trace; gives what `look` makes of each graph where it is saved."""
    config = ExportConfig(imgsz=(64, 96), typing=typing, dynamic="batch")
    traced, results = export.trace(model, config.resolved(True)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "trace", lambda *_: traced)
        patch.setattr(onnx, "save", lambda graph, _: results.append(look(graph)))
        export_forms(model, config, {folder / form: made for form, made in FORMS.items()}, {})
        as_bytes = replace(config, input=InputSpec("uint8", "nhwc"))
        export_forms(model, as_bytes, {folder / "uint8": FORMS["plain"]}, {})
    return dict(zip([*FORMS, "uint8"], results, strict=True))


@pytest.mark.parametrize("name", [*reversed(DETECTORS), *DEMO])
def test_graphs_are_those_of_1_0(name, tmp_path):
    model = quantized(name)
    for typing in ("weak", "strong"):
        signatures = exported(model, typing, tmp_path)
        assert signatures == golden(f"graphs-{typing}.json", name, signatures), typing


def test_a_fault_in_a_graph_is_seen(tmp_path):
    """Any activation's range times 1.02, a scale that is shared wrongly, another threshold of NMS."""
    graph = exported(quantized("demo"), "weak", tmp_path, look=copy.deepcopy)["nms"]
    pinned = read_golden("graphs-weak.json", "demo")["nms"]
    assert signature(graph) == pinned
    scales = activation_scales(graph)
    assert len(scales) > 50
    for name in scales:
        assert signature(change_constant(graph, name, lambda scale: 1.02 * scale)) != pinned, name
    assert signature(share_scale(graph)) != pinned
    assert signature(change_nms_iou(graph, 0.69)) != pinned
