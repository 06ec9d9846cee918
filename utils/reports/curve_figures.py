"""Curves of precision, recall and F1, and a confusion matrix, as the files that users of YOLO know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from utils.core.curves import (
    CONFUSION_CONFIDENCE,
    CONFUSION_FILE,
    CONFUSION_IOU,
    F1_FILE,
    POINTS,
    PR_FILE,
    Curves,
)
from utils.reports.figures import BLUE, GREY, new_figure, title
from utils.reports.tables import stage_name

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

FEW_CLASSES = 20  # up to so many have a line each in the legend
FEW_CELLS = 30  # up to so many classes have numbers in the cells of a confusion matrix
FEW_NAMES = 100  # up to so many classes have their names beside a confusion matrix


def curve_figures(curves: Curves, model: str) -> dict[str, Figure]:
    """File name → figure; `model` is named in their titles, such as 'QAT'."""
    model = stage_name(model)
    return {
        PR_FILE: precision_recall(curves, model),
        F1_FILE: f1_over_confidence(curves, model),
        CONFUSION_FILE: confusion_matrix(curves, model),
    }


def precision_recall(curves: Curves, model: str) -> Figure:
    """Precision over recall at IoU 0.5: a line for each class, and the mean."""
    figure, (axes,) = new_figure(9.0, 5.5, 1)
    title(axes, f"Precision and recall at IoU 0.5: {model}")
    names = [f"{name} {ap:.3f}" for name, ap in zip(curves.names, curves.ap50, strict=True)]
    mean_ap = sum(curves.ap50) / max(len(curves.ap50), 1)
    _class_lines(axes, curves.precision, names, f"all classes {mean_ap:.3f} AP50")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    return figure


def f1_over_confidence(curves: Curves, model: str) -> Figure:
    """F1 over the confidence threshold at IoU 0.5: a line for each class, and the mean."""
    figure, (axes,) = new_figure(9.0, 5.5, 1)
    title(axes, f"F1 over the confidence threshold, IoU 0.5: {model}")
    mean = _mean(curves.f1)
    best = int(mean.argmax())
    summary = f"all classes {mean[best]:.2f} at {best / (POINTS - 1):.3f}"
    _class_lines(axes, curves.f1, list(curves.names), summary)
    axes.set(xlabel="confidence threshold", ylabel="F1", xlim=(0, 1), ylim=(0, 1.02))
    return figure


def confusion_matrix(curves: Curves, model: str) -> Figure:
    """Share of each true class (a column) that is taken for each class (a row), with numbers where there is room."""
    import numpy as np

    counts = np.array(curves.confusion, float)
    shares = counts / np.maximum(counts.sum(0, keepdims=True), 1)
    names = [*curves.classes, "background"]
    side = min(4.5 + 0.35 * len(names), 14.0)
    figure, (axes,) = new_figure(side + 1, side, 1)
    title(axes, f"Confusion matrix, confidence {CONFUSION_CONFIDENCE:g}, IoU {CONFUSION_IOU:g}: {model}")
    image = axes.imshow(np.where(counts > 0, shares, np.nan), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    axes.grid(visible=False)
    axes.set(xlabel="true", ylabel="predicted")
    if len(names) <= FEW_NAMES:
        places = range(len(names))
        axes.set_xticks(places, names, rotation=90, fontsize=8)
        axes.set_yticks(places, names, fontsize=8)
    if len(names) <= FEW_CELLS:
        for row, column in np.argwhere(counts > 0):
            share = shares[row, column]
            colour = "white" if share > 0.5 else "#1F2933"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return figure


def _class_lines(axes: Axes, lines: Sequence[Sequence[float]], names: Sequence[str], summary: str) -> None:
    """A line for each class, grey and without a name where there are many, and a thick one for the mean."""
    points = [index / (POINTS - 1) for index in range(POINTS)]
    for line, name in zip(lines, names, strict=True):
        if len(lines) <= FEW_CLASSES:
            axes.plot(points, line, linewidth=1, label=name)
        else:
            axes.plot(points, line, linewidth=0.8, color=GREY, alpha=0.5)
    axes.plot(points, _mean(lines), linewidth=3, color=BLUE, label=summary)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1))


def _mean(lines: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """The mean of lines of POINTS values; zeros where there are none."""
    import numpy as np

    if lines:
        return np.mean(lines, axis=0)
    return np.zeros(POINTS)
