"""Finding and reading images with their labels, in upstream's layout, and the images and videos that `--source` names.

`.../images/a/b.jpg` has its labels in `.../labels/a/b.txt`: one line per object, `class cx cy w h` as fractions of the
image, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon. An image without a label file shows no object.

Unlike upstream's reader this one neither keeps a pickled cache beside the labels nor rewrites images, and a wrong
label is an error that names its file and line instead of an image that is left out.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from utils.core.errors import DataError, InputError, no_file
from utils.core.files import distinct_names
from utils.core.text import plural

logger = logging.getLogger(__name__)

SUFFIXES = frozenset({".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"})  # upstream's
WRITTEN = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # drawings of other images become PNG
VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")
LISTS = (".txt", ".streams")  # of images, videos and streams, one a line
SMALLEST = 10  # pixels: upstream leaves out images with a smaller side
FIRST, SLOW = 64, 1e-3  # images that show how fast the disk is; seconds for one, above which it is slow


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
    """Read the sizes and labels of `files`; with threads where the disk is slow, since elsewhere threads cost time.

    Args:
        polygons: every label must be a polygon, and is kept.

    Returns:
        The readable images, in the order of `files`, and one line for each of the others: its path and why.

    Raises:
        DataError: a label is malformed or out of range, or no image at all can be read.
    """
    from tqdm import tqdm

    read = partial(_read_image, nc=nc, polygons=polygons)
    began = time.perf_counter()
    results = [read(file) for file in files[:FIRST]]
    slow = time.perf_counter() - began > SLOW * FIRST
    with ThreadPoolExecutor(8) as pool:
        rest = (pool.map if slow else map)(read, files[FIRST:])
        bar = tqdm(
            rest, "reading labels", len(files), initial=len(results), unit="image", delay=2, disable=not progress
        )
        results += bar
    images = [result for result in results if isinstance(result, ImageFile)]
    unreadable = [result for result in results if isinstance(result, str)]
    for line in unreadable[:10]:
        logger.warning("left out: %s", line)
    if len(unreadable) > 10:
        logger.warning("left out: %d more images that cannot be read", len(unreadable) - 10)
    if not images:
        raise DataError(f"none of {plural(len(files), 'image')} can be read; the first: {unreadable[0]}")
    return images, unreadable


def _read_image(file: str, nc: int, polygons: bool) -> ImageFile | str:
    try:
        with Image.open(file) as image:  # reads the header only
            width, height = image.size
            if _decoder_transposes(image):
                width, height = height, width
    except UnidentifiedImageError:
        return f"{file}: not an image, or damaged"
    except Exception as error:  # noqa: BLE001 - Pillow's readers of damaged files raise whatever they run into
        return f"{file}: {getattr(error, 'strerror', None) or ' '.join(str(error).split()) or type(error).__name__}"
    if min(width, height) < SMALLEST:
        return f"{file}: {width}x{height} pixels, smaller than {SMALLEST}"
    content = read_labels(label_file(file), nc, polygons=polygons)
    labels, outlines = content or (np.zeros((0, 5), np.float32), ())
    return ImageFile(file, (width, height), labels, content is not None, outlines)


def _decoder_transposes(image: Image.Image) -> bool:
    """True if OpenCV swaps width and height as EXIF says: in JPEG always, from OpenCV 5 on in PNG and WebP as well."""
    import cv2

    if image.format in ("JPEG", "MPO"):
        exif = image.getexif()
    elif image.format in ("PNG", "WEBP") and int(cv2.__version__.split(".")[0]) >= 5:
        exif = Image.Exif()  # image.getexif() would decode all of a PNG
        exif.load(image.info.get("exif", b""))
    else:
        return False
    return exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)


def read_labels(path: Path, nc: int, *, polygons: bool = False) -> tuple[np.ndarray, tuple[np.ndarray, ...]] | None:
    """Labels of one file, sorted; of equal classes and boxes the first stays, as upstream does. None without the file.

    Args:
        polygons: every label must be a polygon.

    Returns:
        float32 `[n, 5]`: class, cx, cy, w, h in 0..1; and with `polygons` that of each, float32 `[points, 2]`.

    Raises:
        DataError: naming the file (which may be a folder or a link to nothing), the line, and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not path.is_symlink():
            return None
        expected = "expected a text file with one object a line, or no file for an image without objects"
        raise DataError(f"cannot read the labels {path}: {error.strerror}; {expected}") from error
    rows: list[np.ndarray] = []
    outlines: list[np.ndarray] = []
    for number, line in enumerate(lines, 1):
        if not (words := line.split()):
            continue
        values = _label_values(words, f"{path}, line {number}", nc)
        points = values[1:].reshape(-1, 2)
        if len(values) > 5:
            low, high = points.min(0), points.max(0)
            values = np.concatenate([values[:1], (low + high) / 2, high - low])
        elif polygons:
            raise DataError(
                f"{path}, line {number}: a box, and a network for segmentation needs outlines; expected a class and a "
                "polygon x1 y1 x2 y2 x3 y3 ..."
            )
        rows.append(values)
        outlines.append(points)
    if not rows:
        return np.zeros((0, 5), np.float32), ()
    labels = np.stack(rows)
    order = np.lexsort(labels.T[::-1])  # np.unique over rows takes longer than all the rest
    order = order[np.r_[True, (labels[order][1:] != labels[order][:-1]).any(1)]]
    return labels[order], tuple(outlines[index] for index in order) if polygons else ()


