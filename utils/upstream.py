"""The one door to upstream YOLOv9: models, checkpoints, augmented images.

Nothing else in this project imports upstream's modules, but for what brings them in (`upstream_import.py`). Upstream is
imported when it is first needed, from the checkout that this file was copied into.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from utils import upstream_checks, upstream_description
from utils.core.errors import CheckpointError, DataError, InputError
from utils.core.input_files import read_yaml
from utils.core.shown import shown
from utils.core.torch_files import check_archive
from utils.untrusted import allowed_names
from utils.upstream_heads import HEADS, TRAINING_HEAD, TRAINING_HEADS, WITH_MASKS, check_head, refuse_other_tasks
from utils.upstream_import import ensure, quiet

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class FloatCheckpoint:
    """A float network as upstream trained it: float32, evaluation mode, batch norms not yet fused."""

    model: nn.Module
    names: dict[int, str]
    nc: int
    stride: int  # pixels: image sizes are multiples of it
    yaml: dict[str, Any]  # upstream's model description, from which the network can be built again


def load_float(path: str | Path, *, auxiliary: bool = False) -> FloatCheckpoint:
    """Load a checkpoint that upstream's `train.py` or our `reparameterization.py` wrote.

    The pickle may name what `utils/untrusted/allowed_names.py` lists and nothing else, and nothing of it is called, so
    no code of the file runs.

    Args:
        auxiliary: also take a network with its auxiliary branch, see `load_training`.

    Raises:
        CheckpointError: missing, truncated, foreign, quantized, with an auxiliary branch, or of another task than
            detection and instance segmentation.
    """
    model = _read_network(Path(path))
    if not (auxiliary and type(model.model[-1]).__name__ == TRAINING_HEAD):
        check_head(model, path)
    return _float_checkpoint(model, path)


def load_training(path: str | Path) -> FloatCheckpoint:
    """Load a checkpoint that upstream's `train_dual.py` wrote, as `load_float` does: it has an auxiliary branch.

    Raises:
        CheckpointError: missing, truncated, foreign, quantized, already without that branch, or not such a network.
    """
    model = _read_network(Path(path))
    head = type(model.model[-1]).__name__
    if head in HEADS:
        raise CheckpointError(
            f"{path} ends in {head}, without an auxiliary branch: it is converted already and can be used as it is"
        )
    refuse_other_tasks(model, path)
    if head not in TRAINING_HEADS:
        raise CheckpointError(
            f"{path} ends in {head}; this version converts networks that end in {' or '.join(TRAINING_HEADS)}"
        )
    return _float_checkpoint(model, path)


def _read_network(path: Path) -> Any:
    """The network in a float checkpoint: the EMA where there is one, as upstream takes it."""
    ensure()
    check_archive(path, "--weights takes a YOLOv9 .pt file")
    try:
        content = read_checkpoint(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a YOLOv9 checkpoint")
    if "quantized_state" in content:
        raise CheckpointError(
            f"{path} is a quantized checkpoint; this command takes the float weights it was made from"
        )
    model: Any = content.get("model") if content.get("ema") is None else content["ema"]
    if not hasattr(model, "model") or not hasattr(model, "yaml"):
        raise CheckpointError(f"{path} holds no YOLOv9 network under 'ema' or 'model' (keys: {shown(list(content))})")
    upstream_checks.check_layers(path, model)
    return model


def _float_checkpoint(model: Any, path: str | Path) -> FloatCheckpoint:
    model = upstream_checks.ready(path, model, (*HEADS, *TRAINING_HEADS))
    names = model.names if isinstance(model.names, Mapping) else dict(enumerate(model.names))
    return FloatCheckpoint(
        model=model,
        names={int(key): str(value) for key, value in names.items()},
        nc=int(model.model[-1].nc),
        stride=network_stride(model),
        yaml=upstream_description.check(model.yaml),
    )


def network_stride(model: Any) -> int:
    """The pixels that image sizes are multiples of."""
    return max(int(model.stride.max()), 32)


def build_model(config: Mapping[str, Any] | str | Path, nc: int | None = None) -> nn.Module:
    """Build upstream's network with random weights from its YAML (a file or its content).

    Upstream evaluates strings of the YAML as Python, so it is checked first: a checkpoint's YAML must not become code.

    Raises:
        InputError: the file cannot be read, or holds something that utils/upstream_description.py does not let through.
    """
    ensure()
    from models.common import Conv, RepConvN
    from models.yolo import DetectionModel, SegmentationModel

    found = config if isinstance(config, Mapping) else read_description(config)
    description = deepcopy(upstream_description.check(found))
    defaults = Conv.default_act, RepConvN.default_act
    masks = [*description["backbone"], *description["head"]][-1][2] in WITH_MASKS
    kind = SegmentationModel if masks else DetectionModel
    try:
        with quiet():
            return kind(description, ch=description.get("ch", 3), nc=nc).eval()
    except InputError:
        raise
    except Exception as error:  # upstream assumes that layers fit together, and fails anywhere when they do not
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"upstream cannot build this model description: {type(error).__name__}: {reason}") from error
    finally:  # a YAML's `activation` would otherwise stay for every later model
        Conv.default_act, RepConvN.default_act = defaults


def read_description(path: str | Path) -> dict[str, Any]:
    """A model YAML of upstream's.

    Raises:
        InputError: the file cannot be read, or is no model description.
    """
    content = read_yaml(path, "--cfg takes a model YAML such as models/detect/gelan-c.yaml")
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a model description: expected keys such as nc, backbone and head")
    return upstream_description.check(content)


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


def make_dataset(
    paths: Sequence[str] | str,
    imgsz: int,
    batch_size: int,
    *,
    stride: int,
    single_cls: bool = False,
    augment: bool = False,
    hyp: Mapping[str, Any] | None = None,
    keep: Callable[[str], bool] | None = None,
) -> torch.utils.data.Dataset[Any]:
    """Upstream's `LoadImagesAndLabels`, of images and labels only: no label cache and no array beside an image is read.

    An item is (image uint8 `[3, H, W]` RGB, labels float `[n, 6]` of 0, class, normalised xywh, path, shapes).
    `dataset.collate_fn` makes batches of them.

    Args:
        keep: only the images for whose path this holds take part, also as parts of others' mosaics.

    Raises:
        DataError: no image, or no readable one, lies at `paths`.
    """
    ensure()
    from utils.dataloaders import LoadImagesAndLabels

    try:
        with quiet(), _images_left_as_they_are():
            dataset = LoadImagesAndLabels(
                list(paths) if not isinstance(paths, str) else paths,
                imgsz,
                batch_size,
                augment=augment,
                hyp=dict(hyp) if hyp else None,
                single_cls=single_cls,
                stride=stride,
            )
    except Exception as error:  # upstream raises a bare Exception, with its help URL on further lines
        if "can not start training" in str(error):
            where = paths if isinstance(paths, str) else ", ".join(paths)
            raise DataError(f"no image of {where} has labels, and --hyp needs some; leave it out") from error
        raise DataError(str(error).split("\n")[0]) from error
    if keep is not None:
        _keep_images(dataset, [index for index, file in enumerate(dataset.im_files) if keep(file)])
    # Upstream takes an array NAME.npy beside an image instead of it; below a file there is none.
    dataset.npy_files = [Path(file) / "array" for file in dataset.im_files]
    return dataset


@contextmanager
def _images_left_as_they_are() -> Iterator[None]:
    """Within it upstream's reader does not write JPEGs anew that go on behind their end, as those of phones do."""
    from utils import dataloaders

    class Unsaved:
        def save(self, *_: object, **__: object) -> None:
            pass

    before = dataloaders.ImageOps
    dataloaders.ImageOps = SimpleNamespace(exif_transpose=lambda image: Unsaved())
    try:
        yield
    finally:
        dataloaders.ImageOps = before


