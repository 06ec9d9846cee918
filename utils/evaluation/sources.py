"""What `--source` names: images and videos, which of them can be read, and what their drawings are called."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import DataError, InputError, no_file
from utils.core.files import distinct_names
from utils.evaluation.images import SUFFIXES, decode, quiet_decoders

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

WRITTEN = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # others become PNG
VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")
EXPECTED = "expected an image, a folder of them, or a video"


def check_source(source: str | Path) -> list[Path]:
    """The images and videos at `source`; what has such a name and is no file is left out with a line in the log.

    Raises:
        InputError: there are none.
    """
    source = Path(source)
    known = (*SUFFIXES, *VIDEOS)
    if source.is_dir():
        try:
            named = sorted(path for path in source.iterdir() if path.suffix.lower() in known)
        except OSError as error:
            raise InputError(f"--source {source} cannot be listed: {error.strerror}") from error
        found = [path for path in named if os.path.isfile(path)]
        for path in set(named) - set(found):
            logger.warning("left out: %s", no_file(path, "expected an image or a video"))
        if not found:
            raise InputError(f"--source {source} holds neither images nor videos")
        return found
    if not os.path.isfile(source):
        raise InputError(f"--source {no_file(source, EXPECTED)}")
    if source.suffix.lower() not in known:
        raise InputError(f"--source {source} is neither an image nor a video by its name")
    return [source]


def check_readable(files: Sequence[Path]) -> None:
    """Raise `DataError` if not one of `files` can be decoded; the first that can ends the search."""
    if not any(map(_can_be_read, files)):
        if len(files) == 1:
            raise DataError(f"{files[0]} cannot be decoded")
        raise DataError(f"none of the {len(files)} images and videos can be decoded; the first: {files[0]}")


def target_names(files: Sequence[Path]) -> list[str]:
    """What each drawing is called: as its source, with a number where that name would be taken twice."""
    suffixes = [file.suffix.lower() for file in files]
    suffixes = [".mp4" if one in VIDEOS else one if one in WRITTEN else ".png" for one in suffixes]
    wished = [f"{file.stem}{suffix}" for file, suffix in zip(files, suffixes, strict=True)]
    order = sorted(range(len(files)), key=lambda index: wished[index] != files[index].name)  # who has it keeps it
    found = dict(zip(order, distinct_names(wished[index] for index in order), strict=True))
    return [found[index] for index in range(len(files))]


def is_video(file: Path) -> bool:
    """Whether the name is a video's."""
    return file.suffix.lower() in VIDEOS


@contextmanager
def open_video(file: Path) -> Iterator[Any]:
    """OpenCV's VideoCapture of a file.

    Raises:
        DataError: it cannot be decoded.
    """
    import cv2

    with quiet_decoders():
        video = cv2.VideoCapture(str(file))
    try:
        size = video.get(cv2.CAP_PROP_FRAME_WIDTH), video.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if not video.isOpened() or not all(size):
            raise DataError(f"{file} cannot be decoded")
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


def _can_be_read(file: Path) -> bool:
    if not is_video(file):
        return decode(str(file)) is not None
    try:
        with open_video(file) as video:
            return next(frames(video), None) is not None
    except DataError:
        return False
