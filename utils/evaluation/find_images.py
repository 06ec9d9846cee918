"""Finding the image files of a split: folders with their subfolders, and lists.

Each image is listed once, by its real path: folders that are links are followed, also ones that lead back to where
they lie, and what is reached by several names counts as one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from utils.core.errors import DataError, no_file
from utils.core.input_files import is_regular

logger = logging.getLogger(__name__)

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
        elif is_regular(path):
            files += [str(path)] if path.suffix.lower() in SUFFIXES else _read_list(path)
        else:
            raise DataError(no_file(path, "expected a folder of images or a list of them"))
    files = sorted(file for file in files if os.path.splitext(file)[1].lower() in SUFFIXES)
    if not files:
        raise DataError(f"no images in {', '.join(paths)}; expected {' '.join(sorted(SUFFIXES))}")
    return once_each(files)


def walk(root: str) -> Iterator[str]:
    """Files below a folder, without hidden ones. Each real folder is entered once, by a name without links first."""
    entered: set[tuple[int, int]] = set()
    folders: list[str] = [root]
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        try:
            found = os.stat(folder)
            if (found.st_dev, found.st_ino) in entered:
                continue
            entered.add((found.st_dev, found.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"cannot list {folder}: {error.strerror}") from error
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not _is_folder(entry):
                yield entry.path
            elif entry.is_symlink():
                links.append(entry.path)
            else:
                folders.append(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


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
            chosen[real] = _better_labelled(other, file)
    if again:
        logger.warning("%d names lead to images that are listed already; each image is used once", again)
    return sorted(chosen.values())


def _better_labelled(first: str, second: str) -> str:
    labels = [label_file(first), label_file(second)]
    there = [is_regular(path) for path in labels]
    if all(there) and not os.path.samefile(*labels) and labels[0].read_bytes() != labels[1].read_bytes():
        raise DataError(
            f"{first} and {second} are one image, and its labels differ: {labels[0]}, {labels[1]}; remove one of them"
        )
    return second if there == [False, True] else first


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
