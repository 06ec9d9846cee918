"""From detections and labels to precision, recall and AP.

Matching, interpolation and the operating point (the confidence with the best mean F1) are upstream's; the tests compare
with upstream's functions and with pycocotools. Equal scores, which INT8 networks give often, keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from utils.core.curves import POINTS, Curves
from utils.core.device import sent
from utils.core.errors import DataError
from utils.core.score import AtThreshold, Resampled
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.bootstrap import Outcomes, group_images, image_weights, resample

IOU_THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
_EPSILON = 1e-16
CONFIDENCES = np.linspace(0, 1, 1000)  # at which precision and recall are read
SIZE_BOUNDS = {"small": 0, "medium": 32**2, "large": 96**2}  # areas in pixels from which on, as COCO has them


def match(
    detections: Sequence[Tensor], labels: Sequence[Tensor], overlaps: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Find the correct detections, at each IoU threshold, for a batch of images at once.

    A detection stands for the label of its class that it overlaps most; the best-scored detection that stands for a
    label, with sufficient overlap, is correct, and all others are not.

    Args:
        detections: for each image float `[n, 6]`: xyxy, score, class; best score first.
        labels: for each image float `[m, 5]`: class, xyxy, in the same pixels.
        overlaps: for each image IoU `[m, n]` of something else than the boxes, such as masks.

    Returns:
        Bool `[B, largest n, 10]`; and the area of the label's box that each detection stands for, `[B, largest n]`.
    """
    detected = pad_sequence(list(detections), batch_first=True, padding_value=-1.0)  # [B, N, 6]
    truth = pad_sequence(list(labels), batch_first=True, padding_value=-2.0)  # [B, M, 5]; no class is -1 or -2
    if not detected.shape[1] or not truth.shape[1]:
        wrong = detected.new_zeros((*detected.shape[:2], len(IOU_THRESHOLDS)), dtype=torch.bool)
        return wrong, detected.new_zeros(detected.shape[:2])
    if overlaps is None:
        overlap = pairwise_iou(truth[..., 1:], detected[..., :4])  # [B, M, N]
    else:
        overlap = _padded(overlaps, detected.new_zeros((len(detected), truth.shape[1], detected.shape[1])))
    is_of_class = truth[..., :1] == detected[..., 5].unsqueeze(1)
    best, label = overlap.where(is_of_class, -1.0).max(1)  # [B, N]
    areas = box_areas(truth[..., 1:]).gather(1, label)
    thresholds = sent(torch.tensor(IOU_THRESHOLDS, dtype=best.dtype), best.device)
    suffices = best.unsqueeze(-1) >= thresholds  # [B, N, 10]
    label = label.unsqueeze(-1).expand_as(suffices)
    last = detected.shape[1]
    rank = torch.arange(last, device=detected.device).view(1, -1, 1)
    first = rank.new_full((len(detected), truth.shape[1], len(IOU_THRESHOLDS)), last)
    first = first.scatter_reduce(1, label, rank.where(suffices, last), "amin")  # [B, M, 10]
    is_first = first.gather(1, label) == rank
    return suffices & is_first, areas


def _padded(matrices: Sequence[Tensor], into: Tensor) -> Tensor:
    """Write matrices `[m, n]` into the first rows and columns of `into` `[B, M, N]`, and return it."""
    for padded, matrix in zip(into, matrices, strict=True):
        rows, columns = matrix.shape
        padded[:rows, :columns] = matrix
    return into


def box_areas(boxes: Tensor) -> Tensor:
    """Areas of xyxy boxes: `[..., 4]` → `[...]`."""
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of xyxy boxes: `[..., M, 4]` and `[..., N, 4]` → `[..., M, N]`."""
    low = torch.maximum(a[..., :, None, :2], b[..., None, :, :2])
    high = torch.minimum(a[..., :, None, 2:], b[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    both = box_areas(a)[..., :, None] + box_areas(b)[..., None, :]
    return shared / (both - shared + 1e-7)


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Means over the classes that have labels, fractions; AP is over IoU 0.50:0.95, AP50 at IoU 0.50.

    `ap_coco` and `ap50_coco` are AP by pycocotools' definition, see `coco_average_precision`.
    """

    ap: float
    ap50: float
    precision: float
    recall: float
    ap_coco: float
    ap50_coco: float


