"""The job behind `scripts/benchmark_trt.py`: engines, or ONNX files on a CPU, timed interleaved.

Their rows are written as a table, JSON, and a plot of latency against throughput.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from utils.core.errors import InputError
from utils.core.files import write_text
from utils.core.input_spec import COLOURS, KIND_KEY, InputSpec
from utils.core.tasks import DETECT
from utils.core.text import Column, code, columns, markdown_table, plural
from utils.reports.figures import BLUE, GREEN, GREY, ORANGE, VERMILLION, new_figure, save_figure
from utils.runners import onnxrt
from utils.runners.base import imgsz_of
from utils.runners.onnxrt import OnnxRuntimeRunner
from utils.trt import benchmark
from utils.trt.benchmark import (
    FAILURES,
    ONNX_RUNTIME,
    TENSORRT,
    BenchmarkRow,
    Candidate,
    Entry,
    one_line,
)
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, profile_shapes
from utils.trt.timing import TimingConfig, random_input

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.trt.tensorrt_api import Api

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 8, 12)
LOGARITHMIC = 12  # more between the fastest and the slowest, and the axes of the plot are logarithmic


@dataclass(frozen=True)
class Benchmark:
    """What is timed, and how.

    Attributes:
        entries: ONNX files and engines; without `api` ONNX Runtime runs the former.
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

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is what is measured."""
        return self.api is not None

    def measure(self, batch: int) -> list[BenchmarkRow]:
        """Build what is missing for this batch size, and time everything interleaved."""
        engines: dict[Entry, Path | str] = {}
        if self.api is not None:
            engines = benchmark.prepare(self.entries, batch, self.size, self.building, self.api)
        with ExitStack() as stack:
            if self.api is not None:
                candidates = benchmark.open_engines(
                    engines, batch, self.size, self.api, self.device, self.timing, stack
                )
            else:
                candidates = [open_onnx(entry.file, entry.baseline, batch, self.size, stack) for entry in self.entries]
            rows = benchmark.time_candidates(candidates, self.timing)
            candidates.clear()
        if self.api is not None:
            torch.cuda.empty_cache()  # TensorRT cannot have what PyTorch keeps
        return rows

    def about(self, method: str) -> dict[str, Any]:
        """What rows are measured on and how, as JSON holds it."""
        on_cpu = {"Selected Device": f"CPU, {plural(torch.get_num_threads(), 'thread')}"}
        return {
            "device": device_information(self.device.index) if self.on_gpu else on_cpu,
            "tensorrt": self.api.name if self.api else "",
            "software": self.api.name if self.api else f"ONNX Runtime {onnxrt.version()}",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "imgsz": list(self.timed_size) if self.timed_size else None,
            "method": method,
        }


def common_size(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """(height, width) in pixels at which files are timed without --imgsz; None for an engine that does not say its own.

    Raises:
        InputError: they differ, or an engine beside other files does not say its size.
    """
    sizes = {entry.file: _size_of(entry) for entry in entries}
    unknown = [file for file, size in sizes.items() if size is None]
    if unknown and len(sizes) > 1:
        raise InputError(f"{unknown[0]} does not say its image size, and all files are timed at one; give --imgsz")
    texts = {file: "x".join(map(str, size)) for file, size in sizes.items() if size is not None}
    first = next(iter(texts), None)
    for file, text in texts.items():
        if first is not None and text != texts[first]:
            raise InputError(f"{first} is of {texts[first]}, and {file} of {text}; give --imgsz, or files of one size")
    return next(iter(sizes.values()), None)


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
    powers = [1 << n for n in range(sweep.bit_length()) if 1 << n <= sweep]
    return list(dict.fromkeys((*powers, sweep)))


# --- ONNX Runtime as a candidate --------------------------------------------------------------------------------------


def open_onnx(file: Path, baseline: bool, batch: int, size: tuple[int, int] | None, opened: ExitStack) -> Candidate:
    """An ONNX file in ONNX Runtime on the CPU; what does not run is a row that says why.

    The row's precision is that of the file: on a CPU few layers are computed in another type than FP32.
    """
    summary = OnnxFile.read(file)
    precision = "INT8 file" if summary.quantized else "FP16 file" if summary.half else "FP32"
    row = BenchmarkRow(file.stem, batch, baseline, precision, runtime=ONNX_RUNTIME,
              nms=set(DETECT.detections) <= set(summary.outputs))  # fmt: skip
    try:
        runner = opened.enter_context(OnnxRuntimeRunner(file))
        row = replace(row, masks=bool(runner.task.masks))
        spec = runner.inputs[0]
        side = size or (runner.imgsz if None in spec.shape[1:] else None)
        known = tuple(1 if one is None else one for one in spec.shape)
        _, channels, *own = summary.input_spec.nchw(known)
        height, width = side or own
        shape = summary.input_spec.own((batch, channels, height, width))
        feeds = {spec.name: random_input(shape, getattr(torch, spec.dtype))}
        runner.infer(feeds)  # refuses a shape that the file does not take
        return Candidate(row, lambda: runner.infer(feeds))
    except FAILURES as error:
        return Candidate(replace(row, error=one_line(error)))


# --- rows as a table, JSON and a plot ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column: its text of a row with figures, and whether it is shown for these rows."""

    title: str
    text: Callable[[BenchmarkRow], str]
    shown: Callable[[Sequence[BenchmarkRow]], bool] = lambda rows: True
    left: bool = False
    measured: bool = True  # empty without figures


