"""The one door to upstream YOLOv9: models, checkpoints, augmented pictures.

Nothing else in this project imports upstream's modules. Upstream is imported when it is first needed, from the
checkout that this file was copied into.
"""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.quantize.errors import CheckpointError, DataError, DependencyError, InputError
from utils import network_checks, upstream_shims
from utils.file_schema import shown
from utils.torch_files import check_archive

if TYPE_CHECKING:
    import torch
    from torch import nn

CHECKOUT = Path(__file__).resolve().parents[1]
AUXILIARY_HEADS = ("DualDetect", "DualDDetect", "TripleDetect", "TripleDDetect", "DualDSegment")
TRAINING_HEAD = "DualDDetect"  # of yolov9-t, -s, -m, -c and -e
DETECT_HEADS = ("Detect", "DDetect")
OTHER_HEADS = ("Segment", "DSegment", "Panoptic", "Classify")


@dataclass(frozen=True)
class FloatCheckpoint:
    """A float network as upstream trained it: float32, evaluation mode, batch norms not yet fused."""

    model: nn.Module
    names: dict[int, str]
    nc: int
    stride: int  # pixels: image sizes are multiples of it
    yaml: dict[str, Any]  # upstream's model description, from which the network can be built again


@lru_cache(maxsize=1)
def ensure() -> None:
    """Import upstream with what it needs on a current stack.

    Raises:
        InputError: this file does not lie in a patched YOLOv9 checkout, or a library of upstream's is missing.
    """
    if not (CHECKOUT / "models" / "yolo.py").is_file():
        raise InputError(
            f"{CHECKOUT} is not a patched YOLOv9 checkout; run ./patch_yolov9.sh CHECKOUT and start the program there"
        )
    if sys.path[0] != str(CHECKOUT):
        sys.path.insert(0, str(CHECKOUT))
    upstream_shims.install()
    try:
        import models.yolo  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            f"upstream YOLOv9 needs {error.name}; run install_dependencies.sh, where this overlay was cloned"
        ) from error
    upstream_shims.after_import()
    logging.getLogger("yolov5").setLevel(logging.ERROR)  # its layer table, printed at every build


def load_float(path: str | Path, *, auxiliary: bool = False) -> FloatCheckpoint:
    """Load a checkpoint that upstream's `train.py` or our `reparameterization.py` wrote.

    The pickle may name upstream's and torch.nn's module classes and nothing else, so no code of the file runs.

    Args:
        auxiliary: also take a network with its auxiliary branch, see `load_training`.
    Raises:
        CheckpointError: missing, truncated, foreign, quantized, with an auxiliary branch, or not a detector.
    """
    model = _read_network(Path(path))
    if not (auxiliary and type(model.model[-1]).__name__ == TRAINING_HEAD):
        check_head(model, path)
    return _float_checkpoint(model, path)


def load_training(path: str | Path) -> FloatCheckpoint:
    """Load a checkpoint that upstream's `train_dual.py` wrote, as `load_float` does: it has an auxiliary branch.

    Raises:
        CheckpointError: missing, truncated, foreign, quantized, already without that branch, or not such a detector.
    """
    model = _read_network(Path(path))
    head = type(model.model[-1]).__name__
    if head in DETECT_HEADS:
        raise CheckpointError(
            f"{path} ends in {head}, without an auxiliary branch: it is converted already and can be used as it is"
        )
    if head != TRAINING_HEAD:
        raise CheckpointError(f"{path} ends in {head}; this version converts detectors that end in {TRAINING_HEAD}")
    return _float_checkpoint(model, path)


def _read_network(path: Path) -> Any:
    """The network in a float checkpoint: the EMA where there is one, as upstream takes it."""
    ensure()
    content = _read_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a YOLOv9 checkpoint")
    if "quantized_state" in content:
        raise CheckpointError(
            f"{path} is a quantized checkpoint; this command takes the float weights it was made from"
        )
    model: Any = content.get("model") if content.get("ema") is None else content["ema"]
    if not hasattr(model, "model") or not hasattr(model, "yaml"):
        raise CheckpointError(f"{path} holds no YOLOv9 network under 'ema' or 'model' (keys: {shown(list(content))})")
    network_checks.check_layers(path, model)
    return model