@dataclass(frozen=True)
class ClassScores:
    """Scores of the classes that have labels; all arrays have one entry per class.

    Attributes:
        classes, labels: class ids, and numbers of labels.
        precision, recall: at `threshold`, the confidence where the mean F1 over classes is best.
        ap, ap_coco: `[classes, 10]`, one column per IoU threshold, by upstream's definition and by pycocotools'.
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
        """Means over classes, zeros without a label; or the scores of the class in this row."""
        rows = slice(None) if row is None else slice(row, row + 1)
        ap = self.ap[rows]
        ap_coco = self.ap_coco[rows]
        precision = self.precision[rows]
        recall = self.recall[rows]
        return Averages(
            ap=_mean(ap),
            ap50=_mean(ap[:, 0]),
            precision=_mean(precision),
            recall=_mean(recall),
            ap_coco=_mean(ap_coco),
            ap50_coco=_mean(ap_coco[:, 0]),
        )


def _mean(values: np.ndarray) -> float:
    """The mean; 0 of no values."""
    return float(values.mean()) if values.size else 0.0


def ap_per_class(
    correct: np.ndarray,
    confidence: np.ndarray,
    classes: np.ndarray,
    label_classes: np.ndarray,
) -> ClassScores:
    """AP, precision and recall of each class that has labels.

    Detections have `correct` bool `[n, 10]` from `match`, `confidence` in 0..1 and `classes` `[n]`; labels `[m]`.
    """
    order = np.argsort(-confidence, kind="stable")
    order = order[np.argsort(classes[order].astype(np.int32), kind="stable")]
    correct, confidence, classes = correct[order], confidence[order], classes[order]
    hits_at = np.ascontiguousarray(correct.T)  # [10, n]
    ids, counts = np.unique(label_classes, return_counts=True)
    ap, ap_coco = np.zeros((2, len(ids), correct.shape[1]))
    precision, recall = np.zeros((2, len(ids), len(CONFIDENCES)))
    for row, (label, count) in enumerate(zip(ids, counts, strict=True)):
        start = np.searchsorted(classes, label)
        end = np.searchsorted(classes, label, side="right")
        if start == end:
            continue
        curves = [_recall_and_precision(hits, count) for hits in hits_at[:, start:end]]
        ap[row] = [average_precision(*curve) for curve in curves]
        ap_coco[row] = [coco_average_precision(*curve) for curve in curves]
        recall_at_50, precision_at_50 = curves[0]
        scores = -confidence[start:end]
        recall[row] = np.interp(-CONFIDENCES, scores, recall_at_50, left=0)
        precision[row] = np.interp(-CONFIDENCES, scores, precision_at_50, left=1)
    f1_of_class = 2 * precision * recall / (precision + recall + _EPSILON)
    f1 = f1_of_class.sum(0) / max(len(ids), 1)
    best = _smoothed(f1).argmax()
    return ClassScores(
        classes=ids.astype(int),
        labels=counts,
        precision=precision[:, best],
        recall=recall[:, best],
        ap=ap,
        ap_coco=ap_coco,
        threshold=float(CONFIDENCES[best]),
        f1=f1,
    )


def _recall_and_precision(hits: np.ndarray, labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision after each detection, best score first; `hits` bool `[n]`."""
    cumulative = hits.cumsum()
    recall = cumulative / (labels + _EPSILON)
    precision = cumulative / np.arange(1, len(hits) + 1)
    return recall, precision