def _label_values(words: list[str], where: str, nc: int) -> np.ndarray:
    """The numbers of a line: a class and a box, or a class and a polygon."""
    try:
        values = np.array(words, dtype=np.float32)
    except ValueError:
        raise DataError(f"{where}: {' '.join(words)[:60]!r} is not a list of numbers") from None
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        raise DataError(f"{where}: {plural(len(values), 'value')}; expected class cx cy w h, or a class and a polygon")
    if not 0 <= values[0] < nc or values[0] != int(values[0]):  # NaN fails the first comparison
        raise DataError(f"{where}: class {words[0]} is not one of the dataset's {plural(nc, 'class')} (0 to {nc - 1})")
    if not (values[1:].min() >= 0 and values[1:].max() <= 1):  # nor is NaN
        raise DataError(f"{where}: coordinates must be fractions of the image, 0 to 1; found {' '.join(words)[:60]!r}")
    return values


@contextmanager
def quiet_decoders() -> Iterator[None]:
    """Silence the process' standard error, to which FFmpeg and libpng write about damaged files: our line says it."""
    stderr = 2  # decoders write to the descriptor, past Python's sys.stderr
    saved = os.dup(stderr)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stderr)
    try:
        yield
    finally:
        os.dup2(saved, stderr)
        os.close(saved)


def decode(path: str) -> np.ndarray | None:
    """The image as BGR uint8 `[H, W, 3]`, turned as its EXIF orientation says; None when it cannot be decoded."""
    import cv2

    try:
        if "://" in path:
            with open_video(path) as video:
                return next(frames(video), None)
        data = np.fromfile(path, np.uint8)  # cv2.imread does not open every path on every system
        with quiet_decoders():
            return cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
    except (OSError, cv2.error, DataError):
        return None


def find_images(paths: Iterable[str]) -> list[str]:
    """The image files in folders (with their subfolders) and in `.txt` lists, each once, sorted as upstream sorts them.

    Raises:
        DataError: a path does not exist, or there is no image.
    """
    paths = list(paths)
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _walk(str(path))
        elif path.is_file():
            files += [str(path)] if path.suffix.lower() in SUFFIXES else _read_list(path)
        else:
            raise DataError(no_file(path, "expected a folder of images or a list of them"))
    files = [file for file in files if os.path.splitext(file)[1].lower() in SUFFIXES]
    if not files:
        raise DataError(f"no images in {', '.join(paths)}; expected {' '.join(sorted(SUFFIXES))}")
    images = sorted(set(files))
    if len(images) < len(files):
        logger.warning("%d images are listed more than once; each is used once", len(files) - len(images))
    return images


def _walk(root: str) -> Iterator[str]:
    """Files below a folder, without hidden ones; links are followed, and each real folder is entered once."""
    entered: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = [name for name in folders if name[0] != "."]
        folders.sort(key=lambda name: os.path.islink(f"{folder}/{name}"))
        yield from (os.path.join(folder, name) for name in names if name[0] != ".")


