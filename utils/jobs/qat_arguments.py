"""The arguments of qat.py's commands: what the user leaves out is None, and the options' classes hold the defaults.

Torch is not imported here, so that `-h` answers at once.
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

from models.quantize.recipe import AUTO, CALIBRATION_METHODS, QUANTIZERS, Finetune, Supervision, Train
from utils.cli import IMAGE_SIZE_FLAGS, add_data, add_device, add_run_dir
from utils.core.bounds import bounded
from utils.core.thresholds import AP_NMS_IOU, MASK_AP_NMS_IOU
from utils.jobs.options import (
    GRANULARITIES,
    METRICS,
    CalibrateOptions,
    EvalOptions,
    QuantizeOptions,
    SensitiveOptions,
)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Arguments of `qat.py quantize`."""
    parser.description = "Float evaluation, calibration (PTQ), PTQ evaluation, then finetuning (QAT); the best is kept."
    _add_common(parser, QuantizeOptions)
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--seed",
        type=bounded("seed"),
        metavar="N",
        help=f"for images' order and augmentation (default: {QuantizeOptions.seed})",
    )
    run.add_argument("--no-eval-origin", action="store_true", help="do not evaluate the float model")
    run.add_argument("--no-eval-ptq", action="store_true", help="do not evaluate the calibrated model before QAT")
    run.add_argument("--ptq-only", action="store_true", help="stop after PTQ")
    run.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue a run: its folder, or the last one in --project"
    )
    recipe, defaults = parser.add_argument_group("the recipe (the command line wins over --recipe's file)"), Finetune()
    recipe.add_argument("--recipe", metavar="FILE", help="YAML; see models/quantize/recipe.py")
    recipe.add_argument(
        "--quantizer",
        choices=QUANTIZERS,
        help=f"whose modules are placed, with the same results (default: {QuantizeOptions.quantizer}, which needs no "
        "library)",
    )
    recipe.add_argument(
        "--calib-method", choices=(*CALIBRATION_METHODS, AUTO), help="how ranges are found; auto compares the methods"
    )
    recipe.add_argument("--calib-batches", type=int, metavar="N", help="batches to calibrate on")
    recipe.add_argument("--percentile", type=float, metavar="P", help="of magnitudes, for --calib-method percentile")
    recipe.add_argument(
        "--hyp", metavar="FILE", help="upstream's YAML of augmentation, for QAT's images (default: no augmentation)"
    )
    recipe.add_argument("--epochs", type=int, metavar="N", help=f"epochs of QAT (default: {defaults.epochs})")
    recipe.add_argument(
        "--iters", type=int, metavar="N", help=f"iterations an epoch, at most (default: {defaults.iters})"
    )
    recipe.add_argument(
        "--lr",
        type=float,
        metavar="LR",
        help="highest learning rate, of weights; those of biases and ranges keep their ratio (default: 3e-5; more for "
        "30 to 1,000 steps, three times as much for 100)",
    )
    recipe.add_argument(
        "--train",
        choices=get_args(Train),
        help=f"what QAT trains; all: weights, biases, ranges (default: {defaults.train})",
    )
    recipe.add_argument(
        "--supervision", choices=get_args(Supervision),
        help=f"what QAT compares with the float model: detection, or layers (default: {defaults.supervision})",
    )  # fmt: skip
    recipe.add_argument(
        "--supervision-stride", type=int, metavar="N",
        help=f"supervision by layers, of which every N-th is compared (default: {defaults.supervision_stride})",
    )  # fmt: skip
    recipe.add_argument(
        "--teacher", metavar="FILE", help="float checkpoint that supervises QAT (default: the one of --weights)"
    )
    _without_defaults(parser)


