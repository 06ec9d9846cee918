"""What a user can choose for the commands of qat.py: frozen, checked once.

Torch is not imported here, so that `-h` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from models.quantize.recipe import AUTO, QUANTIZERS, Recipe
from utils.core.bounds import check_bounds
from utils.core.errors import InputError, RecipeError
from utils.core.shown import shown
from utils.core.thresholds import AP_CONFIDENCE

Options = TypeVar("Options", bound="QuantizeOptions | CalibrateOptions")
# On resume these may differ from what the run was started with: they change where and how long, not what is computed.
FREE_ON_RESUME = frozenset({"device", "workers", "budget"})
GRANULARITIES = ("layer", "module", "quantizer")
METRICS = ("proxy", "ap")
# Options that stand for an entry of the recipe → its section and key.
RECIPE_OPTIONS = {
    "calib_method": ("calibration", "method"),
    "calib_batches": ("calibration", "batches"),
    "percentile": ("calibration", "percentile"),
    "epochs": ("finetune", "epochs"),
    "iters": ("finetune", "iters"),
    "lr": ("finetune", "lr"),
    "supervision_stride": ("finetune", "supervision_stride"),
    "supervision": ("finetune", "supervision"),
    "train": ("finetune", "train"),
}
FOLDER = frozenset({"project", "name", "exist_ok"})  # a resumed run stays in its folder, whatever these say


@dataclass(frozen=True)
class _Options:
    """What every command takes.

    Raises:
        InputError: a value is outside its range.
    """

    weights: str = ""
    data: str = "data/coco.yaml"
    device: str = ""
    batch_size: int = 10
    imgsz: int = 640
    workers: int = 8
    project: str = ""
    name: str = "exp"
    exist_ok: bool = False

    def __post_init__(self) -> None:
        _check_kinds(self)
        check_bounds(self, "batch_size", "imgsz", "workers")


@dataclass(frozen=True)
class _CalibratingOptions(_Options):
    """What every command takes that calibrates a float network.

    Raises:
        InputError: a value is outside its range.
    """

    hyp: str | None = None
    seed: int = 57
    recipe: str | None = None
    calib_batches: int | None = None

    def __post_init__(self) -> None:
        for name, (section, key) in RECIPE_OPTIONS.items():
            if getattr(self, name, None) is not None:
                Recipe.from_dict({section: {key: getattr(self, name)}}, flag(name))
        super().__post_init__()
        check_bounds(self, "seed")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the saved state."""
        return asdict(self)


@dataclass(frozen=True)
class QuantizeOptions(_CalibratingOptions):
    """Options of `qat.py quantize`. Those that stand for a recipe's entry are None where the recipe decides.

    Raises:
        InputError: a value is outside its range.
    """

    project: str = "runs/qat"
    no_eval_origin: bool = False
    no_eval_ptq: bool = False
    ptq_only: bool = False
    quantizer: str = "torch"
    calib_method: str | None = None
    percentile: float | None = None
    epochs: int | None = None
    iters: int | None = None
    lr: float | None = None
    train: str | None = None
    supervision: str | None = None
    supervision_stride: int | None = None
    teacher: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantizer not in QUANTIZERS:
            raise InputError(f"--quantizer {self.quantizer!r} is unknown; choose {' or '.join(QUANTIZERS)}")

    @property
    def stem(self) -> str:
        """What files are named after: the weights file without its suffix."""
        return Path(self.weights).stem


@dataclass(frozen=True)
class EvalOptions(_Options):
    """Options of `qat.py eval`.

    Raises:
        InputError: a value is outside its range.
    """

    project: str = "runs/qat_eval"
    conf_thres: float = AP_CONFIDENCE
    iou_thres: float | None = None
    save_json: bool = False
    upsample_masks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "conf_thres", "iou_thres")


@dataclass(frozen=True)
class CalibrateOptions(_CalibratingOptions):
    """Options of `qat.py calibrate`: those of a quantization that it compares methods for, and on what.

    Raises:
        InputError: a value is outside its range.
    """

    project: str = "runs/qat_calibrate"
    num_image: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "num_image")

    def as_quantize(self) -> QuantizeOptions:
        """The options of a quantization of the same network with the same images."""
        shared = {item.name for item in fields(QuantizeOptions)} & {item.name for item in fields(self)}
        return QuantizeOptions(**{name: getattr(self, name) for name in shared})