def _read_list(path: Path) -> list[str]:
    """The lines of a list of images; relative ones count from the list's folder, or else from the working folder."""
    try:
        text = path.read_text(encoding="utf-8", errors="ignore")
    except OSError as error:
        raise DataError(f"cannot read the list of images {path}: {error.strerror}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    in_working_folder = bool(lines) and not os.path.exists(path.parent / lines[0]) and os.path.exists(lines[0])
    base = Path.cwd() if in_working_folder else path.parent
    return [line if "://" in line or is_stream(line) else os.path.normpath(base / line) for line in lines]


def label_file(image: str) -> Path:
    """The label file of an image: the last folder called `images` in its path becomes `labels`."""
    before, separator, after = image.rpartition(f"{os.sep}images{os.sep}")
    path = f"{before}{os.sep}labels{os.sep}{after}" if separator else image
    return Path(path).with_suffix(".txt")


def unlabelled(split: str, first: str) -> DataError:
    """The error that no image of a split has a label file; its first image says where one is expected."""
    return DataError(f"no image of '{split}' has a label file; expected, for the first, {label_file(first)}")


def source_name(source: str) -> str:
    """The name of a file without its folder; of a URL the last part of its path, or else the host."""
    if "://" not in source:
        return Path(source).name
    url = urlsplit(source)
    return re.sub(r"[^\w.-]+", "_", Path(url.path).name or url.hostname or "stream")


def is_stream(source: str) -> bool:
    """Whether it is a camera's number, such as `0`, or a URL that is not an image's, such as `rtsp://host/live`."""
    return source.isdecimal() or ("://" in source and Path(source_name(source)).suffix.lower() not in SUFFIXES)


def is_video(source: str) -> bool:
    """Whether it is a video by its name, or a stream."""
    return is_stream(source) or Path(source).suffix.lower() in VIDEOS


def shown(source: str) -> str:
    """A source as it is printed: a URL without user and password."""
    return f"camera {source}" if source.isdecimal() else re.sub(r"(?<=://)[^/@]*@", "", source)


def find_sources(sources: Iterable[str]) -> list[str]:
    """The images, videos and streams that `--source` names: files, folders, globs, lists (`.txt`), cameras, URLs.

    Raises:
        InputError: one of `sources` holds none.
    """
    paths: list[str] = []
    for source in sources:
        listed = [source]
        if os.path.isdir(source):
            listed = sorted(glob.glob(f"{glob.escape(source)}/*"))
        elif os.path.isfile(source):
            listed = _read_list(Path(source)) if source.lower().endswith(LISTS) else listed
        elif "://" not in source and not source.isdecimal():
            listed = sorted(glob.glob(source, recursive=True))
            if not listed:
                expected = (
                    "expected a file, folder, glob or list (.txt) of images or videos, a camera's number or a URL"
                )
                raise InputError(f"--source {no_file(source, expected)}")
        named = [path for path in listed if is_video(path) or Path(source_name(path)).suffix.lower() in SUFFIXES]
        files = [path for path in named if "://" in path or is_stream(path) or os.path.isfile(path)]
        missing = sorted(set(named) - set(files))
        if missing:
            logger.warning("%d of %d in %s are no files; the first: %s", len(missing), len(named), source, missing[0])
        if not files:
            raise InputError(f"--source {source} holds neither images nor videos by their names")
        paths += files
    return list(dict.fromkeys(paths))


def target_names(sources: Sequence[str]) -> list[str]:
    """What each drawing is called: as its source, with a number where an earlier drawing has that name."""
    names = []
    for source in sources:
        name = source_name(source)
        stem, suffix = os.path.splitext(name)
        if is_video(source):
            names.append(f"{stem if suffix.lower() in VIDEOS else name}.mp4")
        else:
            names.append(f"{stem}{suffix.lower() if suffix.lower() in WRITTEN else '.png'}")
    return distinct_names(names)


@contextmanager
def open_video(source: str) -> Iterator[Any]:
    """OpenCV's VideoCapture of a file, a URL or a camera.

    Raises:
        DataError: it cannot be opened.
    """
    import cv2

    with quiet_decoders():
        video = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    try:
        size = video.get(cv2.CAP_PROP_FRAME_WIDTH), video.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if not video.isOpened() or not all(size):
            raise DataError(f"{shown(source)} cannot be {'opened' if is_stream(source) else 'decoded'}")
        yield video
    finally:
        video.release()


def frames(video: Any) -> Iterator[np.ndarray]:
    """The frames of a video, uint8 BGR `[H, W, 3]`, until the end or the first that cannot be decoded."""
    while True:
        with quiet_decoders():
            good, frame = video.read()
        if not good:
            return
        yield frame
