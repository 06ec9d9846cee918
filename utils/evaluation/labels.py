"""Label files in upstream's layout.

`.../images/a/b.jpg` has its labels in `.../labels/a/b.txt`: one line per object, `class cx cy w h` as fractions of the
image, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon. A line that upstream's reader refuses is refused here, too, so that
AP is that of upstream's val.py. Labels that lie a little outside are clipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.core.errors import DataError
from utils.core.files import read_unicode

OUTSIDE = 0.01  # of the image: labels further outside are wrong
BOX_VALUES = 5  # class, cx, cy, w, h
SHOWN_CHARACTERS = 60  # of a line, in a message


class Labels(NamedTuple):
    """Content of a label file.

    Attributes:
        rows: float32 `[n, 5]`: class, cx, cy, w, h in 0..1.
        polygons: where one row is a polygon, those of all rows: float32 `[points, 2]`, x, y as fractions of the image.
        bad, clipped: a text for each line that is wrong, and for each label that lay up to `OUTSIDE` outside.
        boxes: number of boxes beside polygons; `polygons` has their four corners, where upstream takes two.
    """

    rows: np.ndarray = np.zeros((0, BOX_VALUES), np.float32)
    polygons: tuple[np.ndarray, ...] = ()
    bad: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    boxes: int = 0


class Label(NamedTuple):
    """One line of a label file.

    Attributes:
        row: float32 `[5]`: class, cx, cy, w, h in 0..1.
        polygon: float32 `[points, 2]`, x, y as fractions of the image; the corners of a box.
        is_box: the line has a box, and not a polygon.
        is_clipped: the line's coordinates lay up to `OUTSIDE` outside of the image.
    """

    row: np.ndarray
    polygon: np.ndarray
    is_box: bool
    is_clipped: bool


def label_file(image: str) -> Path:
    """The label file of an image: the last folder called `images` in its path becomes `labels`."""
    before, separator, after = image.rpartition(f"{os.sep}images{os.sep}")
    path = f"{before}{os.sep}labels{os.sep}{after}" if separator else image
    return Path(path).with_suffix(".txt")


def unlabelled(split: str, first: str) -> DataError:
    """The error for a split without a single label file; `first` is its first image."""
    expected = f"expected, for the first, {label_file(first)}"
    return DataError(f"no image of '{split}' has a label file; {expected}; without labels, give --unlabelled")


def read_labels(path: Path, nc: int) -> Labels | None:
    """Labels of one file, sorted; of equal classes and boxes the first stays, as upstream does. None without the file.

    Raises:
        DataError: the file cannot be opened, being a folder or a link to nothing, for example.
    """
    text = _text_of(path)
    if text is None:
        return None
    labels: list[Label] = []
    bad: list[str] = []
    clipped: list[str] = []
    for number, line in _numbered_lines(text):
        words = line.split()
        try:
            label = _label(words, nc)
        except ValueError as error:
            bad.append(f"line {number}: {error}")
            continue
        labels.append(label)
        if label.is_clipped:
            clipped.append(f"line {number}: {_shortened(words)}")
    if not labels:
        return Labels(bad=tuple(bad))
    rows = np.stack([label.row for label in labels])
    order = _distinct_order(rows)
    boxes = sum(1 for label in labels if label.is_box)
    if boxes == len(labels):
        return Labels(rows[order], bad=tuple(bad), clipped=tuple(clipped))
    polygons = tuple(labels[index].polygon for index in order)
    return Labels(rows[order], polygons, tuple(bad), tuple(clipped), boxes)


def _text_of(path: Path) -> str | None:
    """The text of a label file; None without the file, `DataError` where it cannot be opened."""
    try:
        return read_unicode(path)
    except OSError as error:
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if is_missing and not path.is_symlink():
            return None
        expected = "expected a text file with one object a line, or no file for an image without objects"
        raise DataError(f"cannot read the labels {path}: {error.strerror}; {expected}") from error


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number, from 1 on, and text of each line that may hold a label.

    Empty lines are skipped everywhere; lines of blanks only at the beginning, since upstream refuses them later.
    """
    has_begun = False
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        if line.strip() or (line and has_begun):
            has_begun = True
            yield number, line


