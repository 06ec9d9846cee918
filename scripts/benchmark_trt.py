#!/usr/bin/env python3
"""Time engines over batch sizes and contexts, INT8 against FP16 and PyTorch, in one run and in turns.

    python scripts/benchmark_trt.py yolov9-c-int8.onnx --baseline yolov9-c.onnx --batch-size 1 4 8 12 --useCudaGraph
    python scripts/benchmark_trt.py yolov9-c-int8.onnx yolov9-c-converted.pt --sweep 64 --infStreams 1 2 4

FILE is an ONNX file, of which an engine is built for each batch size (FILE-bN.engine beside it, used again while it is
newer), an engine, or a float .pt, which PyTorch runs in FP32 and FP16, eager and by torch.compile. All are timed at one
image size: that of the files, which a .pt takes over (alone: 640), or --imgsz. --baseline is the float model's ONNX;
its engine is FP16. Files with NMS inside are compared with a baseline that has it inside too, and files with masks with
one that has masks: a segmentation network beside a detector shows what masks cost. trtexec takes the times where it is
installed and no .pt takes part, else our own loop does. With --device cpu, ONNX Runtime runs ONNX files on the CPU, and
there are no engines.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import IMAGE_SIZE_FLAGS, add_build_options, add_device, add_run_dir, command_line, run_program
from utils.core.arguments import idle, refuse_idle
from utils.core.bounds import bounded
from utils.core.errors import DependencyError, InputError
from utils.core.output_paths import refuse_overwrite, refuse_overwrite_in
from utils.core.run_folder import new_run
from utils.jobs.dependencies import need, need_tensorrt

if TYPE_CHECKING:
    from utils.trt.benchmark import Entry
    from utils.trt.benchmark_rows import Row
    from utils.trt.build_config import BuildConfig
    from utils.trt.tensorrt_api import Api
    from utils.trt.trtexec import Trtexec

logger = logging.getLogger("utils.benchmark")

OF_BUILDS = ("tactic_sources_off", "optimization_level", "max_aux_streams", "timing_iterations", "build_limit", "tune")
OF_GPUS = ("useCudaGraph", "useSpinWait", "noDataTransfers", "exposeDMA")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmark_trt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="ONNX file, engine, or float .pt")
    parser.add_argument(
        "--baseline", nargs="+", type=Path, default=[], metavar="FILE",
        help="float ONNX (its engine is FP16), or an FP16 engine; several to compare with and without NMS or masks",
    )  # fmt: skip
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument(
        "--batch-size", type=bounded("batch_size"), nargs="+", metavar="N", help="default: 1 4 8 12"
    )  # fmt: skip
    batches.add_argument("--sweep", type=bounded("batch_size"), metavar="N", help="batch sizes 1, 2, 4, ... up to N")
    parser.add_argument(*IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), nargs="+", metavar="PX",
                        help="height and width, or both in one, of files of dynamic size and of a .pt")  # fmt: skip
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
    times.add_argument(
        "--infStreams", type=bounded("infStreams"), nargs="+", default=[1], metavar="N",
        help="contexts side by side, each with its own stream and buffers; several to compare (default: 1)",
    )  # fmt: skip
    times.add_argument("--useCudaGraph", action="store_true", help="replay a CUDA graph; also of torch.compile's rows")
    times.add_argument("--useSpinWait", action="store_true", help="wait without sleeping")
    times.add_argument("--noDataTransfers", action="store_true", help="without copying inputs and outputs")
    times.add_argument("--exposeDMA", action="store_true", help="copy before and after a run, not during others")
    times.add_argument("--own-timing", action="store_true", help="our own loop, even where trtexec is installed")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction,
        help="rows of torch.compile for a .pt; takes minutes (default: on a GPU)",
    )  # fmt: skip
    building = parser.add_argument_group("building")
    add_build_options(building)
    add_device(parser)
    add_run_dir(parser, "runs/benchmark_trt")
    return parser


def main(args: argparse.Namespace) -> int:
    """Build what is missing, time, write table, JSON, CSV and plot. 1 if an engine has no figures."""
    if args.imgsz and len(args.imgsz) > 2:
        raise InputError(f"--imgsz takes one side or height and width, not {len(args.imgsz)} numbers")
    if args.noDataTransfers:
        refuse_idle(args, ["exposeDMA"], "with --noDataTransfers, which copies nothing")
    checkpoints = [file for file in args.files if file.suffix.lower() == ".pt"]
    others = [file for file in args.files if file not in checkpoints]
    on_cpu = args.device.strip().lower() == "cpu"
    engines = bool(others or args.baseline) and not on_cpu
    if engines:
        need_tensorrt()
    need("torch", "onnx", *(["onnxruntime"] if on_cpu and (others or args.baseline) else []))
    from utils.jobs import benchmark, benchmark_networks, benchmark_report
    from utils.trt import tensorrt_api
    from utils.trt.benchmark import Entry, check
    from utils.trt.build_config import BuildConfig
    from utils.trt.decision import check_target
    from utils.trt.timing import TimingConfig

    entries = [*(Entry(file, True) for file in args.baseline), *map(Entry, others)]
    size = (args.imgsz[0], args.imgsz[-1]) if args.imgsz else None
    batches = benchmark.batch_sizes(args.batch_size, args.sweep)
    timing = TimingConfig(args.warmUp, args.duration, args.rounds, args.useCudaGraph, args.useSpinWait,
                          not args.noDataTransfers, overlap=not args.exposeDMA)  # fmt: skip
    check(entries)
    building = BuildConfig.given(args)
    if not engines:
        benchmark.check_without_engines(entries, args.infStreams, building)
    elif all(entry.is_engine for entry in entries):
        refuse_idle(args, OF_BUILDS, "to engines that are built already")
    if args.compile and not checkpoints:
        raise InputError("--compile is for PyTorch's networks, and no .pt takes part")
    api = tensorrt_api.load() if engines else None
    if api is None:
        device = tensorrt_api.use_device(args.device)
    else:
        device = tensorrt_api.engine_device(args.device)
        check_target(api, tensorrt_api.gpu(device.index), ())
    check_outputs(args, entries, batches, size, api, checkpoints, building)
    common = None if size else benchmark.common_size(entries, checkpoints)
    compiled = device.type == "cuda" if args.compile is None else args.compile
    job = benchmark.Benchmark(
        entries, {file: benchmark_networks.load_checkpoint(file, device) for file in checkpoints}, size,
        list(dict.fromkeys(args.infStreams)), timing, building, device, compiled, size or common, api,
        _trtexec(api) if api and not (args.own_timing or checkpoints) else None,
    )  # fmt: skip
    if not job.on_gpu and idle(args, *OF_GPUS):  # benchmark_trt.sh gives them, wherever it runs
        logger.warning("on a CPU these do nothing: %s", ", ".join(idle(args, *OF_GPUS)))
    about = benchmark_report.about(job, _method(args, job.program, job.on_gpu))
    logger.info("=== Device Information ===\n%s\n", "\n".join(f"{k}: {v}" for k, v in about["device"].items()))
    rows: list[Row] = []
    with new_run(args.project, args.name, args.exist_ok) as folder:
        for batch in batches:
            found = job.measure(batch)
            for row in found:
                logger.info("%s\n%s\n", row.title,
                            "\n".join(row.figures.lines()) if row.figures else f"no figures: {row.error}")  # fmt: skip
            rows += found
            files = benchmark_report.save(rows, about, command_line(), folder)
    logger.info("%s\n", benchmark_report.text(rows))
    notes = ["\n".join(benchmark_report.fastest(rows)), *(note for row in rows for note in row.notes)]
    for note in dict.fromkeys(filter(None, notes)):
        logger.info("%s\n", note)
    logger.info("%s", " ".join(map(str, files)))
    return 0 if benchmark.succeeded(rows) else 1


def check_outputs(
    args: argparse.Namespace,
    entries: Sequence[Entry],
    batches: Sequence[int],
    size: tuple[int, int] | None,
    api: Api | None,
    checkpoints: Sequence[Path],
    building: BuildConfig,
) -> None:
    """Raise `InputError` if an engine that is built, or a file of the run folder, would replace a file that is read."""
    from utils.trt.benchmark import planned
    from utils.trt.engine_file import is_current
    from utils.trt.tensorrt_api import gpu

    read: list[Path] = [*(entry.file for entry in entries), *checkpoints]
    built: list[Path] = []
    made = [entry for entry in entries if not entry.is_engine]
    for entry, batch in product(made, batches if api else ()):
        engine, wanted = planned(entry, batch, size, building)
        if api and not is_current(engine, entry.file, api, gpu(), wanted):
            built += [engine, engine.with_name(f"{engine.name}.json")]
    refuse_overwrite(dict.fromkeys(built), read, "rename one of the files: engines are named after their ONNX files")
    refuse_overwrite_in(args.project, args.name, args.exist_ok, ["benchmark.*"], read)


def _trtexec(api: Api) -> Trtexec | None:
    """The installed trtexec if it is of the TensorRT that builds the engines, whose version alone loads them."""
    from utils.trt import trtexec

    try:
        found = trtexec.find()
    except DependencyError:
        return None
    if found.name == api.name:
        return found
    logger.warning(
        "%s is of %s, and engines are built and loaded by %s: the times are our own loop's",
        found.path,
        found.name,
        api.name,
    )
    return None


def _method(args: argparse.Namespace, program: Trtexec | None, on_gpu: bool) -> str:
    words = [f"trtexec {program.version}" if program else "own loop"]
    words += ["CUDA graph"] * (on_gpu and args.useCudaGraph) + ["spin wait"] * (on_gpu and args.useSpinWait)
    transfers = "with data transfers" + (" before and after each run" if args.exposeDMA else "")
    words += ["without data transfers" if args.noDataTransfers else transfers] * on_gpu
    return f"{', '.join(words)}, {args.duration:g} s in {args.rounds} rounds, in turns; latency: median"


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
