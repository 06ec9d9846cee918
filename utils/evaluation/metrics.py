"""From detections and labels to precision, recall and AP.

Matching, interpolation and the operating point (the confidence with the best mean F1) are upstream's; the tests compare
with upstream's functions and with pycocotools. Equal scores, which INT8 networks give often, keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Which detections are correct, at each IoU threshold, for a batch of images at once.

    A detection stands for the label of its class that it overlaps most; the best-scored detection that stands for a
    label, with sufficient overlap, is correct, and all others are not.

    Args:
        detections: for each image float `[n, 6]`: xyxy, score, class; best score first.
        labels: for each image float `[m, 5]`: class, xyxy, in the same pixels.
        overlaps: for each image IoU `[m, n]` of something else than the boxes, such as masks.

    Returns:
        Bool `[B, largest n, 10]`; and the area of the label's box that each detection stands for, `[B, largest n]`.
    """
    found = pad_sequence(list(detections), batch_first=True, padding_value=-1.0)  # [B, N, 6]
    truth = pad_sequence(list(labels), batch_first=True, padding_value=-2.0)  # [B, M, 5]; no class is -1 or -2
    if not found.shape[1] or not truth.shape[1]:
        wrong = found.new_zeros((*found.shape[:2], len(IOU_THRESHOLDS)), dtype=torch.bool)
        return wrong, found.new_zeros(found.shape[:2])
    if overlaps is None:
        overlap = pairwise_iou(truth[..., 1:], found[..., :4])  # [B, M, N]
    else:
        overlap = found.new_zeros((len(found), truth.shape[1], found.shape[1]))
        for padded, of_image in zip(overlap, overlaps, strict=True):
            padded[: of_image.shape[0], : of_image.shape[1]] = of_image
    overlap = overlap.where(truth[..., :1] == found[..., 5].unsqueeze(1), -1.0)
    best, label = overlap.max(1)  # [B, N]
    areas = box_areas(truth[..., 1:]).gather(1, label)
    enough = best.unsqueeze(-1) >= sent(torch.tensor(IOU_THRESHOLDS, dtype=best.dtype), best.device)  # [B, N, 10]
    label = label.unsqueeze(-1).expand_as(enough)
    rank = torch.arange(found.shape[1], device=found.device).view(1, -1, 1)
    first = rank.new_full((len(found), truth.shape[1], len(IOU_THRESHOLDS)), found.shape[1])
    first = first.scatter_reduce(1, label, rank.where(enough, found.shape[1]), "amin")  # [B, M, 10]
    return enough & (first.gather(1, label) == rank), areas


def box_areas(boxes: Tensor) -> Tensor:
    """Areas of xyxy boxes: `[..., 4]` → `[...]`."""
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of xyxy boxes: `[..., M, 4]` and `[..., N, 4]` → `[..., M, N]`."""
    low = torch.maximum(a[..., :, None, :2], b[..., None, :, :2])
    high = torch.minimum(a[..., :, None, 2:], b[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / (box_areas(a)[..., :, None] + box_areas(b)[..., None, :] - shared + 1e-7)


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
        """Means over classes, zeros when there is no label; or the scores of the class in this row."""
        rows = slice(None) if row is None else slice(row, row + 1)
        ap, ap_coco = self.ap[rows], self.ap_coco[rows]
        arrays = {"ap": ap, "ap50": ap[:, 0], "ap_coco": ap_coco, "ap50_coco": ap_coco[:, 0],
                  "precision": self.precision[rows], "recall": self.recall[rows]}  # fmt: skip
        return Averages(**{name: float(array.mean()) if array.size else 0.0 for name, array in arrays.items()})


def ap_per_class(
    correct: np.ndarray, confidence: np.ndarray, classes: np.ndarray, label_classes: np.ndarray
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
    f1 = (2 * precision * recall / (precision + recall + _EPSILON)).sum(0) / max(len(ids), 1)
    tenth = len(CONFIDENCES) // 10 + 1  # upstream smooths by a running mean over it; the curve's ends are repeated
    best = np.convolve(np.pad(f1, tenth // 2, mode="edge"), np.ones(tenth) / tenth, mode="valid").argmax()
    return ClassScores(
        ids.astype(int), counts, precision[:, best], recall[:, best], ap, ap_coco, float(CONFIDENCES[best]), f1
    )


def precision_at(recall: np.ndarray, precision: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The precision envelope at some recalls, as `average_precision` reads it: `[points]`."""
    recall = np.concatenate([[0.0], recall, [1.0]])
    precision = np.concatenate([[1.0], precision, [0.0]])
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return np.interp(points, recall, envelope)


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
    envelope: np.ndarray = np.append(
        np.maximum.accumulate(precision[::-1])[::-1], 0.0
    )  # nothing beyond the last recall
    return float(envelope[np.searchsorted(recall, np.linspace(0, 1, 101))].mean())


