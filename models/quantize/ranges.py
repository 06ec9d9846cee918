"""Ranges of quantized tensors and weights, for reports."""

from __future__ import annotations

from typing import Any

from torch import nn

from models.quantize import backend
from models.quantize.modules import QuantConv2d


def tensor_ranges(model: Any) -> list[dict[str, Any]]:
    """List the ranges, one row for each scale.

    Returns:
        rows of `name`, `kind` ('activation' or 'weight'), `amax` (the largest), `min` and `max` of amax over channels,
        `channels` (1 for activations), and `tensors` (how many share it).
    """
    shared = model.quantization_plan.scales
    rows = [
        _row(name.replace("/", "."), "activation", quantizer, len(shared.get(name.replace("/", "."), ("",))))
        for name, quantizer in model.activation_quantizers.items()
    ]
    for name, module in model.named_modules():
        if isinstance(module, QuantConv2d) and "weight_quantizer" in module._modules:
            rows.append(_row(name, "weight", module.weight_quantizer, 1))
    return rows


def _row(name: str, kind: str, quantizer: nn.Module, tensors: int) -> dict[str, Any]:
    amax = backend.get_amax(quantizer).flatten()
    low, high = float(amax.min()), float(amax.max())
    return {
        "name": name,
        "kind": kind,
        "amax": high,
        "min": low,
        "max": high,
        "channels": amax.numel(),
        "tensors": tensors,
    }
