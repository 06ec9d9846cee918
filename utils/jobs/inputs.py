"""Inputs of qat.py's commands, loaded and checked before anything is written."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import Field, create_model

from models.quantize import checkpoint, placement
from models.quantize.finetune import as_input, seed_everything
from models.quantize.recipe import Number, Recipe
from utils import upstream
from utils.core.device import select_device
from utils.core.errors import DataError, InputError
from utils.core.files import EXPECTED, read_yaml
from utils.core.input_spec import channels_of
from utils.core.options import one_size, size_text
from utils.core.strict_model import StrictModel, validate
from utils.core.tasks import task_of_head
from utils.core.text import plural
from utils.evaluation.bootstrap import group_images
from utils.evaluation.data_yaml import check_classes, load_data
from utils.evaluation.dataset import Loader, make_loader, whole_batch
from utils.evaluation.image_files import find_images
from utils.evaluation.input_plan import fitting_size
from utils.evaluation.labels import unlabelled
from utils.jobs.open import dataset_of
from utils.jobs.options import Kind, QatOptions, QuantizeOptions, SensitiveOptions
from utils.runners.pytorch import last_layer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from models.quantize.checkpoint import QuantizedCheckpoint
    from utils.evaluation.data_yaml import DataConfig

logger = logging.getLogger(__name__)

OTHER_NAMES = "the class names of the model differ from those of the dataset"
MOST_LEFT_OUT = 0.05  # share of a split's images; without more, AP and ranges would be those of another set
FEW_IMAGES = 100  # of calibration; docs/calibration.md says what fewer cost
AnyOptions = TypeVar("AnyOptions", bound=QatOptions)
Profile = Sequence[tuple[str, float]]  # layers of an engine and their milliseconds
FEWEST_HELD_OUT = 100  # images: on 24, the loss jumped by half from epoch to epoch
AUGMENTATION = {  # parameters of a hyp.yaml that upstream reads → largest value
    "mosaic": 1,
    "mixup": 1,
    "copy_paste": 1,
    "flipud": 1,
    "fliplr": 1,
    "hsv_h": 1,
    "hsv_s": 1,
    "hsv_v": 1,
    "translate": 1,
    "scale": 1,
    "perspective": 1,
    "degrees": 180,
    "shear": 45,
}


@dataclass(frozen=True)
class Inputs(Generic[Kind]):
    """Everything that a run works on.

    Attributes:
        options: the command's options.
        recipe: the recipe that `plan` was made by.
        source: the FP32 checkpoint; its model is fused, and is copied rather than run.
        plan: the places of quantizers.
        data: the dataset, with the same number of classes.
        device: the device that networks run on.
        imgsz: side of the input, or (height, width), in pixels, multiples of the network's stride.
        held_out: real paths of the training images that neither calibrate nor train, and that choose the calibration
            method and the best state of QAT.
        hyp: the augmentation's parameters; None for images as validation sees them.
        profile: layers of an engine and their times, for the costs of the network's parts; None without one.
        same_names: the network's classes have the names that the dataset gives them.
    """

    options: Kind
    recipe: Recipe
    source: upstream.FloatCheckpoint
    plan: placement.Plan
    data: DataConfig
    device: torch.device
    imgsz: int | tuple[int, int]
    held_out: frozenset[str] = frozenset()
    hyp: dict[str, Any] | None = None
    profile: Profile | None = None
    same_names: bool = True

    @classmethod
    def load(cls, options: Kind, recipe: Recipe) -> Inputs[Kind]:
        """Load the inputs that the options name, check that they fit together, and plan where quantizers go.

        Raises:
            InputError: an input cannot be used; a subclass names its kind.
        """
        device = select_device(options.device)
        profile = None
        if isinstance(options, SensitiveOptions) and options.profile:
            profile = read_profile(options.profile)
        source = upstream.load_float(options.weights)
        options = from_training(options, source)
        data = load_data(options.data or "")
        same_names = check_classes(source.names, data, options.weights)
        _read_splits(data, options)
        check_left_out(data, options.force)
        hyp = _read_augmentation(options)
        checkpoint.check_rebuilds(options.weights, upstream.fuse(source.model))
        plan = placement.plan(source.model, recipe)
        placement.check(plan, recipe)
        imgsz = one_size(fitting_size(options.imgsz, source.stride))
        held_out = choose_held_out(data, recipe.finetune.held_out)
        available = len(data.read("train").images) - len(held_out)
        _warn_of_few_images(available, recipe.calibration.images)
        return cls(options, recipe, source, plan, data, device, imgsz, held_out, hyp, profile, same_names)

    def network(self) -> nn.Module:
        """Return a copy of the fused FP32 model, on the device."""
        return copy.deepcopy(self.source.model).to(self.device)

    def placed(self, plan: placement.Plan | None = None) -> nn.Module:
        """Return a copy with quantizers, not calibrated, in evaluation mode; `plan` replaces the run's."""
        model = self.network()
        placement.apply(model, plan or self.plan)
        return model.to(self.device).eval()

    def calibration_images(self) -> Iterator[Tensor]:
        """Return batches of training images, letterboxed as for validation, in the network's form, on the device."""
        from tqdm import tqdm

        seed_everything(self.options.seed)
        loader = self.training_loader(augment=False, first=self.recipe.calibration.images)
        is_quiet = not logger.isEnabledFor(logging.INFO)
        channels = channels_of(self.source.model)
        batches = tqdm(image_batches(loader), "calibration", len(loader), unit="batch", disable=is_quiet)
        return (as_input(batch, self.device, channels) for batch in batches)

    def training_loader(self, *, batches: int = 1, **different: Any) -> Loader:
        """Return the training images that are not held out, in an order that the seed decides, augmented with `--hyp`.

        Args:
            batches: size of a batch of the loader, in batches of `--batch-size`.
            different: arguments of `make_loader` that replace these.
        """
        arguments: dict[str, Any] = {"augment": self.hyp is not None, "hyp": self.hyp, "shuffle": True}
        arguments["keep"] = self._is_not_held_out if self.held_out else None
        arguments |= different
        return make_loader(
            self.data,
            "train",
            imgsz=self.imgsz,
            batch_size=batches * self.options.batch_size,
            stride=self.source.stride,
            workers=self.options.workers,
            seed=self.options.seed,
            share=True,
            progress=True,
            **arguments,
        )

    def _is_held_out(self, file: str) -> bool:
        """True if an image is held out."""
        return os.path.realpath(file) in self.held_out

    def _is_not_held_out(self, file: str) -> bool:
        """True if an image calibrates and trains."""
        return not self._is_held_out(file)

    @cached_property
    def held_out_images(self) -> list[Tensor]:
        """The images whose loss chooses calibration methods and the best state of QAT, in batches, letterboxed.

        They are the held-out ones; if none are held out, all training images.
        """
        keep = self._is_held_out if self.held_out else None
        batches = 4 if self.device.type == "cuda" else 1  # small batches leave a GPU idle
        loader = self.training_loader(augment=False, shuffle=False, keep=keep, batches=batches)
        return list(image_batches(loader))

    @property
    def deciding_images(self) -> str:
        """The images of `held_out_images`, in words."""
        if self.held_out:
            return plural(len(self.held_out), "held-out training image")
        return "all training images (too few to hold some out)"

    @property
    def doubts(self) -> list[str]:
        """Sentences about what a user has to check before the next step."""
        return doubts_about(self.data, self.same_names, self.options.unlabelled)

    @property
    def has_masks(self) -> bool:
        """True if the network is one for segmentation."""
        return bool(task_of_head(last_layer(self.source.model)).prototypes)


