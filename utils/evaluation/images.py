"""Finding and reading images with their labels, in upstream's layout, and the images and videos that `--source` names.

`.../images/a/b.jpg` has its labels in `.../labels/a/b.txt`: one line per object, `class cx cy w h` as fractions of the
image, or `class x1 y1 x2 y2 x3 y3 ...`, a polygon. What upstream's reader leaves out is left out here, too: AP is to be
that of upstream's val.py. This one keeps no cache, rewrites no images, and clips labels that lie a little outside.
"""

from __future__ import annotations

import codecs
import glob
import logging
import mimetypes
import os
import re
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import cv2
import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from tqdm import tqdm

from utils.core.errors import DataError, InputError, no_file
from utils.core.files import distinct_names, file_hash
from utils.core.score import SplitCounts
from utils.core.text import plural

logger = logging.getLogger(__name__)
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # silence; FFmpeg reads it when the first video is opened
_one_at_a_time = threading.Lock()

SUFFIXES = frozenset({".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"})  # upstream's
WRITTEN = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # drawings of other images become PNG
VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")
LISTS = (".txt", ".streams")  # of images, videos and streams, one a line
SMALLEST = 10  # pixels: upstream leaves out images with a smaller side
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # of whole files, by Pillow's name of the format
TURNED = ("JPEG", "MPO", *(("PNG", "WEBP") if cv2.__version__ >= "5" else ()))  # by OpenCV, as EXIF says
OUTSIDE = 0.01  # of the image: labels further outside are wrong


class Labels(NamedTuple):
    """What a label file holds.

    Attributes:
        rows: float32 `[n, 5]`: class, cx, cy, w, h in 0..1.
        polygons: where one row is a polygon, those of all rows: float32 `[points, 2]`, x, y as fractions of the image.
        bad, clipped: a text for each line that is wrong, and for each label that lay up to `OUTSIDE` outside.
        boxes: number of boxes (by their corners in `polygons`) among polygons; upstream takes two points for each.
    """

    rows: np.ndarray = np.zeros((0, 5), np.float32)
    polygons: tuple[np.ndarray, ...] = ()
    bad: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    boxes: int = 0


@dataclass(frozen=True)
class ImageFile:
    """One image: `size` is (width, height) as shown; one with a label file, also an empty one, is `labelled`."""

    path: str
    size: tuple[int, int]
    labels: Labels
    labelled: bool


@dataclass
class SplitImages:
    """Images of a split as they were read.

    Attributes:
        name: of the split, and how much of it was read if not all.
        images, left_out: those that can be used, sorted by path; and a line for each of the others, its path and why.
        bad_lines: a text for each wrong line in labels of images that are left out.
        undecodable: paths of images that turn out to be damaged where they are decoded.
        in_train: paths of images that are training images, too; empty for the training images themselves.
    """

    name: str
    images: list[ImageFile]
    left_out: list[str]
    bad_lines: list[str]
    undecodable: set[str] = field(default_factory=set)
    in_train: set[str] = field(default_factory=set)

    def counts(self, root: Path) -> SplitCounts:
        """How many images, objects and oddities there are; names count from `root`."""
        images = [image for image in self.images if image.path not in self.undecodable]
        flat: list[str] = []
        for image in images:
            without_area = (image.labels.rows[:, 3:] == 0).any(1)
            flat += [str(label_file(image.path))] * int(without_area.sum())
        named: dict[str, list[str]] = {
            "without_a_label_file": [str(label_file(image.path)) for image in images if not image.labelled],
            "left_out": [*self.left_out, *(f"{path}: cannot be decoded" for path in sorted(self.undecodable))],
            "bad_label_lines": self.bad_lines,
            "clipped_labels": self.clipped_lines,
            "boxes_among_polygons": [image.path for image in images for _ in range(image.labels.boxes)],
            "boxes_without_area": flat,
            "also_in_train": [image.path for image in images if image.path in self.in_train],
        }
        first = {name: lines[0].replace(f"{root}{os.sep}", "") for name, lines in named.items() if lines}
        return SplitCounts(
            name=self.name, images=len(images), objects=sum(len(image.labels.rows) for image in images),
            backgrounds=sum(not len(image.labels.rows) for image in images),
            **{name: len(lines) for name, lines in named.items()},
            first={name: line.encode("utf-8", "backslashreplace").decode() for name, line in first.items()},
        )  # fmt: skip

    @property
    def clipped_lines(self) -> list[str]:
        """A text for each label that was clipped."""
        return [f"{label_file(image.path)}, {text}" for image in self.images for text in image.labels.clipped]


