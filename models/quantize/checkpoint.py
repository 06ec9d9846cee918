"""Quantized checkpoints: recipe and state, no pickled code.

The file is a torch zip of plain containers and tensors, and nothing else is read (utils/torch_archive.py). Loading
builds upstream's network from its YAML, places quantizers by the stored recipe, and fills in weights and scales in full
precision, so that a fresh process computes what the saving process computed.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from models.quantize import placement
from models.quantize.errors import CheckpointError, no_file
from models.quantize.recipe import Recipe
from models.quantize.storage import save_torch
from utils import torch_archive

FORMAT = "yolov9-quantized"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A quantized network, float32, evaluation mode, quantizers on."""

    model: nn.Module
    recipe: Recipe
    names: dict[int, str]
    nc: int
    stride: int  # pixels: image sizes are multiples of it
    yaml: dict[str, Any]  # upstream's model description
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | Path,
    model: nn.Module,
    *,
    recipe: Recipe,
    names: Mapping[int, str],
    nc: int,
    stride: int,
    yaml: Mapping[str, Any],
    library: str = "modelopt",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a quantized network that `placement.apply` made; the file appears whole or not at all.

    Args:
        extra: plain values to keep beside it, such as AP and the file it was made from.
    """
    from models.quantize import __version__

    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": __version__,
        "library": library,
        "recipe": recipe.to_dict(),
        "names": dict(names),
        "nc": int(nc),
        "stride": int(stride),
        "yaml": dict(yaml),
        "extra": dict(extra or {}),
        "quantized_state": {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
    }
    save_torch(content, path)


def load(path: str | Path) -> QuantizedCheckpoint:
    """Read a quantized checkpoint.

    Raises:
        CheckpointError: missing, truncated, foreign, a float checkpoint, or of a version this one cannot read.
    """
    from utils import upstream

    content = _read(Path(path))
    if content is None:
        raise CheckpointError(
            f"{path} is a float checkpoint; this command takes a quantized one: "
            f"python qat.py quantize --weights {path} makes it"
        )
    try:
        recipe = Recipe.from_dict(content["recipe"])
        model = upstream.fuse(upstream.build_model(content["yaml"], content["nc"]))
        placement.apply(model, placement.plan(model, recipe), content["library"])
        names = {int(key): str(value) for key, value in content["names"].items()}
        state = content["quantized_state"]
        stride, nc, yaml, extra = content["stride"], content["nc"], content["yaml"], content["extra"]
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}; it was not written whole") from error
    result = model.load_state_dict(state, strict=False)
    different = [*result.missing_keys, *result.unexpected_keys]
    if different:
        raise CheckpointError(
            f"{path} was written by version {content['version']}, which placed quantizers differently "
            f"({len(different)} entries, such as {different[0]}); quantize again from the float weights"
        )
    model.names = names
    return QuantizedCheckpoint(model.eval(), recipe, names, nc, stride, yaml, extra)


def kind(path: str | Path) -> Literal["float", "quantized"]:
    """Whether a file is a quantized checkpoint of this project or (anything that may be) a float one of upstream's.

    Raises:
        CheckpointError: missing, or no complete PyTorch file.
    """
    return "float" if _read(Path(path)) is None else "quantized"


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a quantized checkpoint; None for a PyTorch file that is something else."""
    if not path.is_file():
        raise CheckpointError(no_file(path, "--weights takes a .pt file"))
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a PyTorch checkpoint, or it is truncated")
    try:
        content = torch_archive.read(path)
    except pickle.UnpicklingError:
        return None  # it names classes, as upstream's checkpoints do
    except Exception as error:  # a damaged file can break torch's reader anywhere
        raise CheckpointError(
            f"{path} is not a PyTorch checkpoint, or it is truncated ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {content.get('format_version')}; this version reads {FORMAT_VERSION}; quantize again"
        )
    return content