def doubts_about(data: DataConfig, same_names: bool, unlabelled: bool) -> list[str]:
    """Return a sentence for other class names, and, if labels count, for each evaluated split that lacks label files.

    Args:
        same_names: the network's classes have the names that the dataset gives them.
        unlabelled: labels are not read.
    """
    doubts = []
    if not same_names:
        doubts.append(OTHER_NAMES)
    if unlabelled:
        return doubts
    for counts in data.counts():
        if counts.lacks_labels and not counts.name.startswith("train"):
            images = plural(counts.images, "image")
            doubts.append(f"{counts.without_a_label_file} of {images} of {counts.name} have no label file")
    return doubts


def from_training(options: AnyOptions, source: upstream.FloatCheckpoint | QuantizedCheckpoint) -> AnyOptions:
    """Return the options with the image size and the dataset that the weights were trained with as defaults.

    For a quantized checkpoint they are those of its calibration. The log has a line for each default, and for a size
    that differs from the weights'. `InputError` if there is no dataset.
    """
    size = options.imgsz or source.imgsz or 640
    _log_size(options, source, size)
    data = dataset_of(options.data, {Path(options.weights): source.data})
    return options.model_copy(update={"imgsz": size, "data": data})


def _log_size(
    options: QatOptions, source: upstream.FloatCheckpoint | QuantizedCheckpoint, size: int | tuple[int, int]
) -> None:
    """Log the image size if it is a default, or another than that of the weights."""
    weights = options.weights
    own_size = source.imgsz
    trained = "trained" if isinstance(source, upstream.FloatCheckpoint) else "calibrated"
    if options.imgsz is None and own_size is None:
        text = "--imgsz was not given, and %s does not store the size that it was %s at: using %s"
        logger.info(text, weights, trained, size_text(size))
    elif options.imgsz is None:
        logger.info("--imgsz was not given: using %s, at which %s was %s", size_text(size), weights, trained)
    elif own_size is not None and own_size != size:
        text = "--imgsz is %s, and %s was %s at %s"
        logger.info(text, size_text(size), weights, trained, size_text(own_size))