def _milliseconds(part: str, percentile: str = "median") -> Callable[[BenchmarkRow], str]:
    def text(row: BenchmarkRow) -> str:
        statistics = row.figures.parts.get(part) if row.figures else None
        return f"{getattr(statistics, percentile):.3f} ms" if statistics else ""

    return text


def _any(holds: Callable[[BenchmarkRow], bool]) -> Callable[[Sequence[BenchmarkRow]], bool]:
    return lambda rows: any(map(holds, rows))


def benchmark_table(rows: Sequence[BenchmarkRow]) -> tuple[Sequence[Column], list[tuple[str, ...]]]:
    """Columns and cells; those of masks, copies and ONNX Runtime are there where a row has some.

    Latency is the median in milliseconds; why a row has no figures stands in the last column.
    """
    bases = {row.precision for row in rows if row.baseline}
    copied = _any(lambda row: row.figures is not None and "h2d" in row.figures.parts)
    known = [
        _Column("model", lambda row: row.model, left=True, measured=False),
        _Column("in", lambda row: row.runtime, _any(lambda row: row.runtime != TENSORRT), left=True, measured=False),
        _Column("precision", lambda row: row.precision, left=True, measured=False),
        _Column("NMS", lambda row: "inside" if row.nms else "without", left=True, measured=False),
        _Column("masks", lambda row: "with" if row.masks else "without", _any(lambda row: row.masks), left=True,
                measured=False),
        _Column("batch", lambda row: str(row.batch), measured=False),
        _Column("latency", _milliseconds("latency")),
        _Column("p99", _milliseconds("latency", "p99")),
        _Column("H2D", _milliseconds("h2d"), copied),
        _Column("compute", _milliseconds("compute"), copied),
        _Column("D2H", _milliseconds("d2h"), copied),
        _Column("qps", lambda row: f"{row.figures.qps:,.1f}" if row.figures else ""),
        _Column("images/s", lambda row: f"{row.images_per_second:,.0f}"),
        _Column("against FP16" if bases <= {"FP16"} else "against the baseline",
                lambda row: "" if row.gain is None else f"{row.gain:+.1%}"),
    ]  # fmt: skip
    shown = [column for column in known if column.shown(rows)]
    cells = []
    for row in rows:
        line = [column.text(row) if row.figures or not column.measured else "" for column in shown]
        cells.append((*line[:-1], line[-1] or row.error))
    return columns([column.title for column in shown], [column.title for column in shown if column.left]), cells


