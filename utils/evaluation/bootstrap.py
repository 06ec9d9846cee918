"""Standard errors of AP, and of differences of AP, by resampling the images (the bootstrap).

A resampling draws as many images as there are, with replacement, so that image i counts `weight[i]` times with its
labels and detections: each class is sorted once, and counts become sums of weights, of all resamplings side by side.
They depend on nothing but the number of images. So two networks are resampled alike, and their difference on each
resampling gives the standard error of the difference (paired bootstrap; Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapters 6 and 8).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from utils.core.errors import InputError
from utils.core.score import REPLICATES, Resampled
from utils.core.text import plural

SEED = 0  # of the resamplings
GRID = np.linspace(0, 1, 101)  # recalls that AP reads, as in `metrics.average_precision`
SHARES = np.where((GRID == 0) | (GRID == 1), 0.5, 1.0) / 100  # of these in AP: trapezoids
ROUNDED_UP: np.ndarray = np.append(np.arange(101) / 100 > GRID, False)  # recalls whose number in GRID is too small
BLOCK = 1 << 20  # detections × resamplings at a time: 4 MiB a table


@dataclass(frozen=True)
class Outcomes:
    """What AP of an evaluation is made of.

    Attributes:
        paths: of the images.
        image, correct, confidence, classes: of each detection its image's index `[n]`, whether it is correct at each
            IoU threshold bool `[n, 10]`, its score `[n]` and its class `[n]`.
        label_image, label_classes: of each label its image's index `[m]` and its class `[m]`.
        groups: of each image the group that it is resampled with, see `group_images`; None: each by itself.
    """

    paths: Sequence[str]
    image: np.ndarray
    correct: np.ndarray
    confidence: np.ndarray
    classes: np.ndarray
    label_image: np.ndarray
    label_classes: np.ndarray
    groups: Sequence[str] | None = None


def resample(outcomes: Outcomes, replicates: int = REPLICATES) -> Resampled | None:
    """AP of an evaluation on resamplings of its images; None for a single image or group, which cannot be resampled."""
    drawn = image_weights(outcomes, replicates)
    if drawn is None:
        return None
    ap = weighted_ap(outcomes, drawn.weights)
    without = np.isnan(ap)  # another resampling, with labels, stands for one without any
    ap[without] = np.resize(ap[~without], without.sum())
    return None if without.all() else Resampled.of(drawn.images, ap, drawn.units)


class Resamplings(NamedTuple):
    """How often each image counts in each resampling.

    Attributes:
        images: a hash of the resamplings, the images' names, their groups, and the classes of their labels.
        weights: int32 `[images, replicates]`.
        units: the number of images or groups that are drawn from.
    """

    images: str
    weights: np.ndarray
    units: int


def image_weights(outcomes: Outcomes, replicates: int = REPLICATES) -> Resamplings | None:
    """Draw the images of an evaluation; None where there is only one image or group.

    Images count in the order of their paths, so that evaluations in another order compare. They are known by their
    names without folder and suffix, so that those of another machine do. The images of a group are drawn together.
    """
    count = len(outcomes.paths)
    order = sorted(range(count), key=outcomes.paths.__getitem__)
    groups = [outcomes.groups[index] for index in order] if outcomes.groups else list(range(count))
    units = {group: unit for unit, group in enumerate(dict.fromkeys(groups))}
    if len(units) < 2:
        return None
    drawn = draw_weights(len(units), replicates)[[units[group] for group in groups]]
    weights = np.empty_like(drawn)
    weights[order] = drawn
    digest = hashlib.sha256(np.ascontiguousarray(drawn, "<i4").tobytes())
    for index in order:
        labels = np.sort(outcomes.label_classes[outcomes.label_image == index]).astype(int).tolist()
        digest.update(repr((PurePath(outcomes.paths[index]).stem, labels)).encode("utf-8", "surrogatepass"))
    return Resamplings(digest.hexdigest()[:32], weights, len(units))


def group_images(paths: Sequence[str], groups: str) -> list[str]:
    """The group of each image: frames of a clip, or photographs of one scene, which are not independent of each other.

    Args:
        groups: a text file with a line `image group` for each image (the image's name, with or without folder and
            suffix: of several of one name the one whose folders are most alike), or a regular expression: what it
            matches at the beginning of an image's name is its group.

    Raises:
        InputError: it is neither, or an image has no group.
    """
    names = [PurePath(path).stem for path in paths]
    try:
        if Path(groups).is_file():
            found = [*_listed_groups(paths, Path(groups).read_text("utf-8-sig").splitlines())]
        else:
            found = [match.group() if (match := re.match(groups, name)) else "" for name in names]
    except (ValueError, re.error) as error:
        expected = "expected a file with a line 'image group' for each image, or a regular expression of image names"
        raise InputError(f"--groups {groups}: {error}; {expected}") from error
    if missing := [name for name, group in zip(names, found, strict=True) if not group]:
        raise InputError(
            f"--groups {groups} gives no group to {len(missing)} of {plural(len(names), 'image')}, first {missing[0]}"
        )
    return found


def _listed_groups(paths: Sequence[str], lines: Sequence[str]) -> Iterator[str]:
    listed = defaultdict[str, list[tuple[Any, str]]](list)  # an image's name → its folders, last first, and its group
    for image, group in (line.rsplit(maxsplit=1) for line in lines if line.strip()):
        listed[PurePath(image).name].append((PurePath(image).parent.parts[::-1], group))
    for path in map(PurePath, paths):
        same = listed.get(path.name, []) + listed.get(path.stem, [])
        parts = [zip(folders, path.parent.parts[::-1], strict=False) for folders, _ in same]
        alike = [len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]) for pairs in parts]
        best = {group for (_, group), length in zip(same, alike, strict=True) if length == max(alike)}
        if len(best) > 1:
            raise ValueError(f"{path} is in several groups")
        yield "".join(best)


def draw_weights(images: int, replicates: int) -> np.ndarray:
    """How often each image is drawn in each resampling: int32 `[images, replicates]`, columns of sum `images`.

    The numbers come from the bare generator, whose stream NumPy promises to keep.
    """
    raw = np.random.PCG64(SEED).random_raw(images * replicates).reshape(replicates, images)
    drawn: np.ndarray = (raw % np.uint64(images)).astype(np.int64)
    return np.stack([np.bincount(row, minlength=images) for row in drawn], axis=1).astype(np.int32)


def weighted_ap(outcomes: Outcomes, weights: np.ndarray) -> np.ndarray:
    """AP as `metrics.ap_per_class` would give it if each image were there several times.

    Detections of equal score stay in the order of their images; the copies of one image count as one after another.

    `weights` say how often each image counts, int `[images, B]`; `[B]` are means over IoU thresholds and over the
    classes that have labels then, NaN where none has.
    """
    order = np.argsort(-outcomes.confidence, kind="stable")
    order = order[np.argsort(outcomes.classes[order].astype(np.int32), kind="stable")]
    classes, owners, correct = outcomes.classes[order], outcomes.image[order], outcomes.correct[order]

    total, present = np.zeros(weights.shape[1]), np.zeros(weights.shape[1], int)
    for label in np.unique(outcomes.label_classes):
        labels = weights[outcomes.label_image[outcomes.label_classes == label]].sum(0, dtype=np.int64)
        rows = slice(np.searchsorted(classes, label), np.searchsorted(classes, label, side="right"))
        total += _class_ap(owners[rows], correct[rows], weights, labels) * (labels > 0)
        present += labels > 0
    return np.where(present, total / np.maximum(present, 1), np.nan)


def _class_ap(owners: np.ndarray, correct: np.ndarray, weights: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """AP of one class, mean over IoU thresholds, for each resampling: `[B]`.

    Args:
        owners, correct: of its detections, best score first: the image's index `[n]`, bool `[n, 10]`.
        labels: their number in each resampling, `[B]`.
    """
    hits = np.flatnonzero(correct.any(1))
    result = np.zeros(weights.shape[1])
    if not len(hits):
        return result
    step = max(1, BLOCK // len(owners))
    for start in range(0, len(result), step):
        block = slice(start, start + step)
        mine = np.ascontiguousarray(weights[:, block])
        ranks = mine[owners].cumsum(0, dtype=np.int32)  # detections up to and with each, copies counted
        some, last, of_hits = np.maximum(ranks[hits], 1), np.maximum(ranks[-1], 1), mine[owners[hits]]
        for column in correct[hits].T:
            if column.any():
                found = of_hits[column].cumsum(0, dtype=np.int32)
                result[block] += _areas(found, some[column], last, np.maximum(labels[block], 1))
    return result / correct.shape[1]


def _areas(found: np.ndarray, ranks: np.ndarray, last: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Area under each resampling's precision envelope, as `metrics.average_precision` defines it: `[B]`.

    Up to the recall of a hit, but not below that of the hit before, the envelope is the best precision from that hit
    on. From the last hit's recall it falls in a line to 0 at recall 1.

    `found` and `ranks` are hits, and detections, up to and with each hit, int `[hits, B]`; `last` and `labels` all
    detections, and all labels, int `[B]`.
    """
    envelope = found / ranks
    np.maximum.accumulate(envelope[::-1], axis=0, out=envelope[::-1])
    # how many of the recalls that are read lie below each hit's, found / labels in floating-point numbers
    exact = found * 100.0 / labels
    above = np.ceil(exact)
    below = above.astype(np.int32)
    below += ROUNDED_UP[below] & (above == exact)
    shares = np.concatenate([[0.0], SHARES.cumsum()])[below]
    shares[1:] -= shares[:-1].copy()
    recall, precision = found[-1] / labels, found[-1] / last
    slope = precision / np.where(recall < 1, 1 - recall, 1)
    tail: np.ndarray = np.append(((1 - GRID) * SHARES)[::-1].cumsum()[::-1], 0.0)  # sums from each recall on
    return np.einsum("ij,ij->j", shares, envelope) + slope * tail[below[-1]]
