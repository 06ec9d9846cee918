"""Image files: found in folders and lists as upstream finds them, their sizes read, their pixels decoded.

Files that upstream's reader leaves out are left out here, too, so that AP is that of upstream's val.py. This reader
keeps no cache and rewrites no images.
"""

from __future__ import annotations

import glob
import mimetypes
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from utils.core.errors import DataError, no_file
from utils.core.files import read_unicode

_one_at_a_time = threading.Lock()

SUFFIXES = frozenset({".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"})  # upstream's
SMALLEST = 10  # pixels: upstream leaves out images with a smaller side
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # of whole files, by Pillow's name of the format
TURNED = ("JPEG", "MPO", *(("PNG", "WEBP") if cv2.__version__ >= "5" else ()))  # formats that OpenCV rotates by EXIF
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
BYTE_ORDERS = {b"MM": ">", b"II": "<"}  # of EXIF data, as struct writes them
STDERR = 2  # decoders write to the descriptor, past Python's sys.stderr


def source_name(source: str) -> str:
    """The name of a file without its folder; of a URL the last part of its path, or else the host."""
    if "://" not in source:
        return Path(source).name
    url = urlsplit(source)
    return re.sub(r"[^\w.-]+", "_", Path(url.path).name or url.hostname or "stream")


def find_images(paths: Iterable[str]) -> list[str]:
    """The image files in folders (with their subfolders) and in `.txt` lists, see `list_images`."""
    return list_images(paths)[0]


