"""What `--source` names: images, videos, cameras and streams; opened, read, and the names of their drawings."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from utils.core.errors import DataError, InputError
from utils.core.files import distinct_names
from utils.evaluation.image_files import SUFFIXES, decode, read_list, source_name

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # silence; FFmpeg reads it when the first video is opened

WRITTEN = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # drawings of other images become PNG
VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")
LISTS = (".txt", ".streams")  # of images, videos and streams, one a line


def find_sources(sources: Iterable[str]) -> list[str]:
    """The images, videos and streams that `--source` names: files, folders, globs, lists (`.txt`), cameras, URLs.

    `InputError` if one of `sources` holds none.
    """
    paths: list[str] = []
    for source in sources:
        readable = [path for path in _listed(source) if is_video(path) or _has_image_suffix(path)]
        if not readable:
            expected = "expected a file, folder, glob or list (.txt) of images or videos, a camera or a URL"
            raise InputError(f"--source {source} holds neither images nor videos by their names; {expected}")
        paths += readable
    return list(dict.fromkeys(paths))


def _listed(source: str) -> list[str]:
    """The files, cameras and URLs that a source names, of any kind."""
    if os.path.isdir(source):
        return sorted(glob.glob(f"{glob.escape(source)}/*"))
    if os.path.isfile(source):
        return read_list(Path(source)) if source.lower().endswith(LISTS) else [source]
    if is_stream(source) or "://" in source:
        return [source]
    return sorted(glob.glob(source, recursive=True))


def _has_image_suffix(source: str) -> bool:
    """True for an image by its name."""
    return Path(source_name(source)).suffix.lower() in SUFFIXES


def is_stream(source: str) -> bool:
    """True for a camera's number, such as `0`, or a URL that is not an image's, such as `rtsp://host/live`."""
    return source.isdecimal() or ("://" in source and not _has_image_suffix(source))


def is_video(source: str) -> bool:
    """True for a video by its name, or a stream."""
    return is_stream(source) or Path(source).suffix.lower() in VIDEOS


def shown(source: str) -> str:
    """A source as it is printed: a URL without user and password."""
    return f"camera {source}" if source.isdecimal() else re.sub(r"(?<=://)[^/]*@", "", source)


def target_names(sources: Sequence[str]) -> list[str]:
    """Name of each drawing: as its source, with a number where an earlier drawing has that name."""
    return distinct_names(map(_target_name, sources))


def _target_name(source: str) -> str:
    """Name of the drawing of one source."""
    name = source_name(source)
    stem, suffix = os.path.splitext(name)
    suffix = suffix.lower()
    if is_video(source):
        return f"{stem if suffix in VIDEOS else name}.mp4"
    return f"{stem}{suffix if suffix in WRITTEN else '.png'}"


def decode_source(source: str) -> np.ndarray | None:
    """An image of a file or a URL as BGR uint8 `[H, W, 3]`; None when it cannot be decoded."""
    if "://" not in source:
        return decode(source)
    try:
        with open_video(source) as video:
            return next(frames(video), None)
    except (OSError, cv2.error, DataError):
        return None


@contextmanager
def open_video(source: str) -> Iterator[Any]:
    """OpenCV's VideoCapture of a file, a URL or a camera; `DataError` if it cannot be opened.

    From now on OpenCV and FFmpeg are silent about damaged files in this process.
    """
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    video = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    try:
        width = video.get(cv2.CAP_PROP_FRAME_WIDTH)
        height = video.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if not (video.isOpened() and width and height):
            raise DataError(f"{shown(source)} cannot be {'opened' if is_stream(source) else 'decoded'}")
        yield video
    finally:
        video.release()


def frames(video: Any) -> Iterator[np.ndarray]:
    """The frames of a video, uint8 BGR `[H, W, 3]`, until the end or the first that cannot be decoded."""
    while True:
        is_read, frame = video.read()
        if not is_read:
            return
        yield frame
