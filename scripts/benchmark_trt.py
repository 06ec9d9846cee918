#!/usr/bin/env python3
"""Time engines over batch sizes, INT8 against FP16, in one run and in turns.

    python scripts/benchmark_trt.py yolov9-c-int8.onnx --baseline yolov9-c.onnx --batch-size 1 4 8 12 --useCudaGraph

FILE is an ONNX file, of which an engine is built for each batch size (FILE-bN.engine beside it, used again while it is
newer), or an engine. --baseline is the float model's ONNX; its engine is FP16. Files with NMS inside are compared with
a baseline that has it inside too, and files with masks with one that has masks: a segmentation network beside a
detector shows what masks cost. trtexec takes the times where it is installed, else our own loop does.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import logging
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import IMAGE_SIZE_FLAGS, add_build_options, add_device, add_run_dir, run_program
from utils.core.bounds import bounded
from utils.core.errors import DependencyError, InputError
from utils.core.output_paths import refuse_overwrite, refuse_overwrite_in
from utils.core.run_folder import new_run
from utils.jobs.dependencies import need, need_tensorrt

if TYPE_CHECKING:
    from utils.trt import benchmark
    from utils.trt.tensorrt_api import Api
    from utils.trt.trtexec import Trtexec

logger = logging.getLogger("utils.benchmark")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmark_trt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="ONNX file or engine")
    parser.add_argument(
        "--baseline", nargs="+", type=Path, default=[], metavar="FILE",
        help="float ONNX (its engine is FP16), or an FP16 engine; several to compare with and without NMS or masks",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size",
        type=bounded("batch_size"),
        nargs="+",
        default=[1, 4, 8, 12],
        metavar="N",
        help="default: 1 4 8 12",
    )
    parser.add_argument(*IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), nargs="+", metavar="PX",
                        help="height and width, or both in one, of files of dynamic size")  # fmt: skip
    times = parser.add_argument_group("timing, with trtexec's names and defaults")
    times.add_argument(
        "--warmUp", type=bounded("warmUp"), default=200, metavar="MS", help="before each round (default: 200)"
    )
    times.add_argument(
        "--duration", type=bounded("duration"), default=3, metavar="S", help="of each engine (default: 3)"
    )
    times.add_argument(
        "--rounds", type=bounded("rounds"), default=3, metavar="N", help="turns that it is spread over (default: 3)"
    )
    times.add_argument("--useCudaGraph", action="store_true", help="replay a CUDA graph")
    times.add_argument("--useSpinWait", action="store_true", help="wait without sleeping")
    times.add_argument("--noDataTransfers", action="store_true", help="without copying inputs and outputs")
    times.add_argument("--own-timing", action="store_true", help="our own loop, even where trtexec is installed")
    building = parser.add_argument_group("building")
    add_build_options(building)
    building.add_argument(
        "--input-format", choices=("linear", "chw4", "chw32"), nargs="+", default=["linear"],
        help="of ONNX files exported with --input int8: how channels lie in the engine's memory; several to compare",
    )  # fmt: skip
    add_device(parser)
    add_run_dir(parser, "runs/benchmark_trt")
    return parser


def main(args: argparse.Namespace) -> int:
    """Build what is missing, time, write table, JSON and plot. 1 if an engine has no figures."""
    if args.imgsz and len(args.imgsz) > 2:
        raise InputError(f"--imgsz takes one side or height and width, not {len(args.imgsz)} numbers")
    need_tensorrt()
    need("torch", "onnx")
    from utils.jobs import benchmark_report
    from utils.trt import benchmark, tensorrt_api
    from utils.trt.build_config import BuildConfig, check_target
    from utils.trt.timing import TimingConfig

    size = (args.imgsz[0], args.imgsz[-1]) if args.imgsz else None
    entries = [*(benchmark.Entry(file, True) for file in args.baseline), *map(benchmark.Entry, args.files)]
    benchmark.check(entries)
    entries = benchmark.in_formats(entries, args.input_format)
    timing = TimingConfig(args.warmUp, args.duration, args.rounds, args.useCudaGraph, args.useSpinWait,
                             not args.noDataTransfers)  # fmt: skip
    building = BuildConfig.given(args)
    api, device = tensorrt_api.load(), tensorrt_api.engine_device(args.device)
    check_target(api, tensorrt_api.gpu(device.index), ())
    check_outputs(args, entries, size, api)
    program = None if args.own_timing else _trtexec()
    gpu = benchmark_report.device_information(device.index)
    about = {
        "device": gpu,
        "tensorrt": api.name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "method": _method(args, f"trtexec {program.version}" if program else "own loop"),
    }
    logger.info("=== Device Information ===\n%s\n", "\n".join(f"{name}: {value}" for name, value in gpu.items()))
    rows: list[benchmark.Row] = []
    with new_run(args.project, args.name, args.exist_ok) as folder:
        for batch in args.batch_size:
            engines = benchmark.prepare(entries, batch, size, building, api)
            found = benchmark.measure(engines, batch, size, timing, api, device, program)
            for row in found:
                logger.info("%s, batch %d\n%s\n", row.model, batch,
                            "\n".join(row.figures.lines()) if row.figures else f"no figures: {row.error}")  # fmt: skip
            rows += found
            files = benchmark_report.save(rows, about, shlex.join(["python", *sys.argv]), folder)
    logger.info("%s\n", benchmark_report.text(rows))
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        logger.info("%s\n", note)
    logger.info("%s", " ".join(map(str, files)))
    return 1 if any(row.error for row in rows) else 0


def check_outputs(
    args: argparse.Namespace, entries: Sequence[benchmark.Entry], size: tuple[int, int] | None, api: Api
) -> None:
    """Raise `InputError` if an engine that is built, or a file of the run folder, would replace a file that is read."""
    from utils.trt.benchmark import engine_path
    from utils.trt.engine_file import is_current
    from utils.trt.tensorrt_api import gpu

    read, built = [entry.file for entry in entries], []
    for entry in entries:
        for batch in args.batch_size if not entry.is_engine else ():
            engine = engine_path(entry, batch, size)
            if not is_current(engine, entry.file, api, gpu()):
                built += [engine, engine.with_name(f"{engine.name}.json")]
    refuse_overwrite(dict.fromkeys(built), read, "rename one of the files: engines are named after their ONNX files")
    refuse_overwrite_in(args.project, args.name, args.exist_ok, ["benchmark.*"], read)


def _trtexec() -> Trtexec | None:
    from utils.trt import trtexec

    try:
        return trtexec.find()
    except DependencyError:
        return None


def _method(args: argparse.Namespace, by: str) -> str:
    words = ["CUDA graph"] * args.useCudaGraph + ["spin wait"] * args.useSpinWait
    words += ["without data transfers" if args.noDataTransfers else "with data transfers"]
    return f"{by}, {', '.join(words)}, {args.duration:g} s in {args.rounds} rounds, engines in turns; latency: median"


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