@dataclass(frozen=True)
class SensitiveOptions(CalibrateOptions):
    """Options of `qat.py sensitive`.

    Raises:
        InputError: a value is outside its range.
    """

    project: str = "runs/qat_sensitive"
    calib_method: str | None = None
    percentile: float | None = None
    granularity: str = "layer"
    metric: str = "proxy"
    budget: float | None = None  # minutes
    target_drop: float = 0.002
    float_budget: float = 0.5  # share of the network's cost
    profile: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("granularity", GRANULARITIES), ("metric", METRICS)):
            if getattr(self, name) not in choices:
                raise InputError(f"{flag(name)} {getattr(self, name)!r} is none of {', '.join(choices)}")
        check_bounds(self, "target_drop", "float_budget", "budget")


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def given_options(arguments: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The entries of parsed `arguments` that belong to `kind` and that the user gave (the others are None)."""
    names = {item.name for item in fields(kind)}
    return {key: value for key, value in arguments.items() if key in names and value is not None}


def resumed_options(saved: Mapping[str, Any], given: Mapping[str, Any], kind: type[Options]) -> Options:
    """The options of a saved run, with what the user may change on resume taken from `given`.

    Raises:
        InputError: an option was given that would make it another run.
    """
    for name, value in given.items():
        if name not in FREE_ON_RESUME | FOLDER and value != saved.get(name):
            before = "not given" if saved.get(name) is None else saved[name]
            raise InputError(
                f"{flag(name)} is {value} here and {before} in the run to resume; "
                f"leave it out, or start a new run without --resume"
            )
    known = {item.name for item in fields(kind)}
    kept = {key: value for key, value in saved.items() if key in known}
    return kind(**kept | {key: value for key, value in given.items() if key in FREE_ON_RESUME & known})


def further_files(options: QuantizeOptions) -> dict[str, str | None]:
    """The files that a run reads beside weights, dataset and recipe, by option."""
    return {"--hyp": options.hyp, "--teacher": options.teacher}


def merged_recipe(options: QuantizeOptions) -> Recipe:
    """The recipe of a run: the default, then `--recipe`'s file, then what the command line says.

    `--lr` is the highest rate of weights; the rates of biases and ranges keep their ratio to it. `--supervision-stride`
    is one of layers, and so asks for them.

    Raises:
        RecipeError: an unknown key, a value outside its range, a percentile for a method that has none, or a stride for
            a supervision that has none.
    """
    recipe = Recipe.from_file(options.recipe)
    changes = {f"{section}_{key}": getattr(options, name) for name, (section, key) in RECIPE_OPTIONS.items()}
    if options.supervision_stride is not None:
        if options.supervision == "task":
            raise RecipeError(
                f"--supervision-stride {options.supervision_stride} does nothing with --supervision task, which "
                "compares the head's maps only; leave one of them out"
            )
        changes["finetune_supervision"] = "layers"
    merged = recipe.replace(**{key: value for key, value in changes.items() if value is not None})
    if options.percentile is not None and merged.calibration.method != "percentile":
        raise RecipeError(
            f"--percentile {options.percentile} does nothing with calibration method {merged.calibration.method!r}; "
            "add --calib-method percentile"
        )
    return merged


def check_recipe(options: QuantizeOptions, given: Mapping[str, Any], saved: Recipe) -> None:
    """That a recipe's file, where one is given on resume, still says what it said when the run was started.

    The run goes on with its saved recipe, in which calibration by `auto` may have put the method that it found.

    Raises:
        InputError: it says something else.
        RecipeError: it cannot be read.
    """
    if given.get("recipe") is None:
        return
    now = merged_recipe(options)
    if now.calibration.method == AUTO:
        now = now.replace(calibration=saved.calibration)
    if now != saved:
        raise InputError(
            f"{options.recipe} has changed since the run was started; leave --recipe out to go on with what it said, "
            "or start a new run without --resume"
        )


def _check_kinds(options: Any) -> None:
    """Options may come from a saved state: texts must be texts, and switches true or false."""
    for item in fields(options):
        value, kind = getattr(options, item.name), str(item.type)
        if kind.startswith("str") and not (isinstance(value, str) or (value is None and kind.endswith("None"))):
            raise InputError(f"{flag(item.name)} is {shown(value)}; expected a text")
        if kind == "bool" and not isinstance(value, bool):
            raise InputError(f"{flag(item.name)} is {shown(value)}; expected true or false")
