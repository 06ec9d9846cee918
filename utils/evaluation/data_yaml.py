"""Reading a dataset's YAML in upstream's form, without downloading anything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.errors import DataError
from utils.core.input_files import read_yaml
from utils.core.shown import shown

SPLITS = ("train", "val", "test")
COCO_CLASSES = 80


@dataclass(frozen=True)
class DataConfig:
    """What a data.yaml says.

    Attributes:
        file: the YAML itself.
        root: the folder that its entries are relative to.
        names: class names by id, without gaps.
        splits: for `train`, `val`, `test` (those that are given): existing folders of images, or lists of images.
        is_coco: COCO's 80 classes on val2017, whose results use COCO's 91 category ids.
        missing: splits that are given and not there → the first of their entries that lies nowhere.
    """

    file: Path
    root: Path
    names: Mapping[int, str]
    splits: Mapping[str, tuple[str, ...]]
    is_coco: bool
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def annotations(self) -> Path | None:
        """COCO annotations of the val split, if they are there."""
        return self.annotations_of("val")

    def annotations_of(self, split: str) -> Path | None:
        """`root/annotations/instances_{stem of the split's entry}.json`, if anything is there."""
        entries = self.splits.get(split, ())
        if len(entries) != 1:
            return None
        file = self.root / "annotations" / f"instances_{Path(entries[0]).stem}.json"
        return file if os.path.lexists(file) else None

    def paths(self, split: str) -> tuple[str, ...]:
        """The folders and lists of a split.

        Raises:
            DataError: the YAML does not name this split, or its images are not there.
        """
        if split in self.missing:
            raise DataError(_not_found(self.file, split, self.missing[split], self.root))
        if split not in self.splits:
            raise DataError(f"{self.file} has no '{split}:' entry; it has {', '.join(self.splits)}")
        return self.splits[split]


def load_data(path: str | Path) -> DataConfig:
    """Read a data.yaml.

    A relative `path:` is looked for beside the checkout's root as upstream does, then in the working folder and beside
    the YAML. A split that lies nowhere is an error only for `val`: calibration, say, needs no test images.

    Raises:
        DataError: the file is missing or is no such YAML, names and nc disagree, or val's images are not there.
    """
    file = Path(path)
    content = _read(file)
    names = _names(content, file)
    entries = {split: _entry(content, split, file) for split in SPLITS if content.get(split)}
    if "val" not in entries and "train" not in entries:
        raise DataError(f"{file} has neither 'train:' nor 'val:'; they name the folders of images")
    root = _root(content.get("path"), file, entries)
    splits = {split: found for split, paths in entries.items() if (found := _resolve(root, paths))}
    missing = {
        split: next(one for one in paths if not _resolve(root, (one,)))
        for split, paths in entries.items()
        if split not in splits
    }
    if "val" in missing:
        raise DataError(_not_found(file, "val", missing["val"], root))
    is_coco = len(names) == COCO_CLASSES and entries.get("val", ("",))[0].endswith("val2017.txt")
    return DataConfig(file, root, names, splits, is_coco, missing)


def _not_found(file: Path, split: str, entry: str, root: Path) -> str:
    return f"{file}: {split} images {entry!r} not found in {root}; correct 'path:' or '{split}:'"


def _read(file: Path) -> Mapping[str, Any]:
    content = read_yaml(file, "--data takes a dataset's YAML", DataError)
    if not isinstance(content, Mapping):
        raise DataError(f"{file} is no dataset's YAML: expected keys such as path, train, val and names")
    root = content.get("path")
    if root is not None and not _is_path(root):
        raise DataError(f"{file}: 'path:' is {shown(root)}; expected the folder that train and val count from")
    return content


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _names(content: Mapping[str, Any], file: Path) -> dict[int, str]:
    given = content.get("names")
    if isinstance(given, (list, tuple)):
        given = dict(enumerate(given))
    if not isinstance(given, Mapping) or not given:
        raise DataError(f"{file} has no class names; expected 'names:' with one name per class")
    odd = next((key for key, name in given.items() if not isinstance(name, (str, int, float))), None)
    if odd is not None:
        raise DataError(f"{file}: class {shown(odd)} is named {shown(given[odd])}; expected a text")
    if sorted(given, key=str) != sorted(range(len(given)), key=str):
        raise DataError(f"{file}: the keys of 'names:' must be 0 to {len(given) - 1}, found {shown(list(given))}")
    nc = content.get("nc", len(given))
    if isinstance(nc, bool) or nc != len(given):
        raise DataError(f"{file} says nc: {shown(nc)} and gives {len(given)} names; they must agree")
    return {key: str(given[key]) for key in range(len(given))}


def _entry(content: Mapping[str, Any], split: str, file: Path) -> tuple[str, ...]:
    value = content[split]
    entries = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(_is_path(entry) and entry for entry in entries):
        raise DataError(
            f"{file}: '{split}:' is {shown(value)}; expected a folder, a list of images, or several of them"
        )
    return entries


def _root(given: Any, file: Path, entries: Mapping[str, tuple[str, ...]]) -> Path:
    """The first candidate in which any split is found, else the first that exists, else upstream's."""
    relative = Path(str(given)) if given else Path()
    checkout = Path(__file__).resolve().parents[2]
    bases = [checkout, Path.cwd(), file.resolve().parent]
    candidates = list(dict.fromkeys((base / relative).resolve() for base in bases))
    for split in ("val", "train", "test"):
        for candidate in candidates:
            if split in entries and _resolve(candidate, entries[split]):
                return candidate
    return next((candidate for candidate in candidates if os.path.isdir(candidate)), candidates[0])


def _resolve(root: Path, entries: tuple[str, ...]) -> tuple[str, ...]:
    """Absolute paths of all entries, or nothing when one is missing. `../x` is also looked for as `x`, as upstream."""
    found = []
    for entry in entries:
        options = [root / entry] + ([root / entry[3:]] if entry.startswith("../") else [])
        with contextlib.suppress(StopIteration):
            found.append(str(next(option for option in options if os.path.exists(option)).resolve()))
    return tuple(found) if len(found) == len(entries) else ()
