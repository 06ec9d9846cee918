"""The options of qat.py's commands and of val_trt.py: one declaration each, from which the parsers follow.

Torch is not imported here, so that `-h` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from models.quantize.recipe import AUTO, Epochs, Images, Iterations, Method, Percentile, Rate, Recipe, Train
from utils.core.curves import PLOT_FILES
from utils.core.errors import InputError, RecipeError
from utils.core.options import (
    COMPATIBILITY,
    BatchSize,
    Count,
    DeviceOptions,
    Fraction,
    InputSize,
    RunFolderOptions,
    RuntimeOptions,
    Workers,
    data_option,
    groups_option,
    option,
    project_option,
    size_option,
    target_drop_option,
)
from utils.core.tasks import AP_CONFIDENCE, AP_NMS_IOU, DISPLAY_CONF, DISPLAY_IOU, MASK_AP_NMS_IOU

Kind = TypeVar("Kind", bound="CalibratingOptions")
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]  # NumPy takes 32 bits, and each epoch adds to it
RECIPE = "the recipe (the command line wins over --recipe's file)"
RECIPE_FILE = "recipe.yaml"  # that calibrate and sensitive write into their run folders
# On resume: they change where and how fast, or what is allowed and drawn, and not what is computed.
CHANGEABLE = frozenset({"device", "workers", "force", "plots", "keep_epochs"})
FREE_ON_RESUME = CHANGEABLE | {"project", "name", "exist_ok", "resume"}  # a resumed run stays in its folder


class QatOptions(RunFolderOptions, DeviceOptions):
    """What every command of qat.py takes."""

    weights: str = option("", "checkpoint (.pt)", metavar="FILE")
    data: str | None = data_option()
    batch_size: BatchSize = option(10, "images a batch, of all processes together", metavar="N")
    imgsz: InputSize | None = size_option("that of the weights' training or calibration, else 640")
    workers: Workers = option(8, "processes that read images, at most, for each GPU", metavar="N")
    unlabelled: bool = option(False, "the images have no labels: AP is that with the FP32 model's detections as labels")
    target_drop: Fraction | None = target_drop_option()
    force: bool = option(
        False, "go on where AP would mislead: more than 5 % of the images left out, or an FP32 model with an AP near 0"
    )

    @property
    def image_groups(self) -> str | None:
        """The value of `--groups`; None without it, and for a command that does not have it."""
        return getattr(self, "groups", None)

    @property
    def augmentation(self) -> str | None:
        """The file of `--hyp`; None without it, and for a command that does not have it."""
        return getattr(self, "hyp", None)


class CalibratingOptions(QatOptions):
    """What every command takes that calibrates a float network; recipe entries are None where the recipe decides."""

    seed: Seed = option(57, "for images' order and augmentation", group="the run", metavar="N")
    recipe: str | None = option(None, "YAML: docs/recipe.md of the overlay", group=RECIPE, metavar="FILE")
    calib_images: Images | None = option(
        None, "training images to calibrate on (default: 250)", group=RECIPE, metavar="N", recipe="calibration.images"
    )
    hyp: str | None = option(
        None, "upstream's YAML of augmentation, for QAT's images (default: no augmentation)", group=RECIPE,
        metavar="FILE",
    )  # fmt: skip

    def merged_recipe(self) -> Recipe:
        """The recipe of a run: the default, then `--recipe`'s file, then what the command line says.

        `--lr` is the highest rate of weights; the rates of biases and ranges keep their ratio to it.

        Raises:
            RecipeError: an unknown key, a value outside its range, or a percentile for a method that has none.
        """
        entries = {self.argument(name)["recipe"].replace(".", "_"): value for name, value in self if value is not None}
        given = {entry: value for entry, value in entries.items() if entry}
        recipe = Recipe.from_file(self.recipe)
        if batches := recipe.calibration.batches:
            recipe = recipe.replace(calibration_images=batches * self.batch_size)
        merged = recipe.replace(**given)
        if "calibration_percentile" in given and merged.calibration.method != "percentile":
            raise RecipeError(f"--percentile does nothing with --calib-method {merged.calibration.method}")
        return merged

    def resumed(self: Kind, saved: Mapping[str, Any]) -> Kind:
        """The options of a saved run, with what may differ on resume taken from these.

        Raises:
            InputError: an option was given that would make it another run.
        """
        for name in self.model_fields_set - FREE_ON_RESUME:
            value, before = getattr(self, name), saved.get(name)
            if name == "recipe" or value != before:
                raise InputError(
                    f"{self.flag(name)} is {value} here and {'not given' if before is None else before} in the run to "
                    "resume; leave it out, or start a new run without --resume"
                )
        return self.of({**saved, **{name: getattr(self, name) for name in CHANGEABLE & self.model_fields_set}})


class MethodOptions(CalibratingOptions):
    """What a command takes that calibrates by one method, and can be resumed."""

    resume: str | None = option(
        None, "continue a run: its folder, or the last unfinished one in --project", group="the run", metavar="RUN",
        nargs="?", const="",
    )  # fmt: skip
    calib_method: Method | None = option(
        None, "how ranges are found (default: auto, by the loss on training images)", group=RECIPE,
        recipe="calibration.method",
    )  # fmt: skip
    percentile: Percentile | None = option(
        None, "of magnitudes; --calib-method percentile is implied", group=RECIPE, metavar="P",
        recipe="calibration.percentile",
    )  # fmt: skip


def rate(text: str) -> float | str:
    """A learning rate, or auto."""
    return text if text == AUTO else float(text)


class QuantizeOptions(MethodOptions):
    """Calibrate (PTQ), then finetune (QAT).

    The float model is evaluated, calibrated, evaluated, and finetuned; the best state is kept.
    """

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "qat", "resume", "name")
    WRITTEN = (
        "weights/last.pt", "weights/ptq_*.pt", "weights/qat_*.pt", "report.*", "results.csv", "placement.txt",
        "*_per_epoch.png", "detections.png", *PLOT_FILES,
    )  # fmt: skip
    project: str = project_option("runs/qat")
    groups: str | None = groups_option()
    no_eval_origin: bool = option(False, "do not evaluate the float model", group="the run")
    no_eval_ptq: bool = option(False, "do not evaluate the calibrated model before QAT", group="the run")
    qat: Literal["always", "auto", "never"] = option(
        "always", "auto: run QAT unless PTQ is shown to lose at most --target-drop; never: stop after PTQ",
        group="the run",
    )  # fmt: skip
    ptq_only: bool = option(False, "as --qat never", group="the run")
    supervision_stride: Count | None = option(
        None,
        "of yolov9-qat; does nothing, since QAT compares detections and not layers",
        group=COMPATIBILITY,
        metavar="N",
    )
    eval_epochs: bool = option(False, "measure AP after every epoch of QAT, too", group="the run")
    keep_epochs: bool = option(False, "keep the checkpoint of every epoch of QAT when the run ends", group="the run")
    plots: bool = option(True, f"draw {', '.join(PLOT_FILES)}", group="the run")
    epochs: Epochs | None = option(
        None, "epochs of QAT (default: 10)", group=RECIPE, metavar="N", recipe="finetune.epochs"
    )
    iters: Iterations | None = option(
        None, "iterations an epoch, at most (default: 45)", group=RECIPE, metavar="N", recipe="finetune.iters"
    )
    lr: Rate | Literal["auto"] | None = option(
        None, "highest learning rate, of weights, or auto, which is 3e-5; those of biases and ranges keep their ratio "
        "(default: 3e-5)", group=RECIPE, metavar="LR", recipe="finetune.lr", type=rate,
    )  # fmt: skip
    train: Train | None = option(
        None, "what QAT trains; all: weights, biases, ranges (default: all)", group=RECIPE, recipe="finetune.train"
    )

    @model_validator(mode="before")
    @classmethod
    def ptq_only_is_never(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take `--ptq-only` for `--qat never`; raise `InputError` where `--qat` says something else."""
        if not values.get("ptq_only"):
            return values
        if values.get("qat", "never") != "never":
            raise InputError(f"--ptq-only is --qat never, and --qat {values['qat']} was given; leave one of them out")
        return {**values, "ptq_only": False, "qat": "never"}

    @property
    def evaluates_nothing(self) -> bool:
        """Whether no network is evaluated, so that the validation images are not needed."""
        return self.qat == "never" and self.no_eval_origin and self.no_eval_ptq

    @model_validator(mode="after")
    def auto_needs_both(self) -> QuantizeOptions:
        """Raise `InputError` where `--qat auto` could not compare PTQ with the float model."""
        if self.qat == "auto" and (self.no_eval_origin or self.no_eval_ptq):
            flag = "--no-eval-origin" if self.no_eval_origin else "--no-eval-ptq"
            raise InputError(f"--qat auto compares PTQ with the float model, so leave {flag} out")
        return self


