#!/usr/bin/env python3
"""Quantize a YOLOv9 detector to INT8 and evaluate checkpoints.

    python qat.py quantize --weights yolov9-c.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/exp/weights/qat_best_yolov9-c.pt --data data/coco.yaml

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from models.quantize.errors import InputError
from models.quantize.options import QUANTIZERS, EvalOptions, QuantizeOptions, given_options
from models.quantize.recipe import CALIBRATION_METHODS, Finetune
from utils.cli import IMAGE_SIZE_FLAGS, add_data, add_device, add_run_dir, run_program


def build_parser() -> argparse.ArgumentParser:
    """The command line. Options that the user leaves out are None, and the options' classes hold the defaults."""
    parser = argparse.ArgumentParser("qat.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="{quantize,eval}")
    _add_quantize(commands.add_parser("quantize", help="calibrate (PTQ), then finetune (QAT)"))
    _add_eval(commands.add_parser("eval", help="AP of a float or quantized checkpoint"))
    return parser


def _add_common(parser: argparse.ArgumentParser, options: type[QuantizeOptions] | type[EvalOptions]) -> None:
    parser.add_argument("--weights", metavar="FILE", help="checkpoint (.pt)")
    add_data(parser)
    add_device(parser)
    parser.add_argument("--batch-size", type=int, metavar="N", help=f"pictures a batch (default: {options.batch_size})")
    parser.add_argument(
        *IMAGE_SIZE_FLAGS, dest="imgsz", type=int, metavar="PX", help=f"input size in pixels (default: {options.imgsz})"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help=f"processes that read pictures, at most (default: {options.workers})"
    )
    add_run_dir(parser, options.project, options.name)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.description = "Float evaluation, calibration (PTQ), PTQ evaluation, then finetuning (QAT); the best is kept."
    _add_common(parser, QuantizeOptions)
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--seed", type=int, metavar="N", help=f"for pictures' order and augmentation (default: {QuantizeOptions.seed})"
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
        "--quantizer", choices=QUANTIZERS, help=f"quantizer library (default: {QuantizeOptions.quantizer})"
    )
    recipe.add_argument("--calib-method", choices=CALIBRATION_METHODS, help="how ranges are found")
    recipe.add_argument("--calib-batches", type=int, metavar="N", help="batches to calibrate on")
    recipe.add_argument("--percentile", type=float, metavar="P", help="of magnitudes, for --calib-method percentile")
    recipe.add_argument(
        "--hyp", metavar="FILE", help="upstream's YAML of augmentation, for QAT's pictures (default: no augmentation)"
    )
    recipe.add_argument("--epochs", type=int, metavar="N", help=f"epochs of QAT (default: {Finetune.epochs})")
    recipe.add_argument(
        "--iters", type=int, metavar="N", help=f"iterations an epoch, at most (default: {Finetune.iters})"
    )
    recipe.add_argument(
        "--lr", type=float, metavar="LR", help="learning rate of the first epochs; the schedule is scaled with it"
    )
    recipe.add_argument(
        "--supervision-stride", type=int, metavar="N",
        help=f"compare every N-th layer with the float model (default: {Finetune.supervision_stride})",
    )  # fmt: skip
    recipe.add_argument("--patience", type=int, metavar="N", help="stop after N epochs without a better AP; 0: never")
    _without_defaults(parser)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = "Evaluate a float or quantized checkpoint on the val split."
    _add_common(parser, EvalOptions)
    parser.add_argument(
        "--conf-thres", type=float, metavar="F", help=f"lowest score (default: {EvalOptions.conf_thres})"
    )
    parser.add_argument("--iou-thres", type=float, metavar="F", help=f"IoU of NMS (default: {EvalOptions.iou_thres})")
    parser.add_argument(
        "--save-json", action="store_true", help="write detections as COCO JSON, and score them with pycocotools"
    )
    _without_defaults(parser)


def _without_defaults(parser: argparse.ArgumentParser) -> None:
    """Let None mean "not given": what the user gave is compared with a resumed run and wins over a recipe."""
    parser.set_defaults(**{action.dest: None for action in parser._actions if action.dest != "help"})


def quantize(args: argparse.Namespace) -> None:
    """`qat.py quantize`."""
    given = given_options(vars(args), QuantizeOptions)
    if args.resume is None and not args.weights:
        raise InputError("--weights is missing; give the float checkpoint, or --resume to continue a run")
    from models.quantize import session

    if args.resume is not None:
        run = session.find_run(args.resume, args.project or QuantizeOptions.project)
        session.resume(run, given, args.command_line)
    else:
        session.start(QuantizeOptions(**given), args.command_line)


def evaluate(args: argparse.Namespace) -> None:
    """`qat.py eval`."""
    if not args.weights:
        raise InputError("--weights is missing; give the checkpoint to evaluate")
    from models.quantize import measure

    measure.evaluate_checkpoint(EvalOptions(**given_options(vars(args), EvalOptions)), args.command_line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)

    def handle(args: argparse.Namespace) -> None:
        args.command_line = shlex.join(["python", "qat.py", *words])
        {"quantize": quantize, "eval": evaluate}[args.command](args)

    return run_program(build_parser(), handle, words)


if __name__ == "__main__":
    sys.exit(main())
