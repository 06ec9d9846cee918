"""Reading images, their sizes and their labels, in upstream's layout.

`.../images/a/b.jpg` has its labels in `.../labels/a/b.txt`: one line per object, `class cx cy w h` as fractions of the
image, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon. An image without a label file shows no object.

Unlike upstream's reader this one neither keeps a pickled cache beside the labels nor rewrites images, and a wrong
label is an error that names its file and line instead of an image that is left out.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from utils.core.errors import DataError
from utils.evaluation.find_images import SUFFIXES, label_file
from utils.evaluation.find_images import find_images as find_images

__all__ = ["SUFFIXES", "ImageFile", "find_images", "label_file", "read_images", "read_labels", "read_polygons"]

logger = logging.getLogger(__name__)

SMALLEST = 10  # pixels: upstream leaves out images with a smaller side
FIRST, SLOW = 64, 1e-3  # images that show how fast the disk is; seconds for one, above which it is slow
NO_LABELS: np.ndarray = np.zeros((0, 5), np.float32)
STDERR = 2  # the decoders write to the descriptor, past Python's sys.stderr
_ORIENTATION = 0x0112  # EXIF's tag
_TRANSPOSING = (5, 6, 7, 8)  # orientations that swap width and height


@dataclass(frozen=True)
class ImageFile:
    """One image.

    Attributes:
        size: (width, height) as shown.
        labels: float32 `[n, 5]`: class, cx, cy, w, h.
        labelled: it has a label file, possibly an empty one.
        polygons: of the labels, where they were asked for: float32 `[points, 2]`, x, y as fractions of the image.
    """

    path: str
    size: tuple[int, int]
    labels: np.ndarray
    labelled: bool
    polygons: tuple[np.ndarray, ...] = ()


def read_images(
    files: Sequence[str], nc: int, *, polygons: bool = False, progress: bool = False
) -> tuple[list[ImageFile], list[str]]:
    """Read the sizes and labels of `files`.

    Args:
        polygons: every label must be a polygon, and is kept.

    Returns:
        The readable images, in the order of `files`, and one line for each of the others: its path and why.

    Raises:
        DataError: a label is malformed or out of range, or no image at all can be read.
    """
    from tqdm import tqdm

    good: list[ImageFile] = []
    bad: list[str] = []
    bar = tqdm(
        _read_all(files, nc, polygons), "reading labels", len(files), unit="image", delay=2, disable=not progress
    )
    for result in bar:
        if isinstance(result, ImageFile):
            good.append(result)
        else:
            bad.append(result)
    for line in bad[:10]:
        logger.warning("left out: %s", line)
    if len(bad) > 10:
        logger.warning("left out: %d more images that cannot be read", len(bad) - 10)
    if not good:
        raise DataError(f"none of {len(files)} images can be read; the first: {bad[0]}")
    return good, bad


def _read_all(files: Sequence[str], nc: int, polygons: bool) -> Iterator[ImageFile | str]:
    """Read every file, with threads where the disk is waited for; where it is not, threads are slower than none."""
    first, rest = files[:FIRST], files[FIRST:]
    began = time.perf_counter()
    yield from (_read_image(file, nc, polygons) for file in first)
    if time.perf_counter() - began < SLOW * len(first):
        yield from (_read_image(file, nc, polygons) for file in rest)
        return
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(lambda file: _read_image(file, nc, polygons), rest)


def _read_image(file: str, nc: int, polygons: bool) -> ImageFile | str:
    try:
        with Image.open(file) as image:  # reads the header only
            width, height = image.size
            if orientation(image) in _TRANSPOSING and turned(image.format or ""):
                width, height = height, width
    except UnidentifiedImageError:
        return f"{file}: not an image, or damaged"
    except Exception as error:  # noqa: BLE001 - Pillow's readers of damaged files raise whatever they run into
        return f"{file}: {getattr(error, 'strerror', None) or ' '.join(str(error).split()) or type(error).__name__}"
    if min(width, height) < SMALLEST:
        return f"{file}: {width}x{height} pixels, smaller than {SMALLEST}"
    path = label_file(file)
    labelled = _is_there(path)
    if polygons and labelled:
        labels, outlines = read_polygons(path, nc)
        return ImageFile(file, (width, height), labels, labelled, outlines)
    return ImageFile(file, (width, height), read_labels(path, nc) if labelled else NO_LABELS, labelled)


def orientation(image: Image.Image) -> int | None:
    """An image's EXIF orientation, as far as its header has it: `getexif` would decode all of a PNG."""
    if image.format in ("JPEG", "MPO"):
        return image.getexif().get(_ORIENTATION)
    if not isinstance(content := image.info.get("exif"), bytes):
        return None
    found = Image.Exif()
    found.load(content)
    return found.get(_ORIENTATION)


