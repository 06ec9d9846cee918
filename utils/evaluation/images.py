"""Reading images, their sizes and their labels, in upstream's layout.

`.../images/a/b.jpg` has its labels in `.../labels/a/b.txt`: one line per object, `class cx cy w h` as fractions of the
image, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon. An image without a label file shows no object.

Unlike upstream's reader this one neither keeps a pickled cache beside the labels nor rewrites images, and a wrong
label is an error that names its file and line instead of an image that is left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from utils.core.errors import DataError, no_file

__all__ = ["SUFFIXES", "ImageFile", "find_images", "label_file", "read_images", "read_labels"]

logger = logging.getLogger(__name__)

SMALLEST = 10  # pixels: upstream leaves out images with a smaller side
FIRST, SLOW = 64, 1e-3  # images that show how fast the disk is; seconds for one, above which it is slow
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
    read = partial(_read_image, nc=nc, polygons=polygons)
    began = time.perf_counter()
    yield from map(read, files[:FIRST])
    if time.perf_counter() - began < SLOW * FIRST:
        yield from map(read, files[FIRST:])
        return
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(read, files[FIRST:])


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
    found = read_labels(label_file(file), nc, polygons=polygons)
    labels, outlines = found or (np.zeros((0, 5), np.float32), ())
    return ImageFile(file, (width, height), labels, found is not None, outlines)


def orientation(image: Image.Image) -> int | None:
    """An image's EXIF orientation, as far as its header has it: `getexif` would decode all of a PNG."""
    if image.format in ("JPEG", "MPO"):
        return image.getexif().get(_ORIENTATION)
    if not isinstance(content := image.info.get("exif"), bytes):
        return None
    found = Image.Exif()
    found.load(content)
    return found.get(_ORIENTATION)


def turned(kind: str) -> bool:
    """Whether OpenCV turns images of a format as EXIF says: JPEG always, from version 5 on PNG and WebP as well."""
    import cv2

    return kind in ("JPEG", "MPO") or (kind in ("PNG", "WEBP") and int(cv2.__version__.split(".")[0]) >= 5)


def read_labels(path: Path, nc: int, *, polygons: bool = False) -> tuple[np.ndarray, tuple[np.ndarray, ...]] | None:
    """Labels of one file, sorted; of equal classes and boxes the first stays, as upstream does. None without the file.

    Args:
        polygons: every label must be a polygon.

    Returns:
        float32 `[n, 5]`: class, cx, cy, w, h in 0..1; and with `polygons` that of each, float32 `[points, 2]`.

    Raises:
        DataError: naming the file (which may be a folder or a link to nothing), the line, and what is wrong with it.
    """
    rows: list[np.ndarray] = []
    outlines: list[np.ndarray] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not path.is_symlink():
            return None
        expected = "expected a text file with one object a line, or no file for an image without objects"
        raise DataError(f"cannot read the labels {path}: {error.strerror}; {expected}") from error
    for number, line in enumerate(lines, 1):
        if not (words := line.split()):
            continue
        values = _values(words, f"{path}, line {number}", nc)
        if polygons and len(values) == 5:
            raise DataError(
                f"{path}, line {number}: a box, and a network for segmentation needs outlines; expected a class and a "
                "polygon x1 y1 x2 y2 x3 y3 ..."
            )
        rows.append(_box(values))
        outlines.append(values[1:].reshape(-1, 2))
    if not rows:
        return np.zeros((0, 5), np.float32), ()
    found = np.stack(rows)
    kept = _unique(found)
    return found[kept], tuple(outlines[index] for index in kept) if polygons else ()


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
    """Let the process' standard error go nowhere within the block, where FFmpeg and libpng write about damaged files.

    Keep the block to the decoding itself; we say in one line what is wrong.
    """
    try:
        kept = os.dup(STDERR)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), STDERR)
        try:
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


SUFFIXES = frozenset(
    {".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"}
)  # what upstream reads


def find_images(paths: Iterable[str]) -> list[str]:
    """The image files in folders (with their subfolders) and in `.txt` lists, sorted, as upstream orders them.

    Raises:
        DataError: a path does not exist, there is no image, or one image has two label files that differ.
    """
    paths = list(paths)
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += walk(str(path))
        elif os.path.isfile(path):
            files += [str(path)] if path.suffix.lower() in SUFFIXES else _read_list(path)
        else:
            raise DataError(no_file(path, "expected a folder of images or a list of them"))
    files = sorted(file for file in files if os.path.splitext(file)[1].lower() in SUFFIXES)
    if not files:
        raise DataError(f"no images in {', '.join(paths)}; expected {' '.join(sorted(SUFFIXES))}")
    return once_each(files)


def walk(root: str) -> Iterator[str]:
    """Files below a folder, without hidden ones. Each real folder is entered once, by a name without links first."""
    entered: set[str] = set()
    folders = [root]
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder)
        if real in entered:
            continue
        entered.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"cannot list {folder}: {error.strerror}") from error
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not (os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()):
                yield entry.path
            else:
                (links if entry.is_symlink() else folders).append(entry.path)


def once_each(files: Iterable[str]) -> list[str]:
    """`files` (sorted) without those that are another's image by a second name; says how many these are.

    Of two names the one that has labels stays, or else the first.

    Raises:
        DataError: both have labels, and different ones.
    """
    chosen: dict[str, str] = {}
    again = 0
    real_folder = lru_cache(maxsize=1024)(os.path.realpath)
    for file in files:
        folder, name = os.path.split(file)
        real = os.path.realpath(file) if os.path.islink(file) else os.path.join(real_folder(folder), name)
        other = chosen.setdefault(real, file)
        again += other is not file
        if other != file:
            ours, theirs = label_file(file), label_file(other)
            if not theirs.is_file():
                chosen[real] = file if ours.is_file() else other
            elif ours.is_file() and ours.read_bytes() != theirs.read_bytes():
                raise DataError(
                    f"{other} and {file} are one image, and its labels differ: {theirs}, {ours}; remove one"
                )
    if again:
        logger.warning("%d names lead to images that are listed already; each image is used once", again)
    return sorted(chosen.values())


def label_file(image: str) -> Path:
    """The label file of an image: the last folder called `images` in its path becomes `labels`."""
    before, separator, after = image.rpartition(f"{os.sep}images{os.sep}")
    path = f"{before}{os.sep}labels{os.sep}{after}" if separator else image
    return Path(path).with_suffix(".txt")


def unlabelled(split: str, first: str) -> DataError:
    """The error that no image of a split has a label file; its first image says where one is expected."""
    return DataError(f"no image of '{split}' has a label file; expected, for the first, {label_file(first)}")


def _read_list(path: Path) -> list[str]:
    """The lines of a list of images; relative ones count from the list's folder, or else from the working folder."""
    try:
        text = path.read_text(encoding="utf-8", errors="ignore")
    except OSError as error:
        raise DataError(f"cannot read the list of images {path}: {error.strerror}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    in_working_folder = bool(lines) and not os.path.exists(path.parent / lines[0]) and os.path.exists(lines[0])
    base = Path.cwd() if in_working_folder else path.parent
    return [os.path.normpath(base / line) for line in lines]