def choose_held_out(data: DataConfig, number: int) -> frozenset[str]:
    """Return real paths of training images, evenly spread: a tenth of the split, at least 100, and at most `number`.

    The result is empty if fewer images than these would be left for QAT.
    """
    files = find_images(data.paths("train"))
    number = min(number, max(len(files) // 10, FEWEST_HELD_OUT))
    if 2 * number > len(files):
        return frozenset()
    places = [(2 * i + 1) * len(files) // (2 * number) for i in range(number)]
    return frozenset(os.path.realpath(files[place]) for place in places)


def image_batches(loader: Any) -> Iterator[Tensor]:
    """Yield the images of each batch, uint8 `[B, 3, H, W]`; of a shared batch this process's, maybe none.

    Images that cannot be decoded are left out; how many is logged after a loader's first pass.

    Raises:
        DataError: no image can be decoded.
    """
    decoded = 0
    batches = 0
    is_shared = loader.batch_sampler.shared
    try:
        for batch in loader:
            batches += 1
            count, images = whole_batch(batch.images) if is_shared else (len(batch), batch.images)
            decoded += count
            if count:
                yield images
    finally:  # the caller may end the pass
        expected = min(batches * loader.batch_sampler.batch_size, loader.batch_sampler.images)
        if 0 < decoded < expected:
            _warn_of_undecodable(loader, expected - decoded, expected)
    if not decoded:
        first = "".join(f"; the first: {image.path}" for image in getattr(loader.dataset, "images", ())[:1])
        images_in_words = plural(len(loader.dataset), "image")
        raise DataError(f"cannot decode any of the {images_in_words}, although their headers can be read{first}")


def _warn_of_undecodable(loader: Any, undecodable: int, images: int) -> None:
    """Warn, once for a loader, of images that are left out."""
    if getattr(loader, "undecodable_said", False):
        return
    loader.undecodable_said = True
    text = "%d of %d images are left out, since they cannot be decoded, or are mosaics of one that cannot"
    logger.warning(text, undecodable, images)


def _read_splits(data: DataConfig, options: QatOptions) -> None:
    """Read the training split, and the validation split if the command uses it; `DataError` if one cannot be read."""
    data.read("train", progress=True)
    if options.unlabelled:
        if not isinstance(options, QuantizeOptions) or options.qat == "auto":
            data.paths("val")  # raises without one
        return
    if isinstance(options, QuantizeOptions) and options.evaluates_nothing:
        return
    images = data.read("val", progress=True).images
    if not any(image.labelled for image in images):
        raise unlabelled("val", images[0].path)
    if options.image_groups:
        group_images([image.path for image in images], options.image_groups)


def check_left_out(data: DataConfig, force: bool) -> None:
    """Stop before a split is evaluated, or calibrated on, that lacks too many of its images.

    Raises:
        DataError: more than `MOST_LEFT_OUT` of a split's images are left out, and `force` is not given.
    """
    for counts in data.counts():
        if counts.left_out_share > MOST_LEFT_OUT and not force:
            total = counts.images + counts.left_out
            raise DataError(
                f"{counts.left_out} of {plural(total, 'image')} of {counts.name} are left out (first: "
                f"{counts.first['left_out']}); correct them, or go on without them with --force"
            )


def _read_augmentation(options: QatOptions) -> dict[str, Any] | None:
    """Return the parameters in the file of `--hyp`, if given; `InputError` for an input that is not a square."""
    file = options.augmentation
    if not file:
        return None
    hyp = read_hyp(file)
    if not isinstance(options.imgsz, int):
        raise InputError(
            f"--hyp augments squares, as upstream does, and --imgsz is {size_text(options.imgsz or 640)}; leave "
            "--hyp out, or give one side"
        )
    return hyp


def _warn_of_few_images(available: int, number: int) -> None:
    """Warn if fewer than `FEW_IMAGES` images calibrate; log it if they are only fewer than the recipe's `number`."""
    used = min(available, number)
    if used < min(number, FEW_IMAGES):
        text = "calibration has %s; with fewer than %d AP varies more (docs/calibration.md of the overlay)"
        logger.warning(text, plural(used, "image"), FEW_IMAGES)
    elif used < number:
        logger.info("calibration has %s; the recipe asks for %d", plural(used, "image"), number)


def read_hyp(path: str | Path) -> dict[str, Any]:
    """Read upstream's augmentation parameters from a YAML such as data/hyps/hyp.scratch-high.yaml.

    The file may hold other parameters, too.

    Raises:
        InputError: the file cannot be read, or a parameter is missing, or not a number that the augmentation can use.
    """
    content = read_yaml(path, f"--hyp takes {EXPECTED['hyp']}")
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name in AUGMENTATION}
    bounds: dict[str, Any] = {}
    for name, largest in AUGMENTATION.items():
        bounds[name] = (Annotated[Number, Field(ge=0, le=largest)], ...)
    model = create_model("Augmentation", __base__=StrictModel, **bounds)
    return validate(model, content, f"--hyp {path}").model_dump()


def read_profile(path: str | Path) -> Profile:
    """Read layer names and milliseconds of an engine.

    The file is a JSON list of `{"name", "ms"}`, or an object with such a list as `layers`.

    Raises:
        InputError: the file is not one of these, or holds no layer times.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"), strict=False)
        rows = content["layers"] if isinstance(content, dict) else content
        profile = [(str(row["name"]), float(row["ms"])) for row in rows if row["ms"] is not None]
    except (OSError, ValueError, TypeError, KeyError) as error:
        expected = "expected ENGINE.layers.json, as scripts/inspect_engine.py writes it"
        raise InputError(f"--profile {path}: {error}; {expected}") from error
    if sum(ms for _, ms in profile) <= 0:
        raise InputError(f"--profile {path} contains no layer times; write it for an engine of --max-aux-streams 0")
    return profile
