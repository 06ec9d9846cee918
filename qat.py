#!/usr/bin/env python3
"""Quantize a YOLOv9 detector to INT8 and evaluate checkpoints.

    python qat.py quantize --weights yolov9-c.pt --data data/coco.yaml
    python qat.py sensitive --weights yolov9-c.pt --data data/coco.yaml
    python qat.py calibrate --weights yolov9-c.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/exp/weights/qat_best_yolov9-c.pt --data data/coco.yaml

Run it in a patched YOLOv9 checkout (patch_yolov9.sh). `torchrun --nproc-per-node N qat.py ...` uses N GPUs.
"""

from __future__ import annotations

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from models.quantize.recipe import AUTO, CALIBRATION_METHODS, QUANTIZERS, Finetune
from models.quantize.recipe_fields import SUPERVISIONS, TRAIN_OPTIONS
from utils.cli import IMAGE_SIZE_FLAGS, add_data, add_device, add_kernel_options, add_run_dir, run_program
from utils.core import distributed
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.core.output_paths import refuse_overwrite_in
from utils.core.thresholds import AP_NMS_IOU, MASK_AP_NMS_IOU
from utils.jobs.dependencies import need
from utils.jobs.options import (
    ENGINE_BATCH,
    ENGINE_MINUTES,
    GRANULARITIES,
    METRICS,
    CalibrateOptions,
    EvalOptions,
    QuantizeOptions,
    SensitiveOptions,
    given_options,
)

Job = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]  # find, start and resume a run
Options = TypeVar("Options", QuantizeOptions, SensitiveOptions, CalibrateOptions, EvalOptions)


