"""Reading a dataset's YAML in upstream's form, without downloading anything, and its splits."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from utils.core.errors import DataError
from utils.core.files import read_yaml
from utils.core.logging import warn_once
from utils.core.split_counts import SplitCounts
from utils.core.strict_model import StrictModel, validate
from utils.core.text import plural, short_repr
from utils.evaluation.image_files import find_images, list_images
from utils.evaluation.split import SplitImages, images_in_both, read_images

logger = logging.getLogger(__name__)

COCO_CLASSES = 80
NAMED = 5  # images that are left out, in the log


def _by_id(names: Any) -> Any:
    """Class names as a mapping from 0 on; each may be a number, which YAML makes of a text such as 7 or yes."""
    if isinstance(names, list):
        names = dict(enumerate(names))
    expected = "a name for each class, from 0 on"
    if not isinstance(names, Mapping) or not names:
        raise ValueError(expected)
    count = len(names)
    if set(names) == set(range(1, count + 1)):
        # The numbers of the label files are not known here: those that begin at 1 have to be written anew.
        advice = "number the names from 0, and the classes of the label files, too, if these begin at 1"
        raise ValueError(f"{expected}; {advice}")
    if set(names) != set(range(count)):
        raise ValueError(expected)
    if not all(isinstance(name, (str, int, float)) for name in names.values()):
        raise ValueError("a text for each class")
    return {number: str(names[number]) for number in range(count)}


def _number_in_quotes(nc: Any) -> Any:
    """A number that is written as text, such as '10', which upstream takes."""
    is_number = isinstance(nc, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", nc)
    return int(nc) if is_number else nc


def _one_or_more(split: Any) -> Any:
    """The entries of a split as a list; one may be written without it, and none as null or ''."""
    if isinstance(split, list):
        return split
    return [split] if split else []


FilePath = Annotated[str, Field(pattern=r"^[^\x00]*$")]
SplitEntry = Annotated[FilePath, Field(min_length=1)]
Split = Annotated[list[SplitEntry], BeforeValidator(_one_or_more)]


class DataYaml(StrictModel, extra="ignore"):  # upstream's files have `download` too, others `roboflow` and the like
    """A data.yaml as it is written: a split is a folder of images, a list of images, or several of them."""

    names: Annotated[dict[int, str], BeforeValidator(_by_id)]
    nc: Annotated[float | None, BeforeValidator(_number_in_quotes)] = None
    path: FilePath | None = None
    train: Split = Field(default_factory=list)
    val: Split = Field(default_factory=list)
    test: Split = Field(default_factory=list)

    @field_validator("nc")
    @classmethod
    def _agrees(cls, nc: float | None, fields: ValidationInfo) -> float | None:
        count = len(fields.data.get("names", ()))
        if nc is not None and nc != count:
            raise ValueError(f"the number of names, {count}")
        return nc


@dataclass(frozen=True)
class DataConfig:
    """The content of a data.yaml, with paths that exist.

    Attributes:
        file, root: the YAML itself, and the folder that its entries are relative to.
        names: class names by id, without gaps.
        splits: for `train`, `val`, `test` (those that are given): existing folders of images, or lists of images.
        is_coco: COCO's 80 classes on val2017, whose results use COCO's 91 category ids.
        missing: splits that are given and not there → the first of their entries that does not exist.
        parts: (split, limit) → its images, as they were read.
    """

    file: Path
    root: Path
    names: Mapping[int, str]
    splits: Mapping[str, tuple[str, ...]]
    is_coco: bool
    missing: Mapping[str, str] = field(default_factory=dict)
    parts: dict[tuple[str, int | None], SplitImages] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)

    def annotations_of(self, split: str) -> Path | None:
        """`root/annotations/instances_{stem of the split's entry}.json`, if anything is there."""
        entries = self.splits.get(split, ())
        stem = Path(entries[0]).stem if len(entries) == 1 else ""
        file = self.root / "annotations" / f"instances_{stem}.json"
        return file if os.path.lexists(file) else None

    def paths(self, split: str) -> tuple[str, ...]:
        """The folders and lists of a split; `DataError` if the YAML does not name it, or its images are not there."""
        if split in self.missing:
            raise DataError(_not_found(self.file, split, self.missing[split], self.root))
        if split not in self.splits:
            raise DataError(f"{self.file} has no '{split}:' entry; it has {', '.join(self.splits)}")
        return self.splits[split]

    def read(self, split: str, limit: int | None = None, *, progress: bool = False) -> SplitImages:
        """The images of a split with their labels; they are read once, and one line of the log counts them.

        Args:
            limit: only so many images, evenly spread over the split.

        Raises:
            DataError: the split is not there, or no image of it can be used.
        """
        if (split, limit) in self.parts:
            return self.parts[split, limit]
        part = self._read_part(split, limit, progress)
        whole = self.parts.get((split, None))
        if whole:
            part.in_train = whole.in_train
        elif split != "train" and "train" in self.splits:
            training_images = find_images(self.paths("train"))
            part.in_train = images_in_both([image.path for image in part.images], training_images)
        is_first = not any(read_split == split for read_split, _ in self.parts)
        if limit is None or is_first:
            self._log_counts(part, split)
        self.parts[split, limit] = part
        return part

    def _read_part(self, split: str, limit: int | None, progress: bool) -> SplitImages:
        """Read the images of a split, only so many of them, evenly spread, with a limit."""
        files, left_out = list_images(self.paths(split))
        name = split
        chosen = files
        if limit is not None and limit < len(files):
            indices = np.linspace(0, len(files) - 1, max(limit, 1)).astype(int)
            chosen = [files[index] for index in indices]
            name = f"{split} ({len(chosen)} of {plural(len(files), 'image')})"
        part = read_images(chosen, self.nc, name=name, progress=progress)
        part.left_out += left_out
        return part

    def _log_counts(self, part: SplitImages, split: str) -> None:
        """Log the counts of a split; warn of missing labels and of training images in it."""
        counts = part.counts(self.root)
        logger.info("%s", counts)
        images = plural(counts.images, "image")
        if counts.lacks_labels and split != "train":  # whose labels nothing reads
            logger.warning(
                "%s: %d of %s have no label file (first: %s) and count as backgrounds; AP is too low if they show "
                "objects",
                split,
                counts.without_a_label_file,
                images,
                counts.first["without_a_label_file"],
            )
        if counts.also_in_train:
            logger.warning(
                "%d of %s of %s are training images, too (first: %s): AP on them does not measure new images",
                counts.also_in_train,
                images,
                split,
                counts.first["also_in_train"],
            )
        if len(part.left_out) > 1:
            for line in part.left_out[:NAMED]:
                logger.info("  %s", line.replace(f"{self.root}{os.sep}", ""))

    def counts(self) -> list[SplitCounts]:
        """Counts of the parts that were read; where a whole split was read, of that alone."""
        whole = {split for split, limit in self.parts if limit is None}
        counts = []
        for (split, limit), part in self.parts.items():
            if limit is None or split not in whole:
                counts.append(part.counts(self.root))
        return counts


def check_classes(names: Mapping[int, str], data: DataConfig, network: str) -> bool:
    """Compare the classes of a network with those of a dataset: the same number, and the same names.

    Returns:
        True if the names are the same. A warning shows different ones: classes are then matched by number.

    Raises:
        DataError: the numbers differ, or the names are the same in another order.
    """
    own = [*names.values()]
    expected = [*data.names.values()]
    if len(own) != len(expected):
        raise DataError(
            f"{network} detects {plural(len(own), 'class')} {short_repr(own)}, and {data.file} has {len(expected)} "
            f"{short_repr(expected)}; give the dataset that the weights were trained on"
        )
    if own == expected:
        return True
    if sorted(own) == sorted(expected):
        place = next(number for number, name in enumerate(own) if name != expected[number])
        raise DataError(
            f"{data.file} has the classes of {network} in another order: class {place} is {expected[place]!r} there "
            f"and {own[place]!r} in the model; give the dataset that the weights were trained on"
        )
    warn_once(
        logger,
        f"the class names of {network} {short_repr(own)} differ from those of {data.file} {short_repr(expected)}: "
        "classes are matched by number",
        what=f"class names {own} {expected}",
    )
    return False


def load_data(path: str | Path, split: str = "val") -> DataConfig:
    """Read a data.yaml, whose `split` is to be used.

    A relative `path:` is looked for in the checkout as upstream does, then in the working folder and beside the YAML;
    without `path:` splits are looked for beside the YAML first. The first of these that holds the images of a split is
    taken, or else the first that exists; a warning says which, where others hold such images, too.

    Raises:
        DataError: the file is missing or not such a YAML, names and nc disagree, or the split's images are not there.
    """
    file = Path(path)
    content = validate(DataYaml, read_yaml(file, "--data takes a dataset's YAML", DataError), file, DataError)
    written = {"train": content.train, "val": content.val, "test": content.test}
    entries = {name: tuple(paths) for name, paths in written.items() if paths}
    if not entries:
        raise DataError(f"{file} has no 'train:', 'val:' or 'test:'; they name the folders of images")
    root = _root(file, content.path, entries, split)
    splits: dict[str, tuple[str, ...]] = {}
    missing: dict[str, str] = {}
    for name, paths in entries.items():
        places = [(path, _place(root, path)) for path in paths]
        absent = [path for path, place in places if place is None]
        if absent:
            missing[name] = absent[0]
        else:
            splits[name] = tuple(place for _, place in places if place)
    if split in missing:
        raise DataError(_not_found(file, split, missing[split], root))
    is_coco = len(content.names) == COCO_CLASSES and entries.get("val", ("",))[0].endswith("val2017.txt")
    return DataConfig(file, root, content.names, splits, is_coco, missing)


def _root(
    file: Path,
    path: str | None,
    entries: Mapping[str, tuple[str, ...]],
    split: str,
) -> Path:
    """The folder that the entries of a data.yaml are relative to, see `load_data`; `path` is the YAML's own."""
    checkout = Path(__file__).resolve().parents[2]
    beside = file.resolve().parent
    bases = (checkout, Path.cwd(), beside) if path else (beside, checkout, Path.cwd())
    candidates = list(dict.fromkeys((base / (path or "")).resolve() for base in bases))
    for name in dict.fromkeys((split, "val", "train", "test")):
        for root in candidates:
            if name in entries and all(_place(root, entry) for entry in entries[name]):
                _warn_of_others(file, name, entries[name][0], root, candidates)
                return root
    return next(filter(os.path.isdir, candidates), candidates[0])


def _not_found(
    file: Path,
    split: str,
    entry: str,
    root: Path,
) -> str:
    return f"{file}: {split} images {entry!r} not found in {root}; correct 'path:' or '{split}:'"


def _warn_of_others(
    file: Path,
    split: str,
    entry: str,
    root: Path,
    candidates: Sequence[Path],
) -> None:
    """Warn where an entry of the YAML exists in several places; the first is taken."""
    places = list(dict.fromkeys(place for folder in (root, *candidates) for place in _places(folder, entry)))
    if len(places) > 1:
        text = f"{file}: {split} images {entry!r} are taken from {places[0]}, and not from {', '.join(places[1:])}"
        warn_once(logger, f"{text}; absolute paths in the YAML decide")


def _place(root: Path, entry: str) -> str | None:
    """The absolute path of an entry, None where it does not exist."""
    return next(iter(_places(root, entry)), None)


def _places(root: Path, entry: str) -> list[str]:
    """Places of an entry in a root, as absolute paths: `../x` is also looked for as `x`, as upstream does."""
    entry = entry.replace("\\", "/")  # a file from Windows
    places = (root / entry, root / entry.removeprefix("../"))
    return list(dict.fromkeys(str(place.resolve()) for place in places if os.path.exists(place)))
