"""Precision, recall and F1 as curves, and a confusion matrix: the classes that are taken for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PR_FILE = "PR_curve.png"
F1_FILE = "F1_curve.png"
CONFUSION_FILE = "confusion_matrix.png"
PLOT_FILES = (PR_FILE, F1_FILE, CONFUSION_FILE)
POINTS = 201  # of a curve: at recalls, or confidences, 0, 0.005, ..., 1
# Of a confusion matrix, as in upstream's val.py
CONFUSION_CONFIDENCE = 0.25
CONFUSION_IOU = 0.45


@dataclass(frozen=True)
class Curves:
    """The curves of one network on one split, at IoU 0.5, of each class that has labels.

    Attributes:
        names: of these classes, `[k]`.
        ap50: area under each class's precision-recall curve, `[k]`.
        precision: at the recalls 0 to 1, `[k][POINTS]`.
        f1: at the confidences 0 to 1, `[k][POINTS]`.
        classes: of the dataset, `[n]`.
        confusion: numbers of objects `[n + 1][n + 1]`, a row for each predicted class and a column for each true one;
            the last row are objects that are missed, the last column detections of nothing.
    """

    names: list[str]
    ap50: list[float]
    precision: list[list[float]]
    f1: list[list[float]]
    classes: list[str]
    confusion: list[list[int]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a run's state holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Curves:
        """The inverse of `to_dict`."""
        return cls(**content)