def _smoothed(curve: np.ndarray) -> np.ndarray:
    """The running mean over a tenth of CONFIDENCES `[1000]`, as upstream takes it; the curve's ends are repeated."""
    tenth = len(CONFIDENCES) // 10 + 1
    padded = np.pad(curve, tenth // 2, mode="edge")
    return np.convolve(padded, np.ones(tenth) / tenth, mode="valid")


def precision_at(recall: np.ndarray, precision: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The precision envelope at some recalls, as `average_precision` reads it: `[points]`."""
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.concatenate([[1.0], precision, [0.0]])
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    values: np.ndarray = np.interp(points, recall, envelope)
    return values


def average_precision(recall: np.ndarray, precision: np.ndarray) -> float:
    """Area under the precision envelope, read at 101 recalls and integrated by trapezoids, as upstream does.

    `recall` and `precision` are `[n]`, after each detection, best score first.
    """
    values = precision_at(recall, precision, np.linspace(0, 1, 101))
    return float((values[0] / 2 + values[1:-1].sum() + values[-1] / 2) / 100)


# AP of a network with its own detections as labels: precision is 1 up to recall 1, where upstream's curve ends at 0.
SELF_AP = average_precision(np.ones(1), np.ones(1))


def coco_average_precision(recall: np.ndarray, precision: np.ndarray) -> float:
    """Mean of the precision envelope at 101 recalls, without interpolation, as pycocotools does.

    It is lower than upstream's by up to 0.01: upstream draws a line from the last recall down to precision 0 at recall
    1, and lines between recalls; pycocotools counts nothing beyond the last, and takes the next higher one.
    """
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    envelope: np.ndarray = np.append(best_from_here, 0.0)  # nothing beyond the last recall
    places = np.searchsorted(recall, np.linspace(0, 1, 101))
    return float(envelope[places].mean())


def f1_at(
    confidence: np.ndarray,
    recall: np.ndarray,
    precision: np.ndarray,
    points: np.ndarray,
) -> np.ndarray:
    """F1 at some confidences, of detections `[n]`, best score first: `[points]`."""
    if not len(confidence):
        return np.zeros(len(points))
    recall = np.interp(-points, -confidence, recall, left=0)
    precision = np.interp(-points, -confidence, precision, left=1)
    f1: np.ndarray = 2 * precision * recall / (precision + recall + _EPSILON)
    return f1


class ImageOutcome(NamedTuple):
    """Detections and labels of an image, as AP needs them.

    Attributes:
        correct, correct_masks: of its detections bool `[n, 10]`, see `match`, by boxes, and by masks if there are some.
        detections: scores, classes, and the area of the label that a detection stands for, `[n, 3]`.
        labels: their classes and areas, `[m, 2]`.
    """

    correct: np.ndarray
    detections: np.ndarray
    labels: np.ndarray
    correct_masks: np.ndarray | None = None


class _BatchOutcome(NamedTuple):
    """Outcomes of a batch, on the device where they were computed.

    Attributes:
        paths: of the images.
        counts, label_counts: numbers of their detections and labels.
        correct, areas: from `match`, bool `[B, N, 10]` and `[B, N]`, padded.
        scores: scores and classes of the detections, `[n, 2]`.
        labels: their classes and areas, `[m, 2]`.
        correct_masks: from `match` by masks, `[B, N, 10]`; None where none are compared.
    """

    paths: Sequence[str]
    counts: list[int]
    label_counts: list[int]
    correct: Tensor
    areas: Tensor
    scores: Tensor
    labels: Tensor
    correct_masks: Tensor | None

    def by_image(self) -> Iterator[tuple[str, ImageOutcome]]:
        """Path and outcome of each image."""
        areas = self.areas.cpu().numpy()
        is_detection = np.arange(areas.shape[1]) < np.array(self.counts)[:, None]  # not padding, bool [B, N]
        detections = np.column_stack((self.scores.cpu().numpy(), areas[is_detection]))
        correct = self.correct.cpu().numpy()[is_detection]
        columns = [
            _divided(correct, self.counts),
            _divided(detections, self.counts),
            _divided(self.labels.cpu().numpy(), self.label_counts),
        ]
        if self.correct_masks is not None:
            correct_masks = self.correct_masks.cpu().numpy()[is_detection]
            columns.append(_divided(correct_masks, self.counts))
        return zip(self.paths, starmap(ImageOutcome, zip(*columns, strict=True)), strict=True)


def _divided(rows: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Rows of several images `[sum of counts, ...]`, image by image."""
    return np.split(rows, np.cumsum(counts)[:-1])


@dataclass
class EvalStatistics:
    """Detections against labels, image by image, until AP is computed.

    Attributes:
        groups: images that are resampled together, see `group_images`; None: each by itself.
        agreement: the labels are a network's detections. AP is divided by `SELF_AP`, so that this network itself has 1;
            AP by pycocotools' definition is 1 for it as it is.
    """

    groups: str | None = None
    agreement: bool = False
    _images: dict[str, ImageOutcome] = field(default_factory=dict)
    _batches: list[_BatchOutcome] = field(default_factory=list)

    def add(
        self,
        detections: RaggedBatch,
        labels: RaggedBatch,
        paths: Sequence[str],
        mask_overlaps: Sequence[Tensor] | None = None,
    ) -> None:
        """Take in a batch: for each image detections `[n, 6]` and labels `[m, 5]` in its pixels, masks' IoU `[m, n]`.

        Nothing here waits for a GPU: results stay where they are until `images` is read.
        """
        correct, areas = match(detections, labels)
        correct_masks = None
        if mask_overlaps is not None:
            correct_masks, _ = match(detections, labels, mask_overlaps)
        label_columns = (labels.flat[:, 0], box_areas(labels.flat[:, 1:]))
        outcome = _BatchOutcome(
            paths,
            detections.counts,
            labels.counts,
            correct,
            areas,
            scores=detections.flat[:, 4:6].contiguous(),
            labels=torch.stack(label_columns, 1),
            correct_masks=correct_masks,
        )
        self._batches.append(outcome)

    @property
    def images(self) -> dict[str, ImageOutcome]:
        """Path → outcome, in the order of the images."""
        for batch in self._batches:
            self._images.update(batch.by_image())
        self._batches.clear()
        return self._images

    @property
    def has_masks(self) -> bool:
        """True if masks were compared."""
        return any(image.correct_masks is not None for image in self.images.values())

    def resampled(self, masks: bool = False) -> Resampled | None:
        """AP of boxes or of masks on resamplings of the images, see `resample`; it takes seconds for 5,000 images."""
        if masks and not self.has_masks:
            return None
        resampled = resample(self.outcomes(masks))
        if resampled and self.agreement:
            return resampled.scaled(1 / SELF_AP)
        return resampled

    def score_resampled(self) -> Resampled | None:
        """`Score.decides` on resamplings of the images."""
        boxes = self.resampled()
        masks = self.resampled(masks=True)
        if boxes is None or masks is None:
            return boxes
        means = ((box + mask) / 2 for box, mask in zip(boxes.ap, masks.ap, strict=True))
        return Resampled.of(boxes.images, means, boxes.units)

    def outcomes(self, masks: bool = False) -> Outcomes:
        """All detections and labels, image by image; correct by their boxes, or by their masks."""
        images = self.images.values()
        index = np.arange(len(images))
        confidence, classes, _ = np.concatenate([image.detections for image in images]).T
        label_classes, _ = np.concatenate([image.labels for image in images]).T
        correct = [image.correct_masks if masks else image.correct for image in images]
        detection_counts = [len(image.detections) for image in images]
        label_counts = [len(image.labels) for image in images]
        paths = list(self.images)
        groups = group_images(paths, self.groups) if self.groups else None
        return Outcomes(
            paths=paths,
            image=index.repeat(detection_counts),
            correct=np.concatenate(correct),
            confidence=confidence,
            classes=classes,
            label_image=index.repeat(label_counts),
            label_classes=label_classes,
            groups=groups,
        )

    def at_threshold(self, threshold: float, names: Mapping[int, str]) -> AtThreshold:
        """Objects that a product with this confidence threshold finds and misses, by the names of the classes."""
        outcomes = self.outcomes()
        is_taken = outcomes.confidence >= threshold
        is_hit = is_taken & outcomes.correct[:, 0]
        objects = len(outcomes.label_image)
        taken = int(is_taken.sum())
        hits = int(is_hit.sum())
        precision_resampled, recall_resampled = _resampled_at(outcomes, is_taken, is_hit)
        return AtThreshold(
            threshold=threshold,
            objects=objects,
            found=hits,
            precision=hits / max(taken, 1),
            recall=hits / max(objects, 1),
            precision_resampled=precision_resampled,
            recall_resampled=recall_resampled,
            by_class=_hits_by_class(outcomes, is_hit, names),
            by_size=self._hits_by_size(is_hit),
        )

    def _hits_by_size(self, is_hit: np.ndarray) -> dict[str, tuple[int, int]]:
        """Size of objects → numbers of objects and of hits; sizes without objects are left out."""
        object_areas = np.concatenate([image.labels[:, 1] for image in self.images.values()])
        detected_areas = np.concatenate([image.detections[:, 2] for image in self.images.values()])
        bounds = [*SIZE_BOUNDS.values(), np.inf]
        objects, _ = np.histogram(object_areas, bounds)
        hits, _ = np.histogram(detected_areas[is_hit], bounds)
        counts = zip(SIZE_BOUNDS, objects.tolist(), hits.tolist(), strict=True)
        return {size: (number, hits_of_size) for size, number, hits_of_size in counts if number}

    def disagreements(self, confidence: float) -> dict[str, int]:
        """Path of each image → number of detections above a confidence, and of labels, without a partner (IoU 0.5)."""
        counts = {}
        for path, image in self.images.items():
            is_confident = image.detections[:, 0] >= confidence
            pairs = int((is_confident & image.correct[:, 0]).sum())
            counts[path] = int(is_confident.sum()) + len(image.labels) - 2 * pairs
        return counts

    def class_curves(self, names: Mapping[int, str], classes: Sequence[str], confusion: np.ndarray) -> Curves:
        """The curves at IoU 0.5 of the classes that have labels.

        Args:
            names: of these classes, by id.
            classes: of the dataset.
            confusion: see `Curves`.
        """
        outcomes = self.outcomes()
        points = np.linspace(0, 1, POINTS)
        curves = Curves([], [], [], [], list(classes), confusion.tolist())
        labels, counts = np.unique(outcomes.label_classes, return_counts=True)
        for label, count in zip(labels, counts, strict=True):
            is_of_class = outcomes.classes == label
            order = np.argsort(-outcomes.confidence[is_of_class], kind="stable")
            confidence = outcomes.confidence[is_of_class][order]
            hits = outcomes.correct[is_of_class, 0][order].cumsum()
            recall = hits / count
            precision = hits / np.arange(1, len(hits) + 1)
            curves.names.append(names[int(label)])
            curves.ap50.append(average_precision(recall, precision))
            curves.precision.append(precision_at(recall, precision, points).tolist())
            curves.f1.append(f1_at(confidence, recall, precision, points).tolist())
        return curves

    def class_scores(self, masks: bool = False) -> ClassScores:
        """AP, precision and recall of each class, by boxes or by masks; `DataError` if there was no image."""
        if not self.images:
            raise DataError("no image could be decoded")
        outcomes = self.outcomes(masks)
        scores = ap_per_class(outcomes.correct, outcomes.confidence, outcomes.classes, outcomes.label_classes)
        if self.agreement:
            return replace(scores, ap=np.minimum(scores.ap / SELF_AP, 1.0))
        return scores


def _hits_by_class(outcomes: Outcomes, is_hit: np.ndarray, names: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """Name of each class that has labels → numbers of objects and of hits."""
    hit_classes = outcomes.classes[is_hit]
    labels, counts = np.unique(outcomes.label_classes, return_counts=True)
    by_class = {}
    for label, count in zip(labels, counts, strict=True):
        hits = int((hit_classes == label).sum())
        by_class[names[int(label)]] = (int(count), hits)
    return by_class


def _resampled_at(
    outcomes: Outcomes, is_taken: np.ndarray, is_hit: np.ndarray
) -> tuple[Resampled | None, Resampled | None]:
    """Precision and recall on resamplings of the images, of the detections that are taken and that are hits."""
    resamplings = image_weights(outcomes)
    if resamplings is None:
        return None, None

    def totals(owners: np.ndarray) -> np.ndarray:
        """Number of objects or detections in each resampling, from the image of each one: `[B]`."""
        counts = np.bincount(owners, minlength=len(outcomes.paths))
        sums: np.ndarray = resamplings.weights.T @ counts
        return sums

    hits = totals(outcomes.image[is_hit])
    precision = hits / np.maximum(totals(outcomes.image[is_taken]), 1)
    recall = hits / np.maximum(totals(outcomes.label_image), 1)
    images, units = resamplings.images, resamplings.units
    return Resampled.of(images, precision, units), Resampled.of(images, recall, units)