def _distinct_order(rows: np.ndarray) -> np.ndarray:
    """Indices that sort rows `[n, 5]` and leave out repeated ones; faster than np.unique."""
    order = np.lexsort(rows.T[::-1])
    in_order = rows[order]
    differs = (in_order[1:] != in_order[:-1]).any(1)
    distinct: np.ndarray = order[np.append(True, differs)]
    return distinct


def _label(words: Sequence[str], nc: int) -> Label:
    """The label of a line; raises `ValueError` with what is wrong with it."""
    values = _values(words, nc)
    box, is_box = values[1:], len(values) == BOX_VALUES
    if is_box:
        points = _corners(box)
    else:
        points = box.reshape(-1, 2)
        box = _box_between(points.min(0), points.max(0))
    if box.min() >= 0 and box.max() <= 1:  # False for NaN; as upstream, the corners of a box may lie outside
        return Label(np.append(values[:1], box), points, is_box, is_clipped=False)
    low = points.min(0).clip(0, 1)
    high = points.max(0).clip(0, 1)
    if not (_is_nearly_inside(box) and (low < high).all()):
        raise ValueError(f"coordinates must be fractions of the image, 0 to 1; found {_shortened(words)}")
    row: np.ndarray = np.append(values[:1], _box_between(low, high))
    return Label(row, points.clip(0, 1), is_box, is_clipped=True)


def _values(words: Sequence[str], nc: int) -> np.ndarray:
    """The numbers of a line, float32, with a class of the dataset first; raises `ValueError`."""
    line = _shortened(words)
    try:
        values: np.ndarray = np.array(words, dtype=np.float32)
    except ValueError:
        raise ValueError(f"{line} is not a list of numbers") from None
    count = len(values)
    if count == BOX_VALUES + 1:
        raise ValueError(f"6 values; expected class cx cy w h, without a sixth, such as a confidence; found {line}")
    is_polygon = count > BOX_VALUES and count % 2 == 1
    if count != BOX_VALUES and not is_polygon:
        raise ValueError(f"{count} values; expected class cx cy w h, or a class and a polygon; found {line}")
    if not 0 <= values[0] < nc or values[0] != int(values[0]):  # NaN fails the first comparison
        raise ValueError(f"class {words[0]} is out of range; the dataset has classes 0 to {nc - 1}")
    if _is_pose(values[1:]):
        raise ValueError(
            f"a box and the keypoints of a pose; expected class cx cy w h, or a class and a polygon; found {line}"
        )
    return values


def _shortened(words: Sequence[str]) -> str:
    """The beginning of a line in quotes, for a message."""
    return repr(" ".join(words)[:SHOWN_CHARACTERS])


def _corners(box: np.ndarray) -> np.ndarray:
    """The four corners of a box cx cy w h, float32 `[4, 2]`."""
    x1, y1 = box[:2] - box[2:] / 2
    x2, y2 = box[:2] + box[2:] / 2
    corners: np.ndarray = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float32)
    return corners


def _box_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The box cx cy w h `[4]` from its smallest to its largest x, y."""
    box: np.ndarray = np.concatenate([(low + high) / 2, high - low])
    return box


def _is_nearly_inside(box: np.ndarray) -> bool:
    """True if a box cx cy w h lies at most `OUTSIDE` outside of the image."""
    largest = 1 + OUTSIDE * np.array([1, 1, 2, 2], np.float32)  # a box may be as wide as the image and both margins
    return bool(box[:2].min() >= -OUTSIDE and box[2:].min() > 0 and (box <= largest).all())


def _is_pose(values: np.ndarray) -> bool:
    """True if values are cx cy w h and at least two keypoints x y v in this box, or 0 0 0; upstream sees a polygon."""
    if len(values) < 10 or len(values) % 3 != 1:
        return False
    keypoints = values[4:].reshape(-1, 3)
    distances = np.abs(keypoints[:, :2] - values[:2])
    is_inside = (distances <= values[2:4] / 2 + OUTSIDE).all(1)
    is_visible = keypoints[:, 2] == 1
    is_absent = (keypoints == 0).all(1)
    fits = (is_visible & is_inside) | is_absent
    return bool(is_visible.any() and fits.all())