def read_images(files: Sequence[str], nc: int, *, name: str = "images", progress: bool = False) -> SplitImages:
    """Read sizes and labels of `files`; `DataError` if a label file cannot be opened, or no image can be used."""

    def read(file: str) -> ImageFile | str:
        if isinstance(size := read_header(file), str):
            return size
        labels = read_labels(label_file(file), nc)
        return ImageFile(file, size, labels or Labels(), labels is not None)

    with ThreadPoolExecutor(8) as pool:  # disks are waited for
        results = list(
            tqdm(pool.map(read, files), "reading labels", len(files), unit="image", delay=2, disable=not progress)
        )
    split = SplitImages(name, [], [], [])
    for result in results:
        if isinstance(result, str):
            split.left_out.append(result)
        elif bad := [f"{label_file(result.path)}, {text}" for text in result.labels.bad]:
            split.left_out.append(bad[0])
            split.bad_lines += bad
        else:
            split.images.append(result)
    if not split.images:
        raise DataError(f"none of {plural(len(files), 'image')} can be used; the first: {split.left_out[0]}")
    return split


def images_in_both(images: Iterable[str], others: Sequence[str]) -> set[str]:
    """Those of `images` that are among `others`, too: the same file, or one with the same bytes under another name.

    Only files of one length are read. An image that was saved again, with other bytes, counts as another one.
    """
    places: set[tuple[int, int]] = set()
    by_length: dict[int, list[str]] = defaultdict(list)
    with ThreadPoolExecutor(8) as pool:  # disks are waited for
        for path, status in zip(others, pool.map(_status, others), strict=True):
            if status is not None:
                places.add((status.st_dev, status.st_ino))
                by_length[status.st_size].append(path)
    hashes: dict[str, str] = {}

    def hash_of(path: str) -> str:
        if path not in hashes:
            hashes[path] = file_hash(path)
        return hashes[path]

    shared: set[str] = set()
    for path in images:
        status = _status(path)
        if status is None:
            continue
        alike = by_length.get(status.st_size, ())
        if (status.st_dev, status.st_ino) in places or any(hash_of(path) == hash_of(other) for other in alike):
            shared.add(path)
    return shared


def _status(path: str) -> os.stat_result | None:
    """What the file system says of a file that links lead to; None where there is none."""
    try:
        return os.stat(path)
    except OSError:
        return None


def read_header(file: str) -> tuple[int, int] | str:
    """(width, height) as OpenCV decodes the image, or why evaluation leaves it out."""
    try:
        with open(file, "rb") as stream, Image.open(stream) as image:  # reads the header only
            size, kind, end = image.size, image.format or "", ENDS.get(image.format or "", b"")
            turned = kind in TURNED and _is_turned(image.info.get("exif", b""))  # image.getexif() would decode a PNG
            stream.seek(-len(end), os.SEEK_END)
            if stream.read() != end:  # upstream's reader loads such a JPEG, and checks every PNG
                image.load() if kind == "JPEG" else image.verify()
    except UnidentifiedImageError:
        return f"{file}: not an image, or damaged"
    except Exception as error:  # noqa: BLE001 - Pillow's readers of damaged files raise whatever they run into
        return f"{file}: {getattr(error, 'strerror', None) or ' '.join(str(error).split()) or type(error).__name__}"
    if f".{kind.lower()}" not in SUFFIXES:
        return f"{file}: its content is {kind}, which is not read; convert it to PNG or JPEG"
    if min(size) < SMALLEST:
        return f"{file}: {size[0]}x{size[1]} pixels, smaller than {SMALLEST}"
    return size[::-1] if turned else size


def _is_turned(exif: bytes) -> bool:
    """Whether OpenCV exchanges width and height: it reads the orientation as 16 bits, whatever its type is."""
    data = exif.removeprefix(b"Exif\0\0")
    order = {b"MM": ">", b"II": "<"}.get(data[:2])
    if order is None:
        return False
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (entries,) = struct.unpack_from(f"{order}H", data, start)
        for place in range(start + 2, start + 2 + 12 * entries, 12):
            (tag,) = struct.unpack_from(f"{order}H", data, place)
            if tag == ExifTags.Base.Orientation:
                return struct.unpack_from(f"{order}H", data, place + 8)[0] in (5, 6, 7, 8)
    except struct.error:  # it ends early
        return False
    return False


