"""The images of a split with their labels, as they were read, those that are left out, and counts of both."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from tqdm import tqdm

from utils.core.errors import DataError
from utils.core.files import file_hash
from utils.core.split_counts import SplitCounts
from utils.core.text import plural
from utils.evaluation.image_files import read_header
from utils.evaluation.labels import Labels, label_file, read_labels

THREADS = 8  # most of the time disks are waited for


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
        """Numbers of images, objects and oddities; names count from `root`."""
        images = [image for image in self.images if image.path not in self.undecodable]
        objects = [len(image.labels.rows) for image in images]
        lines = self._counted_lines(images)
        first = {name: _relative(part[0], root) for name, part in lines.items() if part}
        return SplitCounts(
            name=self.name,
            images=len(images),
            objects=sum(objects),
            backgrounds=objects.count(0),
            **{name: len(part) for name, part in lines.items()},
            first=first,
        )

    def _counted_lines(self, images: Sequence[ImageFile]) -> dict[str, list[str]]:
        """Field of `SplitCounts` → a line for each image, label or file that it counts; of these images."""
        without_a_label_file = [str(label_file(image.path)) for image in images if not image.labelled]
        undecodable = [f"{path}: cannot be decoded" for path in sorted(self.undecodable)]
        boxes_among_polygons: list[str] = []
        boxes_without_area: list[str] = []
        for image in images:
            boxes_among_polygons.extend(repeat(image.path, image.labels.boxes))
            has_no_area = (image.labels.rows[:, 3:] == 0).any(1)
            boxes_without_area.extend(repeat(str(label_file(image.path)), int(has_no_area.sum())))
        also_in_train = [image.path for image in images if image.path in self.in_train]
        return {
            "without_a_label_file": without_a_label_file,
            "left_out": [*self.left_out, *undecodable],
            "bad_label_lines": self.bad_lines,
            "clipped_labels": self.clipped_lines,
            "boxes_among_polygons": boxes_among_polygons,
            "boxes_without_area": boxes_without_area,
            "also_in_train": also_in_train,
        }

    @property
    def clipped_lines(self) -> list[str]:
        """A text for each label that was clipped."""
        return [f"{label_file(image.path)}, {text}" for image in self.images for text in image.labels.clipped]


def _relative(line: str, root: Path) -> str:
    """A line with its paths as seen from `root`, in characters that UTF-8 can hold."""
    text = line.replace(f"{root}{os.sep}", "")
    return text.encode("utf-8", "backslashreplace").decode()


def read_images(
    files: Sequence[str],
    nc: int,
    *,
    name: str = "images",
    progress: bool = False,
) -> SplitImages:
    """Read sizes and labels of `files`; `DataError` if a label file cannot be opened, or no image can be used."""
    split = SplitImages(name, [], [], [])
    with ThreadPoolExecutor(THREADS) as pool:
        images = pool.map(lambda file: _read_image(file, nc), files)
        bar = tqdm(images, "reading labels", len(files), unit="image", delay=2, disable=not progress)
        for image in bar:
            _take_in(image, split)
    if not split.images:
        raise DataError(f"cannot use any of {plural(len(files), 'image')}; the first: {split.left_out[0]}")
    return split


def _read_image(file: str, nc: int) -> ImageFile | str:
    """Size and labels of an image, or why evaluation leaves it out."""
    size = read_header(file)
    if isinstance(size, str):
        return size
    labels = read_labels(label_file(file), nc)
    return ImageFile(file, size, labels or Labels(), labels is not None)


def _take_in(image: ImageFile | str, split: SplitImages) -> None:
    """Add an image, or the line that names what is wrong with it, to the split."""
    if isinstance(image, str):
        split.left_out.append(image)
        return
    bad_lines = [f"{label_file(image.path)}, {text}" for text in image.labels.bad]
    if bad_lines:
        split.left_out.append(bad_lines[0])
        split.bad_lines += bad_lines
    else:
        split.images.append(image)


def images_in_both(images: Iterable[str], others: Sequence[str]) -> set[str]:
    """Those of `images` that are among `others`, too: the same file, or one with the same bytes under another name.

    Only files of one length are read. An image that was saved again, with other bytes, counts as another one.
    """
    places: set[tuple[int, int]] = set()  # device and number of each file of `others`
    by_length: dict[int, list[str]] = defaultdict(list)
    with ThreadPoolExecutor(THREADS) as pool:
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
        is_same_file = (status.st_dev, status.st_ino) in places
        same_length = by_length.get(status.st_size, ())
        if is_same_file or any(hash_of(path) == hash_of(other) for other in same_length):
            shared.add(path)
    return shared


def _status(path: str) -> os.stat_result | None:
    """Status of a file, or of the one that a link leads to; None where it does not exist."""
    try:
        return os.stat(path)
    except OSError:
        return None
