"""Quantized checkpoints: recipe and state, no pickled code.

The file is a torch zip of plain containers and tensors, and nothing else is read (`utils/core/checkpoints.py`).
Loading builds the FP32 model from its own modules (`utils/upstream/structure.py`; files of before 2.0: from its YAML),
places quantizers by the stored recipe, and fills in weights and scales in full precision, so that a fresh process
computes what the saving process computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from models.quantize import placement
from models.quantize.recipe import Recipe
from utils.core import checkpoints
from utils.core.errors import CheckpointError, InputError
from utils.core.files import save_torch
from utils.core.input_spec import size_in
from utils.core.text import short_repr
from utils.core.weights import FLOAT_HASH
from utils.upstream.description import HEADS, check_description, check_head
from utils.upstream.structure import describe_modules, rebuild_modules

FORMAT = "yolov9-quantized"
FORMAT_VERSION = 1
AGAIN = "quantize again from the FP32 weights"
STATE = "quantized_state"
MODULES = "fp32_modules"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A quantized network, float32, evaluation mode, quantizers on."""

    model: nn.Module
    recipe: Recipe
    names: dict[int, str]
    nc: int
    stride: int  # pixels: image sizes are multiples of it
    yaml: dict[str, Any]  # upstream's model description
    extra: dict[str, Any] = field(default_factory=dict)  # plain values, such as AP and the file it was made from

    @property
    def imgsz(self) -> int | tuple[int, int] | None:
        """Side, or (height, width), that it was calibrated at, in pixels; None if the file does not have it."""
        return size_in(self.extra)

    @property
    def data(self) -> str | None:
        """The dataset's YAML that it was quantized with; None if the file does not have it."""
        data = self.extra.get("data")
        if data:
            return str(data)
        return None

    @property
    def origin(self) -> str:
        """Name of the project that trained the FP32 weights, such as 'Ultralytics 8.4.190'; empty for upstream."""
        return str(self.extra.get("origin", ""))

    @property
    def weights_hash(self) -> str:
        """Hash of the FP32 weights that it was made from (`upstream.hash_of_weights`); empty in files of before 2.0."""
        return str(self.extra.get(FLOAT_HASH, ""))


def save(path: str | Path, checkpoint: QuantizedCheckpoint) -> None:
    """Write a quantized network that `placement.apply` made; the file appears whole or not at all."""
    from models.quantize import __version__

    content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__}
    content["recipe"] = checkpoint.recipe.to_dict()
    content["names"] = dict(checkpoint.names)
    content["nc"] = int(checkpoint.nc)
    content["stride"] = int(checkpoint.stride)
    content["yaml"] = dict(checkpoint.yaml)
    content["extra"] = dict(checkpoint.extra)
    content[MODULES] = checkpoint.model.fp32_modules
    state = checkpoint.model.state_dict()
    content[STATE] = {name: value.detach().cpu().clone() for name, value in state.items()}
    save_torch(content, path)


def check_rebuilds(path: str | Path, model: nn.Module) -> None:
    """Raise `CheckpointError` if a quantized checkpoint of this fused FP32 model would not build it again.

    Args:
        path: of the model, for the message, which names the first module or tensor that differs.
    """
    from utils import upstream

    try:
        for name, reason in upstream.unfused(model):
            raise CheckpointError(f"{name} {reason}")
        rebuilt = rebuild_modules(describe_modules(model), upstream.module_classes())
        expected = _shapes(model)
        shapes = _shapes(rebuilt)
        for name in expected | shapes:
            if expected.get(name) != shapes.get(name):
                raise CheckpointError(f"rebuilt, {name} has shape {shapes.get(name)} instead of {expected.get(name)}")
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be quantized and built again: {error}") from error


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def load_quantized(path: str | Path, heads: Sequence[str] = HEADS) -> QuantizedCheckpoint:
    """Read a quantized checkpoint.

    Args:
        heads: upstream's classes that its last layer may be of.

    Raises:
        CheckpointError: the file is missing, truncated, foreign, an FP32 checkpoint, or has an unknown version.
    """
    content = _read(path)
    if content is None:
        raise CheckpointError(
            f"{path} is an FP32 checkpoint, and this command takes a quantized one; "
            f"create it with python qat.py quantize --weights {path}"
        )
    try:
        return _restore(path, content, heads)
    except CheckpointError:
        raise
    except Exception as error:  # content of another program can fail anywhere
        reason = " ".join(str(error).split())[:300]
        name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} is damaged or from another version: {name}{reason}; {AGAIN}") from error


def _restore(path: str | Path, content: Mapping[str, Any], heads: Sequence[str]) -> QuantizedCheckpoint:
    """The network that the content describes, with its quantizers, weights and ranges."""
    from utils import upstream

    nc = int(content["nc"])
    state = content[STATE]
    recipe = Recipe.from_stored(content["recipe"])
    yaml = check_description(content["yaml"])
    model: Any
    if content.get(MODULES):
        model = rebuild_modules(content[MODULES], upstream.module_classes())
        model.yaml = yaml
    else:
        model = upstream.fuse(upstream.build_model(yaml, nc))
        upstream.resize(model, state)
    check_head(model, path, heads)
    placement.apply(model, placement.plan(model, recipe))
    names = {int(key): str(value) for key, value in content["names"].items()}
    classes = int(model.model[-1].nc)
    if nc != classes:
        raise CheckpointError(f"{path} is damaged: it names {nc} classes, but its head has {classes}; {AGAIN}")
    upstream.check_class_names(path, names, classes, AGAIN)
    upstream.check_finite(path, state, AGAIN)
    result = model.load_state_dict(state, strict=False)
    different = [*result.missing_keys, *result.unexpected_keys]
    if different:
        raise CheckpointError(
            f"{path} was written by version {content['version']}, which placed quantizers differently "
            f"({len(different)} entries differ, such as {different[0]}); {AGAIN}"
        )
    model.names = names
    stride = upstream.network_stride(model)
    extra = dict(content["extra"])
    return QuantizedCheckpoint(model.eval(), recipe, names, nc, stride, yaml, extra)


def kind(path: str | Path) -> Literal["float", "quantized"]:
    """Return whether a file is a quantized checkpoint of this project; every other PyTorch file counts as FP32.

    Raises:
        CheckpointError: the file is missing, or not a PyTorch file.
    """
    if _read(path, skip=(STATE, MODULES)) is None:
        return "float"
    return "quantized"


def summary(path: str | Path) -> dict[str, Any]:
    """Read the description in a quantized checkpoint, without its weights; nothing of it is checked or built.

    Returns:
        Its entries that hold no tensors; empty for anything that may be an FP32 checkpoint.

    Raises:
        CheckpointError: the file is missing, not a PyTorch file, or of an unknown version.
    """
    return _read(path, skip=(STATE, MODULES, "yaml")) or {}


def _read(path: str | Path, skip: Collection[str] = ()) -> dict[str, Any] | None:
    """The content of a quantized checkpoint without the keys to `skip`; None for a PyTorch file of another kind."""
    try:
        content = checkpoints.read_torch_file(Path(path), skip=skip)
    except checkpoints.NotAllowed:
        return None  # it names classes, as upstream's checkpoints do
    if not isinstance(content, dict):
        return None
    format_name = content.get("format")
    if not isinstance(format_name, str) or format_name != FORMAT:  # a tensor compares elementwise
        return None
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {short_repr(version)}; this version reads {FORMAT_VERSION}; {AGAIN}")
    return content