def _float_checkpoint(model: Any, path: str | Path) -> FloatCheckpoint:
    model = network_checks.ready(path, model, (*DETECT_HEADS, TRAINING_HEAD))
    names = model.names if isinstance(model.names, Mapping) else dict(enumerate(model.names))
    return FloatCheckpoint(
        model=model,
        names={int(key): str(value) for key, value in names.items()},
        nc=int(model.model[-1].nc),
        stride=network_stride(model),
        yaml=dict(model.yaml),
    )


def network_stride(model: Any) -> int:
    """The pixels that image sizes are multiples of."""
    return max(int(model.stride.max()), 32)


def build_model(config: Mapping[str, Any] | str | Path, nc: int | None = None) -> nn.Module:
    """Build upstream's network with random weights from its YAML (a file or its content).

    Upstream evaluates strings of the YAML as Python, so only plain names are let through: a checkpoint's YAML must
    not become code.

    Raises:
        InputError: the file cannot be read or names something that is not a module of upstream's or torch.nn's.
    """
    ensure()
    from models.common import Conv, RepConvN
    from models.yolo import DetectionModel

    description = deepcopy(dict(config)) if isinstance(config, Mapping) else read_description(config)
    _check_description(description)
    defaults = Conv.default_act, RepConvN.default_act
    try:
        with _quiet():
            return DetectionModel(description, ch=description.get("ch", 3), nc=nc).eval()
    except (KeyError, TypeError, NameError, ValueError, IndexError, RuntimeError) as error:
        raise InputError(f"upstream cannot build this model description: {type(error).__name__}: {error}") from error
    finally:  # a YAML's `activation` would otherwise stay for every later model
        Conv.default_act, RepConvN.default_act = defaults


def read_description(path: str | Path) -> dict[str, Any]:
    """A model YAML of upstream's.

    Raises:
        InputError: the file cannot be read, or is no model description.
    """
    description = _read_yaml(Path(path))
    _check_description(description)
    return description


def fuse(model: nn.Module) -> nn.Module:
    """Fold batch norms into convolutions and RepConvN branches into one, in place; float32, evaluation mode.

    Unlike upstream's `fuse`, no bound method is stored on an instance, so that the network can be copied.
    """
    ensure()
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    from models.common import Conv, RepConvN

    for module in model.modules():
        if isinstance(module, RepConvN) and not hasattr(module, "conv"):
            module.fuse_convs()
    for module in model.modules():
        if isinstance(module, Conv) and hasattr(module, "bn"):
            module.conv = fuse_conv_bn_eval(module.conv, module.bn)
            del module.bn
    return model


def call_fused(model: nn.Module) -> nn.Module:
    """Give fused Conv and RepConvN instances the forward that upstream has for that state, in place."""
    ensure()
    from models.common import Conv, RepConvN

    for module in model.modules():
        fused = (isinstance(module, Conv) and not hasattr(module, "bn")) or (
            isinstance(module, RepConvN) and hasattr(module, "conv")
        )
        if fused:
            module.forward = module.forward_fuse
    return model


def check_head(model: nn.Module, where: str | Path) -> None:
    """Refuse networks that this project does not quantize, saying what to do.

    Raises:
        CheckpointError: an auxiliary branch, or a task other than detection.
    """
    head = type(model.model[-1]).__name__
    if head in AUXILIARY_HEADS:
        raise CheckpointError(
            f"{where} still has its auxiliary training branch ({head}); convert it first: "
            f"python reparameterization.py --weights {where} --save {Path(where).stem}-converted.pt"
        )
    if head in OTHER_HEADS:
        raise CheckpointError(f"{where} ends in {head}; this version handles detection ({', '.join(DETECT_HEADS)})")


def make_dataset(
    paths: Sequence[str] | str,
    imgsz: int,
    batch_size: int,
    *,
    stride: int,
    rect: bool = False,
    pad: float = 0.0,
    single_cls: bool = False,
    augment: bool = False,
    hyp: Mapping[str, Any] | None = None,
) -> torch.utils.data.Dataset[Any]:
    """Upstream's `LoadImagesAndLabels`.

    An item is (image uint8 `[3, H, W]` RGB, labels float `[n, 6]` of 0, class, normalised xywh, path, shapes).
    `dataset.collate_fn` makes batches of them.

    Raises:
        DataError: no picture, or no readable one, lies at `paths`.
    """
    ensure()
    from utils.dataloaders import LoadImagesAndLabels

    try:
        with _quiet():
            return LoadImagesAndLabels(
                list(paths) if not isinstance(paths, str) else paths,
                imgsz,
                batch_size,
                augment=augment,
                hyp=dict(hyp) if hyp else None,
                rect=rect,
                single_cls=single_cls,
                stride=stride,
                pad=pad,
            )
    except Exception as error:  # upstream raises a bare Exception, with its help URL on further lines
        raise DataError(str(error).split("\n")[0]) from error