def _keep_images(dataset: Any, kept: Sequence[int]) -> None:
    """Leave only some images in upstream's dataset: mosaics draw from all that it holds."""
    for name in ("im_files", "label_files", "labels", "segments"):
        entries = getattr(dataset, name)
        setattr(dataset, name, [entries[index] for index in kept])
    dataset.shapes, dataset.batch = dataset.shapes[list(kept)], dataset.batch[: len(kept)]
    dataset.n, dataset.indices = len(kept), range(len(kept))
    dataset.ims, dataset.im_hw0, dataset.im_hw = ([None] * len(kept) for _ in range(3))


@lru_cache(maxsize=1)
def module_classes() -> dict[str, type[nn.Module]]:
    """The module classes that a checkpoint may hold, by each name that a pickle may have for them."""
    ensure()
    import models.common
    import models.yolo

    ours = {"models.common": models.common, "models.yolo": models.yolo}
    found: dict[str, type[nn.Module]] = {}
    for module, names in allowed_names.UPSTREAM_MODULES.items():
        for name in names:
            if hasattr(ours[module], name):  # not every release of upstream has all of them
                found |= {
                    f"{prefix}{module}.{name}": getattr(ours[module], name)
                    for prefix in allowed_names.UPSTREAM_PREFIXES
                }
    for module, names in allowed_names.TORCH_MODULES.items():
        found |= {f"{module}.{name}": getattr(sys.modules[module], name) for name in names}
    return found


def read_checkpoint(file: str | Path | IO[bytes], device: Any = "cpu") -> Any:
    """What a checkpoint of upstream's holds, also its training state; nothing that it names is called.

    Raises:
        CheckpointError: it is no PyTorch checkpoint, is damaged, or holds something that only code could need.
        OSError: it cannot be read.
    """
    from torch import nn

    from utils.untrusted import torch_archive
    from utils.untrusted.pickle_machine import Damaged, NotAllowed

    where = file if isinstance(file, (str, Path)) else "the checkpoint"
    try:
        content = torch_archive.read(file, module_classes(), device)
    except NotAllowed as error:
        verb = "holds" if " " in error.name else "names"
        raise CheckpointError(
            f"{where} {verb} {error.name}, which is no module class of YOLOv9 or torch.nn; it was not loaded. "
            "Save the network without fusing or wrapping it, or as upstream's train.py does; the name of a class of "
            "yours has to stand in utils/untrusted/allowed_names.py"
        ) from error
    except Damaged as error:
        raise CheckpointError(f"{where} is not a PyTorch checkpoint, or it is truncated ({error})") from error
    for value in content.values() if isinstance(content, dict) else [content]:
        if isinstance(value, nn.Module) and hasattr(value, "yaml"):
            try:
                upstream_description.check(value.yaml)  # upstream's train.py builds its network from it
            except InputError as error:
                raise CheckpointError(f"{where} is not loaded: {error}") from error
    return content
