"""From detections and labels to precision, recall and AP.

Matching, interpolation and the operating point (the confidence with the best mean F1) are upstream's; the tests compare
with upstream's functions and with pycocotools. Equal scores, which INT8 networks give often, keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.core.device import sent
from utils.core.errors import DataError
from utils.core.score import AtThreshold, Resampled, Score
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.bootstrap import Outcomes, group_images, image_weights, resample

IOU_THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
_EPSILON = 1e-16
CONFIDENCES = np.linspace(0, 1, 1000)  # at which precision and recall are read
SIZE_BOUNDS = {"small": 0, "medium": 32**2, "large": 96**2}  # areas in pixels from which on, as COCO has them


def match(
    detections: Sequence[Tensor], labels: Sequence[Tensor], overlaps: Sequence[Tensor] | None = None
) -> tuple[RaggedBatch, Tensor]:
    """Which detections are correct, at each IoU threshold, for a batch of images at once.

    A detection stands for the label of its class that it overlaps most; the best-scored detection that stands for a
    label, with sufficient overlap, is correct, and all others are not.

    Args:
        detections: for each image float `[n, 6]`: xyxy, score, class; best score first.
        labels: for each image float `[m, 5]`: class, xyxy, in the same pixels.
        overlaps: for each image IoU `[m, n]` of something else than the boxes, such as masks.

    Returns:
        For each image bool `[n, 10]`; and the area of the label's box that each detection stands for, `[sum of n]`.
    """
    detections = RaggedBatch.of(detections)
    place, found = _padded(detections, -1.0)  # [B, N, 6]
    _, truth = _padded(RaggedBatch.of(labels), -2.0)  # [B, M, 5]; no class is -1 or -2
    if not found.shape[1] or not truth.shape[1]:
        wrong = found.new_zeros((len(place), len(IOU_THRESHOLDS)), dtype=torch.bool)
        return RaggedBatch(wrong, detections.counts), found.new_zeros(len(place))
    if overlaps is None:
        overlap = pairwise_iou(truth[..., 1:], found[..., :4])  # [B, M, N]
    else:
        overlap = found.new_zeros((len(found), truth.shape[1], found.shape[1]))
        for one, given in zip(overlap, overlaps, strict=True):
            one[: given.shape[0], : given.shape[1]] = given
    overlap = overlap.where(truth[..., :1] == found[..., 5].unsqueeze(1), -1.0)
    best, label = overlap.max(1)  # [B, N]
    areas = box_areas(truth[..., 1:]).gather(1, label)
    enough = best.unsqueeze(-1) >= sent(torch.tensor(IOU_THRESHOLDS, dtype=best.dtype), best.device)  # [B, N, 10]
    label = label.unsqueeze(-1).expand_as(enough)
    rank = torch.arange(found.shape[1], device=found.device).view(1, -1, 1)
    first = rank.new_full((len(found), truth.shape[1], len(IOU_THRESHOLDS)), found.shape[1])
    first = first.scatter_reduce(1, label, rank.where(enough, found.shape[1]), "amin")  # [B, M, 10]
    correct = enough & (first.gather(1, label) == rank)
    return RaggedBatch(correct.flatten(0, 1)[place], detections.counts), areas.flatten()[place]


def box_areas(boxes: Tensor) -> Tensor:
    """Areas of xyxy boxes: `[..., 4]` → `[...]`."""
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def _padded(rows: RaggedBatch, filling: float) -> tuple[Tensor, Tensor]:
    """Rows of several images, `[n, C]` each, in one table, in a few steps however many images there are.

    Returns:
        int64 `[sum of n]`, the place of each row in the flattened table; and the table `[B, largest n, C]`.
    """
    counts = np.array(rows.counts)
    width = int(counts.max())
    owner = np.arange(len(rows)).repeat(counts)
    within = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    place = sent(torch.from_numpy(owner * width + within), rows.flat.device)
    table = rows.flat.new_full((len(rows) * width, rows.flat.shape[1]), filling)
    return place, table.index_copy_(0, place, rows.flat).unflatten(0, (len(rows), width))


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of xyxy boxes: `[..., M, 4]` and `[..., N, 4]` → `[..., M, N]`."""
    low = torch.maximum(a[..., :, None, :2], b[..., None, :, :2])
    high = torch.minimum(a[..., :, None, 2:], b[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / (box_areas(a)[..., :, None] + box_areas(b)[..., None, :] - shared + 1e-7)


@dataclass(frozen=True)
class Averages:
    """Means over the classes that have labels, fractions; AP is over IoU 0.50:0.95."""

    ap: float
    ap50: float
    precision: float
    recall: float


@dataclass(frozen=True)
class ClassScores:
    """Scores of the classes that have labels; all arrays have one entry per class.

    Attributes:
        classes: class ids.
        labels: number of labels.
        precision, recall: at the confidence where the mean F1 over classes is best.
        ap: `[classes, 10]`, one column per IoU threshold, by upstream's definition.
        ap_coco: the same by pycocotools' definition.
        threshold: the confidence of `precision` and `recall`.
        f1: mean over classes at each of CONFIDENCES, `[1000]`.
    """

    classes: np.ndarray
    labels: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    ap: np.ndarray
    ap_coco: np.ndarray
    threshold: float
    f1: np.ndarray

    def mean(self, row: int | None = None) -> Averages:
        """Means over classes, zeros when there is no label; or the scores of the class in this row."""
        rows = slice(None) if row is None else slice(row, row + 1)
        parts = (self.ap[rows], self.ap[rows, 0], self.precision[rows], self.recall[rows])
        return Averages(*(float(part.mean()) if len(self.classes) else 0.0 for part in parts))


def score(correct: np.ndarray, confidence: np.ndarray, classes: np.ndarray, label_classes: np.ndarray) -> ClassScores:
    """AP, precision and recall of each class that has labels.

    Args:
        correct: bool `[n, 10]`, from `match`.
        confidence: `[n]`, in 0..1.
        classes: `[n]`, of the detections.
        label_classes: `[m]`, of the labels.
    """
    order = np.argsort(-confidence, kind="stable")
    order = order[np.argsort(classes[order].astype(np.int32), kind="stable")]
    correct, confidence, classes = correct[order], confidence[order], classes[order]
    hits_at = np.ascontiguousarray(correct.T)  # [10, n]
    ids, counts = np.unique(label_classes, return_counts=True)
    ap, ap_coco = np.zeros((2, len(ids), correct.shape[1]))
    precision, recall = np.zeros((2, len(ids), len(CONFIDENCES)))
    for row, (label, count) in enumerate(zip(ids, counts, strict=True)):
        start, end = np.searchsorted(classes, label), np.searchsorted(classes, label, side="right")
        if start == end:
            continue
        for column, hits in enumerate(hits_at[:, start:end]):
            found = hits.cumsum()
            curve = found / (count + _EPSILON), found / np.arange(1, len(hits) + 1)  # recall and precision
            ap[row, column], ap_coco[row, column] = average_precision(*curve), coco_average_precision(*curve)
            if not column:
                for scores, values, left in ((recall, curve[0], 0), (precision, curve[1], 1)):
                    scores[row] = np.interp(-CONFIDENCES, -confidence[start:end], values, left=left)
    if not correct.any():
        nothing = np.zeros(len(ids))
        return ClassScores(ids.astype(int), counts, nothing, nothing, ap, ap_coco, 0.0, np.zeros(len(CONFIDENCES)))
    f1 = (2 * precision * recall / (precision + recall + _EPSILON)).mean(0)
    tenth = len(CONFIDENCES) // 10 + 1  # upstream smooths by a running mean over it; the curve's ends are repeated
    best = np.convolve(np.pad(f1, tenth // 2, mode="edge"), np.ones(tenth) / tenth, mode="valid").argmax()
    return ClassScores(
        ids.astype(int), counts, precision[:, best], recall[:, best], ap, ap_coco, float(CONFIDENCES[best]), f1
    )


def average_precision(recall: np.ndarray, precision: np.ndarray) -> float:
    """Area under the precision envelope, read at 101 recalls and integrated by trapezoids, as upstream does.

    Args:
        recall, precision: `[n]`, after each detection, best score first.
    """
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.concatenate([[1.0], precision, [0.0]])
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    values = np.interp(np.linspace(0, 1, 101), recall, envelope)
    return float((values[0] / 2 + values[1:-1].sum() + values[-1] / 2) / 100)


def coco_average_precision(recall: np.ndarray, precision: np.ndarray) -> float:
    """Mean of the precision envelope at 101 recalls, without interpolation, as pycocotools does.

    It is lower than upstream's by up to 0.01: upstream draws a line from the last recall down to precision 0 at recall
    1, and lines between recalls; pycocotools counts nothing beyond the last, and takes the next higher one.

    Args:
        recall, precision: `[n]`, after each detection, best score first.
    """
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    envelope = np.concatenate([envelope, [0.0]])  # nothing beyond the last recall
    return float(envelope[np.searchsorted(recall, np.linspace(0, 1, 101))].mean())


@dataclass
class EvalStatistics:
    """What is kept of each batch of a network's detections, on the runner's device until the end.

    Attributes:
        correct: of each batch, for each image bool `[n, 10]`, see `match`.
        detections: scores, classes, and the area of the label that a detection stands for, `[n, 3]`.
        labels: their classes and areas, `[m, 2]`.
        paths: of all images.
        correct_masks: as `correct`, by masks; None where there are none.
        groups: see `group_images`; None: each image by itself.
    """

    correct: list[RaggedBatch] = field(default_factory=list)
    detections: list[RaggedBatch] = field(default_factory=list)
    labels: list[RaggedBatch] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    correct_masks: list[RaggedBatch] | None = None
    groups: str | None = None

    def add(
        self, found: Sequence[Tensor], labels: Sequence[Tensor], paths: Sequence[str],
        mask_overlaps: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Take in a batch: for each image detections `[n, 6]` and labels `[m, 5]`, both in the image's pixels.

        `mask_overlaps` are IoU of their masks, `[m, n]`.
        """
        found, labels = RaggedBatch.of(found), RaggedBatch.of(labels)
        correct, areas = match(found, labels)
        self.correct.append(correct)
        if mask_overlaps is not None:
            self.correct_masks = [*(self.correct_masks or ()), match(found, labels, mask_overlaps)[0]]
        rows = torch.cat((found.flat[:, 4:6], areas.unsqueeze(1).to(found.flat.dtype)), 1)
        self.detections.append(RaggedBatch(rows, found.counts))
        rows = torch.stack((labels.flat[:, 0], box_areas(labels.flat[:, 1:])), 1)
        self.labels.append(RaggedBatch(rows, labels.counts))
        self.paths += paths

    def extend(self, part: Mapping[str, list[Any]]) -> None:
        """Take in what `to_plain` of another gave."""
        for name, rows in part.items():
            more = rows if name == "paths" or not rows else [RaggedBatch.of(rows)]
            setattr(self, name, [*(getattr(self, name) or ()), *more])

    def to_plain(self) -> dict[str, list[Any]]:
        """Lists of tensors on the CPU and of paths, as torch.save takes them."""
        names = ["correct", "detections", "labels", *(["correct_masks"] if self.correct_masks is not None else ())]
        # memory of their own: a view would take its batch with it into a file
        rows = {name: [rows.clone() for one in getattr(self, name) for rows in one.cpu()] for name in names}
        return {**rows, "paths": list(self.paths)}

    def resampled(self) -> Resampled | None:
        """AP on resamplings of the images, see `resample`; it takes seconds for 5,000 images."""
        return resample(self.outcomes())

    def mask_resampled(self) -> Resampled | None:
        """The same of masks; None where there are none."""
        return None if self.correct_masks is None else resample(self.outcomes(self.correct_masks))

    def score_resampled(self) -> Resampled | None:
        """The same of `Score.decides`."""
        boxes, masks = self.resampled(), self.mask_resampled()
        if boxes is None or masks is None:
            return boxes
        return Resampled.of(boxes.images, ((a + b) / 2 for a, b in zip(boxes.ap, masks.ap, strict=True)))

    def outcomes(self, correct: Sequence[RaggedBatch] | None = None) -> Outcomes:
        """All detections and labels in arrays; `correct` is by boxes, unless it is that of masks."""
        correct = self.correct if correct is None else correct
        counts = [[count for one in rows for count in one.counts] for rows in (correct, self.labels)]
        owners = [np.arange(len(self.paths)).repeat(count) for count in counts]
        hits, detections, labels = (_together(rows) for rows in (correct, self.detections, self.labels))
        confidence, classes, _ = detections.T
        groups = group_images(self.paths, self.groups) if self.groups else None
        return Outcomes(self.paths, owners[0], hits, confidence, classes, owners[1], labels[:, 0], groups)

    def at(self, threshold: float, names: Mapping[int, str]) -> AtThreshold:
        """What a product with this confidence threshold finds and misses, by the names of the classes."""
        outcomes = self.outcomes()
        taken = outcomes.confidence >= threshold
        hit = taken & outcomes.correct[:, 0]
        bounds = list(SIZE_BOUNDS.values())
        label_sizes = np.searchsorted(bounds, _together(self.labels)[:, 1], "right") - 1
        hit_sizes = np.searchsorted(bounds, _together(self.detections)[hit, 2], "right") - 1
        hit_classes = outcomes.classes[hit]
        resamplings: dict[str, Resampled] = {}
        if (drawn := image_weights(outcomes)) is not None:
            images, weights = drawn
            objects, found, detections = (
                weights.T @ np.bincount(owners, minlength=len(outcomes.paths))
                for owners in (outcomes.label_image, outcomes.image[hit], outcomes.image[taken])
            )
            for name, whole in (("precision", detections), ("recall", objects)):
                resamplings[f"{name}_resampled"] = Resampled.of(images, found / np.maximum(whole, 1))
        count, number = len(outcomes.label_image), int(hit.sum())
        return AtThreshold(
            threshold=threshold, objects=count, found=number, precision=number / max(int(taken.sum()), 1),
            recall=number / max(count, 1),
            by_class={
                names[int(label)]: (int((outcomes.label_classes == label).sum()), int((hit_classes == label).sum()))
                for label in np.unique(outcomes.label_classes)
            },
            by_size={
                name: (int((label_sizes == i).sum()), int((hit_sizes == i).sum()))
                for i, name in enumerate(SIZE_BOUNDS) if (label_sizes == i).any()
            },
            **resamplings,
        )  # fmt: skip

    def score(self) -> Score:
        """AP, the mean over classes.

        Raises:
            DataError: there was no image.
        """
        masks = self.mask_scores()
        return Score(self.scores().mean().ap, masks.mean().ap if masks else None)

    def scores(self, correct: Sequence[RaggedBatch] | None = None) -> ClassScores:
        """AP, precision and recall of each class; `correct` is by boxes, unless it is that of masks.

        Raises:
            DataError: there was no image.
        """
        if not self.paths:
            raise DataError("no image could be decoded")
        outcomes = self.outcomes(correct)
        return score(outcomes.correct, outcomes.confidence, outcomes.classes, outcomes.label_classes)

    def mask_scores(self) -> ClassScores | None:
        """The same of masks; None where there are none."""
        return None if self.correct_masks is None else self.scores(self.correct_masks)


def _together(batches: Iterable[RaggedBatch]) -> np.ndarray:
    """The rows of all images of all batches, `[n, ...]`."""
    rows: np.ndarray = torch.cat([batch.flat for batch in batches]).cpu().numpy()
    return rows
