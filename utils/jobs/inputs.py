"""What a quantize run works on, loaded and checked before anything is written."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from models.quantize import backend, placement
from models.quantize.recipe import AUTO, Number, Recipe
from utils import upstream
from utils.core import distributed
from utils.core.device import select_device
from utils.core.errors import DataError, InputError
from utils.core.files import EXPECTED, read_yaml
from utils.core.strict_model import StrictModel, validate
from utils.core.tasks import masks_of_head, task_of_head
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import SeededImages, ShareOfBatches, dataset_hash, make_loader, whole_batch
from utils.evaluation.images import find_images, label_file, unlabelled
from utils.evaluation.input_plan import mask_stride
from utils.jobs.options import QuantizeOptions
from utils.runners.pytorch import TorchRunner, last_layer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from utils.evaluation.data_yaml import DataConfig


logger = logging.getLogger(__name__)

Share = Annotated[Number, Field(ge=0, le=1)]


class Augmentation(StrictModel):
    """What upstream's LoadImagesAndLabels reads of a hyp.yaml: probabilities, and the most that an image changes."""

    model_config = ConfigDict(extra="ignore")  # the file holds upstream's training parameters as well
    mosaic: Share
    mixup: Share
    copy_paste: Share
    flipud: Share
    fliplr: Share
    hsv_h: Share
    hsv_s: Share
    hsv_v: Share
    degrees: Number = Field(ge=0, le=180)
    translate: Share
    scale: Share
    shear: Number = Field(ge=0, le=45)
    perspective: Share


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
        held_out: real paths of the training images that QAT is not trained on, and that choose its best state.
        taught_by: the float checkpoint that supervises QAT, fused, if it is another one.
    """

    source: upstream.FloatCheckpoint
    plan: placement.Plan
    data: DataConfig
    hyp: dict[str, Any] | None
    device: torch.device
    imgsz: int
    held_out: frozenset[str]
    taught_by: upstream.FloatCheckpoint | None = None

    @classmethod
    def load(cls, options: QuantizeOptions, recipe: Recipe) -> Inputs:
        """Load what the options name.

        Raises:
            InputError: or one of its kinds, for whatever of it cannot be used.
        """
        source = upstream.load_float(options.weights)
        data = load_data(options.data)
        data.paths("train")
        trains = not options.ptq_only and recipe.finetune.epochs > 0  # and is evaluated after each epoch
        measured = trains or not (options.no_eval_origin and options.no_eval_ptq)
        if measured or recipe.calibration.method == AUTO:
            check_labelled(data)
        check_classes(options.weights, source.names, data)
        hyp = read_hyp(options.hyp) if options.hyp else None
        device = select_device(options.device)
        backend.create(library=options.quantizer)  # a missing library is better known now than after an evaluation
        plan = placement.plan(upstream.fuse(source.model), recipe)
        placement.check(plan, recipe)
        size = fitting_size(options.imgsz, source.stride)
        held_out = choose_held_out(data, recipe.finetune.held_out)
        teacher = load_teacher(options.teacher, source)
        by_layers = recipe.finetune.supervision == "layers"
        if teacher is not None and by_layers and _shapes(teacher.model) != _shapes(source.model):
            raise InputError(
                f"--teacher {options.teacher} is a network of another shape, whose layers cannot be compared with "
                "those of the network to quantize; leave supervision by layers out"
            )
        return cls(source, plan, data, hyp, device, size, held_out, teacher)

    def network(self) -> nn.Module:
        """A copy of the fused float network, on the device."""
        return copy.deepcopy(self.source.model).to(self.device)

    def teacher(self) -> nn.Module:
        """The float network that supervises QAT, on the device."""
        return upstream.call_fused(copy.deepcopy((self.taught_by or self.source).model).to(self.device))

    def dataset_hash(self, files: Mapping[str, str | None]) -> str:
        """What a run reads, to be compared when it is resumed; `files` are those beside the dataset, by option.

        Raises:
            InputError: or one of its kinds: something of it cannot be read.
        """
        return dataset_hash(self.data, ("train", "val"), files)

    def training_loader(self, options: QuantizeOptions) -> DataLoader[Any]:
        """The training images that are not held out, in an order that the seed decides, augmented with `--hyp`."""
        keep = None if not self.held_out else lambda file: os.path.realpath(file) not in self.held_out
        return self.calibration_loader(options, augment=self.hyp is not None, hyp=self.hyp, keep=keep)

    def held_out_loader(self, options: QuantizeOptions) -> DataLoader[Any]:
        """The held out training images, letterboxed as for validation; all of them where none are held out."""
        keep = None if not self.held_out else lambda file: os.path.realpath(file) in self.held_out
        return self.calibration_loader(options, shuffle=False, keep=keep)

    def calibration_loader(self, options: QuantizeOptions, shuffle: bool = True, **more: Any) -> DataLoader[Any]:
        """All training images, letterboxed as for validation, in an order that the seed decides; or as `more` says."""
        return make_loader(
            self.data, "train", imgsz=self.imgsz, batch_size=options.batch_size, stride=self.source.stride,
            workers=options.workers, shuffle=shuffle, seed=options.seed, progress=True, share=True, **more,
        )  # fmt: skip

    def validation_loader(self, batch_size: int, workers: int, limit: int | None = None) -> DataLoader[Any]:
        """Validation images in a fixed order, at most `limit` of them, evenly spread; every process loads them all."""
        stride = None  # of the grid that masks are compared on
        if self.has_masks:
            with TorchRunner(upstream.call_fused(self.network()), self.device) as runner:
                stride = mask_stride(runner, (self.imgsz, self.imgsz))
        return make_loader(
            self.data, "val", imgsz=self.imgsz, batch_size=batch_size, stride=self.source.stride, workers=workers,
            limit=limit, mask_stride=stride, progress=True,
        )  # fmt: skip

    @property
    def has_masks(self) -> bool:
        """Whether the network is one for segmentation."""
        return bool(task_of_head(last_layer(self.source.model)).prototypes)


def choose_held_out(data: DataConfig, number: int) -> frozenset[str]:
    """Real paths of training images, evenly spread: so many, and a tenth of the split at most."""
    files = find_images(data.paths("train"))
    number = min(number, len(files) // 10)
    return frozenset(os.path.realpath(files[(2 * i + 1) * len(files) // (2 * number)]) for i in range(number))


def load_teacher(weights: str | None, student: upstream.FloatCheckpoint) -> upstream.FloatCheckpoint | None:
    """The float checkpoint of `--teacher`, fused; None without one.

    Raises:
        InputError: or one of its kinds: it cannot be read, or its head gives other maps than the student's.
    """
    if weights is None:
        return None
    teacher = upstream.load_float(weights)
    ours, theirs = (
        {"classes": one.nc, "strides": [int(stride) for stride in head.stride], "bins": int(head.reg_max),
         "masks": masks_of_head(head)}
        for one, head in ((student, student.model.model[-1]), (teacher, teacher.model.model[-1]))
    )  # fmt: skip
    for name, value in ours.items():
        if theirs[name] != value:
            raise InputError(
                f"--teacher {weights} has {name} {theirs[name]}, and the network to quantize {value}; the maps of "
                "both heads are compared, so that they must agree"
            )
    upstream.fuse(teacher.model)
    return teacher


def _shapes(model: nn.Module) -> dict[str, Any]:
    return {name: value.shape for name, value in model.state_dict().items()}


def image_batches(loader: DataLoader[Any]) -> Iterator[Tensor]:
    """The images of each batch, uint8 `[B, 3, H, W]`; where several processes share them, this one's, maybe none.

    Those that cannot be decoded are left out. Their number among all that were asked for is said where the pass ends,
    or the caller ends it, and only in the first pass of a loader.

    Raises:
        DataError: at the end, if not one of them could be decoded.
    """
    found, batches = 0, 0
    shared = isinstance(loader.batch_sampler, ShareOfBatches)
    try:
        for batch in loader:
            batches += 1
            count, images = whole_batch(batch.images) if shared else (len(batch), batch.images)
            found += count
            if count:
                yield images
    finally:
        _warn_of_undecodable(loader, batches, found)
    if not found:
        files = [image.path for image in getattr(loader.dataset, "images", ())]
        first = f"; the first: {files[0]}" if files else ""
        count = len(loader.dataset)
        raise DataError(f"none of the {count} images can be decoded, although their headers can be read{first}")


def _warn_of_undecodable(loader: Any, batches: int, found: int) -> None:
    """Say how many images `batches` batches lack, if this loader's were not said before."""
    asked = min(batches * loader.batch_sampler.batch_size, len(loader.dataset))
    if 0 < found < asked and distributed.is_main() and not getattr(loader, "undecodable_said", False):
        loader.undecodable_said = True
        what = "%d of %d images cannot be decoded and are left out"
        if isinstance(loader.dataset, SeededImages):  # one file may be in several mosaics
            what = "%d of %d augmented images are left out, because an image that they are made of cannot be decoded"
        logger.warning(what, asked - found, asked)


def check_classes(weights: str | Path, names: Mapping[int, str], data: DataConfig) -> None:
    """Raises `DataError` when a checkpoint and a dataset have different numbers of classes."""
    if len(names) != data.nc:
        raise DataError(
            f"{weights} detects {len(names)} classes and {data.file} has {data.nc}; "
            "give the dataset that the weights were trained on"
        )


def check_labelled(data: DataConfig) -> None:
    """Raises `DataError` when there are no validation images, or none of them has a label file: AP needs labels."""
    files = find_images(data.paths("val"))
    if not any(os.path.isfile(label_file(file)) for file in files):
        raise unlabelled("val", files[0])


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
    return validate(Augmentation, content, f"--hyp {path}").model_dump()
