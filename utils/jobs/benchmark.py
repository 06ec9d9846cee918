"""The job behind `scripts/benchmark_trt.py`: engines, or ONNX files on a CPU, timed interleaved.

Their rows are written as a table and JSON.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch

from utils.core.cpu import cpu_cores
from utils.core.errors import InputError
from utils.core.files import write_text
from utils.core.input_spec import COLOURS, KIND_KEY, InputSpec
from utils.core.text import markdown_table, plural
from utils.jobs.open import open_openvino
from utils.runners import onnxrt, openvino
from utils.runners.base import Runner, imgsz_of
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.runners.openvino import Precision
from utils.trt import benchmark
from utils.trt.benchmark import FAILURES, ONNX_RUNTIME, OPENVINO, TENSORRT, BenchmarkRow, Candidate, Entry, one_line
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_file import OnnxFile
from utils.trt.preflight import profile_shapes
from utils.trt.tensorrt_api import Api
from utils.trt.timing import TimingConfig, random_input

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 8, 12)


@dataclass(frozen=True)
class OnCpu:
    """Settings for ONNX files that run without an engine.

    Attributes:
        threads: None for one on each core.
        openvino: OpenVINO's device; None if ONNX Runtime runs the files.
        precision: OpenVINO's for layers that are not INT8. Baselines are timed in each precision in which the device is
            fast.
    """

    threads: int | None = None
    openvino: str | None = None
    precision: Precision = "fp32"

    def precisions(self, entry: Entry) -> Sequence[Precision]:
        """Return the float precisions in which a file is timed."""
        if self.openvino and entry.baseline:
            return openvino.precisions(self.openvino)
        return [self.precision]

    def open(self, file: Path, precision: Precision) -> Runner:
        """Open a runner for an ONNX file."""
        if self.openvino:
            return open_openvino(file, self.openvino, precision, threads=self.threads)
        return OnnxRuntimeRunner(file, threads=self.threads)

    def software(self) -> str:
        """Name and version of the library that runs the files."""
        if self.openvino:
            return f"{OPENVINO} {openvino.release()}"
        return f"{ONNX_RUNTIME} {onnxrt.version()}"

    def hardware(self) -> str:
        """Device and threads, in words."""
        device = "CPU"
        if self.openvino:
            device = f"{self.openvino} ({openvino.device_title(self.openvino)})"
        if device.startswith("CPU"):
            device += f", {plural(self.threads or cpu_cores(), 'thread')}"
        return device


@dataclass(frozen=True)
class Benchmark:
    """The files to time, and the settings of the measurement.

    Attributes:
        entries: ONNX files and engines; without `api` the ONNX files run with the settings of `on_cpu`.
        size: (height, width) in pixels that the user gave, for files of dynamic size; None if each file has its own.
        timed_size: (height, width) at which everything is timed; None if all files are engines that do not name one.
        api: TensorRT; None if no engine takes part.
    """

    entries: Sequence[Entry]
    size: tuple[int, int] | None
    timing: TimingConfig
    building: BuildConfig
    device: torch.device
    timed_size: tuple[int, int] | None = None
    api: Api | None = None
    on_cpu: OnCpu = OnCpu()

    def measure(self, batch: int) -> list[BenchmarkRow]:
        """Build what is missing for this batch size, time everything interleaved, and log a line for each row."""
        with ExitStack() as stack:
            if self.api is None:
                candidates = self._open_onnx_files(batch, stack)
            else:
                engines = benchmark.build_missing(self.entries, batch, self.size, self.building, self.api)
                candidates = benchmark.open_engines(
                    engines, batch, self.size, self.api, self.device, self.timing, stack
                )
            rows = benchmark.time_candidates(candidates, self.timing)
            for row in rows:
                logger.info("%s: %s", row.title, row.figures or f"no figures: {row.error}")
            candidates.clear()
        if self.api is not None:
            torch.cuda.empty_cache()  # TensorRT cannot have what PyTorch keeps
        return rows

    def _open_onnx_files(self, batch: int, opened: ExitStack) -> list[Candidate]:
        """Open each file in each precision in which it is timed."""
        candidates = []
        for entry in self.entries:
            for precision in self.on_cpu.precisions(entry):
                candidates.append(open_onnx(entry, batch, self.size, self.on_cpu, precision, opened))
        return candidates

    def about(self, method: str) -> dict[str, Any]:
        """Device, software, date, image size and `method` of the measurement, as JSON holds them."""
        if self.api:
            tensorrt = software = self.api.name
            device = device_information(self.device.index)
        else:
            tensorrt = ""
            software = self.on_cpu.software()
            device = {"Selected Device": self.on_cpu.hardware()}
        return {
            "device": device,
            "tensorrt": tensorrt,
            "software": software,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "imgsz": list(self.timed_size) if self.timed_size else None,
            "method": method,
        }


def common_size(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """(height, width) in pixels at which files are timed without --imgsz; None if they are engines that do not name it.

    Raises:
        InputError: they differ.
    """
    sizes = {entry.file: _size_of(entry) for entry in entries}
    if len({*sizes.values()}) > 1:
        words = ", ".join(f"{file} ({_size_in_words(size)})" for file, size in sizes.items())
        raise InputError(f"all files are timed at one image size, but these differ: {words}; give --imgsz")
    return next(iter(sizes.values()))


def _size_in_words(size: tuple[int, int] | None) -> str:
    if size is None:
        return "unknown"
    height, width = size
    return f"{height}x{width}"


def _size_of(entry: Entry) -> tuple[int, int] | None:
    """(height, width) at which a file is timed by itself; None for an engine whose note does not name it."""
    if entry.is_engine:
        return _size_of_engine(EngineNote.load(entry.file))
    file = OnnxFile.read(entry.file)
    name, shape = file.image
    ranges = profile_shapes(file, BuildConfig())
    if ranges:
        shape = file.input_spec.nchw(ranges[name][-1])
    return cast(tuple[int, int], tuple(shape[2:]))


def _size_of_engine(note: EngineNote) -> tuple[int, int] | None:
    """The largest (height, width) of an engine's profile; without a profile, that of its metadata."""
    for _, _, largest in note.profile.values():
        form = InputSpec.of_file(note.metadata, note.metadata.get(KIND_KEY, "float"), largest)
        _, channels, height, width = form.nchw(largest)
        return (height, width) if channels in COLOURS else None
    return imgsz_of(note.metadata)