class CalibrateOptions(CalibratingOptions):
    """Compare calibration methods, and write a recipe with the best.

    AP of each method comes from one pass of statistics; what --recipe says about methods is replaced.
    """

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "num_image", "name")
    HIDDEN = ("hyp",)
    WRITTEN = ("calibration.json", RECIPE_FILE, "report.*", "*.png")
    project: str = project_option("runs/qat_calibrate")
    num_image: Count = option(200, "validation images, evenly spread over the split", group="the run", metavar="N")
    groups: str | None = groups_option()


class SensitiveOptions(MethodOptions):
    """Find the parts that hurt in INT8, and write a recipe that keeps them in float.

    Every unit of the network is scored by a proxy; AP is measured with the worst in float; the recipe keeps in float
    what pays.
    """

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "num_image", "profile", "resume", "name")
    HIDDEN = ("hyp",)
    WRITTEN = ("state.pt", "summary-sensitive-analysis.json", "*.png", RECIPE_FILE, "report.*")
    project: str = project_option("runs/qat_sensitive")
    num_image: Count = option(200, "validation images, evenly spread over the split", group="the run", metavar="N")
    granularity: Literal["layer", "module"] = option("layer", "of the units", group="the run")
    metric: Literal["proxy", "ap"] = option("proxy", "ap: measure AP with every unit in float", group="the run")
    float_budget: Fraction = option(
        0.5, "share of the network's cost that may be in float, 0..1", group=RECIPE, metavar="F"
    )
    profile: str | None = option(
        None, "JSON with an engine's layer times: cost is time, not MACs", group=RECIPE, metavar="FILE"
    )


