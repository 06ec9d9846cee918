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
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, profile_shapes
from utils.trt.tensorrt_api import Api
from utils.trt.timing import TimingConfig, random_input

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 8, 12)


@dataclass(frozen=True)
class OnCpu:
    """How ONNX files are run where no engine takes part.

    Attributes:
        threads: None: one for each core.
        openvino: OpenVINO's device; None: ONNX Runtime runs them.
        precision: OpenVINO's for what is not INT8. Baselines are timed in each precision that the device is fast in.
    """

    threads: int | None = None
    openvino: str | None = None
    precision: Precision = "fp32"

    def precisions(self, entry: Entry) -> Sequence[Precision]:
        """The float precisions in which a file is timed."""
        if self.openvino and entry.baseline:
            return openvino.precisions(self.openvino)
        return [self.precision]

    def open(self, file: Path, precision: Precision) -> Runner:
        """A runner for an ONNX file."""
        if self.openvino:
            return open_openvino(file, self.openvino, precision, threads=self.threads)
        return OnnxRuntimeRunner(file, threads=self.threads)

    def software(self) -> str:
        """What runs the files, and its version."""
        return f"{OPENVINO} {openvino.release()}" if self.openvino else f"{ONNX_RUNTIME} {onnxrt.version()}"

    def hardware(self) -> str:
        """Device and threads, in words."""
        device = f"{self.openvino} ({openvino.device_title(self.openvino)})" if self.openvino else "CPU"
        if device.startswith("CPU"):
            device += f", {plural(self.threads or cpu_cores(), 'thread')}"
        return device