def batch_sizes(batches: Sequence[int] | None, sweep: int | None) -> list[int]:
    """Return the batch sizes to time, each once: `batches`, or 1, 2, 4, ... below `sweep`, and `sweep`.

    >>> batch_sizes(None, 6)
    [1, 2, 4, 6]
    >>> batch_sizes([8, 1, 8], None)
    [8, 1]
    """
    if sweep is None:
        return list(dict.fromkeys(batches or BATCHES))
    powers = [1 << exponent for exponent in range(sweep.bit_length())]
    return list(dict.fromkeys([*powers, sweep]))


def open_onnx(
    entry: Entry, batch: int, size: tuple[int, int] | None, on_cpu: OnCpu, precision: Precision, opened: ExitStack
) -> Candidate:
    """Open an ONNX file that runs without an engine; if it does not run, the candidate is a row with the reason.

    The row's precision is the file's in ONNX Runtime, which computes most layers in FP32 whatever the file; in OpenVINO
    it is that of the computation.
    """
    file = OnnxFile.read(entry.file)
    row = BenchmarkRow(
        entry.name,
        batch,
        entry.baseline,
        _precision_of(file, on_cpu, precision),
        nms=file.form.has_nms,
        masks=bool(file.form.masks),
        runtime=OPENVINO if on_cpu.openvino else ONNX_RUNTIME,
        build=entry.build,
    )
    try:
        runner = opened.enter_context(on_cpu.open(entry.file, precision))
        feeds = random_feed(runner, batch, size)
        runner.infer(feeds)  # refuses a shape that the file does not take
        return Candidate(row, lambda: runner.infer(feeds))
    except FAILURES as error:
        return Candidate(replace(row, error=one_line(error)))


def _precision_of(file: OnnxFile, on_cpu: OnCpu, precision: Precision) -> str:
    """Name of the precision in a row, see `open_onnx`."""
    if on_cpu.openvino:
        return "INT8" if file.quantized else precision.upper()
    if file.quantized:
        return "INT8 file"
    return "FP16 file" if file.half else "FP32"


