"""Quantized networks whose every number is known on any CPU: what 1.0 and 2.0 export of them must be equal bit for bit.

Weights are fractions with a denominator of 512 and ranges with one of 64, so that no sum of them depends on its order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from models.quantize import placement
from models.quantize.backend import get_amax, set_amax
from models.quantize.modules import QuantConv2d
from models.quantize.recipe import Recipe
from utils import upstream

DEMO = {"demo": "gelan-digits", "demo-masks": "gelan-digits-seg"}
DETECTORS = ("gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e", "yolov7-af")


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
    for module in model.modules():
        if isinstance(module, QuantConv2d) and "weight_quantizer" in module._modules:
            set_amax(module.weight_quantizer, module.weight.detach().abs().amax((1, 2, 3), keepdim=True))
    for quantizer in model.activation_quantizers.values():
        set_amax(quantizer, 1 + _fractions(rng, get_amax(quantizer).shape, 64).abs())
    return model


def _fractions(rng: Any, shape: tuple[int, ...], denominator: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-64, 65, tuple(shape)).astype(np.float32)) / denominator
