"""Rows of a comparison as text, as Markdown, and as JSON, with what they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from utils.core import text_tables
from utils.core.files import atomic_path
from utils.core.text_tables import aligned, code, columns
from utils.jobs.compare_placement.engines import Row
from utils.trt.build_config import describe_options

COLUMNS = columns(
    ("model", "batch", "variant", "ms", "p90", "images/s", "vs FP16", "built with", "INT8 time", "layers", "reformats"),
    left=("model", "variant", "built with", "layers", "reformats"),
)


def measured_on(sources_off: Sequence[str] = ()) -> dict[str, str]:
    """GPU, TensorRT, tactic sources that were off, date: what a number means nothing without."""
    import torch

    from utils.trt import tensorrt_api

    gpu = tensorrt_api.gpu()
    return {
        "gpu": gpu.name if gpu else "none",
        "tensorrt": tensorrt_api.load().name + (f" without {' '.join(sources_off)}" if sources_off else ""),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "method": "CUDA graph, runs enqueued one behind the other, engines in turns, median",
    }


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one row, one for each of COLUMNS."""
    if row.error:
        return (row.model, str(row.batch), row.variant, *[""] * (len(COLUMNS) - 4), row.error)
    layers = " + ".join(f"{count} {name}" for name, count in row.layers.items())
    forms = ", ".join(_form(name, count, row.reformat_ms) for name, count in row.reformats.items())
    spent = sum(row.reformat_ms.values())
    share = "" if not row.profile_ms else f", {spent / row.profile_ms:.0%} of the time"
    return (
        row.model,
        str(row.batch),
        row.variant,
        f"{row.ms:.3f}",
        f"{row.p90:.3f}",
        f"{row.images_per_second:,.0f}",
        "" if row.ratio is None else f"{row.ratio:.2f}x",
        _built_with(row),
        "" if row.int8_time is None else f"{row.int8_time:.0%}",
        layers,
        f"{forms}{share}" if forms else "none",
    )


def _built_with(row: Row) -> str:
    """The options, and how many auxiliary streams TensorRT took if that is another number."""
    words = describe_options(row.options)
    if row.streams is None or row.streams == row.options.get("max_aux_streams"):
        return words
    return f"{words} ({row.streams} streams)"


def _form(name: str, count: int, ms: Mapping[str, float]) -> str:
    return f"{count} {name} {ms[name]:.2f} ms" if name in ms else f"{count} {name}"


def text(rows: Sequence[Row]) -> str:
    """Aligned columns."""
    return "\n".join(aligned(COLUMNS, map(cells, rows)))


def markdown(rows: Sequence[Row], about: Mapping[str, str], command: str) -> str:
    """A table, how it was made, and the slowest layers of each engine."""
    lines = [
        *text_tables.markdown(COLUMNS, map(cells, rows)),
        "",
        f"{about['gpu']}, {about['tensorrt']}, {about['date']}; {about['method']}.",
        code(command),
        "",
    ]
    for row in rows:
        if row.slowest:
            lines += [f"Slowest layers of {row.model}, batch {row.batch}, {row.variant}:", ""]
            lines += [f"- {ms:.4f} ms, {precision}: `{name}`" for name, precision, ms in row.slowest]
            lines.append("")
    return "\n".join(lines)


def save(rows: Sequence[Row], about: Mapping[str, str], command: str, folder: Path) -> list[Path]:
    """Write `comparison.md` and `comparison.json`."""
    content = {"command": command, "measured_on": dict(about), "rows": [row.to_dict() for row in rows]}
    texts = {
        folder / "comparison.md": markdown(rows, about, command),
        folder / "comparison.json": json.dumps(content, indent=2) + "\n",
    }
    for path, body in texts.items():
        with atomic_path(path) as temporary:
            temporary.write_text(body, encoding="utf-8")
    return list(texts)
