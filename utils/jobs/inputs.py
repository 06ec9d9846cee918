"""What a quantize run works on, loaded and checked before anything is written."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.quantize import backend, placement, recipe_fit
from models.quantize.recipe import AUTO, Recipe
from utils import upstream
from utils.core.device import select_device
from utils.core.errors import DataError, InputError
from utils.core.file_schema import Mismatch, number, record
from utils.core.input_files import EXPECTED, read_yaml
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.fingerprint import Fingerprint
from utils.jobs.options import QuantizeOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from utils.evaluation.data_yaml import DataConfig


logger = logging.getLogger(__name__)

# what upstream's LoadImagesAndLabels reads: probabilities, and the most that an image is changed by
AUGMENTATION = {
    "mosaic": number(0, 1), "mixup": number(0, 1), "copy_paste": number(0, 1), "flipud": number(0, 1),
    "fliplr": number(0, 1), "hsv_h": number(0, 1), "hsv_s": number(0, 1), "hsv_v": number(0, 1),
    "degrees": number(0, 180), "translate": number(0, 1), "scale": number(0, 1), "shear": number(0, 45),
    "perspective": number(0, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """What a run works on.

    Attributes:
        source: the float checkpoint; its network is fused, and is copied rather than run.
        plan: where quantizers go.
        data: the dataset, with the same number of classes.
        hyp: the augmentation's parameters; None for images as validation sees them.
        device: where networks run.
        imgsz: side of the input in pixels, a multiple of the network's stride.
    """

    source: upstream.FloatCheckpoint
    plan: placement.Plan
    data: DataConfig
    hyp: dict[str, Any] | None
    device: torch.device
    imgsz: int

    @classmethod
    def load(cls, options: QuantizeOptions, recipe: Recipe) -> Inputs:
        """Load what the options name.

        Raises:
            InputError: or one of its kinds, for whatever of it cannot be used.
        """
        source = upstream.load_float(options.weights)
        data = load_data(options.data)
        data.paths("train")
        unmeasured = options.no_eval_origin and options.no_eval_ptq and options.ptq_only
        if not unmeasured or recipe.calibration.method == AUTO:
            data.paths("val")
        check_classes(options.weights, source.names, data)
        hyp = read_hyp(options.hyp) if options.hyp else None
        device = select_device(options.device)
        backend.create(library=options.quantizer)  # a missing library is better known now than after an evaluation
        plan = placement.plan(upstream.fuse(source.model), recipe)
        recipe_fit.check(plan, recipe)
        return cls(source, plan, data, hyp, device, fitting_size(options.imgsz, source.stride))

    def network(self) -> nn.Module:
        """A copy of the fused float network, on the device."""
        return copy.deepcopy(self.source.model).to(self.device)

    def fingerprint(self, files: Mapping[str, str | None]) -> Fingerprint:
        """What a run reads, to be compared when it is resumed; `files` are those beside the dataset, by option.

        Raises:
            InputError: or one of its kinds: something of it cannot be read.
        """
        return Fingerprint.of(self.data, ("train", "val"), files)

    def training_loader(self, options: QuantizeOptions, *, augment: bool = False) -> DataLoader[Any]:
        """Training images in an order that the seed decides: letterboxed as for validation, or augmented."""
        return make_loader(
            self.data, "train", imgsz=self.imgsz, batch_size=options.batch_size, stride=self.source.stride,
            workers=options.workers, shuffle=True, seed=options.seed, augment=augment,
            hyp=self.hyp if augment else None, progress=True,
        )  # fmt: skip

    def validation_loader(self, batch_size: int, workers: int, limit: int | None = None) -> DataLoader[Any]:
        """Validation images in a fixed order, at most `limit` of them, evenly spread."""
        return make_loader(
            self.data, "val", imgsz=self.imgsz, batch_size=batch_size, stride=self.source.stride, workers=workers,
            limit=limit, progress=True,
        )  # fmt: skip


def image_batches(loader: DataLoader[Any]) -> Iterator[Tensor]:
    """The images of each batch, uint8 `[B, 3, H, W]`.

    Those that cannot be decoded are left out. Their number among all that were asked for is said where the pass ends,
    or the caller ends it, and only in the first pass of a loader.

    Raises:
        DataError: at the end, if not one of them could be decoded.
    """
    found, batches = 0, 0
    try:
        for images, *_ in loader:
            batches += 1
            found += len(images)
            if len(images):
                yield images
    finally:
        _warn_of_undecodable(loader, batches, found)
    if not found:
        files = [image.path for image in getattr(loader.dataset, "images", ())]
        first = f"; the first: {files[0]}" if files else ""
        raise DataError(f"none of the {len(files)} images can be decoded, although their headers can be read{first}")


def _warn_of_undecodable(loader: Any, batches: int, found: int) -> None:
    """Say how many images `batches` batches lack, if this loader's were not said before."""
    asked = min(batches * loader.batch_sampler.batch_size, len(loader.dataset))
    if 0 < found < asked and not getattr(loader, "undecodable_said", False):
        loader.undecodable_said = True
        logger.warning("%d of %d images cannot be decoded and are left out", asked - found, asked)


def check_classes(weights: str | Path, names: Mapping[int, str], data: DataConfig) -> None:
    """Raises `DataError` when a checkpoint and a dataset have different numbers of classes."""
    if len(names) != data.nc:
        raise DataError(
            f"{weights} detects {len(names)} classes and {data.file} has {data.nc}; "
            "give the dataset that the weights were trained on"
        )


def fitting_size(imgsz: int, stride: int) -> int:
    """`imgsz` (pixels), rounded up to a multiple of the network's stride, as evaluation does, with a warning."""
    size = math.ceil(imgsz / stride) * stride
    if size != imgsz:
        logger.warning("image size %d is no multiple of the stride %d; using %d", imgsz, stride, size)
    return size


def read_hyp(path: str | Path) -> dict[str, Any]:
    """Upstream's augmentation parameters, from a YAML such as data/hyps/hyp.scratch-high.yaml.

    Raises:
        InputError: the file cannot be read, or a parameter that the augmentation reads is missing, or is no number
            that it can use.
    """
    content = read_yaml(path, f"--hyp takes {EXPECTED['hyp']}")
    missing = [key for key in AUGMENTATION if not isinstance(content, Mapping) or key not in content]
    if missing:
        raise InputError(f"--hyp {path} lacks {', '.join(missing)}; expected {EXPECTED['hyp']}")
    try:
        record(AUGMENTATION, others=True)(content, "")
    except Mismatch as mismatch:
        raise InputError(f"--hyp {path}: {mismatch}; data/hyps/hyp.scratch-high.yaml has usual values") from mismatch
    return {key: content[key] for key in AUGMENTATION}