@dataclass(frozen=True)
class Benchmark:
    """What is timed, and how.

    Attributes:
        entries: ONNX files and engines; without `api` the former are run as `on_cpu` has it.
        size: (height, width) in pixels that was given, for files of dynamic size; None: each has its own.
        timed_size: the one at which everything is timed; None if an engine alone does not say it.
        api: TensorRT; None where no engine takes part.
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
                candidates = [open_onnx(entry, batch, self.size, self.on_cpu, precision, stack)
                              for entry in self.entries for precision in self.on_cpu.precisions(entry)]  # fmt: skip
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

    def about(self, method: str) -> dict[str, Any]:
        """What rows are measured on and how, as JSON holds it."""
        hardware = self.on_cpu.hardware()
        return {
            "device": device_information(self.device.index) if self.api else {"Selected Device": hardware},
            "tensorrt": self.api.name if self.api else "",
            "software": self.api.name if self.api else self.on_cpu.software(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "imgsz": list(self.timed_size) if self.timed_size else None,
            "method": method,
        }


def common_size(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """(height, width) in pixels at which files are timed without --imgsz; None for engines that do not say their own.

    Raises:
        InputError: they differ.
    """
    sizes = {entry.file: _size_of(entry) for entry in entries}
    if len({*sizes.values()}) > 1:
        found = (f"{file} ({'x'.join(map(str, size)) if size else 'unknown'})" for file, size in sizes.items())
        raise InputError(f"all files are timed at one image size, found {', '.join(found)}; give --imgsz")
    return next(iter(sizes.values()))


def _size_of(entry: Entry) -> tuple[int, int] | None:
    """Height and width at which a file is timed by itself; None for an engine whose note does not say it."""
    if not entry.is_engine:
        summary = OnnxFile.read(entry.file)
        ranges = profile_shapes(summary, BuildConfig())
        shape = summary.input_spec.nchw(ranges[summary.image[0]][-1]) if ranges else summary.image[1]
        return cast(tuple[int, int], tuple(shape[2:]))
    note = EngineNote.load(entry.file)
    for _, _, largest in note.profile.values():
        form = InputSpec.of_file(note.metadata, note.metadata.get(KIND_KEY, "float"), largest)
        _, channels, height, width = form.nchw(largest)
        return (height, width) if channels in COLOURS else None
    return imgsz_of(note.metadata)


def batch_sizes(given: Sequence[int] | None, sweep: int | None) -> list[int]:
    """The batch sizes that were asked for; `sweep` is the last of 1, 2, 4, ..., also where it is no power of two."""
    if sweep is None:
        return list(dict.fromkeys(given or BATCHES))
    return list(dict.fromkeys((*(1 << n for n in range(sweep.bit_length())), sweep)))


def open_onnx(
    entry: Entry, batch: int, size: tuple[int, int] | None, on_cpu: OnCpu, precision: Precision, opened: ExitStack
) -> Candidate:
    """An ONNX file without an engine; what does not run is a row that says why.

    The row's precision is that of the file in ONNX Runtime, which computes few layers in another type than FP32, and
    in OpenVINO that of the computation.
    """
    summary = OnnxFile.read(entry.file)
    name = "INT8 file" if summary.quantized else "FP16 file" if summary.half else "FP32"
    if on_cpu.openvino:
        name = "INT8" if summary.quantized else precision.upper()
    row = BenchmarkRow(
        entry.name,
        batch,
        entry.baseline,
        name,
        nms=summary.form.has_nms,
        masks=bool(summary.form.masks),
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


def random_feed(runner: Runner, batch: int, size: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
    """Random images in the form that a network takes.

    Args:
        size: (height, width) in pixels; None: the network's own, or where that is dynamic, that of its export.
    """
    spec = runner.inputs[0]
    _, channels, *own = runner.input_spec.nchw(tuple(1 if one is None else one for one in spec.shape))
    height, width = size or (runner.imgsz if None in spec.shape[1:] else None) or own
    shape = runner.input_spec.own((batch, channels, height, width))
    return {spec.name: random_input(shape, getattr(torch, spec.dtype))}


def benchmark_table(rows: Sequence[BenchmarkRow]) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """Titles, cells, and the titles of words; those of masks, copies and ONNX Runtime are there where a row has some.

    Latency is the median in milliseconds; why a row has no figures stands in the last column.
    """
    bases = {row.precision for row in rows if row.baseline}
    gain = "against FP16" if bases <= {"FP16"} else "against the baseline"
    unless_all = {"in": TENSORRT, "masks": "without", "H2D": "", "compute": "", "D2H": ""}
    table: list[dict[str, str]] = []
    for row in rows:
        parts = row.figures.parts if row.figures else {}
        median = {part: f"{one.median:.3f} ms" for part, one in parts.items()}
        table.append({
            "model": row.model, "in": row.runtime, "precision": row.precision,
            "NMS": "inside" if row.nms else "without", "masks": "with" if row.masks else "without",
            "batch": str(row.batch),
            "latency": median.get("latency", ""), "p99": f"{parts['latency'].p99:.3f} ms" if parts else "",
            "H2D": median.get("h2d", ""), "compute": median.get("compute", "") if "h2d" in parts else "",
            "D2H": median.get("d2h", ""), "qps": f"{row.figures.qps:,.1f}" if row.figures else "",
            "images/s": f"{row.images_per_second:,.0f}" if row.figures else "",
            gain: row.error or ("" if row.gain is None else f"{row.gain:+.1%}"),
        })  # fmt: skip
    shown = [title for title in table[0] if any(cells[title] != unless_all.get(title) for cells in table)]
    left = [title for title in shown if title in ("model", "in", "precision", "NMS", "masks")]
    return shown, [tuple(cells[title] for title in shown) for cells in table], left


def save_benchmark(rows: Sequence[BenchmarkRow], about: Mapping[str, Any], command: str, folder: Path) -> list[Path]:
    """Write `benchmark.md` (a table, what it was measured on, what the layers say) and `benchmark.json`."""
    words = f"{about['device']['Selected Device']}, {about['software']}, {about['date']}; {about['method']}"
    lines = [*markdown_table(*benchmark_table(rows)), "", words, "", f"`{command}`"]
    notes = (note for row in rows for note in row.notes)
    lines += [f"\n{note}" for note in (*notes, *benchmark.verdicts(rows))]
    content = {"command": command, **about, "rows": [row.to_dict() for row in rows]}
    files = {folder / "benchmark.md": "\n".join(lines) + "\n",
             folder / "benchmark.json": json.dumps(content, indent=2) + "\n"}  # fmt: skip
    for path, body in files.items():
        write_text(path, body)
    return list(files)


def device_information(index: int | None = None) -> dict[str, str]:
    """The GPU, as trtexec describes it."""
    gpu = torch.cuda.get_device_properties(index if index is not None else torch.cuda.current_device())
    return {
        "Selected Device": gpu.name,
        "Compute Capability": f"{gpu.major}.{gpu.minor}",
        "SMs": str(gpu.multi_processor_count),
        "Device Global Memory": f"{gpu.total_memory >> 20} MiB",
    }
