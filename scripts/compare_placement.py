#!/usr/bin/env python3
"""Judge a placement of quantizers by the engines that TensorRT makes of it: FP16, convolutions only, and ours.

    python scripts/compare_placement.py models/detect/gelan-c.yaml --imgsz 640 --batch-size 1 8 --output runs/placement

MODEL is a model's YAML (random weights: the speed is the same) or float weights. Run it in a patched checkout, on the
GPU. Files in --output are used again when they are newer than what they are made from, so that an interrupted
comparison goes on; after a change of a rule give --force-onnx. --onnx-only and --from-onnx split the work between an
environment that exports and one that has TensorRT.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import add_build_options, add_device, add_image_size, command_line, run_program
from utils.core.arguments import refuse_idle
from utils.core.bounds import bounded
from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.input_files import check_file, check_files
from utils.core.output_paths import refuse_overwrite
from utils.jobs.dependencies import need, need_tensorrt

if TYPE_CHECKING:
    from utils.jobs.compare_placement.variants import Job
    from utils.onnx_graph.export_config import Typing

logger = logging.getLogger("utils.jobs.compare_placement")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "compare_placement.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="model YAML, or float weights (.pt)")
    add_image_size(parser)
    parser.add_argument(
        "--batch-size", type=bounded("batch_size"), nargs="+", default=[1, 8], metavar="N", help="default: 1 8"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/placement"), metavar="DIR",
                        help="where all files go (default: runs/placement)")  # fmt: skip
    parser.add_argument(
        "--variants", nargs="+", default=["fp16", "int8-convs", "int8"], choices=("fp16", "int8-convs", "int8"),
        help="fp16; int8-convs: convolutions only, each with an input scale of its own; int8: ours (default: all). "
        "What is not named is neither exported nor built",
    )  # fmt: skip
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="recipe's YAML for both INT8 variants")
    parser.add_argument(
        "--typing",
        choices=("weak", "strong"),
        help="how the ONNX is typed (default: as the TensorRT here needs it; weak without one)",
    )
    parser.add_argument("--no-simplify", action="store_true", help="without onnxslim")
    parser.add_argument("--force-onnx", action="store_true", help="export again, and build again")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--onnx-only", action="store_true", help="export, then stop")
    part.add_argument("--from-onnx", action="store_true", help="build and time what --onnx-only left")
    builds = parser.add_argument_group("building")
    builds.add_argument(
        "--workers", type=bounded("builds"), metavar="K", help="builds side by side (default: half the cores, up to 4)"
    )
    builds.add_argument("--timing-cache", metavar="FILE", help="default: one for each model, in --output")
    add_build_options(builds)
    times = parser.add_argument_group("timing")
    times.add_argument(
        "--iterations", type=bounded("iterations"), default=300, metavar="N", help="runs of each engine (default: 300)"
    )
    times.add_argument(
        "--rounds", type=bounded("rounds"), default=5, metavar="N", help="turns that they are spread over (default: 5)"
    )
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Export, build, time, as far as was asked for."""
    if not args.onnx_only:
        need_tensorrt()
    if args.tune and (args.workers or 1) > 1:
        raise InputError(f"--tune times engines between builds, and {args.workers} --workers would disturb that")
    if args.from_onnx:
        refuse_idle(args, ["force_onnx"], "with --from-onnx, which exports nothing")
    check_files(recipe=args.recipe)
    for model in args.models if not args.from_onnx else ():
        check_file(model, "give a model's YAML such as models/detect/gelan-c.yaml, or a .pt")
    need("torch", "onnx", *["onnxslim"] * (not args.no_simplify and not args.from_onnx))
    from utils.jobs.compare_placement.variants import jobs

    wanted = jobs(args.models, args.batch_size, args.variants, args.imgsz, args.output)
    refuse_overwrite(outputs(args, wanted), [*args.models, args.recipe])
    if not args.onnx_only:
        check_setup(args)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the folder {args.output}: {error.strerror}; choose another --output"
        ) from error
    if not args.from_onnx:
        export_all(args, wanted)
    missing = [job.onnx for job in wanted if not job.onnx.is_file()]
    if missing:
        raise InputError(f"{missing[0]} does not exist; run the same command with --onnx-only first")
    return 0 if args.onnx_only else compare(args, wanted)


def outputs(args: argparse.Namespace, wanted: Sequence[Job]) -> Iterator[Path]:
    """What is written; ONNX files are only exported without --from-onnx, and engines only built without --onnx-only."""
    for job in dict.fromkeys(wanted):  # a batch can be named twice
        yield job.onnx
        yield job.engine
        yield job.engine.with_name(f"{job.engine.name}.json")
    yield from (args.output / f"comparison.{suffix}" for suffix in ("md", "json"))
    if args.timing_cache:
        yield Path(args.timing_cache)


def check_setup(args: argparse.Namespace) -> None:
    """Raise `InputError` if TensorRT or the GPU that engines are built and timed on is missing."""
    from utils.trt import tensorrt_api
    from utils.trt.decision import check_target

    api, device = tensorrt_api.load(), tensorrt_api.engine_device(args.device)
    check_target(api, tensorrt_api.gpu(device.index), ())


def export_all(args: argparse.Namespace, wanted: Sequence) -> None:
    """The ONNX files of all models."""
    from utils.jobs.compare_placement.variants import export

    if args.force_onnx:
        for job in wanted:
            job.onnx.unlink(missing_ok=True)
    typing = args.typing or needed_typing()
    for model in args.models:
        mine = [job for job in wanted if job.model == model.stem]
        export(model, mine, args.imgsz, args.recipe, select_device(args.device), not args.no_simplify, typing)


def needed_typing() -> Typing:
    """Of the TensorRT that is installed here; weak without one, which is what 8.6 reads."""
    from utils.trt import tensorrt_api

    if tensorrt_api.installed() is None:
        return "weak"
    return tensorrt_api.load().typing


def compare(args: argparse.Namespace, wanted: Sequence) -> int:
    """Build and time; results are written after each model and batch. 1 if an engine is missing."""
    from utils.jobs.compare_placement import engines, table
    from utils.trt.build_config import BuildConfig

    workers = args.workers or (1 if args.tune else engines.default_workers())
    config = BuildConfig.given(args, shares=workers, timing_cache=args.timing_cache)
    failed = engines.build_engines(wanted, config, workers, args.device)
    about, command = table.measured_on(config.sources_off), command_line()
    rows: list[engines.Row] = []
    files: list[Path] = []
    for group in engines.measure(wanted, failed, args.iterations, args.rounds, args.device):
        rows += group
        files = table.save(rows, about, command, args.output)
        logger.info("%s\n", table.text(group))
    logger.info("%s\n\n%s; %s", table.text(rows), ", ".join(about.values()), " ".join(map(str, files)))
    return 1 if any(row.error for row in rows) else 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