def f1_at(confidence: np.ndarray, recall: np.ndarray, precision: np.ndarray, points: np.ndarray) -> np.ndarray:
    """F1 at some confidences, of detections `[n]`, best score first: `[points]`."""
    if not len(confidence):
        return np.zeros(len(points))
    recall = np.interp(-points, -confidence, recall, left=0)
    precision = np.interp(-points, -confidence, precision, left=1)
    return 2 * precision * recall / (precision + recall + _EPSILON)


class ImageOutcome(NamedTuple):
    """What is kept of an image.

    Attributes:
        correct, correct_masks: of its detections bool `[n, 10]`, see `match`, by boxes, and by masks if there are some.
        detections: scores, classes, and the area of the label that a detection stands for, `[n, 3]`.
        labels: their classes and areas, `[m, 2]`.
    """

    correct: np.ndarray
    detections: np.ndarray
    labels: np.ndarray
    correct_masks: np.ndarray | None = None


@dataclass
class EvalStatistics:
    """What is kept of a network's detections until AP is computed.

    Attributes:
        groups: which images are resampled together, see `group_images`; None: each by itself.
        agreement: the labels are a network's detections. AP is divided by `SELF_AP`, so that this network itself has 1;
            AP by pycocotools' definition is 1 for it as it is.
    """

    groups: str | None = None
    agreement: bool = False
    _images: dict[str, ImageOutcome] = field(default_factory=dict)
    _batches: list[tuple[Sequence[str], list[int], list[int], list[Tensor]]] = field(default_factory=list)

    def add(
        self, detections: RaggedBatch, labels: RaggedBatch, paths: Sequence[str],
        mask_overlaps: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Take in a batch: of each image detections `[n, 6]` and labels `[m, 5]` in its pixels, masks' IoU `[m, n]`.

        Nothing here waits for a GPU: results stay where they are until `images` is read.
        """
        truth = torch.stack((labels.flat[:, 0], box_areas(labels.flat[:, 1:])), 1)
        found = [*match(detections, labels), detections.flat[:, 4:6].contiguous(), truth]
        if mask_overlaps is not None:
            found.append(match(detections, labels, mask_overlaps)[0])
        self._batches.append((paths, detections.counts, labels.counts, found))

    @property
    def images(self) -> dict[str, ImageOutcome]:
        """Path → outcome, in the order of the images."""
        for paths, counts, label_counts, found in self._batches:
            correct, areas, rows, truth, *masks = (part.cpu().numpy() for part in found)
            inside = np.arange(correct.shape[1]) < np.array(counts)[:, None]  # without padding, bool [B, N]
            columns = [(correct[inside], counts), (np.column_stack((rows, areas[inside])), counts)]
            columns += [(truth, label_counts), *((of_masks[inside], counts) for of_masks in masks)]
            of_images = zip(*(np.split(array, np.cumsum(each)[:-1]) for array, each in columns), strict=True)
            self._images.update(zip(paths, starmap(ImageOutcome, of_images), strict=True))
        self._batches.clear()
        return self._images

    @property
    def has_masks(self) -> bool:
        """Whether masks were compared."""
        return any(image.correct_masks is not None for image in self.images.values())

    def resampled(self, masks: bool = False) -> Resampled | None:
        """AP of boxes or of masks on resamplings of the images, see `resample`; it takes seconds for 5,000 images."""
        if masks and not self.has_masks:
            return None
        resampled = resample(self.outcomes(masks))
        return resampled.scaled(1 / SELF_AP) if resampled and self.agreement else resampled

    def score_resampled(self) -> Resampled | None:
        """The same of `Score.decides`."""
        boxes, masks = self.resampled(), self.resampled(masks=True)
        if boxes is None or masks is None:
            return boxes
        means = ((a + b) / 2 for a, b in zip(boxes.ap, masks.ap, strict=True))
        return Resampled.of(boxes.images, means, boxes.units)

    def outcomes(self, masks: bool = False) -> Outcomes:
        """All detections and labels, image by image; correct by their boxes, or by their masks."""
        images, index = self.images.values(), np.arange(len(self.images))
        confidence, classes, _ = np.concatenate([image.detections for image in images]).T
        label_classes, _ = np.concatenate([image.labels for image in images]).T
        return Outcomes(
            paths=list(self.images), image=index.repeat([len(image.detections) for image in images]),
            correct=np.concatenate([image[3 if masks else 0] for image in images]),
            confidence=confidence, classes=classes,
            label_image=index.repeat([len(image.labels) for image in images]), label_classes=label_classes,
            groups=group_images(list(self.images), self.groups) if self.groups else None,
        )  # fmt: skip

    def at_threshold(self, threshold: float, names: Mapping[int, str]) -> AtThreshold:
        """What a product with this confidence threshold finds and misses, by the names of the classes."""
        outcomes = self.outcomes()
        taken = outcomes.confidence >= threshold
        hit = taken & outcomes.correct[:, 0]
        label_areas = np.concatenate([image.labels[:, 1] for image in self.images.values()])
        areas = np.concatenate([image.detections[:, 2] for image in self.images.values()])
        label_sizes, hit_sizes = (
            np.histogram(areas, [*SIZE_BOUNDS.values(), np.inf])[0].tolist() for areas in (label_areas, areas[hit])
        )
        resamplings: dict[str, Resampled] = {}
        if (drawn := image_weights(outcomes)) is not None:
            objects, found, detections = (
                drawn.weights.T @ np.bincount(owners, minlength=len(outcomes.paths))
                for owners in (outcomes.label_image, outcomes.image[hit], outcomes.image[taken])
            )
            for name, whole in (("precision", detections), ("recall", objects)):
                shares = found / np.maximum(whole, 1)
                resamplings[f"{name}_resampled"] = Resampled.of(drawn.images, shares, drawn.units)
        count, number = len(outcomes.label_image), int(hit.sum())
        return AtThreshold(
            threshold=threshold, objects=count, found=number, precision=number / max(int(taken.sum()), 1),
            recall=number / max(count, 1),
            by_class={
                names[int(label)]: (int(n), int((outcomes.classes[hit] == label).sum()))
                for label, n in zip(*np.unique(outcomes.label_classes, return_counts=True), strict=True)
            },
            by_size={size: (n, hits) for size, n, hits in zip(SIZE_BOUNDS, label_sizes, hit_sizes, strict=True) if n},
            **resamplings,
        )  # fmt: skip

    def disagreements(self, confidence: float) -> dict[str, int]:
        """Of each image the detections above a confidence, and the labels, that have no partner (IoU 0.5)."""
        counts = {}
        for path, image in self.images.items():
            confident = image.detections[:, 0] >= confidence
            pairs = int((confident & image.correct[:, 0]).sum())
            counts[path] = int(confident.sum()) + len(image.labels) - 2 * pairs
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
        for label, count in zip(*np.unique(outcomes.label_classes, return_counts=True), strict=True):
            of_class = outcomes.classes == label
            order = np.argsort(-outcomes.confidence[of_class], kind="stable")
            confidence = outcomes.confidence[of_class][order]
            hits = outcomes.correct[of_class, 0][order].cumsum()
            recall, precision = hits / count, hits / np.arange(1, len(hits) + 1)
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
        return replace(scores, ap=np.minimum(scores.ap / SELF_AP, 1.0)) if self.agreement else scores
