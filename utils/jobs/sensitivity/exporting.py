"""ONNX files of a network with parts of it in float, with the ranges of one calibration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.quantize import calibration, placement
from models.quantize.placement import Plan, scale_key
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.tasks import task_of_head
from utils.jobs.inputs import Inputs
from utils.jobs.open import Network


@dataclass(frozen=True)
class Exporter:
    """ONNX files of one network, with more or less of it in float, and the ranges of one calibration.

    Attributes:
        plan: where the quantizers are that `amax` has the ranges of.
        batch: images.
    """

    inputs: Inputs
    plan: Plan
    amax: Mapping[str, float]
    batch: int

    def write(self, recipe: Recipe | None, path: Path) -> None:
        """Export the network as a recipe has it, or the float network without one.

        Args:
            recipe: keeps at least in float what the network of `plan` has there.
        """
        from utils.onnx_graph.export import export_onnx
        from utils.onnx_graph.export_config import ExportConfig
        from utils.trt import tensorrt_api

        source, device = self.inputs.source, self.inputs.device
        model = copy.deepcopy(source.model)
        if recipe is None:
            model = upstream.call_fused(model)
        else:
            plan = placement.plan(model, recipe)
            placement.apply(model, plan)
            calibration.load_all(model, ranges_in(plan, self.plan, self.amax))
        head: Any = model.model[-1]
        kind = "float" if recipe is None else "ptq"
        network = Network(
            model.to(device).eval(), source.names, source.stride, type(head).__name__, recipe, kind, task_of_head(head)
        )
        size = (self.inputs.imgsz, self.inputs.imgsz)
        typing = tensorrt_api.load().typing
        export_onnx(
            network.model, ExportConfig(size, self.batch, typing=typing), path, network.metadata()
        )  # fmt: skip


def ranges_in(plan: Plan, whole: Plan, amax: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """The ranges of a placement's scales, from those of one that quantizes the same tensors and more."""
    scale = {tensor.name: tensor.scale for tensor in whole.tensors}
    named = {tensor.scale: scale[tensor.name] for tensor in plan.tensors}
    named |= {f"{path}.input": f"{path}.input" for path in plan.fallback}
    return {scale_key(ours): torch.tensor(amax[scale_key(theirs)]) for ours, theirs in named.items()}
