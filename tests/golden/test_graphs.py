"""Exported graphs of quantized networks: operators, attributes, constants, wiring, inputs, outputs, as 1.0 wrote them.

Every number of a network is known on any CPU: weights are fractions with a denominator of 512 and ranges with one of
64, so that no sum of them depends on its order. `UPDATE_GOLDEN=1` writes graphs-weak.json and graphs-strong.json anew;
a change there is a change of what users' engines compute.
"""

import json
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


def test_another_attribute_constant_or_wire_is_another_signature(tmp_path):
    """The comparator itself: each of these changes what is computed; another name does not."""
    config = ExportConfig(imgsz=(64, 64))
    export_forms(quantized("demo"), config, {tmp_path / "a.onnx": FORMS["plain"]}, {})
    text = (tmp_path / "a.onnx").read_bytes()
    attribute, constant, wire, output, name = graphs = [onnx.ModelProto.FromString(text) for _ in range(5)]
    pads = [
        one for node in attribute.graph.node if node.op_type == "Conv" for one in node.attribute if one.name == "pads"
    ]
    pads[0].ints[0] += 1
    weight = next(one for one in constant.graph.initializer if len(one.dims) == 4)
    weight.raw_data = bytes([weight.raw_data[0] ^ 1]) + weight.raw_data[1:]
    concat = next(node for node in wire.graph.node if node.op_type == "Concat")
    concat.input[:2] = reversed(concat.input[:2])
    for graph, old, new in ((output, "output0", "other"), (name, name.graph.node[0].output[0], "other")):
        for node in graph.graph.node:
            node.input[:] = [new if one == old else one for one in node.input]
            node.output[:] = [new if one == old else one for one in node.output]
    output.graph.output[0].name = "other"
    found = [json.dumps(signature(one)) for one in (onnx.load(tmp_path / "a.onnx"), *graphs)]
    assert len(set(found)) == 5
    assert found[0] == found[5]