def allowed_globals() -> AbstractContextManager[Any]:
    """Within it, `torch.load(..., weights_only=True)` takes the names that a checkpoint of upstream's may have.

    Raises:
        DependencyError: torch cannot be told names.
    """
    import torch

    if torch.torch_version.TorchVersion(torch.__version__) < (2, 6):
        raise DependencyError(
            f"reading a float checkpoint takes torch 2.6 or later, not {torch.__version__}, which evaluates ONNX files "
            "and engines (val_trt.py)"
        )
    return torch.serialization.safe_globals(_allowed())


def _allowed() -> list[tuple[Any, str]]:
    """Upstream's module classes, torch.nn's, NumPy arrays, paths; each with the name that a file has for it."""
    ensure()
    import pathlib

    import numpy as np
    from torch import nn

    import models.common
    import models.experimental
    import models.yolo

    found: dict[str, Any] = {}
    for module in (models.common, models.experimental, models.yolo):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
                found[f"{module.__name__}.{value.__qualname__}"] = value
    found["models.yolo.Model"] = models.yolo.DetectionModel
    found |= {f"yolov9.{name}": value for name, value in found.items()}  # trained with PyPI's yolov9pip
    for value in vars(nn).values():
        if isinstance(value, type) and issubclass(value, nn.Module):
            found[f"{value.__module__}.{value.__qualname__}"] = value
    for module_name in ("pathlib", "pathlib._local"):  # train.py stores its options, with paths in them
        found |= {f"{module_name}.{name}": pathlib.PurePosixPath for name in ("PosixPath", "WindowsPath")}
    reconstruct = np.ndarray(0).__reduce__()[0]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found[f"{core}._reconstruct"] = reconstruct
        found[f"{core}.scalar"] = np.float64(0).__reduce__()[0]
    found |= {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    for dtype in (np.float64, np.float32, np.int64):
        kind = type(np.dtype(dtype))
        found[f"numpy.dtypes.{kind.__name__}"] = kind
    return [(value, name) for name, value in found.items()]


def _read_pickle(path: Path) -> Any:
    import torch

    check_archive(path, "--weights takes a YOLOv9 .pt file")
    allowed = allowed_globals()
    try:
        with allowed:
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(
            r"GLOBAL (\S+) was not an allowed global|Unsupported class (\S+)|Can only \w+ .*?(\w+(?:\.\w+)+)",
            str(error),
        )
        if named:
            culprit = next(group for group in named.groups() if group)
            raise CheckpointError(
                f"{path} names {culprit}, which is no module class of YOLOv9 or torch.nn; it was not loaded. "
                "Save the network without fusing or wrapping it, or as upstream's train.py does"
            ) from error
        raise CheckpointError(f"{path} is not a PyTorch checkpoint, or it is truncated") from error
    except Exception as error:  # a damaged file can break torch's reader anywhere
        raise CheckpointError(
            f"{path} is not a PyTorch checkpoint, or it is truncated ({type(error).__name__})"
        ) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8", errors="ignore"))
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; --cfg takes a model YAML such as models/detect/gelan-c.yaml"
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a model description: expected keys such as nc, backbone and head")
    return content


def _check_description(description: Mapping[str, Any]) -> None:
    missing = [key for key in ("nc", "depth_multiple", "width_multiple", "backbone", "head") if key not in description]
    if missing:
        raise InputError(f"the model description lacks {', '.join(missing)}")
    activation = description.get("activation")
    if activation and not re.fullmatch(r"nn\.\w+\([\w=., ]*\)", str(activation)):
        raise InputError(
            f"the model description's activation {activation!r} is not a torch.nn module such as nn.ReLU()"
        )
    for text in _strings([*description["backbone"], *description["head"]]):
        if not re.fullmatch(r"[A-Za-z_][\w.]*", text):
            raise InputError(f"the model description holds {text!r} where a plain name was expected")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep upstream's own log lines out of ours."""
    log = logging.getLogger("yolov5")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
