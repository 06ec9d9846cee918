"""Finding a split's pictures and reading their labels, in upstream's layout.

`.../images/a/b.jpg` has its labels in `.../labels/a/b.txt`: one line per object, `class cx cy w h` as fractions of the
picture, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon. A picture without a label file shows no object.

Unlike upstream's reader this one neither keeps a pickled cache beside the labels nor rewrites pictures, and a wrong
label is an error that names its file and line instead of a picture that is left out.
"""

from __future__ import annotations

import glob
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.core.errors import DataError

logger = logging.getLogger(__name__)

SUFFIXES = frozenset(
    {".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"}
)  # what upstream reads
SMALLEST = 10  # pixels: upstream leaves out pictures with a smaller side
FIRST, SLOW = 64, 1e-3  # pictures that show how fast the disk is; seconds for one, above which it is slow
_TRANSPOSING = (5, 6, 7, 8)  # EXIF orientations that swap width and height


@dataclass(frozen=True)
class Picture:
    """One picture: its path, `size` (width, height) as shown, and labels float32 `[n, 5]`: class, cx, cy, w, h."""

    path: str
    size: tuple[int, int]
    labels: np.ndarray
    labelled: bool  # it has a label file, possibly an empty one


def find_pictures(paths: Sequence[str]) -> list[str]:
    """The picture files in folders (with their subfolders) and in `.txt` lists, sorted, as upstream orders them.

    Raises:
        DataError: a path does not exist, or there is no picture.
    """
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += glob.glob(str(path / "**" / "*.*"), recursive=True)
        elif path.is_file() and path.suffix.lower() not in SUFFIXES:
            files += _read_list(path)
        elif path.is_file():
            files.append(str(path))
        else:
            raise DataError(f"{path} does not exist; expected a folder of pictures or a list of them")
    files = sorted(file for file in files if Path(file).suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"no pictures in {', '.join(paths)}; expected {' '.join(sorted(SUFFIXES))}")
    return files


def _read_list(path: Path) -> list[str]:
    """The lines of a list of pictures; relative ones count from the list's folder, or else from the working folder."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="ignore").splitlines() if line.strip()]
    in_working_folder = bool(lines) and not (path.parent / lines[0]).exists() and Path(lines[0]).exists()
    base = Path.cwd() if in_working_folder else path.parent
    return [os.path.normpath(base / line) for line in lines]


def label_file(picture: str) -> Path:
    """The label file of a picture: the last folder called `images` in its path becomes `labels`."""
    before, separator, after = picture.rpartition(f"{os.sep}images{os.sep}")
    path = f"{before}{os.sep}labels{os.sep}{after}" if separator else picture
    return Path(path).with_suffix(".txt")


def read_pictures(files: Sequence[str], nc: int, *, progress: bool = False) -> tuple[list[Picture], list[str]]:
    """Read the sizes and labels of `files`.

    Returns:
        The readable pictures, in the order of `files`, and one line for each of the others: its path and why.

    Raises:
        DataError: a label is malformed or out of range, or no picture at all can be read.
    """
    from tqdm import tqdm

    good: list[Picture] = []
    bad: list[str] = []
    bar = tqdm(_read_all(files, nc), "reading labels", len(files), unit="picture", delay=2, disable=not progress)
    for result in bar:
        if isinstance(result, Picture):
            good.append(result)
        else:
            bad.append(result)
    for line in bad[:10]:
        logger.warning("left out: %s", line)
    if len(bad) > 10:
        logger.warning("left out: %d more pictures that cannot be read", len(bad) - 10)
    if not good:
        raise DataError(f"none of {len(files)} pictures can be read; the first: {bad[0]}")
    return good, bad


def _read_all(files: Sequence[str], nc: int) -> Iterator[Picture | str]:
    """One result for each file. Threads where the disk is waited for; where it is not, they are slower than none."""
    first, rest = files[:FIRST], files[FIRST:]
    began = time.perf_counter()
    yield from (_read_picture(file, nc) for file in first)
    if time.perf_counter() - began < SLOW * len(first):
        yield from (_read_picture(file, nc) for file in rest)
        return
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(lambda file: _read_picture(file, nc), rest)


def _read_picture(file: str, nc: int) -> Picture | str:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:  # reads the header only
            width, height = image.size
            # of a PNG this would decode all of it
            if image.format in ("JPEG", "MPO") and image.getexif().get(0x0112) in _TRANSPOSING:
                width, height = height, width
    except UnidentifiedImageError:
        return f"{file}: not a picture, or damaged"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"{file}: {getattr(error, 'strerror', None) or error}"
    if min(width, height) < SMALLEST:
        return f"{file}: {width}x{height} pixels, smaller than {SMALLEST}"
    path = label_file(file)
    labelled = path.is_file()
    labels = read_labels(path, nc) if labelled else np.zeros((0, 5), np.float32)
    return Picture(file, (width, height), labels, labelled)


def read_labels(path: Path, nc: int) -> np.ndarray:
    """Labels of one file as float32 `[n, 5]`: class, cx, cy, w, h in 0..1; duplicates are dropped, as upstream does.

    Raises:
        DataError: naming the file, the line, and what is wrong with it.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [
        _label(words, f"{path}, line {number}", nc) for number, line in enumerate(lines, 1) if (words := line.split())
    ]
    if not rows:
        return np.zeros((0, 5), np.float32)
    found = np.stack(rows)
    found = found[np.lexsort(found.T[::-1])]  # np.unique over rows, which takes longer than all the rest
    return found[np.r_[True, (found[1:] != found[:-1]).any(1)]]


def _label(words: list[str], where: str, nc: int) -> np.ndarray:
    try:
        values = np.array(words, dtype=np.float32)
    except ValueError:
        raise DataError(f"{where}: {' '.join(words)[:60]!r} is not a list of numbers") from None
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        raise DataError(f"{where}: {len(values)} values; expected class cx cy w h, or a class and a polygon")
    if not 0 <= values[0] < nc or values[0] != int(values[0]):  # NaN fails the first comparison
        raise DataError(f"{where}: class {words[0]} is not one of the data set's {nc} classes (0 to {nc - 1})")
    if not (values[1:].min() >= 0 and values[1:].max() <= 1):  # nor is NaN
        raise DataError(
            f"{where}: coordinates must be fractions of the picture, 0 to 1; found {' '.join(words)[:60]!r}"
        )
    return values if len(values) == 5 else _box_of_polygon(values)


def _box_of_polygon(values: np.ndarray) -> np.ndarray:
    points = values[1:].reshape(-1, 2)
    low, high = points.min(0), points.max(0)
    return np.concatenate([values[:1], (low + high) / 2, high - low])
