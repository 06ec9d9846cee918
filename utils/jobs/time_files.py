"""The job behind `scripts/benchmark_trt.py`: options checked, files timed interleaved, a table and JSON written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from utils.cli import command_line
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
    import torch

    from utils.trt.benchmark import BenchmarkRow, Entry
    from utils.trt.build_options import BuildConfig
    from utils.trt.tensorrt_api import Api
    from utils.trt.timing import TimingConfig

logger = logging.getLogger(__name__)

timing_option = partial(option, group="timing, with trtexec's names and defaults")
OF_GPUS = ("useCudaGraph", "useSpinWait", "noDataTransfers")


class BenchmarkOptions(RunFolderOptions, RuntimeOptions, BuildOptions):
    """Latency and throughput of engines and ONNX files."""

    OFTEN = ("baseline", "batch_size", "imgsz", "useCudaGraph", "runtime", "device")
    files: list[Path] = option(..., "ONNX file or engine", positional=True, metavar="FILE")
    baseline: list[Path] = option(
        [],
        "FP32 ONNX (its engine is FP16), or an FP16 engine; several to compare with and without NMS or masks",
        metavar="FILE",
    )
    batch_size: list[BatchSize] | None = option(None, "default: 1 4 8 12", metavar="N")
    sweep: BatchSize | None = option(None, "batch sizes 1, 2, 4, ... up to N", metavar="N")
    imgsz: InputSize | None = size_option("that of the files; only files of dynamic size take another")
    warmUp: Annotated[float, Field(ge=0, le=600_000)] = timing_option(
        200, "before each round", "--warmUp", metavar="MS"
    )
    duration: Annotated[float, Field(gt=0, le=86_400)] = timing_option(3, "of each engine", metavar="S")
    rounds: Annotated[int, Field(ge=1, le=1000)] = timing_option(
        3, "rounds that the duration is split into", metavar="N"
    )
    useCudaGraph: bool = timing_option(False, "replay a CUDA graph", "--useCudaGraph")
    useSpinWait: bool = timing_option(False, "wait without sleeping", "--useSpinWait")
    noDataTransfers: bool = timing_option(False, "without copying inputs and outputs", "--noDataTransfers")
    builds: Annotated[int, Field(ge=1, le=9)] = option(
        1,
        "engines to build of each ONNX file; their spread is the noise of the verdict; 2 take twice as long or more",
        metavar="N",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = option(
        None, "of the CPU, without engines (default: one for each core)", metavar="N"
    )
    project: str = project_option("runs/benchmark_trt")

    @property
    def has_engines(self) -> bool:
        """Whether engines are timed; otherwise ONNX Runtime or OpenVINO runs ONNX files."""
        return self.device.strip().lower() != "cpu" and not self.openvino

    def timing(self) -> TimingConfig:
        """Return how each file is timed."""
        from utils.trt.timing import TimingConfig

        copies = not self.noDataTransfers
        return TimingConfig(self.warmUp, self.duration, self.rounds, self.useCudaGraph, self.useSpinWait, copies)

    def method(self) -> str:
        """Return how files are timed, in words."""
        words = []
        if self.has_engines:
            if self.useCudaGraph:
                words.append("CUDA graph")
            if self.useSpinWait:
                words.append("spin wait")
            words.append("without data transfers" if self.noDataTransfers else "with data transfers")
        return ", ".join([*words, f"{self.duration:g} s in {self.rounds} rounds", "interleaved; latency: median"])


def run(options: BenchmarkOptions) -> int:
    """Build what is missing, time, and write table and JSON; 1 if a file has no figures."""
    check_request(options)
    from utils.jobs import benchmark
    from utils.trt.benchmark import check_entries

    size = height_width(options.imgsz) if options.imgsz else None
    batches = benchmark.batch_sizes(options.batch_size, options.sweep)
    timing, building = options.timing(), options.build_config()
    entries = entries_of(options)
    check_entries(entries, size)
    reject_unused(options, entries)
    api, device = find_device(options)
    if api is not None:
        refuse_engines(entries, batches, size, building)
    files = [entry.file for entry in entries]
    refuse_overwrite_in(options.project, options.name, options.exist_ok, ["benchmark.*"], files)
    timed_size = size or benchmark.common_size(entries)
    on_cpu = benchmark.OnCpu(options.threads, options.openvino, options.float_precision or "fp32")
    job = benchmark.Benchmark(entries, size, timing, building, device, timed_size, api, on_cpu)
    if api is None and options.given(*OF_GPUS):  # benchmark_trt.sh gives them, wherever it runs
        logger.warning("on a CPU these do nothing: %s", ", ".join(options.given(*OF_GPUS)))
    about = job.about(options.method())
    lines = [f"{name}: {value}" for name, value in about["device"].items()]
    logger.info("=== Device Information ===\n%s\n", "\n".join(lines))
    rows: list[BenchmarkRow] = []
    with new_run(options.project, options.name, options.exist_ok) as folder:
        for batch in batches:
            rows += job.measure(batch)
            written = benchmark.save_benchmark(rows, about, command_line(), folder)
    log_results(rows, written)
    return 1 if any(row.error for row in rows) else 0


def check_request(options: BenchmarkOptions) -> None:
    """Raise `InputError` for batch sizes that are given twice, or a file or library that is missing."""
    if options.sweep and options.batch_size:
        raise InputError("--batch-size gives batch sizes and --sweep asks for 1, 2, 4, ...; give one of them")
    for file in (*options.files, *options.baseline):
        check_file(file, "expected an ONNX file or an engine")
    if options.has_engines:
        need_tensorrt()
        need("torch", "onnx")
    else:
        need("torch", "onnx", "openvino" if options.openvino else "onnxruntime")


def entries_of(options: BenchmarkOptions) -> list[Entry]:
    """Return the files to time, baselines first; each ONNX file is there once for each of its builds."""
    from utils.trt.benchmark import Entry

    files = [*(Entry(file, True) for file in options.baseline), *map(Entry, options.files)]
    entries = list(files)
    for number in range(2, options.builds + 1):
        entries += [replace(entry, build=number) for entry in files if not entry.is_engine]
    return entries


def reject_unused(options: BenchmarkOptions, entries: Sequence[Entry]) -> None:
    """Raise `InputError` for an option that does nothing here, or for an engine on a CPU."""
    built = [entry.file for entry in entries if entry.is_engine]
    if options.has_engines:
        options.reject_unused(["threads"], "to engines, which run on a GPU")
        if len(built) == len(entries):
            options.reject_unused(["builds", *BUILD_OPTIONS], "to engines that are built already")
        return
    if built:
        raise InputError(f"{built[0]} is an engine, which runs on a GPU only; on a CPU give .onnx files")
    unused = BUILD_OPTIONS if options.openvino else ("builds", *BUILD_OPTIONS)
    options.reject_unused(unused, "where no engine takes part")


def find_device(options: BenchmarkOptions) -> tuple[Api | None, torch.device]:
    """Return TensorRT, None without engines, and the device; `InputError` if the GPU cannot be built for."""
    from utils.trt import tensorrt_api
    from utils.trt.preflight import check_target

    api = tensorrt_api.load_tensorrt() if options.has_engines else None
    device = tensorrt_api.use_device("cpu" if options.openvino else options.device, for_engines=api is not None)
    if api is not None:
        check_target(api, tensorrt_api.gpu(device.index), ())
    return api, device


def refuse_engines(
    entries: Sequence[Entry], batches: Sequence[int], size: tuple[int, int] | None, building: BuildConfig
) -> None:
    """Raise `InputError` if an engine that is to be built would overwrite a file that is read."""
    from utils.trt.benchmark import planned

    onnx_files = [entry for entry in entries if not entry.is_engine]
    engines = [planned(entry, batch, size, building)[0] for entry, batch in product(onnx_files, batches)]
    files = [entry.file for entry in entries]
    refuse_overwrite(engines, files, "rename one of the files: engines are named after their ONNX files")


def log_results(rows: Sequence[BenchmarkRow], written: Sequence[Path]) -> None:
    """Log the table, the notes on layers and the verdicts, each once, and the files."""
    from utils.jobs.benchmark import benchmark_table
    from utils.trt.benchmark import verdicts

    logger.info("%s\n", "\n".join(aligned(*benchmark_table(rows))))
    notes = [note for row in rows for note in row.notes]
    for note in dict.fromkeys([*notes, *verdicts(rows)]):
        logger.info("%s\n", note)
    logger.info("%s", " ".join(map(str, written)))
