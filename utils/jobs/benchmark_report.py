"""Rows of a benchmark as a table, as JSON, as a plot of latency against throughput; and the GPU in words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core import text_tables
from utils.core.files import atomic_path
from utils.core.text_tables import Column, aligned, code, columns
from utils.trt.benchmark import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ("model", "precision", "NMS", "masks", "batch", "latency", "p99", "qps", "images/s", "against FP16")


def table(rows: Sequence[Row]) -> tuple[Sequence[Column], list[tuple[str, ...]]]:
    """Columns and cells; masks have a column where a network gives some."""
    masks = any(row.masks for row in rows)
    headers = [name for name in HEADERS if masks or name != "masks"]
    return columns(headers, left=("model", "precision", "NMS", "masks")), [cells(row, masks) for row in rows]


def cells(row: Row, masks: bool = False) -> tuple[str, ...]:
    """The texts of a row, one for each column; latency is the median in milliseconds.

    Args:
        masks: whether there is a column for them.
    """
    kind = ("inside" if row.nms else "without", *(["with" if row.masks else "without"] if masks else []))
    start = (row.model, row.precision, *kind, str(row.batch))
    if row.figures is None:
        return (*start, "", "", "", "", row.error)
    latency = row.figures.parts["latency"]
    gain = "" if row.gain is None else f"{row.gain:+.1%}"
    speed = f"{row.images_per_second:,.0f}"
    return (*start, f"{latency.median:.3f} ms", f"{latency.p99:.3f} ms", f"{row.figures.qps:,.1f}", speed, gain)


def text(rows: Sequence[Row]) -> str:
    """Aligned columns."""
    return "\n".join(aligned(*table(rows)))


def markdown(rows: Sequence[Row], about: str, command: str) -> str:
    """A table, what it was measured on and how it was made, and what the layers say."""
    lines = text_tables.markdown(*table(rows))
    lines += ["", about, "", code(command), *(f"\n{note}" for row in rows for note in row.notes)]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], title: str) -> Figure:
    """Latency against throughput, a line for each model, a point for each batch size."""
    from utils.reports.figures import BLUE, GREEN, ORANGE, VERMILLION, new_figure

    figure, (axes,) = new_figure(7.0, 4.2, 1)
    models = dict.fromkeys(row.model for row in rows)
    looks = itertools.cycle(itertools.product("osD^", (BLUE, VERMILLION, GREEN, ORANGE)))
    for model, (marker, colour) in zip(models, looks, strict=False):
        points = [(row.images_per_second, row.figures.parts["latency"].median, row.batch)
                  for row in rows if row.model == model and row.figures]  # fmt: skip
        if points:
            axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker=marker, label=model)
        for speed, latency, batch in points:
            axes.annotate(str(batch), (speed, latency), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set(title=title, xlabel="images/s (batch size beside the points)", ylabel="latency, ms", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def save(rows: Sequence[Row], about: Mapping[str, Any], command: str, folder: Path) -> list[Path]:
    """Write `benchmark.md`, `benchmark.json` and `benchmark.png`."""
    from utils.reports import figures

    words = f"{about['device']['Selected Device']}, {about['tensorrt']}, {about['date']}; {about['method']}"
    content = {"command": command, **about, "rows": [row.to_dict() for row in rows]}
    files = {folder / "benchmark.md": markdown(rows, words, command),
             folder / "benchmark.json": json.dumps(content, indent=2) + "\n"}  # fmt: skip
    for path, body in files.items():
        with atomic_path(path) as temporary:
            temporary.write_text(body, encoding="utf-8")
    return [*files, figures.save(plot(rows, str(about["device"]["Selected Device"])), folder / "benchmark.png")]


def device_information(index: int | None = None) -> dict[str, str]:
    """The GPU as trtexec describes it; what torch does not tell is left out."""
    import torch

    found = torch.cuda.get_device_properties(index if index is not None else torch.cuda.current_device())
    lines = {
        "Selected Device": found.name,
        "Compute Capability": f"{found.major}.{found.minor}",
        "SMs": str(found.multi_processor_count),
        "Device Global Memory": f"{found.total_memory >> 20} MiB",
    }
    shared = getattr(found, "shared_memory_per_multiprocessor", 0)
    bus, clock, memory = (getattr(found, name, 0) for name in ("memory_bus_width", "clock_rate", "memory_clock_rate"))
    lines |= {"Shared Memory per SM": f"{shared >> 10} KiB"} if shared else {}
    lines |= {"Memory Bus Width": f"{bus} bits"} if bus else {}
    lines |= {"Compute Clock Rate": f"{clock / 1e6:.3f} GHz"} if clock else {}
    lines |= {"Memory Clock Rate": f"{memory / 1e6:.3f} GHz"} if memory else {}
    return lines