def add_sensitive(parser: argparse.ArgumentParser) -> None:
    """Arguments of `qat.py sensitive`."""
    parser.description = (
        "Score every unit of the network by a proxy, measure AP with the worst in float, and write a recipe that keeps "
        "in float what pays."
    )
    options = SensitiveOptions
    _add_common(parser, options)
    run = parser.add_argument_group("the run")
    _add_images(run, options)
    run.add_argument("--granularity", choices=GRANULARITIES, help=f"of the units (default: {options.granularity})")
    run.add_argument(
        "--metric", choices=METRICS, help=f"ap: measure AP with every unit in float (default: {options.metric})"
    )
    run.add_argument(
        "--budget", type=bounded("budget"), metavar="MINUTES", help="time for screening and AP (default: no limit)"
    )
    run.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue a run: its folder, or the last one in --project"
    )
    recipe = parser.add_argument_group("the recipe that is analysed, and the one that is written")
    _add_recipe(recipe)
    recipe.add_argument("--calib-method", choices=CALIBRATION_METHODS, help="how ranges are found")
    recipe.add_argument("--percentile", type=float, metavar="P", help="of magnitudes, for --calib-method percentile")
    recipe.add_argument(
        "--target-drop",
        type=bounded("target_drop"),
        metavar="AP",
        help=f"AP that may be lost (default: {options.target_drop})",
    )
    recipe.add_argument(
        "--float-budget", type=bounded("float_budget"), metavar="F",
        help=f"share of the network's cost that may be in float, 0..1 (default: {options.float_budget})",
    )  # fmt: skip
    recipe.add_argument("--profile", metavar="FILE", help="JSON with an engine's layer times: cost is time, not MACs")
    _without_defaults(parser)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `qat.py calibrate`."""
    parser.description = "AP of each calibration method, from one pass of statistics; the best goes to a recipe."
    _add_common(parser, CalibrateOptions)
    _add_images(parser.add_argument_group("the run"), CalibrateOptions)
    _add_recipe(parser.add_argument_group("the recipe (what it says about calibration methods is replaced)"))
    _without_defaults(parser)


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Arguments of `qat.py eval`."""
    parser.description = "Evaluate a float or quantized checkpoint on the val split."
    _add_common(parser, EvalOptions)
    parser.add_argument(
        "--conf-thres",
        type=bounded("conf_thres"),
        metavar="F",
        help=f"lowest score (default: {EvalOptions.conf_thres})",
    )
    parser.add_argument(
        "--iou-thres", type=bounded("iou_thres"), metavar="F",
        help=f"IoU of NMS (default: {AP_NMS_IOU}; segmentation: {MASK_AP_NMS_IOU})",
    )  # fmt: skip
    parser.add_argument(
        "--upsample-masks", action="store_true", help="compare masks at the input's size, not on the prototypes' grid"
    )
    parser.add_argument(
        "--save-json", action="store_true", help="write detections as COCO JSON, and score them with pycocotools"
    )
    _without_defaults(parser)


def _add_common(
    parser: argparse.ArgumentParser, options: type[QuantizeOptions | EvalOptions | CalibrateOptions]
) -> None:
    parser.add_argument("--weights", metavar="FILE", help="checkpoint (.pt)")
    add_data(parser)
    add_device(parser)
    parser.add_argument(
        "--batch-size",
        type=bounded("batch_size"),
        metavar="N",
        help=f"images a batch, of all processes together (default: {options.batch_size})",
    )
    parser.add_argument(
        *IMAGE_SIZE_FLAGS,
        dest="imgsz",
        type=bounded("imgsz"),
        metavar="PX",
        help=f"input size in pixels (default: {options.imgsz})",
    )
    parser.add_argument(
        "--workers",
        type=bounded("workers"),
        metavar="N",
        help=f"processes that read images, at most, for each GPU (default: {options.workers})",
    )
    add_run_dir(parser, options.project, options.name)


def _add_images(group: Any, options: type[CalibrateOptions]) -> None:
    group.add_argument(
        "--num-image", type=bounded("num_image"), metavar="N",
        help=f"validation images, evenly spread over the split (default: {options.num_image})",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=bounded("seed"), metavar="N", help=f"for the images' order (default: {options.seed})"
    )


def _add_recipe(group: Any) -> None:
    group.add_argument("--recipe", metavar="FILE", help="YAML; see models/quantize/recipe.py")
    group.add_argument("--calib-batches", type=int, metavar="N", help="batches to calibrate on")
    group.add_argument("--hyp", metavar="FILE", help="accepted and checked; these images are not augmented")


def _without_defaults(parser: argparse.ArgumentParser) -> None:
    """Let None mean "not given": what the user gave is compared with a resumed run and wins over a recipe."""
    parser.set_defaults(**{action.dest: None for action in parser._actions if action.dest != "help"})