def read_labels(path: Path, nc: int) -> Labels | None:
    """Labels of one file, sorted; of equal classes and boxes the first stays, as upstream does. None without the file.

    `DataError` if it cannot be opened, being a folder or a link to nothing, say.
    """
    try:
        text = _text(path)
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not path.is_symlink():
            return None
        expected = "expected a text file with one object a line, or no file for an image without objects"
        raise DataError(f"cannot read the labels {path}: {error.strerror}; {expected}") from error
    labels: list[tuple[np.ndarray, np.ndarray]] = []
    bad, clipped, boxes = list[str](), list[str](), 0
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        if not line or not (labels or bad or line.strip()):  # a line of blanks in the middle is wrong for upstream
            continue
        words = line.split()
        try:
            row, polygon, is_clipped = _label(words, nc)
        except ValueError as error:
            bad.append(f"line {number}: {error}")
            continue
        labels.append((row, polygon))
        boxes += len(words) == 5
        if is_clipped:
            clipped.append(f"line {number}: {' '.join(words)[:60]!r}")
    if not labels:
        return Labels(bad=tuple(bad))
    rows = np.stack([row for row, _ in labels])
    order = np.lexsort(rows.T[::-1])  # np.unique over rows takes longer than all the rest
    order = order[np.r_[True, (rows[order][1:] != rows[order][:-1]).any(1)]]
    mixed = boxes < len(rows)
    polygons = tuple(labels[index][1] for index in order) if mixed else ()
    return Labels(rows[order], polygons, tuple(bad), tuple(clipped), boxes * mixed)


def _label(words: list[str], nc: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """A line's row, its polygon, and whether it was clipped; raises `ValueError` with what is wrong with it."""
    line = repr(" ".join(words)[:60])
    try:
        values = np.array(words, dtype=np.float32)
    except ValueError:
        raise ValueError(f"{line} is not a list of numbers") from None
    if len(values) == 6:
        raise ValueError(f"6 values; expected class cx cy w h, without a sixth, such as a confidence; found {line}")
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        raise ValueError(f"{len(values)} values; expected class cx cy w h, or a class and a polygon; found {line}")
    if not 0 <= values[0] < nc or values[0] != int(values[0]):  # NaN fails the first comparison
        raise ValueError(f"class {words[0]} is none of the dataset's, 0 to {nc - 1}")
    if _is_pose(values[1:]):
        raise ValueError(
            f"a box and the keypoints of a pose; expected class cx cy w h, or a class and a polygon; found {line}"
        )
    box, points = values[1:], values[1:].reshape(-1, 2)
    if len(values) > 5:
        low, high = points.min(0), points.max(0)
        box = np.concatenate([(low + high) / 2, high - low])
    else:
        (x1, y1), (x2, y2) = box[:2] - box[2:] / 2, box[:2] + box[2:] / 2
        points = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float32)
    if box.min() >= 0 and box.max() <= 1:  # nor is NaN; upstream asks no more of corners
        return np.append(values[:1], box), points, False
    low, high = points.min(0).clip(0, 1), points.max(0).clip(0, 1)
    most = 1 + OUTSIDE * np.array([1, 1, 2, 2], np.float32)  # a box can be as wide as the image and both margins
    if not (box[:2].min() >= -OUTSIDE and box[2:].min() > 0 and (box <= most).all() and (low < high).all()):
        raise ValueError(f"coordinates must be fractions of the image, 0 to 1; found {line}")
    return np.concatenate([values[:1], (low + high) / 2, high - low]), points.clip(0, 1), True


def _is_pose(values: np.ndarray) -> bool:
    """Whether values are cx cy w h and at least two keypoints x y v in this box, or 0 0 0; upstream sees a polygon."""
    if len(values) < 10 or len(values) % 3 != 1:
        return False
    keypoints = values[4:].reshape(-1, 3)
    inside = (np.abs(keypoints[:, :2] - values[:2]) <= values[2:4] / 2 + OUTSIDE).all(1)
    shown = keypoints[:, 2] == 1
    return bool(shown.any() and ((shown & inside) | (keypoints == 0).all(1)).all())


def _text(path: Path) -> str:
    """A text file in UTF-8 or UTF-16, with or without a byte order mark."""
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    # without a mark: the first character is a digit or a letter
    encoding = "utf-8-sig" if 0 not in data[:2] else "utf-16-be" if data[0] == 0 else "utf-16-le"
    return data.decode(encoding, "replace")


@contextmanager
def quiet_decoders() -> Iterator[None]:
    """Silence the process' standard error, to which libpng writes about damaged files: our line says it.

    What other threads write there meanwhile is lost, so that nothing that waits, as for a stream, may stand within it.
    """
    stderr = 2  # decoders write to the descriptor, past Python's sys.stderr
    with _one_at_a_time:
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
    try:
        if "://" in path:
            with open_video(path) as video:
                return next(frames(video), None)
        data = np.fromfile(path, np.uint8)  # cv2.imread does not open every path on every system
        with quiet_decoders():
            image = cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
            if image is None and data[:2].tobytes() == b"\xff\xd8":  # cv2.imread reads a JPEG without its last bytes
                image = cv2.imdecode(np.append(data, np.frombuffer(ENDS["JPEG"], np.uint8)), cv2.IMREAD_COLOR)
            return image
    except (OSError, cv2.error, DataError):
        return None


