"""What qat.py's commands work on, loaded and checked before anything is written."""

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
from utils.evaluation.images import find_images, unlabelled
from utils.evaluation.input_plan import fitting_size
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
MOST_LEFT_OUT = 0.05  # share of a split's images; of more, AP and ranges are those of another set
FEW_IMAGES = 100  # of calibration; docs/calibration.md says what fewer cost
AnyOptions = TypeVar("AnyOptions", bound=QatOptions)
Profile = Sequence[tuple[str, float]]  # layers of an engine and their milliseconds
FEWEST_HELD_OUT = 100  # images: on 24, the loss jumped by half from epoch to epoch
SHARES = (
    *("mosaic", "mixup", "copy_paste", "flipud", "fliplr", "hsv_h", "hsv_s", "hsv_v"),
    *("translate", "scale", "perspective"),
)
AUGMENTATION = {**dict.fromkeys(SHARES, 1), "degrees": 180, "shear": 45}  # what upstream reads of a hyp.yaml → largest


@dataclass(frozen=True)
class Inputs(Generic[Kind]):
    """What a run works on.

    Attributes:
        options: of the command.
        recipe: that `plan` was made by.
        source: the float checkpoint; its network is fused, and is copied rather than run.
        plan: where quantizers go.
        data: the dataset, with the same number of classes.
        device: where networks run.
        imgsz: side of the input, or (height, width), in pixels, multiples of the network's stride.
        held_out: real paths of the training images that neither calibrate nor train, and that choose the calibration
            method and the best state of QAT.
        hyp: the augmentation's parameters; None for images as validation sees them.
        profile: the engine's layers that say what a part of the network costs, if there are any.
        same_names: whether the network's classes have the names that the dataset gives them.
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
        """Load what the options name, check that it fits together (or `InputError`), and plan where quantizers go."""
        device = select_device(options.device)
        profile = read_profile(options.profile) if isinstance(options, SensitiveOptions) and options.profile else None
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
        _say_how_many_calibrate(len(data.read("train").images) - len(held_out), recipe.calibration.images)
        return cls(options, recipe, source, plan, data, device, imgsz, held_out, hyp, profile, same_names)

    def network(self) -> nn.Module:
        """A copy of the fused float network, on the device."""
        return copy.deepcopy(self.source.model).to(self.device)

    def placed(self, plan: placement.Plan | None = None) -> nn.Module:
        """A copy with quantizers, not calibrated, in evaluation mode; `plan` is another than the run's."""
        model = self.network()
        placement.apply(model, plan or self.plan)
        return model.to(self.device).eval()

    def calibration_images(self) -> Iterator[Tensor]:
        """Batches of training images as validation sees them, as the network takes them (`as_input`), on the device."""
        from tqdm import tqdm

        seed_everything(self.options.seed)
        loader = self.training_loader(augment=False, first=self.recipe.calibration.images)
        quiet, channels = not logger.isEnabledFor(logging.INFO), channels_of(self.source.model)
        batches = tqdm(image_batches(loader), "calibration", len(loader), unit="batch", disable=quiet)
        return (as_input(batch, self.device, channels) for batch in batches)

    def training_loader(self, *, batches: int = 1, **different: Any) -> Loader:
        """The training images that are not held out, in an order that the seed decides, augmented with `--hyp`."""
        keep = (lambda file: os.path.realpath(file) not in self.held_out) if self.held_out else None
        how = {"augment": self.hyp is not None, "hyp": self.hyp, "shuffle": True, "keep": keep, **different}
        return make_loader(
            self.data, "train", imgsz=self.imgsz, batch_size=batches * self.options.batch_size, progress=True,
            stride=self.source.stride, workers=self.options.workers, seed=self.options.seed, share=True, **how,
        )  # fmt: skip

    @cached_property
    def held_out_images(self) -> list[Tensor]:
        """The images whose loss decides, in batches, letterboxed as for validation.

        They are the held-out ones; where none are held out, all training images.
        """
        keep = None if not self.held_out else lambda file: os.path.realpath(file) in self.held_out
        batches = 4 if self.device.type == "cuda" else 1  # a GPU waits for Python in small ones; training keeps more
        return list(image_batches(self.training_loader(augment=False, shuffle=False, keep=keep, batches=batches)))

    @property
    def deciding_images(self) -> str:
        """The images whose loss decides, in words."""
        if self.held_out:
            return plural(len(self.held_out), "held-out training image")
        return "all training images (too few to hold some out)"

    @property
    def doubts(self) -> list[str]:
        """What a user has to look at before the next step."""
        return doubts_about(self.data, self.same_names, self.options.unlabelled)

    @property
    def has_masks(self) -> bool:
        """Whether the network is one for segmentation."""
        return bool(task_of_head(last_layer(self.source.model)).prototypes)


def doubts_about(data: DataConfig, same_names: bool, unlabelled: bool) -> list[str]:
    """A sentence for other class names, and, where labels count, for each evaluated split that lacks many label files.

    Args:
        same_names: whether the network's classes have the names that the dataset gives them.
        unlabelled: labels are not read.
    """
    found = [] if same_names else [OTHER_NAMES]
    if unlabelled:
        return found
    return found + [
        f"{counts.without_a_label_file} of {plural(counts.images, 'image')} of {counts.name} have no label file"
        for counts in data.counts()
        if counts.lacks_labels and not counts.name.startswith("train")
    ]