def list_images(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """The images of folders and lists, each once, sorted as upstream does; and a line for each file that is left out.

    Left out are images in other formats, such as GIF; lines of a list that do not name an image; and links from a
    folder to one of its parents, which upstream follows 40 times.

    Raises:
        DataError: a path does not exist, or no image is found.
    """
    paths = list(paths)
    in_folders: list[str] = []
    in_lists: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            pattern = f"{glob.escape(str(path))}/**/*.*"
            in_folders += glob.glob(pattern, recursive=True)  # without hidden ones, as upstream
        elif not path.is_file():
            raise DataError(no_file(path, "expected a folder of images or a list of them"))
        elif path.suffix.lower() in SUFFIXES:
            in_lists.append(str(path))
        else:
            in_lists += read_list(path)
    loops = _loops(in_folders)
    in_folders = [file for file in in_folders if os.path.dirname(file) not in loops]
    images = {file for file in [*in_folders, *in_lists] if os.path.splitext(file)[1].lower() in SUFFIXES}
    if not images:
        raise DataError(f"no images in {', '.join(paths)}; expected {' '.join(sorted(SUFFIXES))}")
    left_out = [
        *_other_formats({*in_folders} - images),
        *(f"{line}: not the name of an image; a list has one a line" for line in sorted({*in_lists} - images)),
    ]
    if loops:
        left_out.append(f"{min(loops, key=len)}: a link to a folder that it lies in; its images count once")
    return sorted(images), left_out


def _other_formats(files: Iterable[str]) -> Iterator[str]:
    """A line for each of these files that is an image in a format which is not read."""
    for file in sorted(files):
        kind = mimetypes.guess_type(file, False)[0] or ""
        if kind.startswith("image/"):
            yield f"{file}: {Path(file).suffix} is not read; convert it to PNG or JPEG"


def _loops(files: Iterable[str]) -> set[str]:
    """The folders of `files` that are, by a link, one of the folders above them."""
    loops = set()
    for folder in {os.path.dirname(file) for file in files}:
        parents = {os.path.realpath(parent) for parent in Path(folder).parents}
        if os.path.realpath(folder) in parents:
            loops.add(folder)
    return loops


def read_list(path: Path) -> list[str]:
    """The lines of a list of images; relative ones count from the list's folder, or else from the working folder.

    URLs and numbers of cameras stay as they are.
    """
    try:
        text = read_unicode(path).replace("\\", "/")  # a list from Windows
    except OSError as error:
        raise DataError(f"cannot read the list of images {path}: {error.strerror}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    base = path.parent
    if lines and not os.path.exists(base / lines[0]) and os.path.exists(lines[0]):
        base = Path.cwd()
    return [line if "://" in line or line.isdecimal() else os.path.normpath(base / line) for line in lines]


def read_header(file: str) -> tuple[int, int] | str:
    """(width, height) as OpenCV decodes the image, or why evaluation leaves it out."""
    try:
        size, kind = _size_and_kind(file)
    except UnidentifiedImageError:
        return f"{file}: not an image, or damaged"
    except Exception as error:  # noqa: BLE001 - Pillow's readers of damaged files raise whatever they run into
        return f"{file}: {getattr(error, 'strerror', None) or ' '.join(str(error).split()) or type(error).__name__}"
    if f".{kind.lower()}" not in SUFFIXES:
        return f"{file}: its content is {kind}, which is not read; convert it to PNG or JPEG"
    if min(size) < SMALLEST:
        return f"{file}: {size[0]}x{size[1]} pixels, smaller than {SMALLEST}"
    return size


def _size_and_kind(file: str) -> tuple[tuple[int, int], str]:
    """(width, height) as OpenCV decodes the image, and Pillow's name of the format; raises whatever Pillow raises."""
    with open(file, "rb") as stream, Image.open(stream) as image:  # reads the header only
        kind = image.format or ""
        width, height = image.size
        exif = image.info.get("exif", b"")  # image.getexif() would decode a PNG
        end = ENDS.get(kind, b"")
        stream.seek(-len(end), os.SEEK_END)
        is_whole = stream.read() == end
        if not is_whole and kind == "JPEG":
            image.load()  # as upstream's reader does
        elif not is_whole:
            image.verify()  # upstream's reader checks every PNG
    if kind in TURNED and _is_turned(exif):
        return (height, width), kind
    return (width, height), kind


def _is_turned(exif: bytes) -> bool:
    """True if OpenCV exchanges width and height: it reads the orientation as 16 bits, whatever its type is."""
    data = exif.removeprefix(b"Exif\0\0")
    order = BYTE_ORDERS.get(data[:2])
    if order is None:
        return False
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (entries,) = struct.unpack_from(f"{order}H", data, start)
        for place in range(start + 2, start + 2 + 12 * entries, 12):
            (tag,) = struct.unpack_from(f"{order}H", data, place)
            if tag == ExifTags.Base.Orientation:
                (orientation,) = struct.unpack_from(f"{order}H", data, place + 8)
                return orientation in SIDEWAYS
    except struct.error:  # it ends early
        return False
    return False


@contextmanager
def quiet_decoders() -> Iterator[None]:
    """Silence the process' standard error, to which libpng writes about damaged files: our own line names them.

    Lines of other threads are lost meanwhile, so do not read a stream or wait for anything else inside.
    """
    with _one_at_a_time:
        saved = os.dup(STDERR)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(saved, STDERR)
            os.close(saved)


def decode(path: str) -> np.ndarray | None:
    """The image as BGR uint8 `[H, W, 3]`, turned as its EXIF orientation says; None when it cannot be decoded."""
    try:
        data = np.fromfile(path, np.uint8)  # cv2.imread does not open every path on every system
        with quiet_decoders():
            return _decoded(data)
    except (OSError, cv2.error):
        return None


def _decoded(data: np.ndarray) -> np.ndarray | None:
    """The image in the bytes of a file, uint8 `[n]`, see `decode`."""
    if not len(data):
        return None
    image = cv2.imdecode(data, cv2.IMREAD_COLOR)
    is_jpeg = data[:2].tobytes() == b"\xff\xd8"
    if image is None and is_jpeg:  # cv2.imread reads a JPEG without its last bytes
        whole: np.ndarray = np.append(data, np.frombuffer(ENDS["JPEG"], np.uint8))
        image = cv2.imdecode(whole, cv2.IMREAD_COLOR)
    return image
