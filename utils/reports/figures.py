"""Charts of a report: AP per epoch, and ranges per layer; images with detections are in `detections.py`.

Every function returns a Matplotlib `Figure` of its own (no pyplot, no global state, no display), and `save_figure`
writes it. Matplotlib is imported when a figure is drawn. Colours are from Okabe and Ito's palette, which stays
distinguishable with every common colour vision; what colour says, shape or line style says as well.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.files import write_bytes
from utils.reports.schema import Range, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILLION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#5F6B76"
STAGE_LINES = {"float": (GREEN, "--"), "ptq": (VERMILLION, ":")}

_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9AA5B1",
    "axes.labelcolor": "#323F4B",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E7EB",
    "grid.linewidth": 0.8,
    "xtick.color": "#52606D",
    "ytick.color": "#52606D",
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
}


def save_figure(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write `figure` to `path`; the suffix says the format (`.png`, `.svg`, `.jpg`). A crash leaves no half file."""
    path = Path(path)
    write_bytes(path, render(figure, path.suffix.lstrip("."), dpi))
    return path


def render(figure: Figure, kind: str, dpi: int = 150) -> bytes:
    """`figure` as bytes of an image file of `kind` (`png`, `svg`, `jpg`); the same figure gives the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    options: dict[str, Any] = {"pil_kwargs": {"quality": 88}} if kind in {"jpg", "jpeg"} else {}
    if kind == "svg":
        options["metadata"] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format=kind, dpi=dpi, **options)
    return buffer.getvalue()


def ap_per_epoch(report: Report) -> Figure:
    """AP over QAT epochs, with the float model's and PTQ's AP as horizontal lines; masks have a panel of their own.

    Raises:
        ValueError: the report has no history.
    """
    epochs = report.scored_epochs
    if not epochs:
        raise ValueError("the report has no epoch with an AP")
    headings = {"ap": "AP on the validation set after each epoch"}
    if all(epoch.mask_ap is not None for epoch in epochs):
        headings = {"ap": "AP of boxes on the validation set after each epoch", "mask_ap": "AP of masks"}
    figure, panels = new_figure(9.0, 3.4 if len(headings) == 1 else 5.8, len(headings))
    for axes, (name, heading) in zip(panels, headings.items(), strict=True):
        _draw_epochs(axes, report, name)
        title(axes, heading)
    panels[-1].set_xlabel("QAT epoch")
    return figure


def _draw_epochs(axes: Axes, report: Report, name: str) -> None:
    """One kind of AP over the epochs; `name` is that of a field of epochs and of rows."""
    from matplotlib.ticker import MaxNLocator

    epochs = [epoch.epoch for epoch in report.scored_epochs]
    scores = [getattr(epoch, name) for epoch in report.scored_epochs]
    axes.plot(epochs, scores, "-o", color=BLUE, linewidth=1.8, markersize=5, label="QAT", zorder=3)
    labels = []
    best = _chosen(report)
    if best is not None:
        axes.plot(epochs[best], scores[best], "o", color="white", markeredgecolor=BLUE, markeredgewidth=2,
                  markersize=9, zorder=4)  # fmt: skip
        labels.append((scores[best], f"chosen {scores[best]:.4f}", BLUE))
    for row in report.rows:
        ap = getattr(row, name)
        if row.stage.lower() in STAGE_LINES and ap is not None:
            colour, line = STAGE_LINES[row.stage.lower()]
            axes.axhline(ap, color=colour, linestyle=line, linewidth=1.6, label=row.stage)
            labels.append((ap, f"{row.stage} {ap:.4f}", colour))
    axes.set_ylabel("AP (IoU 0.50:0.95)")
    axes.set_xlim(min(epochs) - 0.4, max(epochs) + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(y=0.15)
    _label_right(axes, labels)


def _chosen(report: Report) -> int | None:
    """Index of the epoch that became the result, among those with an AP; None where that is the PTQ state.

    It is the one with the smallest loss on held-out images, or with the best AP in reports without such losses.
    """
    scores = [epoch.ap or 0.0 for epoch in report.scored_epochs]
    losses = [epoch.held_out for epoch in report.scored_epochs if epoch.held_out is not None]
    best = losses.index(min(losses)) if len(losses) == len(scores) else scores.index(max(scores))
    result = next((row.ap for row in report.rows if row.stage == "QAT"), None)
    return best if result is None or result == scores[best] else None


def ranges_per_layer(ranges: Sequence[Range]) -> Figure:
    """Dot plots of amax in the order of the network: activations above, weights (smallest to largest channel) below.

    Top-level layers are bands with their numbers, so that some hundred tensors stay readable; the largest of each
    kind and the smallest activation are named.

    Raises:
        ValueError: there are no ranges.
    """
    ordered = sorted(ranges, key=lambda row: int(layer_number(row.name) or -1))  # shared scales come out of order
    kinds = [rows for kind in ("activation", "weight") if (rows := [row for row in ordered if row.kind == kind])]
    if not kinds:
        raise ValueError("the report has no ranges")
    figure, panels = new_figure(11.0, 3.3 * len(kinds), len(kinds))
    for axes, rows in zip(panels, kinds, strict=True):
        _draw_ranges(axes, rows)
    panels[-1].set_xlabel("top-level layer of the network (model.N), its tensors in order")
    return figure


def _draw_ranges(axes: Axes, rows: Sequence[Range]) -> None:
    """The ranges of one kind."""
    weights = rows[0].kind == "weight"
    floor = min((row.amax for row in rows if row.amax), default=1e-6)  # what a logarithm shows for 0
    amax = [max(row.amax or 0.0, floor) for row in rows]
    axes.set_yscale("log")
    if weights:
        low = [min(max(row.min or 0.0, floor * 0.1), top) for row, top in zip(rows, amax, strict=True)]
        axes.vlines(range(len(rows)), low, amax, color=ORANGE, linewidth=1.4, zorder=2)
        axes.plot(amax, linestyle="", marker="_", color=VERMILLION, markersize=5, zorder=3)
        axes.set_ylabel("amax (weight units)")
        title(axes, "Weights: amax of the channels, smallest to largest")
    else:
        axes.plot(amax, linestyle="", marker="o", color=BLUE, markersize=4, zorder=3)
        axes.set_ylabel("amax (activation units)")
        title(axes, "Activations: amax of each tensor")
    axes.margins(y=0.22)
    axes.set_xlim(-0.7, len(rows) - 0.3)
    _layer_bands(axes, [row.name for row in rows])
    order = sorted(range(len(rows)), key=amax.__getitem__)
    for index in {order[-1]} if weights else {order[0], order[-1]}:
        up = 1 if index == order[-1] else -1
        label = rows[index].name.removeprefix("model.").removesuffix("_quantizer")
        axes.annotate(
            f"{label}  {amax[index]:.3g}", (index, amax[index]), xytext=(0, 7 * up),
            textcoords="offset points", ha="right" if index > len(rows) / 2 else "left",
            va="bottom" if up > 0 else "top", fontsize=8, color=GREY, parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        )  # fmt: skip


def _layer_bands(axes: Axes, names: Sequence[str]) -> None:
    """Shade every second top-level layer and write the layer's number below it; narrow ones share a label."""
    start, ticks, labels, last = 0, [], [], -1e9
    for shade, (layer, group) in enumerate(itertools.groupby(names, key=layer_number)):
        count = len(list(group))
        if shade % 2:
            axes.axvspan(start - 0.5, start + count - 0.5, color="#F1F4F8", zorder=0, linewidth=0)
        middle = start + (count - 1) / 2
        if middle - last >= len(names) / 55:
            ticks.append(middle)
            labels.append(layer)
            last = middle
        start += count
    axes.set_xticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")


def layer_number(name: str) -> str:
    """The number of the top-level layer in a module path: `model.4.cv1.conv` → `4`; empty for the network's input."""
    return next((part for part in str(name).split(".") if re.fullmatch("[0-9]{1,9}", part)), "")


def title(axes: Axes, text: str) -> None:
    """The heading of a panel, at its left."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color="#1F2933")


def _label_right(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write each label right of the plot at its height, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap, position = 0.07 * (high - low), -float("inf")
    for value, text, colour in sorted(labels):
        position = max(value, position + gap)
        axes.text(1.01, position, text, color=colour, transform=axes.get_yaxis_transform(), va="center", fontsize=9)


def new_figure(
    width: float, height: float, rows: int, columns: int = 1, layout: Any = "constrained"
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` × `height` inches and its axes, line by line."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout=layout)
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)
