"""Quantized checkpoints: recipe and state, no pickled code.

The file is a torch zip of plain containers and tensors, and nothing else is read (`utils/untrusted/torch_archive.py`).
Loading builds upstream's network from its YAML, places quantizers by the stored recipe, and fills in weights and scales
in full precision, so that a fresh process computes what the saving process computed.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from models.quantize import placement
from models.quantize.backend import QUANTIZERS
from models.quantize.recipe import Recipe
from utils import upstream_checks
from utils.core.bounds import BOUNDS
from utils.core.errors import CheckpointError, InputError
from utils.core.file_schema import Mismatch, check, choice, damaged, integer, mapping, plain, record, text
from utils.core.files import save_torch
from utils.core.shown import shown
from utils.core.torch_files import check_archive
from utils.untrusted import torch_archive
from utils.upstream_heads import HEADS, check_head

FORMAT = "yolov9-quantized"
FORMAT_VERSION = 1
AGAIN = "quantize again from the float weights"
CONTENT = record(
    {
        "format": choice(FORMAT),
        "format_version": integer(FORMAT_VERSION, FORMAT_VERSION),
        "version": text(),
        "library": choice(*QUANTIZERS),  # which quantizers wrote it; files since 0.2 do not say, for all are the same
        "recipe": mapping(text(), plain),
        "nc": integer(1, upstream_checks.MOST_CLASSES),
        "names": mapping(integer(0, upstream_checks.MOST_CLASSES), text()),
        "stride": integer(1, upstream_checks.LARGEST_STRIDE),
        "yaml": mapping(text(), plain),
        "extra": mapping(text(), plain),
        "quantized_state": mapping(text(), upstream_checks.tensor),
    },
    optional=("library",),
)


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

    @property
    def imgsz(self) -> int | None:
        """Side of the images that it was calibrated on, in pixels; None where the file does not say it."""
        found = self.extra.get("imgsz")
        return found if found in BOUNDS["imgsz"] else None


def save(
    path: str | Path,
    model: nn.Module,
    *,
    recipe: Recipe,
    names: Mapping[int, str],
    nc: int,
    stride: int,
    yaml: Mapping[str, Any],
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
        "recipe": recipe.to_dict(),
        "names": dict(names),
        "nc": int(nc),
        "stride": int(stride),
        "yaml": dict(yaml),
        "extra": dict(extra or {}),
        "quantized_state": {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
    }
    save_torch(content, path)


def load(path: str | Path, heads: Sequence[str] = HEADS) -> QuantizedCheckpoint:
    """Read a quantized checkpoint.

    Args:
        heads: upstream's classes that its last layer may be of.

    Raises:
        CheckpointError: the file is missing, truncated, foreign, a float checkpoint, or has an unknown version.
    """
    from utils import upstream

    content = _read(Path(path))
    if content is None:
        raise CheckpointError(
            f"{path} is a float checkpoint; this command takes a quantized one: "
            f"python qat.py quantize --weights {path} writes one"
        )
    check(content, CONTENT, path, AGAIN)
    recipe, model = _build(path, content, heads)
    names, state, nc, yaml = content["names"], content["quantized_state"], content["nc"], content["yaml"]
    stride, extra = content["stride"], content["extra"]
    check({"names": names}, record({"names": upstream_checks.class_names(nc)}), path, AGAIN)
    expected = upstream.network_stride(model)
    check({"stride": stride}, record({"stride": integer(expected, expected)}), path, AGAIN)
    upstream_checks.check_state(path, state, model, AGAIN)
    result = model.load_state_dict(state, strict=False)
    different = [*result.missing_keys, *result.unexpected_keys]
    if different:
        raise CheckpointError(
            f"{path} was written by version {content['version']}, which placed quantizers differently "
            f"({len(different)} entries, such as {different[0]}); quantize again from the float weights"
        )
    model.names = names
    return QuantizedCheckpoint(model.eval(), recipe, names, nc, stride, yaml, extra)


def _build(path: str | Path, content: Mapping[str, Any], heads: Sequence[str]) -> tuple[Recipe, nn.Module]:
    """The network that the content describes, with quantizers, before it gets its weights and ranges."""
    from utils import upstream, upstream_import

    upstream_import.ensure()
    try:
        recipe = Recipe.from_stored(content["recipe"])
        model = upstream.build_model(content["yaml"], content["nc"])
        upstream_checks.check_layers(path, model)
        if type(model.model[-1]).__name__ not in heads:
            check_head(model, path)
        upstream_checks.one_of(tuple(heads))(model.model[-1], f"model.{len(model.model) - 1}")
        model = upstream.fuse(model)
        placement.apply(model, placement.plan(model, recipe))
    except CheckpointError:
        raise
    except Exception as error:  # what describes no network of ours can fail anywhere
        reason = " ".join(str(error).split())[:300]
        name = "" if isinstance(error, (InputError, Mismatch)) else f"{type(error).__name__}: "
        raise CheckpointError(damaged(path, f"its network cannot be built ({name}{reason})", AGAIN)) from error
    return recipe, model


def kind(path: str | Path) -> Literal["float", "quantized"]:
    """Whether a file is a quantized checkpoint of this project or (anything that may be) a float one of upstream's.

    Raises:
        CheckpointError: the file is missing, or is no complete PyTorch file.
    """
    return "float" if _read(Path(path)) is None else "quantized"


def summary(path: str | Path) -> dict[str, Any]:
    """What a quantized checkpoint says of itself, without its weights; nothing of it is checked or built.

    Returns:
        Its entries that hold no tensors; empty for anything that may be a float checkpoint.

    Raises:
        CheckpointError: the file is missing, is no complete PyTorch file, or of an unknown version.
    """
    content = _read(Path(path)) or {}
    return {name: value for name, value in content.items() if name not in ("quantized_state", "yaml")}


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a quantized checkpoint; None for a PyTorch file that is something else."""
    check_archive(path)
    try:
        content = torch_archive.read(path)
    except pickle.UnpicklingError:
        return None  # it names classes, as upstream's checkpoints do
    except Exception as error:  # a damaged file can break torch's reader anywhere
        raise CheckpointError(
            f"{path} is not a PyTorch checkpoint, or it is truncated ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), str) or content["format"] != FORMAT:
        return None
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {shown(version)}; this version reads {FORMAT_VERSION}; quantize again"
        )
    return content