def random_feed(runner: Runner, batch: int, size: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
    """Make random images in the form that a model takes.

    Args:
        size: (height, width) in pixels; None for the model's own, or for that of its export if the model's is dynamic.
    """
    spec = runner.inputs[0]
    fixed = tuple(1 if size is None else size for size in spec.shape)
    _, channels, height, width = runner.input_spec.nchw(fixed)
    if size is None and None in spec.shape[1:]:
        size = runner.imgsz
    if size is not None:
        height, width = size
    shape = runner.input_spec.own((batch, channels, height, width))
    return {spec.name: random_input(shape, getattr(torch, spec.dtype))}


WORDS = ("model", "in", "precision", "NMS", "masks")  # columns of words, which are aligned on the left
# Column -> the cell that carries no information: a column in which all rows have it is left out.
UNINFORMATIVE = {"in": TENSORRT, "masks": "without", "H2D": "", "compute": "", "D2H": ""}


def benchmark_table(rows: Sequence[BenchmarkRow]) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """Return titles, cells, and the titles of the columns that hold words.

    Latency is the median in milliseconds. The last column has the gain, or the reason why a row has no figures. Columns
    for masks, copies and ONNX Runtime are there if a row has some.
    """
    precisions = {row.precision for row in rows if row.baseline}
    gain = "against FP16" if precisions <= {"FP16"} else "against the baseline"
    table = [_words(row) | _times(row) | {gain: _gain(row)} for row in rows]
    titles = []
    for title in table[0]:
        informative = [cells for cells in table if cells[title] != UNINFORMATIVE.get(title)]
        if informative:
            titles.append(title)
    cells = [tuple(row[title] for title in titles) for row in table]
    return titles, cells, [title for title in titles if title in WORDS]


def _words(row: BenchmarkRow) -> dict[str, str]:
    """The cells that say what was timed, by their titles."""
    return {
        "model": row.model,
        "in": row.runtime,
        "precision": row.precision,
        "NMS": "inside" if row.nms else "without",
        "masks": "with" if row.masks else "without",
        "batch": str(row.batch),
    }


def _times(row: BenchmarkRow) -> dict[str, str]:
    """The cells with figures, by their titles; they are empty for a row without figures."""
    cells = dict.fromkeys(("latency", "p99", "H2D", "compute", "D2H", "qps", "images/s"), "")
    if row.figures is None:
        return cells
    parts = row.figures.parts
    cells["latency"] = f"{parts['latency'].median:.3f} ms"
    cells["p99"] = f"{parts['latency'].p99:.3f} ms"
    cells["qps"] = f"{row.figures.qps:,.1f}"
    cells["images/s"] = f"{row.images_per_second:,.0f}"
    if "h2d" in parts:  # only engines have times of copies
        for title in ("H2D", "compute", "D2H"):
            cells[title] = f"{parts[title.lower()].median:.3f} ms"
    return cells


def _gain(row: BenchmarkRow) -> str:
    """The gain over the baseline as a cell, or the reason why there are no figures."""
    if row.error:
        return row.error
    return "" if row.gain is None else f"{row.gain:+.1%}"


def save_benchmark(rows: Sequence[BenchmarkRow], about: Mapping[str, Any], command: str, folder: Path) -> list[Path]:
    """Write `benchmark.md` (table, machine, command, notes on layers, verdicts) and `benchmark.json`."""
    machine = f"{about['device']['Selected Device']}, {about['software']}, {about['date']}; {about['method']}"
    lines = [*markdown_table(*benchmark_table(rows)), "", machine, "", f"`{command}`"]
    for row in rows:
        lines += [f"\n{note}" for note in row.notes]
    lines += [f"\n{verdict}" for verdict in benchmark.verdicts(rows)]
    page = folder / "benchmark.md"
    write_text(page, "\n".join(lines) + "\n")
    content = {"command": command, **about, "rows": [row.to_dict() for row in rows]}
    data = folder / "benchmark.json"
    write_text(data, json.dumps(content, indent=2) + "\n")
    return [page, data]


def device_information(index: int | None = None) -> dict[str, str]:
    """Describe the GPU as trtexec does."""
    if index is None:
        index = torch.cuda.current_device()
    gpu = torch.cuda.get_device_properties(index)
    return {
        "Selected Device": gpu.name,
        "Compute Capability": f"{gpu.major}.{gpu.minor}",
        "SMs": str(gpu.multi_processor_count),
        "Device Global Memory": f"{gpu.total_memory >> 20} MiB",
    }