@cache
def turned(kind: str) -> bool:
    """Whether OpenCV turns images of a format as EXIF says: JPEG always, from version 5 on PNG and WebP as well."""
    import cv2

    if kind in ("JPEG", "MPO"):
        return True
    if kind not in ("PNG", "WEBP"):
        return False
    exif, content = Image.Exif(), io.BytesIO()
    exif[_ORIENTATION] = min(_TRANSPOSING)
    Image.new("RGB", (1, 2)).save(content, kind, exif=exif)
    found = cv2.imdecode(np.frombuffer(content.getvalue(), np.uint8), cv2.IMREAD_COLOR)
    return found is not None and found.shape[:2] == (1, 2)


def _is_there(path: Path) -> bool:
    """Whether anything lies at the path of a label file. A folder closed to us is an error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"cannot read the labels at {path}: {error.strerror}") from error
    return True


def read_labels(path: Path, nc: int) -> np.ndarray:
    """Labels of one file as float32 `[n, 5]`: class, cx, cy, w, h in 0..1; duplicates are dropped, as upstream does.

    Raises:
        DataError: naming the file (which may be a folder or a link to nothing), the line, and what is wrong with it.
    """
    rows = [_box(_values(words, where, nc)) for words, where in _lines(path)]
    if not rows:
        return NO_LABELS
    found = np.stack(rows)
    return found[_unique(found)]


def read_polygons(path: Path, nc: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Labels of one file as `read_labels` gives them, and the polygon of each, float32 `[points, 2]` in 0..1.

    Of polygons with equal classes and boxes the first stays, as upstream does.

    Raises:
        DataError: as `read_labels`; also for a line that holds a box.
    """
    rows, polygons = [], []
    for words, where in _lines(path):
        values = _values(words, where, nc)
        if len(values) == 5:
            raise DataError(
                f"{where}: a box, and a network for segmentation needs outlines; expected a class and a polygon "
                "x1 y1 x2 y2 x3 y3 ..."
            )
        rows.append(_box(values))
        polygons.append(values[1:].reshape(-1, 2))
    if not rows:
        return NO_LABELS, ()
    found = np.stack(rows)
    kept = _unique(found)
    return found[kept], tuple(polygons[index] for index in kept)


def _lines(path: Path) -> Iterator[tuple[list[str], str]]:
    """The words of each line that is not empty, and where it stands."""
    expected = "expected a text file with one object a line, or no file for an image without objects"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; {expected}") from error
    for number, line in enumerate(lines, 1):
        if words := line.split():
            yield words, f"{path}, line {number}"


def _unique(rows: np.ndarray) -> np.ndarray:
    """Which rows remain without duplicates, in ascending order of the rows; of equal ones the first."""
    order = np.lexsort(rows.T[::-1])  # np.unique over rows, which takes longer than all the rest
    found = rows[order]
    kept: np.ndarray = order[np.r_[True, (found[1:] != found[:-1]).any(1)]]
    return kept


def _values(words: list[str], where: str, nc: int) -> np.ndarray:
    """The numbers of a line: a class and a box, or a class and a polygon."""
    try:
        values = np.array(words, dtype=np.float32)
    except ValueError:
        raise DataError(f"{where}: {' '.join(words)[:60]!r} is not a list of numbers") from None
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        raise DataError(f"{where}: {len(values)} values; expected class cx cy w h, or a class and a polygon")
    if not 0 <= values[0] < nc or values[0] != int(values[0]):  # NaN fails the first comparison
        raise DataError(f"{where}: class {words[0]} is not one of the dataset's {nc} classes (0 to {nc - 1})")
    if not (values[1:].min() >= 0 and values[1:].max() <= 1):  # nor is NaN
        raise DataError(f"{where}: coordinates must be fractions of the image, 0 to 1; found {' '.join(words)[:60]!r}")
    return values


def _box(values: np.ndarray) -> np.ndarray:
    """Class, cx, cy, w, h of a line's numbers."""
    if len(values) == 5:
        return values
    points = values[1:].reshape(-1, 2)
    low, high = points.min(0), points.max(0)
    return np.concatenate([values[:1], (low + high) / 2, high - low])


@contextmanager
def quiet_decoders() -> Iterator[None]:
    """Let the process' standard error go nowhere within the block; keep the block to the decoding itself."""
    try:
        kept = os.dup(STDERR)
    except OSError:  # it is closed
        yield
        return
    try:
        os.dup2(_nowhere(), STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


def decode(path: str) -> np.ndarray | None:
    """The image as BGR uint8 `[H, W, 3]`, turned as its EXIF orientation says; None when it cannot be decoded."""
    import cv2

    try:
        data = np.fromfile(path, np.uint8)  # cv2.imread does not open every path on every system
        with quiet_decoders():
            return cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
    except (OSError, cv2.error):
        return None


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)