class EvalOptions(QatOptions):
    """AP of a float or quantized checkpoint on the val split."""

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "name")
    WRITTEN = ("report.json", "*_predictions.json", *PLOT_FILES)
    project: str = project_option("runs/qat_eval")
    conf_thres: Fraction = option(AP_CONFIDENCE, "lowest score", metavar="F")
    iou_thres: Fraction | None = option(
        None, f"IoU of NMS (default: {AP_NMS_IOU}; segmentation: {MASK_AP_NMS_IOU})", metavar="F"
    )
    groups: str | None = groups_option()
    save_json: bool = option(False, "write detections as COCO JSON, and score them with pycocotools")
    plots: bool = option(False, f"draw {', '.join(PLOT_FILES)}")


class ValOptions(RunFolderOptions, RuntimeOptions):
    """Evaluate a TensorRT engine or an ONNX file on a dataset, or draw what it finds."""

    OFTEN = ("data", "reference", "source", "imgsz", "batch_size", "device", "runtime", "name")
    WRITTEN = ("report.json", "*_predictions.json", "labels/*.txt", *PLOT_FILES)
    file: str | None = option(
        None, "an .onnx, .engine or .plan file, or a .pt (at the size that it knows, or 640, unless --imgsz)",
        positional=True, nargs="?", metavar="FILE",
    )  # fmt: skip
    engine_file: str | None = option(None, "FILE, by other names", "--engine-file", "--weights", metavar="FILE")
    data: str | None = data_option()
    source: list[str] | None = option(
        None, "draw detections on images or videos instead of evaluating: files, folders, globs, lists (.txt), a "
        "camera's number, URLs", metavar="PATH",
    )  # fmt: skip
    no_draw: bool = option(False, "with --source, write the labels of --save-txt only, which takes less time")
    imgsz: InputSize | None = size_option("the file's own")
    batch_size: BatchSize = option(32, "images at a time (default: 32); a static batch in the file wins", metavar="N")
    conf_thres: Fraction | None = option(
        None, f"least score (default: {AP_CONFIDENCE}; --source: {DISPLAY_CONF})", metavar="P"
    )
    iou_thres: Fraction | None = option(
        None, f"NMS IoU (default: {AP_NMS_IOU}; segmentation: {MASK_AP_NMS_IOU}; --source: {DISPLAY_IOU})",
        metavar="P",
    )  # fmt: skip
    max_det: Annotated[int, Field(ge=1, le=30_000)] = option(300, "detections per image", metavar="N")
    task: Literal["val", "test", "train"] = option("val", "the split to evaluate (default: val)")
    workers: Workers = option(8, "processes that read images", metavar="N")
    rect: bool = option(False, "smallest input that holds an image (dynamic size only)")
    single_cls: bool = option(False, "all classes count as one")
    verbose: bool = option(False, "a row for each class, however many there are")
    save_txt: bool = option(False, "write detections to labels/NAME.txt")
    save_conf: bool = option(False, "with scores in those files")
    save_json: bool = option(False, "write COCO JSON, and run pycocotools if it can")
    limit: Count | None = option(None, "only N images, evenly spread over the split", metavar="N")
    groups: str | None = groups_option()
    reference: str | None = option(
        None, "the FP32 model that FILE was made from (.pt, .onnx or engine), which is evaluated first: differences, "
        "agreement with its detections, and what is missed at its threshold", metavar="FILE",
    )  # fmt: skip
    target_drop: Fraction | None = target_drop_option()
    force: bool = option(
        False, "go on with a --reference of other weights, or where more than 5 % of the images are left out"
    )
    plots: bool = option(False, f"draw {', '.join(PLOT_FILES)}")
    unlabelled: bool = option(
        False, "the images have no labels: AP is that with the detections of --reference as labels"
    )
    project: str = project_option("runs/val_trt")

    @model_validator(mode="after")
    def check(self) -> ValOptions:
        """Raise `InputError` unless there is one network."""
        if bool(self.file) == bool(self.engine_file):
            found = f"{self.file} and {self.engine_file}" if self.file else "none"
            raise InputError(f"expected one network: --engine-file FILE, or FILE in front of --source; found {found}")
        return self

    @property
    def network(self) -> str:
        """The file that is evaluated or draws."""
        return self.file or self.engine_file or ""
