"""A confusion matrix of detections: the classes that are taken for others, as upstream's val.py draws it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from utils.core.curves import CONFUSION_CONFIDENCE, CONFUSION_IOU
from utils.evaluation.metrics import pairwise_iou


class ConfusionMatrix:
    """Counts of each class: found, taken for another one, missed, or seen where there is nothing.

    Detections of a confidence above 0.25 and labels pair one to one, whatever their classes, the pair that overlaps
    most first, if the IoU is above 0.45.

    Attributes:
        counts: int64 `[n + 1, n + 1]`, a row for each predicted class and a column for each true one; the last row are
            labels that are missed, the last column detections of nothing.
    """

    def __init__(self, classes: int) -> None:
        self.counts: np.ndarray = np.zeros((classes + 1, classes + 1), np.int64)

    def add(self, detections: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        """Take in a batch: for each image detections `[n, 6]` (xyxy, score, class), labels `[m, 5]` (class, xyxy)."""
        for image_detections, image_labels in zip(detections, labels, strict=True):
            is_confident = image_detections[:, 4] > CONFUSION_CONFIDENCE
            self._add_image(image_detections[is_confident], image_labels)

    def _add_image(self, detections: Tensor, labels: Tensor) -> None:
        background = len(self.counts) - 1
        predicted = detections[:, 5].long().cpu().numpy()
        true = labels[:, 0].long().cpu().numpy()
        overlaps = pairwise_iou(labels[:, 1:], detections[:, :4]).cpu().numpy()
        missed = set(range(len(true)))
        without_label = set(range(len(predicted)))
        for label, detection in _pairs(overlaps):
            self.counts[predicted[detection], true[label]] += 1
            missed.remove(label)
            without_label.remove(detection)
        for label in missed:
            self.counts[background, true[label]] += 1
        for detection in without_label:
            self.counts[predicted[detection], background] += 1


def _pairs(overlaps: np.ndarray) -> list[tuple[int, int]]:
    """Rows and columns of IoU `[m, n]` that belong together, each at most once, the largest first."""
    candidates = np.argwhere(overlaps > CONFUSION_IOU)
    candidate_rows, candidate_columns = candidates.T
    order = np.argsort(-overlaps[candidate_rows, candidate_columns], kind="stable")
    pairs: list[tuple[int, int]] = []
    rows: set[int] = set()
    columns: set[int] = set()
    for row, column in candidates[order].tolist():
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            pairs.append((row, column))
    return pairs
