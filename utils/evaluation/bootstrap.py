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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from utils.core.errors import InputError
from utils.core.score import REPLICATES, Resampled
from utils.core.text import plural

SEED = 0  # of the resamplings
GRID = np.linspace(0, 1, 101)  # recalls that AP reads, as in `metrics.average_precision`
SHARES = np.where((GRID == 0) | (GRID == 1), 0.5, 1.0) / 100  # of these in AP: trapezoids
SHARES_BELOW = np.concatenate([[0.0], SHARES.cumsum()])  # sums up to each recall
TAIL: np.ndarray = np.append(((1 - GRID) * SHARES)[::-1].cumsum()[::-1], 0.0)  # sums from each recall on
ROUNDED_UP: np.ndarray = np.append(np.arange(101) / 100 > GRID, False)  # recalls whose number in GRID is too small
BLOCK = 1 << 20  # detections × resamplings at a time: 4 MiB a table


@dataclass(frozen=True)
class Outcomes:
    """Detections and labels of an evaluation, from which AP is computed.

    Attributes:
        paths: of the images.
        image, correct, confidence, classes: for each detection its image's index `[n]`, whether it is correct at each
            IoU threshold bool `[n, 10]`, its score `[n]` and its class `[n]`.
        label_image, label_classes: for each label its image's index `[m]` and its class `[m]`.
        groups: for each image the group that it is resampled with, see `group_images`; None: each by itself.
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
    resamplings = image_weights(outcomes, replicates)
    if resamplings is None:
        return None
    ap = weighted_ap(outcomes, resamplings.weights)
    lacks_labels = np.isnan(ap)
    if lacks_labels.all():
        return None
    # another resampling, with labels, stands for one without any
    ap[lacks_labels] = np.resize(ap[~lacks_labels], lacks_labels.sum())
    return Resampled.of(resamplings.images, ap, resamplings.units)


class Resamplings(NamedTuple):
    """Numbers of times that each image counts in each resampling.

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
    order = sorted(range(len(outcomes.paths)), key=outcomes.paths.__getitem__)
    unit_of_image, units = _units(order, outcomes.groups)
    if units < 2:
        return None
    in_order = draw_weights(units, replicates)[unit_of_image]
    weights = np.empty_like(in_order)
    weights[order] = in_order
    digest = hashlib.sha256(np.ascontiguousarray(in_order, "<i4").tobytes())
    for index in order:
        name = PurePath(outcomes.paths[index]).stem
        classes = np.sort(outcomes.label_classes[outcomes.label_image == index])
        entry = repr((name, classes.astype(int).tolist()))
        digest.update(entry.encode("utf-8", "surrogatepass"))
    return Resamplings(digest.hexdigest()[:32], weights, units)


def _units(order: Sequence[int], groups: Sequence[str] | None) -> tuple[list[int], int]:
    """Number of the image or group that each image, in this order, is drawn with; and how many there are."""
    if not groups:
        return list(range(len(order))), len(order)
    in_order = [groups[index] for index in order]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(in_order))}
    return [numbers[group] for group in in_order], len(numbers)


def group_images(paths: Sequence[str], groups: str) -> list[str]:
    """The group of each image: frames of a clip, or photographs of one scene, which are not independent of each other.

    Args:
        groups: a text file with a line `image group` for each image (the image's name, with or without folder and
            suffix: of several of one name the one whose folders are most alike), or a regular expression: its match at
            the beginning of an image's name is the image's group.

    Raises:
        InputError: it is neither, or an image has no group.
    """
    names = [PurePath(path).stem for path in paths]
    try:
        if Path(groups).is_file():
            lines = Path(groups).read_text("utf-8-sig").splitlines()
            group_of_image = _listed_groups(paths, lines)
        else:
            matches = [re.match(groups, name) for name in names]
            group_of_image = [match.group() if match else "" for match in matches]
    except (ValueError, re.error) as error:
        expected = "expected a file with a line 'image group' for each image, or a regular expression of image names"
        raise InputError(f"--groups {groups}: {error}; {expected}") from error
    missing = [name for name, group in zip(names, group_of_image, strict=True) if not group]
    if missing:
        total = plural(len(names), "image")
        raise InputError(f"--groups {groups} gives no group to {len(missing)} of {total}, first {missing[0]}")
    return group_of_image


class _ListedGroup(NamedTuple):
    """A line of a file of groups: the folders of the image, last first, and its group."""

    folders: tuple[str, ...]
    group: str

    def common_folders(self, path: PurePath) -> int:
        """Number of folders, from the last on, that the line shares with a path."""
        count = 0
        for own, other in zip(self.folders, path.parent.parts[::-1], strict=False):
            if own != other:
                break
            count += 1
        return count


