"""Rows of a benchmark as a table, JSON, a plot of latency against throughput; and the machine in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.files import write_text
from utils.core.text import Column, aligned, code, columns, markdown_table, plural
from utils.trt import benchmark
from utils.trt.benchmark import PYTORCH, TENSORRT, BenchmarkRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.jobs.benchmark import Benchmark

LOGARITHMIC = 12  # more between the fastest and the slowest, and the axes of the plot are logarithmic


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


def _columns(rows: Sequence[BenchmarkRow]) -> list[_Column]:
    """The columns that say something about these rows."""
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
        _Column("contexts", lambda row: str(row.contexts), _any(lambda row: row.contexts > 1), measured=False),
        _Column("latency", _milliseconds("latency")),
        _Column("p99", _milliseconds("latency", "p99")),
        _Column("H2D", _milliseconds("h2d"), copied),
        _Column("compute", _milliseconds("compute"), copied),
        _Column("D2H", _milliseconds("d2h"), copied),
        _Column("qps", lambda row: f"{row.figures.qps:,.1f}" if row.figures else ""),
        _Column("images/s", lambda row: f"{row.images_per_second:,.0f}"),
        _Column("against PyTorch", lambda row: "" if row.speedup is None else f"{row.speedup:.2f}x",
                _any(lambda row: row.speedup is not None)),
        _Column("against FP16" if bases <= {"FP16"} else "against the baseline",
                lambda row: "" if row.gain is None else f"{row.gain:+.1%}",
                lambda rows: any(row.gain is not None for row in rows) or all(row.speedup is None for row in rows)),
    ]  # fmt: skip
    return [column for column in known if column.shown(rows)]


def benchmark_table(rows: Sequence[BenchmarkRow]) -> tuple[Sequence[Column], list[tuple[str, ...]]]:
    """Columns and cells; those of masks, contexts, copies and PyTorch are there where a row has some.

    Latency is the median in milliseconds; why a row has no figures stands in the last column.
    """
    shown = _columns(rows)
    cells = []
    for row in rows:
        line = [column.text(row) if row.figures or not column.measured else "" for column in shown]
        cells.append((*line[:-1], line[-1] or row.error))
    return columns([column.title for column in shown], [column.title for column in shown if column.left]), cells


def benchmark_text(rows: Sequence[BenchmarkRow]) -> str:
    """Aligned columns."""
    return "\n".join(aligned(*benchmark_table(rows)))


def fastest_lines(rows: Sequence[BenchmarkRow]) -> list[str]:
    """A line for each network with the most images per second of all batch sizes and contexts, if there are several."""
    if len({(row.batch, row.contexts) for row in rows}) < 2:
        return []
    return [
        f"most images/s: {row.title}: {row.images_per_second:,.0f} at {row.figures.parts['latency'].median:.3f} ms"
        for row in benchmark.fastest_rows(rows)
        if row.figures
    ]


def markdown(rows: Sequence[BenchmarkRow], about: str, command: str) -> str:
    """A table, what it was measured on and how it was made, and what the layers say."""
    lines = markdown_table(*benchmark_table(rows))
    lines += ["", about, "", code(command)]
    notes = (note for row in rows for note in row.notes)
    lines += [f"\n{note}" for note in (*fastest_lines(rows), *notes, *benchmark.verdicts(rows))]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[BenchmarkRow], title: str) -> Figure:
    """Latency against throughput: a colour for each network, a line and a marker for each number of its contexts."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    from utils.reports.figures import BLUE, GREEN, GREY, ORANGE, VERMILLION, new_figure

    measured = [row for row in rows if row.figures]
    lines = list(dict.fromkeys((_name(row, rows), row.contexts) for row in measured))
    names, numbers = list(dict.fromkeys(name for name, _ in lines)), sorted({number for _, number in lines})
    figure, (axes,) = new_figure(7.0, 4.2 + 0.2 * max(len(lines) - 4, 0), 1)
    for name, contexts in lines:
        colour = (BLUE, VERMILLION, GREEN, ORANGE, GREY)[names.index(name) % 5]
        place = numbers.index(contexts) if len(numbers) > 1 else names.index(name)
        own = [row for row in measured if (_name(row, rows), row.contexts) == (name, contexts)]
        points = [(row.images_per_second, row.figures.parts["latency"].median, row.batch)
                  for row in own if row.figures]  # fmt: skip
        several = len({number for other, number in lines if other == name}) > 1
        label = f", {contexts} context{'s' * (contexts > 1)}" if several or contexts > 1 else ""
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker="osD^vP"[place % 6],
                  linestyle=("-", "--", ":", "-.")[place % 4] if several else "-", label=name + label)  # fmt: skip
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


def _name(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> str:
    """What tells a row's network from the others."""
    if row.runtime == PYTORCH:
        return f"{row.model}, {row.runtime} {row.precision}"
    several = len({one.runtime for one in rows if one.model == row.model}) > 1
    return f"{row.model}, {row.runtime}" if several else row.model


def save_benchmark(rows: Sequence[BenchmarkRow], about: Mapping[str, Any], command: str, folder: Path) -> list[Path]:
    """Write `benchmark.md`, `benchmark.json` and `benchmark.png`."""
    from utils.reports import figures

    words = f"{about['device']['Selected Device']}, {about['software']}, {about['date']}; {about['method']}"
    content = {"command": command, **about, "rows": [row.to_dict() for row in rows]}
    files = {folder / "benchmark.md": markdown(rows, words, command),
             folder / "benchmark.json": json.dumps(content, indent=2) + "\n"}  # fmt: skip
    for path, body in files.items():
        write_text(path, body)
    return [*files, figures.save_figure(plot(rows, str(about["device"]["Selected Device"])), folder / "benchmark.png")]


def about(job: Benchmark, method: str) -> dict[str, Any]:
    """What rows are measured on and how, as JSON holds it."""
    import torch

    on_cpu = {"Selected Device": f"CPU, {plural(torch.get_num_threads(), 'thread')}"}
    return {
        "device": device_information(job.device.index) if job.on_gpu else on_cpu,
        "tensorrt": job.api.name if job.api else "",
        "software": ", ".join(job.software()),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "imgsz": list(job.timed_size) if job.timed_size else None,
        "method": method,
    }


def device_information(index: int | None = None) -> dict[str, str]:
    """The GPU as trtexec describes it; what torch does not tell is left out."""
    import torch

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
