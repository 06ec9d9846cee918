"""The charts of a report, and what other charts share; images are in `detections.py`.

Every function returns a Matplotlib `Figure` of its own (no pyplot, no global state, no display), and `save_figure`
writes it. Matplotlib is imported when a figure is drawn. Colours are from Okabe and Ito's palette, which stays
distinguishable with every common colour vision; shape or line style repeats the meaning of a colour.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.files import write_bytes
from utils.reports.schema import BEST_PTQ, Report, Row
from utils.reports.tables import labels, stage_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILLION = "#D55E00"
GREY = "#5F6B76"
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
}


def save_figure(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write `figure` to `path`, whole or not at all; the suffix says the format (`.png`, `.svg`, `.jpg`)."""
    path = Path(path)
    write_bytes(path, render(figure, path.suffix.lstrip("."), dpi))
    return path


def render(figure: Figure, kind: str, dpi: int = 150) -> bytes:
    """`figure` as bytes of an image file of `kind` (`png`, `svg`, `jpg`)."""
    import matplotlib

    buffer = io.BytesIO()
    options: dict[str, Any] = {"pil_kwargs": {"quality": 88}} if kind in {"jpg", "jpeg"} else {}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format=kind, dpi=dpi, **options)
    return buffer.getvalue()


def differences(report: Report, allowed: float) -> Figure:
    """AP of every row that compares with the FP32 row, as a difference to that with its 95 % interval, on one axis.

    The FP32 row is the line at 0; a dashed line is the loss of AP that is allowed. There must be such a row.
    """
    compared = []
    for name, row in zip(labels(report), report.rows, strict=True):
        difference = report.difference(row)
        if difference is not None:
            compared.append((name, row, difference))
    places = list(reversed(range(len(compared))))
    figure, (axes,) = new_figure(6.4, 1.7 + 0.36 * len(compared), 1)  # narrow enough to be read on a telephone
    title(axes, "AP against the FP32 model (bars: 95 % interval)")
    for place, (_, _, difference) in zip(places, compared, strict=True):
        is_loss = difference.significant and difference.value < 0
        colour = VERMILLION if is_loss else BLUE
        margin = difference.margin or 0.0
        axes.errorbar(difference.value, place, xerr=margin, fmt="o", color=colour, capsize=4, zorder=3)
    base = report.baseline(compared[0][1])
    name = f"FP32: {base.ap:.4f}" if base and base.ap is not None else "FP32"
    axes.axvline(0, color=GREEN, linewidth=1.6, label=name)
    axes.axvline(-allowed, color=GREY, linewidth=1.2, linestyle="--", label=f"allowed loss: {allowed:g}")
    axes.set_yticks(places, [f"{name}  {row.ap or 0:.4f}" for name, row, _ in compared])
    axes.set_ylim(-0.7, len(compared) - 0.3)
    axes.set(xlabel="difference of AP (IoU 0.50:0.95)")
    axes.locator_params(axis="x", nbins=6)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    return figure


def deciding_loss(report: Report) -> str:
    """The images whose loss chose the best state of QAT, in words."""
    if report.held_out_images:
        return f"Loss on {report.held_out_images} training images held out from QAT"
    return "Loss on the training images"


def per_epoch(report: Report) -> tuple[str, Figure]:
    """AP of boxes over QAT epochs, and that of FP32 and PTQ; the loss that decides where AP was not measured.

    The name says which. The chosen state is marked. There must be an epoch with an AP or a loss.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = new_figure(9.0, 3.4, 1)
    name = "held_out" if report.scored_epochs[0].ap is None else "ap"
    what = "AP on the validation set" if name == "ap" else deciding_loss(report)
    title(axes, f"{what}, after each epoch")
    epochs = [epoch.epoch for epoch in report.scored_epochs]
    scores = [getattr(epoch, name) for epoch in report.scored_epochs]
    axes.plot(epochs, scores, "-o", color=BLUE, linewidth=1.8, markersize=5, label="QAT", zorder=3)
    errors = [getattr(epoch, f"{name}_error") or 0.0 for epoch in report.scored_epochs]
    if any(errors):
        axes.errorbar(epochs, scores, errors, fmt="none", ecolor=BLUE, elinewidth=1.2, capsize=3)
    texts = []
    for epoch, score in zip(report.scored_epochs, scores, strict=True):
        if epoch.chosen:
            axes.plot(epoch.epoch, score, "o", color="white", mec=BLUE, mew=2, markersize=9, zorder=4)
            texts.append((score, f"chosen {score:.4f}", BLUE))
    for stage, level in levels_beside(report, name):
        colour, line = STAGE_LINES[stage.lower()]
        axes.axhline(level, color=colour, linestyle=line, linewidth=1.6, label=stage_name(stage))
        is_chosen = stage == "PTQ" and any(row.stage == BEST_PTQ for row in report.rows)
        prefix = "chosen: " if is_chosen else ""
        texts.append((level, f"{prefix}{stage_name(stage)} {level:.4f}", colour))
    note = " (bars: standard error of the difference to PTQ)" if any(errors) else ""
    axes.set(xlabel=f"QAT epoch{note}", ylabel="loss" if name == "held_out" else "AP (IoU 0.50:0.95)")
    axes.set_xlim(min(epochs) - 0.4, max(epochs) + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(y=0.15)
    _texts_beside(axes, texts)
    return "ap_per_epoch" if name == "ap" else "loss_per_epoch", figure


def levels_beside(report: Report, name: str) -> list[tuple[str, float]]:
    """Stages that the epochs are compared with, and their values: AP of FP32 and PTQ, or the loss of PTQ."""
    if name == "held_out":
        levels = [("PTQ", report.scored_epochs[0].held_out_ptq)]
    else:
        levels = [(row.stage, row.ap) for row in report.rows]
    return [(stage, level) for stage, level in levels if stage.lower() in STAGE_LINES and level is not None]


def _texts_beside(axes: Axes, texts: Sequence[tuple[float, str, str]]) -> None:
    """Texts in their colours, right of the plot at their values, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.07 * (high - low)
    position = -float("inf")
    for value, text, colour in sorted(texts):
        position = max(value, position + gap)
        axes.text(1.01, position, text, color=colour, transform=axes.get_yaxis_transform(), va="center", fontsize=9)