def _listed_groups(paths: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The group of each image in the lines of a file; '' without one, `ValueError` where lines contradict."""
    listed = defaultdict[str, list[_ListedGroup]](list)  # by an image's name
    for line in lines:
        if line.strip():
            name, group = line.rsplit(maxsplit=1)
            image = PurePath(name)
            listed[image.name].append(_ListedGroup(image.parent.parts[::-1], group))
    return [_listed_group(PurePath(path), listed) for path in paths]


def _listed_group(path: PurePath, listed: Mapping[str, list[_ListedGroup]]) -> str:
    """The group of the lines whose folders are most like those of an image; '' without a line of its name."""
    entries = [*listed.get(path.name, ()), *listed.get(path.stem, ())]
    if not entries:
        return ""
    alike = [entry.common_folders(path) for entry in entries]
    groups: set[str] = {entry.group for entry, length in zip(entries, alike, strict=True) if length == max(alike)}
    if len(groups) > 1:
        raise ValueError(f"{path} is in several groups")
    return groups.pop()


def draw_weights(images: int, replicates: int) -> np.ndarray:
    """Draws of each image in each resampling: int32 `[images, replicates]`, a column sums to `images`.

    The numbers come from the bare generator, whose stream NumPy promises to keep.
    """
    raw = np.random.PCG64(SEED).random_raw(images * replicates).reshape(replicates, images)
    drawn: np.ndarray = (raw % np.uint64(images)).astype(np.int64)
    counts = [np.bincount(row, minlength=images) for row in drawn]
    weights: np.ndarray = np.stack(counts, axis=1).astype(np.int32)
    return weights


def weighted_ap(outcomes: Outcomes, weights: np.ndarray) -> np.ndarray:
    """AP as `metrics.ap_per_class` would give it if each image were there several times.

    Detections of equal score stay in the order of their images; the copies of one image count as one after another.

    `weights` say how often each image counts, int `[images, B]`; `[B]` are means over IoU thresholds and over the
    classes that have labels then, NaN where none has.
    """
    order = np.argsort(-outcomes.confidence, kind="stable")
    order = order[np.argsort(outcomes.classes[order].astype(np.int32), kind="stable")]
    classes = outcomes.classes[order]
    owners = outcomes.image[order]
    correct = outcomes.correct[order]
    replicates = weights.shape[1]
    total: np.ndarray = np.zeros(replicates)  # of AP over classes
    present: np.ndarray = np.zeros(replicates, int)  # classes that have labels
    for label in np.unique(outcomes.label_classes):
        labels = weights[outcomes.label_image[outcomes.label_classes == label]].sum(0, dtype=np.int64)
        has_labels = labels > 0
        start = np.searchsorted(classes, label)
        end = np.searchsorted(classes, label, side="right")
        ap = _class_ap(owners[start:end], correct[start:end], weights, labels)
        total += np.where(has_labels, ap, 0.0)
        present += has_labels.astype(int)
    mean = total / np.maximum(present, 1)
    ap_with_labels: np.ndarray = np.where(present, mean, np.nan)
    return ap_with_labels


def _class_ap(
    owners: np.ndarray,
    correct: np.ndarray,
    weights: np.ndarray,
    labels: np.ndarray,
) -> np.ndarray:
    """AP of one class, mean over IoU thresholds, for each resampling: `[B]`.

    Args:
        owners, correct: of its detections, best score first: the image's index `[n]`, bool `[n, 10]`.
        labels: their number in each resampling, `[B]`.
    """
    hits = np.flatnonzero(correct.any(1))
    areas: np.ndarray = np.zeros(weights.shape[1])  # sums over IoU thresholds
    if not len(hits):
        return areas
    step = max(1, BLOCK // len(owners))
    for start in range(0, len(areas), step):
        block = slice(start, start + step)
        block_weights = np.ascontiguousarray(weights[:, block])
        ranks = block_weights[owners].cumsum(0, dtype=np.int32)  # detections up to and with each, copies counted
        rank_of_hit = np.maximum(ranks[hits], 1)
        last_rank = np.maximum(ranks[-1], 1)
        copies_of_hit = block_weights[owners[hits]]
        total = np.maximum(labels[block], 1)
        for is_hit in correct[hits].T:
            if is_hit.any():
                cumulative = copies_of_hit[is_hit].cumsum(0, dtype=np.int32)
                areas[block] += _areas(cumulative, rank_of_hit[is_hit], last_rank, total)
    areas /= correct.shape[1]
    return areas


def _areas(
    hits: np.ndarray,
    ranks: np.ndarray,
    last: np.ndarray,
    labels: np.ndarray,
) -> np.ndarray:
    """Area under each resampling's precision envelope, as `metrics.average_precision` defines it: `[B]`.

    Up to the recall of a hit, but not below that of the hit before, the envelope is the best precision from that hit
    on. From the last hit's recall it falls in a line to 0 at recall 1.

    `hits` and `ranks` are hits, and detections, up to and with each hit, int `[hits, B]`; `last` and `labels` all
    detections, and all labels, int `[B]`.
    """
    envelope = hits / ranks
    np.maximum.accumulate(envelope[::-1], axis=0, out=envelope[::-1])
    below = _recalls_below(hits, labels)
    shares = SHARES_BELOW[below]
    shares[1:] -= shares[:-1].copy()
    recall = hits[-1] / labels
    precision = hits[-1] / last
    slope = precision / np.where(recall < 1, 1 - recall, 1)
    areas: np.ndarray = np.einsum("ij,ij->j", shares, envelope)
    areas += slope * TAIL[below[-1]]
    return areas


def _recalls_below(hits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Number of recalls in GRID that lie below each hit's, hits / labels in floating-point numbers: int `[hits, B]`."""
    exact = hits * 100.0 / labels
    above = np.ceil(exact)
    below: np.ndarray = above.astype(np.int32)
    below += ROUNDED_UP[below] & (above == exact)
    return below
