"""Which classes are taken for which others: a confusion matrix of detections, as upstream's val.py draws it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from utils.core.curves import CONFUSION_CONFIDENCE, CONFUSION_IOU
from utils.evaluation.metrics import pairwise_iou


class ConfusionMatrix:
    """Counts how often a class is found, taken for another one, missed, or seen where nothing is.

    Detections of a confidence above 0.25 and labels pair one to one, whatever their classes, the pair that overlaps
    most first, if the IoU is above 0.45.

    Attributes:
        counts: int64 `[n + 1, n + 1]`, a row for each predicted class and a column for each true one; the last row are
            labels that are missed, the last column detections of nothing.
    """

    def __init__(self, classes: int) -> None:
        self.counts: np.ndarray = np.zeros((classes + 1, classes + 1), np.int64)

    def add(self, detections: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        """Take in a batch: of each image detections `[n, 6]` (xyxy, score, class) and labels `[m, 5]` (class, xyxy)."""
        for of_image, truth in zip(detections, labels, strict=True):
            confident = of_image[of_image[:, 4] > CONFUSION_CONFIDENCE]
            self._add_image(confident, truth)

    def _add_image(self, detections: Tensor, labels: Tensor) -> None:
        background = len(self.counts) - 1
        predicted = detections[:, 5].long().cpu().numpy()
        true = labels[:, 0].long().cpu().numpy()
        pairs = _pairs(pairwise_iou(labels[:, 1:], detections[:, :4]).cpu().numpy())
        paired_labels, paired_detections = set(), set()
        for label, detection in pairs:
            self.counts[predicted[detection], true[label]] += 1
            paired_labels.add(label)
            paired_detections.add(detection)
        for label in set(range(len(true))) - paired_labels:
            self.counts[background, true[label]] += 1
        for detection in set(range(len(predicted))) - paired_detections:
            self.counts[predicted[detection], background] += 1


def _pairs(overlaps: np.ndarray) -> list[tuple[int, int]]:
    """Rows and columns of IoU `[m, n]` that belong together, each at most once, the largest first."""
    candidates = np.argwhere(overlaps > CONFUSION_IOU)
    order = np.argsort(-overlaps[candidates[:, 0], candidates[:, 1]], kind="stable")
    pairs: list[tuple[int, int]] = []
    rows: set[int] = set()
    columns: set[int] = set()
    for row, column in candidates[order].tolist():
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            pairs.append((row, column))
    return pairs