def build_parser() -> argparse.ArgumentParser:
    """The command line. Options that the user leaves out are None, and the options' classes hold the defaults."""
    parser = argparse.ArgumentParser("qat.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="{quantize,sensitive,calibrate,eval}")
    _add_quantize(commands.add_parser("quantize", help="calibrate (PTQ), then finetune (QAT)"))
    _add_sensitive(commands.add_parser("sensitive", help="which parts hurt in INT8, and a recipe that mends it"))
    _add_calibrate(commands.add_parser("calibrate", help="compare calibration methods, and a recipe with the best"))
    _add_eval(commands.add_parser("eval", help="AP of a float or quantized checkpoint"))
    return parser


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


def _add_quantize(parser: argparse.ArgumentParser) -> None:
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
    recipe = parser.add_argument_group("the recipe (the command line wins over --recipe's file)")
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
    recipe.add_argument("--calib-batches", type=bounded("calib_batches"), metavar="N", help="batches to calibrate on")
    recipe.add_argument(
        "--percentile", type=bounded("percentile"), metavar="P", help="of magnitudes, for --calib-method percentile"
    )
    recipe.add_argument(
        "--hyp", metavar="FILE", help="upstream's YAML of augmentation, for QAT's images (default: no augmentation)"
    )
    recipe.add_argument(
        "--epochs", type=bounded("epochs"), metavar="N", help=f"epochs of QAT (default: {Finetune.epochs})"
    )
    recipe.add_argument(
        "--iters", type=bounded("iters"), metavar="N", help=f"iterations an epoch, at most (default: {Finetune.iters})"
    )
    recipe.add_argument(
        "--lr",
        type=bounded("lr"),
        metavar="LR",
        help=f"highest learning rate, of weights; those of biases and ranges keep their ratio (default: {Finetune.lr})",
    )
    recipe.add_argument(
        "--train",
        choices=TRAIN_OPTIONS,
        help=f"what QAT trains; all: weights, biases, ranges (default: {Finetune.train})",
    )
    recipe.add_argument(
        "--supervision", choices=SUPERVISIONS,
        help=f"what QAT compares with the float model: detection, or layers (default: {Finetune.supervision})",
    )  # fmt: skip
    recipe.add_argument(
        "--supervision-stride", type=bounded("supervision_stride"), metavar="N",
        help=f"supervision by layers, of which every N-th is compared (default: {Finetune.supervision_stride})",
    )  # fmt: skip
    recipe.add_argument(
        "--teacher", metavar="FILE", help="float checkpoint that supervises QAT (default: the one of --weights)"
    )
    recipe.add_argument(
        "--patience", type=bounded("patience"), metavar="N", help="stop after N epochs without a better state; 0: never"
    )
    _without_defaults(parser)


def _add_sensitive(parser: argparse.ArgumentParser) -> None:
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
    engine = parser.add_argument_group("judged by engines (TensorRT and a GPU)")
    engine.add_argument(
        "--engine", action="store_true",
        help="build and time engines with parts in float; the recipe is the fastest within --target-drop",
    )  # fmt: skip
    engine.add_argument(
        "--engine-minutes", type=bounded("engine_minutes"), metavar="N",
        help=f"time for building and timing, checked before each engine (default: {ENGINE_MINUTES:g})",
    )  # fmt: skip
    engine.add_argument(
        "--engine-batch", type=bounded("engine_batch"), metavar="N", help=f"images (default: {ENGINE_BATCH})"
    )
    add_kernel_options(engine)
    engine.add_argument(
        "--timing-cache", metavar="FILE", help="kernels that were measured before (default: one in the run folder)"
    )
    recipe = parser.add_argument_group("the recipe that is analysed, and the one that is written")
    _add_recipe(recipe)
    recipe.add_argument("--calib-method", choices=CALIBRATION_METHODS, help="how ranges are found")
    recipe.add_argument(
        "--percentile", type=bounded("percentile"), metavar="P", help="of magnitudes, for --calib-method percentile"
    )
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


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = "AP of each calibration method, from one pass of statistics; the best goes to a recipe."
    _add_common(parser, CalibrateOptions)
    _add_images(parser.add_argument_group("the run"), CalibrateOptions)
    _add_recipe(parser.add_argument_group("the recipe (what it says about calibration methods is replaced)"))
    _without_defaults(parser)


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
    group.add_argument("--calib-batches", type=bounded("calib_batches"), metavar="N", help="batches to calibrate on")
    group.add_argument("--hyp", metavar="FILE", help="accepted and checked; these images are not augmented")


def _add_eval(parser: argparse.ArgumentParser) -> None:
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


def _without_defaults(parser: argparse.ArgumentParser) -> None:
    """Let None mean "not given": what the user gave is compared with a resumed run and wins over a recipe."""
    parser.set_defaults(**{action.dest: None for action in parser._actions if action.dest != "help"})


# What each command writes into its run folder.
WRITTEN = {
    QuantizeOptions: ("weights/last.pt", "weights/ptq_*.pt", "weights/qat_*.pt", "report.*", "placement.txt", "*.png"),
    SensitiveOptions: (
        "state.json",
        "parts/*.pt",
        "summary-sensitive-analysis.json",
        "*.png",
        "recipe.yaml",
        "engines/*",
        "sensitivity.html",
    ),
    CalibrateOptions: ("calibration.json", "recipe.yaml"),
    EvalOptions: ("report.json", "*_predictions.json"),
}


def _options(args: argparse.Namespace, kind: type[Options]) -> Options:
    """The options of a new run, which is not to overwrite what it reads."""
    options = kind(**given_options(vars(args), kind))
    read = {name: getattr(options, name, None) for name in ("weights", "data", "recipe", "hyp", "profile", "teacher")}
    check_files(**read)
    refuse_overwrite_in(options.project, options.name, options.exist_ok, WRITTEN[kind], read.values())
    need("torch")
    return options


def quantize(args: argparse.Namespace) -> None:
    """`qat.py quantize`."""

    def job() -> Job:
        from utils.jobs import quantize

        return quantize.find_run, quantize.start, quantize.resume

    _start_or_resume(args, QuantizeOptions, job)


def sensitive(args: argparse.Namespace) -> None:
    """`qat.py sensitive`."""

    def job() -> Job:
        from utils.jobs.sensitivity import run

        return run.find_analysis, run.start, run.resume

    _start_or_resume(args, SensitiveOptions, job)


def _start_or_resume(
    args: argparse.Namespace, kind: type[QuantizeOptions | SensitiveOptions], job: Callable[[], Job]
) -> None:
    """`job` gives the functions that find, start and resume a run; calling it imports torch."""
    if args.resume is not None:
        find, _, resume = job()
        run = find(args.resume, args.project or kind.project)
        resume(run, given_options(vars(args), kind), args.command_line)
        return
    if not args.weights:
        raise InputError("--weights is missing; give the float checkpoint, or --resume to continue a run")
    options = _options(args, kind)
    _, start, _ = job()
    start(options, args.command_line)


def calibrate(args: argparse.Namespace) -> None:
    """`qat.py calibrate`."""
    if not args.weights:
        raise InputError("--weights is missing; give the float checkpoint")
    options = _options(args, CalibrateOptions)
    from utils.jobs import calibrate

    calibrate.run(options, args.command_line)


def evaluate(args: argparse.Namespace) -> None:
    """`qat.py eval`."""
    if not args.weights:
        raise InputError("--weights is missing; give the checkpoint to evaluate")
    options = _options(args, EvalOptions)
    from utils.jobs import evaluate

    evaluate.evaluate_checkpoint(options, args.command_line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)

    def handle(args: argparse.Namespace) -> None:
        args.command_line = shlex.join(["python", "qat.py", *words])
        with distributed.joined():
            {"quantize": quantize, "sensitive": sensitive, "calibrate": calibrate, "eval": evaluate}[args.command](args)

    return run_program(build_parser(), handle, words, together=True)


if __name__ == "__main__":
    sys.exit(main())