def f1_curves(report: Report) -> Figure:
    """F1 over the confidence threshold around the best thresholds; below it the difference of each row to FP32.

    A dot marks the best threshold of a row, and the legend has its shift to that of FP32; a line marks FP32's. Without
    rows that compare with FP32 there is one panel.
    """
    named = [(name, row) for name, row in zip(labels(report), report.rows, strict=True) if row.f1]
    compared = [row for _, row in named if _f1_to_fp32(report, row)]
    if compared:
        figure, (upper, lower) = new_figure(9.0, 5.4, 2)
    else:
        figure, (upper,) = new_figure(9.0, 3.4, 1)
        lower = upper
    title(upper, "F1 over the confidence threshold, mean over classes (IoU 0.5)")
    colours = itertools.cycle((GREEN, VERMILLION, BLUE, ORANGE, GREY))
    lines = itertools.cycle(("--", ":", "-", "-."))  # with the colours 20 pairs
    for (name, row), colour, line in zip(named, colours, lines, strict=False):
        steps = len(row.f1) - 1
        thresholds = [index / steps for index in range(len(row.f1))]
        best = row.best_threshold or 0.0
        label = f"{name}, best at {best:.3f}"
        base = report.baseline(row)
        if row in compared and base and base.best_threshold is not None:
            label += f" ({best - base.best_threshold:+.3f})"
        upper.plot(thresholds, row.f1, line, color=colour, label=label)
        upper.plot([best], [max(row.f1)], "o", color=colour)
        if row in compared:
            lower.plot(thresholds, _f1_to_fp32(report, row), line, color=colour)
    baseline = report.baseline(named[0][1])
    if baseline and baseline.best_threshold is not None:
        threshold = baseline.best_threshold
        upper.axvline(threshold, color=GREY, linewidth=0.8, label=f"FP32: {threshold:.3f}")
    zoom = _around([row.best_threshold or 0.0 for _, row in named])
    upper.set(ylabel="F1", xlim=zoom, ylim=_heights(upper, zoom))
    if compared:
        title(lower, "Difference to FP32")
        lower.axhline(0, color=GREEN, linewidth=0.8)
        lower.set(ylabel="F1 - FP32's", xlim=zoom, ylim=_heights(lower, zoom))
    lower.set(xlabel="confidence threshold")
    upper.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _f1_to_fp32(report: Report, row: Row) -> list[float]:
    """Return F1 of a row minus that of its FP32 row at each confidence; empty where there is no other row with F1."""
    base = report.baseline(row)
    if base is None or base is row or len(base.f1) != len(row.f1):
        return []
    return [f1 - of_base for f1, of_base in zip(row.f1, base.f1, strict=True)]


def _around(thresholds: Sequence[float]) -> tuple[float, float]:
    """Return the confidences that are drawn: 0.2 on each side of the best thresholds, within 0..1."""
    return max(min(thresholds) - 0.2, 0.0), min(max(thresholds) + 0.2, 1.0)


def _heights(axes: Axes, zoom: tuple[float, float]) -> tuple[float, float]:
    """Return the lowest and the highest value that the curves have within `zoom`, and a margin."""
    values = []
    for line in axes.get_lines():
        points = zip(line.get_xdata(), line.get_ydata(), strict=True)
        values += [float(y) for x, y in points if zoom[0] <= float(x) <= zoom[1] and len(line.get_xdata()) > 2]
    margin = 0.08 * (max(values, default=1.0) - min(values, default=0.0)) or 0.001
    return min(values, default=0.0) - margin, max(values, default=1.0) + margin


def title(axes: Axes, text: str) -> None:
    """The heading of a panel, at its left."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color="#1F2933")


def new_figure(width: float, height: float, rows: int, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `width` × `height` inches and its axes, line by line."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)
