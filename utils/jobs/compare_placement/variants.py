"""A model as ONNX files that differ in nothing but the placement of quantizers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError
from utils.core.tasks import task_of_head
from utils.upstream_heads import check_head

if TYPE_CHECKING:
    import torch
    from torch import nn

    from models.quantize.placement import Plan
    from models.quantize.recipe import Recipe
    from utils.onnx_graph.export_config import Typing

logger = logging.getLogger(__name__)

VARIANTS = ("fp16", "int8-convs", "int8")  # the first is what the others are compared with
CALIBRATION_SIZE = 320  # pixels: only the speed of the engines is looked at, not what they detect


@dataclass(frozen=True)
class Job:
    """One engine to build and time.

    Attributes:
        model: name of the model.
        batch: images.
        variant: one of VARIANTS.
        onnx, engine: its files.
    """

    model: str
    batch: int
    variant: str
    onnx: Path
    engine: Path


def jobs(
    models: Sequence[Path], batches: Sequence[int], variants: Sequence[str], imgsz: int, folder: Path
) -> list[Job]:
    """All combinations, by model, then batch."""
    names = [model.stem for model in models]
    if len(set(names)) < len(names):
        raise InputError(f"two models have the same name: {', '.join(names)}; rename one, files are named after them")
    found = []
    for name in names:
        for batch in batches:
            for variant in variants:
                stem = f"{name}-{imgsz}-b{batch}-{variant}"
                found.append(Job(name, batch, variant, folder / f"{stem}.onnx", folder / f"{stem}.engine"))
    return found


def is_fresh(made: Path, *sources: Path | None) -> bool:
    """Whether a file exists and is newer than what it is made from."""
    return made.is_file() and all(
        source is None or not source.is_file() or source.stat().st_mtime <= made.stat().st_mtime for source in sources
    )


def export(
    model: Path, wanted: Sequence[Job], imgsz: int, recipe_file: Path | None, device: torch.device, simplify: bool,
    typing: Typing,
) -> None:  # fmt: skip
    """Write the ONNX files of one model that are missing or older than the model or the recipe.

    Raises:
        InputError: the model or the recipe cannot be used.
    """
    missing = [job for job in wanted if not is_fresh(job.onnx, model, recipe_file)]
    for job in wanted:
        if job not in missing:
            logger.info("%s is there already", job.onnx)
    if not missing:
        return
    import json

    from models.quantize.recipe import Recipe
    from utils.onnx_graph.export import export_onnx
    from utils.onnx_graph.export_config import ExportConfig

    recipe = Recipe.from_file(recipe_file)
    network = load(model).to(device)
    stride, names = int(network.stride.max()), network.names
    for variant in dict.fromkeys(job.variant for job in missing):
        chosen = quantized(network, recipe, variant, device) if variant != "fp16" else _float(network)
        for job in (job for job in missing if job.variant == variant):
            settings = ExportConfig(imgsz=(imgsz, imgsz), batch_size=job.batch, simplify=simplify, typing=typing,
                                    for_int8_kernels=variant == "int8")  # fmt: skip
            task = task_of_head(network.model[-1]).name
            about = {"stride": str(stride), "names": json.dumps(names), "task": task, "variant": variant}
            result = export_onnx(chosen, settings, job.onnx, about)
            logger.info("%s: %d QuantizeLinear", result.path, result.quantize_nodes)


def load(path: Path) -> nn.Module:
    """A fused float network: from a checkpoint, or with random weights from a model's YAML.

    Raises:
        InputError: the file is neither.
    """
    from utils import upstream

    if path.suffix == ".pt":
        model = upstream.load_float(path).model
    elif path.suffix in (".yaml", ".yml"):
        model = random_network(path)
        check_head(model, path)
    else:
        raise InputError(f"{path} is neither a model's YAML nor float weights (.pt)")
    return upstream.fuse(model)


def random_network(config: Path | Mapping[str, Any], nc: int | None = None, seed: int = 0) -> nn.Module:
    """Upstream's network with batch norms that have seen data, unfused, so that activations keep their magnitude."""
    import torch
    from torch import nn

    from utils import upstream

    torch.manual_seed(seed)
    model = upstream.build_model(config, nc)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    model.names = {index: f"class {index}" for index in range(model.model[-1].nc)}
    return model


def quantized(network: nn.Module, recipe: Recipe, variant: str, device: torch.device) -> nn.Module:
    """A quantized copy, calibrated on one random image."""
    import torch

    from models.quantize import placement
    from models.quantize.calibration import calibrate

    model = copy.deepcopy(network)
    plan = placement.plan(model, recipe)
    placement.check(plan, recipe)
    placement.apply(model, convolutions_only(plan) if variant == "int8-convs" else plan)
    model.to(device)
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, CALIBRATION_SIZE, CALIBRATION_SIZE, generator=generator).to(device)
    with torch.no_grad():
        calibrate(model, [image], recipe.replace(calibration_method="max").calibration, progress=False)
    return model


def convolutions_only(plan: Plan) -> Plan:
    """The placement that quantizer libraries give by default: each convolution quantizes its own input.

    No scale is shared on purpose, no Add, pool or Concat is quantized, and channels stay as they are.
    """
    convolutions = tuple(path for path, state in plan.convolutions.items() if state == "int8")
    return replace(plan, tensors=(), image_consumers=(), fallback=convolutions)


def _float(network: nn.Module) -> nn.Module:
    from utils import upstream

    return upstream.call_fused(copy.deepcopy(network))