def fastest_lines(rows: Sequence[BenchmarkRow]) -> list[str]:
    """A line for each network with the most images per second of all batch sizes, if there are several."""
    if len({row.batch for row in rows}) < 2:
        return []
    best: dict[str, BenchmarkRow] = {}
    for row in rows:
        if row.figures and (
            row.model not in best or (row.images_per_second or 0) > (best[row.model].images_per_second or 0)
        ):
            best[row.model] = row
    return [
        f"most images/s: {row.title}: {row.images_per_second:,.0f} at {row.figures.parts['latency'].median:.3f} ms"
        for row in best.values()
        if row.figures
    ]


def plot(rows: Sequence[BenchmarkRow], title: str) -> Figure:
    """Latency against throughput: a line for each network, its batch sizes beside the points."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    measured = [row for row in rows if row.figures]
    names = list(dict.fromkeys(row.model for row in measured))
    figure, (axes,) = new_figure(7.0, 4.2 + 0.2 * max(len(names) - 4, 0), 1)
    for place, name in enumerate(names):
        colour = (BLUE, VERMILLION, GREEN, ORANGE, GREY)[place % 5]
        points = [(row.images_per_second, row.figures.parts["latency"].median, row.batch)
                  for row in measured if row.model == name and row.figures]  # fmt: skip
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker="osD^vP"[place % 6], label=name)
        for speed, latency, batch in points:
            axes.annotate(
                str(batch), (speed, latency), textcoords="offset points", xytext=(5, 5), fontsize=7, color=colour
            )
    axes.set(title=title, xlabel="images/s (batch size beside the points)", ylabel="latency, ms")
    times = [row.figures.parts["latency"].median for row in measured if row.figures]
    if times and max(times) > LOGARITHMIC * min(times):
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):  # plain numbers at 1, 2 and 5 of each power of ten
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        axes.set_ylim(0, None)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=2)
    return figure


def save_benchmark(rows: Sequence[BenchmarkRow], about: Mapping[str, Any], command: str, folder: Path) -> list[Path]:
    """Write `benchmark.md` (a table, what it was measured on, what the layers say), `.json` and `.png`."""
    words = f"{about['device']['Selected Device']}, {about['software']}, {about['date']}; {about['method']}"
    lines = [*markdown_table(*benchmark_table(rows)), "", words, "", code(command)]
    notes = (note for row in rows for note in row.notes)
    lines += [f"\n{note}" for note in (*fastest_lines(rows), *notes, *benchmark.verdicts(rows))]
    content = {"command": command, **about, "rows": [row.to_dict() for row in rows]}
    files = {folder / "benchmark.md": "\n".join(lines) + "\n",
             folder / "benchmark.json": json.dumps(content, indent=2) + "\n"}  # fmt: skip
    for path, body in files.items():
        write_text(path, body)
    return [*files, save_figure(plot(rows, str(about["device"]["Selected Device"])), folder / "benchmark.png")]


def device_information(index: int | None = None) -> dict[str, str]:
    """The GPU as trtexec describes it; what torch does not tell is left out."""
    gpu = torch.cuda.get_device_properties(index if index is not None else torch.cuda.current_device())
    lines = {
        "Selected Device": gpu.name,
        "Compute Capability": f"{gpu.major}.{gpu.minor}",
        "SMs": str(gpu.multi_processor_count),
        "Device Global Memory": f"{gpu.total_memory >> 20} MiB",
    }
    shared = getattr(gpu, "shared_memory_per_multiprocessor", 0)
    bus, clock, memory = (getattr(gpu, name, 0) for name in ("memory_bus_width", "clock_rate", "memory_clock_rate"))
    lines |= {"Shared Memory per SM": f"{shared >> 10} KiB"} if shared else {}
    lines |= {"Memory Bus Width": f"{bus} bits"} if bus else {}
    lines |= {"Compute Clock Rate": f"{clock / 1e6:.3f} GHz"} if clock else {}
    lines |= {"Memory Clock Rate": f"{memory / 1e6:.3f} GHz"} if memory else {}
    return lines
