#!/usr/bin/env python3
"""Quantize a YOLOv9 detector to INT8 and evaluate checkpoints.

    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py sensitive --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py calibrate --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --data data/coco.yaml

Run it in a patched YOLOv9 checkout (patch_yolov9.sh). `torchrun --nproc-per-node N qat.py ...` uses N GPUs.
"""

from __future__ import annotations

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from utils.cli import run_program
from utils.core import distributed
from utils.core.arguments import idle
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.core.output_paths import refuse_overwrite_in
from utils.jobs.dependencies import need
from utils.jobs.options import CalibrateOptions, EvalOptions, QuantizeOptions, SensitiveOptions, given_options
from utils.jobs.qat_arguments import add_calibrate, add_eval, add_quantize, add_sensitive

logger = logging.getLogger(__name__)

Job = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]  # find, start and resume a run
Options = TypeVar("Options", QuantizeOptions, SensitiveOptions, CalibrateOptions, EvalOptions)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("qat.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="{quantize,sensitive,calibrate,eval}")
    add_quantize(commands.add_parser("quantize", help="calibrate (PTQ), then finetune (QAT)"))
    add_sensitive(commands.add_parser("sensitive", help="which parts hurt in INT8, and a recipe that mends it"))
    add_calibrate(commands.add_parser("calibrate", help="compare calibration methods, and a recipe with the best"))
    add_eval(commands.add_parser("eval", help="AP of a float or quantized checkpoint"))
    return parser


# What each command writes into its run folder.
WRITTEN = {
    QuantizeOptions: ("weights/last.pt", "weights/ptq_*.pt", "weights/qat_*.pt", "report.*", "placement.txt", "*.png"),
    SensitiveOptions: ("state.json", "summary-sensitive-analysis.json", "*.png", "recipe.yaml"),
    CalibrateOptions: ("calibration.json", "recipe.yaml"),
    EvalOptions: ("report.json", "*_predictions.json"),
}


OF_TRAINING = ("hyp", "epochs", "iters", "lr", "train", "supervision", "supervision_stride", "teacher")


def _options(args: argparse.Namespace, kind: type[Options]) -> Options:
    """The options of a new run, which is not to overwrite what it reads."""
    options = kind(**given_options(vars(args), kind))
    read = {name: getattr(options, name, None) for name in ("weights", "data", "recipe", "hyp", "profile", "teacher")}
    check_files(**read)
    refuse_overwrite_in(options.project, options.name, options.exist_ok, WRITTEN[kind], read.values())
    need("torch")
    if read["hyp"] and kind is not QuantizeOptions:
        logger.warning("--hyp %s is checked only: these images are not augmented", read["hyp"])
    return options


def quantize(args: argparse.Namespace) -> None:
    """`qat.py quantize`."""
    if args.ptq_only and idle(args, *OF_TRAINING):  # a usual command with --ptq-only behind it
        logger.warning("--ptq-only ends before training; these do nothing: %s", ", ".join(idle(args, *OF_TRAINING)))

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
        resume(run, given_options(vars(args), kind))
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
