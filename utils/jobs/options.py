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
# May change on resume: the place, the speed, the permission to go on and the plots, which change no result.
CHANGEABLE = frozenset({"device", "workers", "force", "plots", "keep_epochs"})
FREE_ON_RESUME = CHANGEABLE | {"project", "name", "exist_ok", "resume"}  # a resumed run stays in its folder


class QatOptions(RunFolderOptions, DeviceOptions):
    """Options of every command of qat.py."""

    weights: str = option("", "checkpoint (.pt)", metavar="FILE")
    data: str | None = data_option()
    batch_size: BatchSize = option(10, "images a batch, of all processes together", metavar="N")
    imgsz: InputSize | None = size_option("that of the weights' training or calibration, else 640")
    workers: Workers = option(8, "processes that read images, at most, for each GPU", metavar="N")
    unlabelled: bool = option(False, "the images have no labels: detections of the FP32 model take their place in AP")
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
    """Options of every command that calibrates an FP32 model; recipe entries are None where the recipe decides."""

    seed: Seed = option(57, "seed of the order of images and of augmentation", group="the run", metavar="N")
    recipe: str | None = option(None, "YAML: docs/recipe.md of the overlay", group=RECIPE, metavar="FILE")
    calib_images: Images | None = option(
        None, "training images to calibrate on (default: 250)", group=RECIPE, metavar="N", recipe="calibration.images"
    )
    hyp: str | None = option(
        None,
        "upstream's YAML of augmentation, for QAT's images (default: no augmentation)",
        group=RECIPE,
        metavar="FILE",
    )

    def merged_recipe(self) -> Recipe:
        """Return the recipe of a run: the default, then `--recipe`'s file, then the options of the command line.

        `--lr` is the highest rate of weights; the rates of biases and ranges keep their ratio to it.

        Raises:
            RecipeError: an unknown key, a value outside its range, or a percentile for a method that has none.
        """
        recipe = Recipe.from_file(self.recipe)
        if recipe.calibration.batches:
            recipe = recipe.replace(calibration_images=recipe.calibration.batches * self.batch_size)
        entries = self._recipe_entries()
        merged = recipe.replace(**entries)
        if "calibration_percentile" in entries and merged.calibration.method != "percentile":
            raise RecipeError(f"--percentile does nothing with --calib-method {merged.calibration.method}")
        return merged

    def _recipe_entries(self) -> dict[str, Any]:
        """Return the entries of a recipe that options set, as `Recipe.replace` takes them."""
        entries = {}
        for name, value in self:
            entry = self.argument(name)["recipe"]
            if entry and value is not None:
                entries[entry.replace(".", "_")] = value
        return entries

    def resumed(self: Kind, saved: Mapping[str, Any]) -> Kind:
        """Return the options of a saved run, with those that may differ on resume taken from these.

        Raises:
            InputError: an option was given that would make it another run.
        """
        for name in self.model_fields_set - FREE_ON_RESUME:
            value = getattr(self, name)
            before = saved.get(name)
            if name == "recipe" or value != before:
                before_in_words = "not given" if before is None else before
                raise InputError(
                    f"{self.flag(name)} is {value} here and {before_in_words} in the run to resume; leave it out, or "
                    "start a new run without --resume"
                )
        changes = {name: getattr(self, name) for name in CHANGEABLE & self.model_fields_set}
        return self.of({**saved, **changes})


class MethodOptions(CalibratingOptions):
    """Options of a command that calibrates by one method, and can be resumed."""

    resume: str | None = option(
        None,
        "continue a run: its folder, or the last unfinished run in --project",
        group="the run",
        metavar="RUN",
        nargs="?",
        const="",
    )
    calib_method: Method | None = option(
        None,
        "how ranges are found (default: auto, by the loss on training images)",
        group=RECIPE,
        recipe="calibration.method",
    )
    percentile: Percentile | None = option(
        None,
        "of magnitudes; --calib-method percentile is implied",
        group=RECIPE,
        metavar="P",
        recipe="calibration.percentile",
    )


def rate(text: str) -> float | str:
    """Parse a learning rate, or auto."""
    return text if text == AUTO else float(text)


