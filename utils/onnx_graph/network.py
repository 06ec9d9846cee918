"""A checkpoint as the exporters need it: a network, float or quantized, and what a file should say about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models import reparam
from models.quantize import __version__, checkpoint
from models.quantize.recipe import Recipe
from utils import upstream
from utils.task import DETECT, Task


@dataclass(frozen=True)
class Network:
    """A network ready for export: fused, float32, evaluation mode.

    Attributes:
        names: class id → name.
        stride: image sizes are multiples of it, pixels.
        head: upstream's class of the checkpoint's last layer, such as DDetect.
        recipe: of a quantized network, None for a float one.
    """

    model: nn.Module
    names: dict[int, str]
    stride: int
    head: str
    recipe: Recipe | None
    task: Task = DETECT

    @property
    def kind(self) -> str:
        """'qat' (calibrated or finetuned) or 'float'."""
        return "float" if self.recipe is None else "qat"

    def metadata(self) -> dict[str, str]:
        """Properties for the exported file; values are texts, structures JSON."""
        entries = {
            "stride": str(self.stride),
            "names": json.dumps(self.names),
            "task": self.task.name,
            "kind": self.kind,
            "version": __version__,
        }
        return entries if self.recipe is None else entries | {"recipe": json.dumps(self.recipe.to_dict())}


def load_network(weights: str | Path, device: torch.device) -> Network:
    """Load a float checkpoint of upstream's, or a quantized one of `qat.py`; of a training network the main branch.

    Raises:
        CheckpointError: it is neither, or damaged, or a network that cannot be exported.
    """
    if checkpoint.kind(weights) == "quantized":
        quantized = checkpoint.load(weights)
        return Network(
            quantized.model.to(device), quantized.names, quantized.stride, _head(quantized.model), quantized.recipe
        )
    source = upstream.load_float(weights, auxiliary=True)
    head = _head(source.model)
    if head == upstream.TRAINING_HEAD:
        source = reparam.convert(source, reparam.derive(source.yaml))
    model = upstream.call_fused(upstream.fuse(source.model)).to(device)
    return Network(model, source.names, source.stride, head, None)


def _head(model: Any) -> str:
    return str(model.yaml["head"][-1][2])