def find_images(paths: Iterable[str]) -> list[str]:
    """The image files in folders (with their subfolders) and in `.txt` lists, see `list_images`."""
    return list_images(paths)[0]


def list_images(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """The images of folders and lists, each once, sorted as upstream does; and why others are left out, a line each.

    Those are images in other formats, such as GIF, lines of a list that name no image, and links from a folder to one
    that it lies in, which upstream follows 40 times.

    `DataError` if a path does not exist, or there is no image.
    """
    paths = list(paths)
    in_folders: list[str] = []
    in_lists: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            pattern = f"{glob.escape(str(path))}/**/*.*"
            in_folders += glob.glob(pattern, recursive=True)  # without hidden ones, as upstream
        elif path.is_file():
            in_lists += [str(path)] if path.suffix.lower() in SUFFIXES else _read_list(path)
        else:
            raise DataError(no_file(path, "expected a folder of images or a list of them"))
    loops = _loops(in_folders)
    in_folders = [file for file in in_folders if os.path.dirname(file) not in loops]
    files = {file for file in in_folders + in_lists if os.path.splitext(file)[1].lower() in SUFFIXES}
    if not files:
        raise DataError(f"no images in {', '.join(paths)}; expected {' '.join(sorted(SUFFIXES))}")
    others = [
        f"{file}: {Path(file).suffix} is not read; convert it to PNG or JPEG"
        for file in sorted({*in_folders} - files)
        if (mimetypes.guess_type(file, False)[0] or "").startswith("image/")
    ]
    others += [f"{line}: not the name of an image; a list has one a line" for line in sorted({*in_lists} - files)]
    if loops:
        others.append(f"{min(loops, key=len)}: a link to a folder that it lies in; its images count once")
    return sorted(files), others


def _loops(files: Iterable[str]) -> set[str]:
    """The folders of `files` that are, by a link, one of the folders above them."""
    folders = {os.path.dirname(file) for file in files}
    return {
        folder
        for folder in folders
        if os.path.realpath(folder) in {os.path.realpath(parent) for parent in Path(folder).parents}
    }


def _read_list(path: Path) -> list[str]:
    """The lines of a list of images; relative ones count from the list's folder, or else from the working folder."""
    try:
        text = _text(path).replace("\\", "/")  # a list from Windows
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
    expected = f"expected, for the first, {label_file(first)}"
    return DataError(f"no image of '{split}' has a label file; {expected}; without labels, give --unlabelled")


def source_name(source: str) -> str:
    """The name of a file without its folder; of a URL the last part of its path, or else the host."""
    if "://" not in source:
        return Path(source).name
    url = urlsplit(source)
    return re.sub(r"[^\w.-]+", "_", Path(url.path).name or url.hostname or "stream")


def is_stream(source: str) -> bool:
    """A camera's number, such as `0`, or a URL that is not an image's, such as `rtsp://host/live`."""
    return source.isdecimal() or ("://" in source and Path(source_name(source)).suffix.lower() not in SUFFIXES)


def is_video(source: str) -> bool:
    """Whether it is a video by its name, or a stream."""
    return is_stream(source) or Path(source).suffix.lower() in VIDEOS


def shown(source: str) -> str:
    """A source as it is printed: a URL without user and password."""
    return f"camera {source}" if source.isdecimal() else re.sub(r"(?<=://)[^/@]*@", "", source)


def find_sources(sources: Iterable[str]) -> list[str]:
    """The images, videos and streams that `--source` names: files, folders, globs, lists (`.txt`), cameras, URLs.

    `InputError` if one of `sources` holds none.
    """
    paths: list[str] = []
    for source in sources:
        if os.path.isdir(source):
            listed = sorted(glob.glob(f"{glob.escape(source)}/*"))
        elif os.path.isfile(source) and source.lower().endswith(LISTS):
            listed = _read_list(Path(source))
        else:
            listed = [source] if os.path.isfile(source) or is_stream(source) or "://" in source else []
            listed = listed or sorted(glob.glob(source, recursive=True))
        files = [path for path in listed if is_video(path) or Path(source_name(path)).suffix.lower() in SUFFIXES]
        if not files:
            expected = "expected a file, folder, glob or list (.txt) of images or videos, a camera or a URL"
            raise InputError(f"--source {source} holds neither images nor videos by their names; {expected}")
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
    """OpenCV's VideoCapture of a file, a URL or a camera; `DataError` if it cannot be opened.

    From now on OpenCV and FFmpeg are silent about damaged files in this process.
    """
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
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
        good, frame = video.read()
        if not good:
            return
        yield frame
