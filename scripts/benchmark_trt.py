#!/usr/bin/env python3
"""Time engines over batch sizes, INT8 against FP16, in one run and interleaved.

    python scripts/benchmark_trt.py yolov9-c-int8.onnx --baseline yolov9-c.onnx --batch-size 1 4 8 12 --useCudaGraph
    python scripts/benchmark_trt.py yolov9-c-int8.onnx --sweep 64

FILE is an ONNX file, of which an engine is built for each batch size (FILE-bN.engine beside it, used again while it is
newer), or an engine. All are timed at one image size: that of the files, or --imgsz. --baseline is the float model's
ONNX; its engine is FP16. Files with NMS inside are compared with a baseline that has it inside too, and files with
masks with one that has masks: a segmentation network beside a detector shows what masks cost.

With --runtime openvino, OpenVINO runs ONNX files on the CPU, INT8 beside FP32 (and BF16, where the processor has it);
with --device cpu, ONNX Runtime runs them in float. There are no engines then. With OpenVINO, --builds 2 opens each file
twice.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from utils.cli import command_line, run_program
from utils.core.errors import InputError
from utils.core.files import check_file, refuse_overwrite, refuse_overwrite_in
from utils.core.options import (
    BatchSize,
    Field,
    InputSize,
    RunFolderOptions,
    RuntimeOptions,
    height_width,
    option,
    project_option,
    size_option,
)
from utils.core.run_folder import new_run
from utils.core.text import aligned
from utils.jobs.open import need, need_tensorrt
from utils.trt.build_options import BUILD_OPTIONS, BuildOptions

if TYPE_CHECKING:
    from utils.trt.benchmark import BenchmarkRow

logger = logging.getLogger("utils.benchmark")

timing_option = partial(option, group="timing, with trtexec's names and defaults")
OF_GPUS = ("useCudaGraph", "useSpinWait", "noDataTransfers")


class BenchmarkOptions(RunFolderOptions, RuntimeOptions, BuildOptions):
    """Latency and throughput of engines and ONNX files."""

    OFTEN = ("baseline", "batch_size", "imgsz", "useCudaGraph", "runtime", "device")
    files: list[Path] = option(..., "ONNX file or engine", positional=True, metavar="FILE")
    baseline: list[Path] = option(
        [], "float ONNX (its engine is FP16), or an FP16 engine; several to compare with and without NMS or masks",
        metavar="FILE",
    )  # fmt: skip
    batch_size: list[BatchSize] | None = option(None, "default: 1 4 8 12", metavar="N")
    sweep: BatchSize | None = option(None, "batch sizes 1, 2, 4, ... up to N", metavar="N")
    imgsz: InputSize | None = size_option("that of the files; only files of dynamic size take another")
    warmUp: Annotated[float, Field(ge=0, le=600_000)] = timing_option(
        200, "before each round", "--warmUp", metavar="MS"
    )
    duration: Annotated[float, Field(gt=0, le=86_400)] = timing_option(3, "of each engine", metavar="S")
    rounds: Annotated[int, Field(ge=1, le=1000)] = timing_option(3, "turns that it is spread over", metavar="N")
    useCudaGraph: bool = timing_option(False, "replay a CUDA graph", "--useCudaGraph")
    useSpinWait: bool = timing_option(False, "wait without sleeping", "--useSpinWait")
    noDataTransfers: bool = timing_option(False, "without copying inputs and outputs", "--noDataTransfers")
    builds: Annotated[int, Field(ge=1, le=9)] = option(
        1, "engines of each ONNX file, whose spread is the verdict's noise; 2 takes twice as long or more", metavar="N"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = option(
        None, "of the CPU, without engines (default: one for each core)", metavar="N"
    )
    project: str = project_option("runs/benchmark_trt")


def refuse_unusable(options: BenchmarkOptions, engines: bool) -> None:
    """Raise `InputError` for options that exclude each other, or a file or library that is missing."""
    if options.sweep and options.batch_size:
        raise InputError("--batch-size gives batch sizes and --sweep asks for 1, 2, 4, ...; give one of them")
    for file in (*options.files, *options.baseline):
        check_file(file, "expected an ONNX file or an engine")
    if engines:
        need_tensorrt()
        need("torch", "onnx")
    else:
        need("torch", "onnx", "openvino" if options.openvino else "onnxruntime")


def reject_unused(options: BenchmarkOptions, engines: bool, built: Sequence[Path], files: int) -> None:
    """Raise `InputError` for an option that does nothing here, or for an engine (`built`) on a CPU."""
    if engines:
        options.reject_unused(["threads"], "to engines, which run on a GPU")
        if len(built) == files:
            options.reject_unused(["builds", *BUILD_OPTIONS], "to engines that are built already")
        return
    if built:
        raise InputError(f"{built[0]} is an engine, which runs on a GPU only; on a CPU give .onnx files")
    unused = BUILD_OPTIONS if options.openvino else ("builds", *BUILD_OPTIONS)
    options.reject_unused(unused, "where no engine takes part")


def main(options: BenchmarkOptions) -> int:
    """Build what is missing, time, write table and JSON. 1 if an engine has no figures."""
    engines = options.device.strip().lower() != "cpu" and not options.openvino
    refuse_unusable(options, engines)
    from utils.jobs import benchmark
    from utils.trt import tensorrt_api
    from utils.trt.benchmark import Entry, check_entries, planned, verdicts
    from utils.trt.preflight import check_target
    from utils.trt.timing import TimingConfig

    files = [*(Entry(file, True) for file in options.baseline), *map(Entry, options.files)]
    entries = [replace(entry, build=number) for number in range(1, options.builds + 1)
               for entry in files if number == 1 or not entry.is_engine]  # fmt: skip
    size = height_width(options.imgsz) if options.imgsz else None
    batches = benchmark.batch_sizes(options.batch_size, options.sweep)
    timing = TimingConfig(options.warmUp, options.duration, options.rounds, options.useCudaGraph, options.useSpinWait,
                          not options.noDataTransfers)  # fmt: skip
    check_entries(entries, size)
    building = options.build_config()
    reject_unused(options, engines, [entry.file for entry in entries if entry.is_engine], len(entries))
    api = tensorrt_api.load_tensorrt() if engines else None
    device = tensorrt_api.use_device("cpu" if options.openvino else options.device, for_engines=api is not None)
    if api is not None:
        check_target(api, tensorrt_api.gpu(device.index), ())
    read = [entry.file for entry in entries]
    engines_made = [planned(entry, batch, size, building)[0]
                    for entry, batch in product(entries, batches) if api and not entry.is_engine]  # fmt: skip
    refuse_overwrite(engines_made, read, "rename one of the files: engines are named after their ONNX files")
    refuse_overwrite_in(options.project, options.name, options.exist_ok, ["benchmark.*"], read)
    common = None if size else benchmark.common_size(entries)
    on_cpu = benchmark.OnCpu(options.threads, options.openvino, options.float_precision or "fp32")
    job = benchmark.Benchmark(entries, size, timing, building, device, size or common, api, on_cpu)
    how = f"{options.duration:g} s in {options.rounds} rounds, interleaved; latency: median"
    if api is not None:
        words = ["CUDA graph"] * options.useCudaGraph + ["spin wait"] * options.useSpinWait
        words += [f"{'without' if options.noDataTransfers else 'with'} data transfers"]
        how = f"{', '.join(words)}, {how}"
    elif options.given(*OF_GPUS):  # benchmark_trt.sh gives them, wherever it runs
        logger.warning("on a CPU these do nothing: %s", ", ".join(options.given(*OF_GPUS)))
    about = job.about(how)
    logger.info("=== Device Information ===\n%s\n", "\n".join(f"{k}: {v}" for k, v in about["device"].items()))
    rows: list[BenchmarkRow] = []
    with new_run(options.project, options.name, options.exist_ok) as folder:
        for batch in batches:
            rows += job.measure(batch)
            written = benchmark.save_benchmark(rows, about, command_line(), folder)
    logger.info("%s\n", "\n".join(aligned(*benchmark.benchmark_table(rows))))
    for note in dict.fromkeys([*(note for row in rows for note in row.notes), *verdicts(rows)]):
        logger.info("%s\n", note)
    logger.info("%s", " ".join(map(str, written)))
    return int(any(row.error for row in rows))


run = partial(run_program, "benchmark_trt.py", (BenchmarkOptions, main), about=__doc__)

if __name__ == "__main__":
    sys.exit(run())