class QuantizeOptions(MethodOptions):
    """Calibrate (PTQ), then finetune (QAT).

    The FP32 model is evaluated, calibrated, evaluated, and finetuned; the best state is kept.
    """

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "qat", "resume", "name")
    WRITTEN = (
        "weights/last.pt",
        "weights/ptq_*.pt",
        "weights/qat_*.pt",
        "report.*",
        "results.csv",
        "placement.txt",
        "*_per_epoch.png",
        "detections.png",
        *PLOT_FILES,
    )
    project: str = project_option("runs/qat")
    groups: str | None = groups_option()
    no_eval_origin: bool = option(False, "do not evaluate the FP32 model", group="the run")
    no_eval_ptq: bool = option(False, "do not evaluate the calibrated model before QAT", group="the run")
    qat: Literal["always", "auto", "never"] = option(
        "always",
        "auto: run QAT unless PTQ is shown to lose at most --target-drop; never: stop after PTQ",
        group="the run",
    )
    ptq_only: bool = option(False, "as --qat never", group="the run")
    supervision_stride: Count | None = option(
        None,
        "an option of yolov9-qat; does nothing, since QAT compares detections and not layers",
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
        None,
        "highest learning rate, of weights, or auto, which is 3e-5; the rates of biases and ranges keep their "
        "ratio (default: 3e-5)",
        group=RECIPE,
        metavar="LR",
        recipe="finetune.lr",
        type=rate,
    )
    train: Train | None = option(
        None, "what QAT trains; all: weights, biases, ranges (default: all)", group=RECIPE, recipe="finetune.train"
    )

    @model_validator(mode="before")
    @classmethod
    def ptq_only_is_never(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Take `--ptq-only` for `--qat never`; raise `InputError` if `--qat` has another value."""
        if not values.get("ptq_only"):
            return values
        if values.get("qat", "never") != "never":
            raise InputError(f"--ptq-only is --qat never, and --qat {values['qat']} was given; leave one of them out")
        return {**values, "ptq_only": False, "qat": "never"}

    @property
    def evaluates_nothing(self) -> bool:
        """True if the command evaluates no model, so that it does not need validation images."""
        return self.qat == "never" and self.no_eval_origin and self.no_eval_ptq

    @model_validator(mode="after")
    def auto_needs_both(self) -> QuantizeOptions:
        """Raise `InputError` if `--qat auto` could not compare PTQ with the FP32 model."""
        if self.qat == "auto" and (self.no_eval_origin or self.no_eval_ptq):
            flag = "--no-eval-origin" if self.no_eval_origin else "--no-eval-ptq"
            raise InputError(f"--qat auto compares PTQ with the FP32 model, so leave {flag} out")
        return self


class CalibrateOptions(CalibratingOptions):
    """Compare calibration methods, and write a recipe with the best.

    AP of each method comes from one pass of statistics; the method in the file of --recipe is replaced.
    """

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "num_image", "name")
    HIDDEN = ("hyp",)
    WRITTEN = ("calibration.json", RECIPE_FILE, "report.*", "*.png")
    project: str = project_option("runs/qat_calibrate")
    num_image: Count = option(200, "validation images, evenly spread over the split", group="the run", metavar="N")
    groups: str | None = groups_option()


class SensitiveOptions(MethodOptions):
    """Find the layers that lose AP in INT8, and write a recipe that keeps them in FP16 (FP32 on CPUs).

    Every layer is scored by a proxy; AP is measured with each of the worst layers in FP16; the recipe keeps those in
    FP16 whose gain is worth their cost.
    """

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "num_image", "profile", "resume", "name")
    HIDDEN = ("hyp",)
    WRITTEN = ("state.pt", "summary-sensitive-analysis.json", "*.png", RECIPE_FILE, "report.*")
    project: str = project_option("runs/qat_sensitive")
    num_image: Count = option(200, "validation images, evenly spread over the split", group="the run", metavar="N")
    granularity: Literal["layer", "module"] = option("layer", "the parts of the model that are tried", group="the run")
    metric: Literal["proxy", "ap"] = option("proxy", "ap: measure AP with every layer in FP16", group="the run")
    float_budget: Fraction = option(
        0.5, "share of the model's cost that may stay in FP16, 0..1", group=RECIPE, metavar="F"
    )
    profile: str | None = option(
        None, "JSON with an engine's layer times: cost is time, not MACs", group=RECIPE, metavar="FILE"
    )


class EvalOptions(QatOptions):
    """Evaluate an FP32 or quantized checkpoint on the val split."""

    OFTEN = ("weights", "data", "imgsz", "batch_size", "device", "name")
    WRITTEN = ("report.json", "*_predictions.json", *PLOT_FILES)
    project: str = project_option("runs/qat_eval")
    conf_thres: Fraction = option(AP_CONFIDENCE, "confidence threshold", metavar="F")
    iou_thres: Fraction | None = option(
        None, f"IoU of NMS (default: {AP_NMS_IOU}; segmentation: {MASK_AP_NMS_IOU})", metavar="F"
    )
    groups: str | None = groups_option()
    save_json: bool = option(False, "write detections as COCO JSON, and score them with pycocotools")
    plots: bool = option(False, f"draw {', '.join(PLOT_FILES)}")


class ValOptions(RunFolderOptions, RuntimeOptions):
    """Evaluate a TensorRT engine or an ONNX file on a dataset, or draw its detections."""

    OFTEN = ("data", "reference", "source", "imgsz", "batch_size", "device", "runtime", "name")
    WRITTEN = ("report.json", "*_predictions.json", "labels/*.txt", *PLOT_FILES)
    file: str | None = option(
        None,
        "an .onnx, .engine or .plan file, or a .pt (at --imgsz, or the size that it stores, or 640)",
        positional=True,
        nargs="?",
        metavar="FILE",
    )
    engine_file: str | None = option(None, "FILE, by other names", "--engine-file", "--weights", metavar="FILE")
    data: str | None = data_option()
    source: list[str] | None = option(
        None,
        "draw detections on images or videos instead of evaluating: files, folders, globs, lists (.txt), a "
        "camera's number, URLs",
        metavar="PATH",
    )
    no_draw: bool = option(False, "with --source, write only the labels of --save-txt, which takes less time")
    imgsz: InputSize | None = size_option("the file's own")
    batch_size: BatchSize = option(32, "images at a time (default: 32); a static batch in the file wins", metavar="N")
    conf_thres: Fraction | None = option(
        None, f"confidence threshold (default: {AP_CONFIDENCE}; --source: {DISPLAY_CONF})", metavar="P"
    )
    iou_thres: Fraction | None = option(
        None,
        f"IoU of NMS (default: {AP_NMS_IOU}; segmentation: {MASK_AP_NMS_IOU}; --source: {DISPLAY_IOU})",
        metavar="P",
    )
    max_det: Annotated[int, Field(ge=1, le=30_000)] = option(300, "detections per image", metavar="N")
    task: Literal["val", "test", "train"] = option("val", "the split to evaluate (default: val)")
    workers: Workers = option(8, "processes that read images", metavar="N")
    rect: bool = option(False, "smallest input that holds an image (only for a dynamic size)")
    single_cls: bool = option(False, "all classes count as one")
    verbose: bool = option(False, "a row for each class, also if there are many")
    save_txt: bool = option(False, "write detections to labels/NAME.txt")
    save_conf: bool = option(False, "write scores into those files, too")
    save_json: bool = option(False, "write COCO JSON, and run pycocotools if the dataset has COCO annotations")
    limit: Count | None = option(None, "only N images, evenly spread over the split", metavar="N")
    groups: str | None = groups_option()
    reference: str | None = option(
        None,
        "the FP32 model that FILE was made from (.pt, .onnx or engine), which is evaluated first: differences, "
        "agreement with its detections, and what is missed at its threshold",
        metavar="FILE",
    )
    target_drop: Fraction | None = target_drop_option()
    force: bool = option(
        False, "go on with a --reference of other weights, or where more than 5 % of the images are left out"
    )
    plots: bool = option(False, f"draw {', '.join(PLOT_FILES)}")
    unlabelled: bool = option(False, "the images have no labels: detections of --reference take their place in AP")
    project: str = project_option("runs/val_trt")

    @model_validator(mode="after")
    def check(self) -> ValOptions:
        """Raise `InputError` unless there is one network."""
        if self.file and self.engine_file:
            raise InputError(f"expected one FILE, and {self.file} and --engine-file {self.engine_file} were given")
        if not self.network:
            raise InputError("FILE is missing; give it in front of --source, or as --engine-file FILE")
        return self

    @property
    def network(self) -> str:
        """The file that is evaluated or draws."""
        return self.file or self.engine_file or ""