def from_training(options: AnyOptions, source: upstream.FloatCheckpoint | QuantizedCheckpoint) -> AnyOptions:
    """The options with the image size and the dataset that the weights were trained (or calibrated) with as defaults.

    What is taken, and a size other than the weights', is said in a line. `InputError` if there is no dataset.
    """
    weights, known = options.weights, source.imgsz
    size = options.imgsz or known or 640
    if options.imgsz is None or known not in (None, size):
        given = "was given" if options.imgsz else "is taken, since none was given"
        trained = "trained" if isinstance(source, upstream.FloatCheckpoint) else "calibrated"
        own = size_text(known) if known else "a size that it does not name"
        logger.info("--imgsz %s %s; %s was %s at %s", size_text(size), given, weights, trained, own)
    data = dataset_of(options.data, {Path(weights): source.data})
    return options.model_copy(update={"imgsz": size, "data": data})


def choose_held_out(data: DataConfig, number: int) -> frozenset[str]:
    """Real paths of training images, evenly spread: a tenth of the split, at least 100, and at most `number`.

    They are none where QAT would be left with fewer images than these: then all training images decide.
    """
    files = find_images(data.paths("train"))
    number = min(number, max(len(files) // 10, FEWEST_HELD_OUT))
    if 2 * number > len(files):
        return frozenset()
    return frozenset(os.path.realpath(files[(2 * i + 1) * len(files) // (2 * number)]) for i in range(number))


def image_batches(loader: Any) -> Iterator[Tensor]:
    """The images of each batch, uint8 `[B, 3, H, W]`; where several processes share them, this one's, maybe none.

    Those that cannot be decoded are left out; how many is said after a loader's first pass. `DataError` if all are.
    """
    decoded, batches, sampler = 0, 0, loader.batch_sampler
    try:
        for batch in loader:
            batches += 1
            count, images = whole_batch(batch.images) if sampler.shared else (len(batch), batch.images)
            decoded += count
            if count:
                yield images
    finally:  # the caller may end the pass
        asked = min(batches * sampler.batch_size, sampler.images)
        if 0 < decoded < asked and not getattr(loader, "undecodable_said", False):
            loader.undecodable_said = True
            why = "which cannot be decoded, or are mosaics of one that cannot"
            logger.warning("%d of %d images are left out, %s", asked - decoded, asked, why)
    if not decoded:
        first = "".join(f"; the first: {image.path}" for image in getattr(loader.dataset, "images", ())[:1])
        what = plural(len(loader.dataset), "image")
        raise DataError(f"none of the {what} can be decoded, although their headers can be read{first}")


def _read_splits(data: DataConfig, options: QatOptions) -> None:
    """Read the training split, and the validation split where the command uses it; `DataError` where it cannot."""
    data.read("train", progress=True)
    if options.unlabelled:
        if not isinstance(options, QuantizeOptions) or options.qat == "auto":
            data.paths("val")
        return
    if isinstance(options, QuantizeOptions) and options.evaluates_nothing:
        return
    images = data.read("val", progress=True).images
    if not any(image.labelled for image in images):
        raise unlabelled("val", images[0].path)
    if groups := options.image_groups:
        group_images([image.path for image in images], groups)


def check_left_out(data: DataConfig, force: bool) -> None:
    """Stop where a split of which much is left out would be measured, or calibrated on.

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
    """The parameters that `--hyp` names, if it is given; `InputError` for an input that is not a square."""
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


def _say_how_many_calibrate(available: int, wanted: int) -> None:
    """Warn where so few images calibrate that AP varies more from draw to draw."""
    used = min(available, wanted)
    if used < min(wanted, FEW_IMAGES):
        logger.warning(
            "calibration has %s; with fewer than %d AP varies more (docs/calibration.md of the overlay)",
            plural(used, "image"), FEW_IMAGES,
        )  # fmt: skip
    elif used < wanted:
        logger.info("calibration has %s of the %d wanted", plural(used, "image"), wanted)


def read_hyp(path: str | Path) -> dict[str, Any]:
    """Upstream's augmentation parameters, from a YAML such as data/hyps/hyp.scratch-high.yaml, which holds others, too.

    Raises:
        InputError: the file cannot be read, or a parameter is missing, or no number that the augmentation can use.
    """
    content = read_yaml(path, f"--hyp takes {EXPECTED['hyp']}")
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name in AUGMENTATION}
    bounds: dict[str, Any] = {
        name: (Annotated[Number, Field(ge=0, le=most)], ...) for name, most in AUGMENTATION.items()
    }
    return validate(create_model("Augmentation", __base__=StrictModel, **bounds), content, f"--hyp {path}").model_dump()


def read_profile(path: str | Path) -> Profile:
    """Layer names and milliseconds of an engine: a JSON list of `{"name", "ms"}`, or an object with it as `layers`."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"), strict=False)
        rows = content["layers"] if isinstance(content, dict) else content
        found = [(str(row["name"]), float(row["ms"])) for row in rows if row["ms"] is not None]
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = "expected ENGINE.layers.json, as scripts/inspect_engine.py writes it"
        raise InputError(f"--profile {path}: {error}; {what}") from error
    if not found or sum(ms for _, ms in found) <= 0:
        raise InputError(f"--profile {path} holds no layer time")
    return found
