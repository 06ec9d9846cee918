"""COCO's annotations as people have them: ids as numbers or text, broken entries named, entries joined by their ids."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.errors import DataError
from utils.core.files import check_file
from utils.core.text import short_repr

MOST_WITHOUT_PARTNER = 0.05  # share of entries that find no partner; above it two files do not belong together
PARTS = ("images", "annotations", "categories")
LONGEST_ID = 40  # digits of an id that counts as a number


@dataclass(frozen=True)
class CocoObject:
    """One annotation that can be used.

    Attributes:
        name: its name in messages: 'annotation 17'.
        image, category: keys of `CocoFile.images` and `CocoFile.categories`.
        box: left, top, width and height as they are written; width and height can be negative.
        crowd: it is a region of many objects.
        entry: the annotation as it is written.
    """

    name: str
    image: int | str
    category: int | str
    box: tuple[float, float, float, float]
    crowd: bool
    entry: dict[str, Any]


@dataclass
class CocoFile:
    """A COCO file, its entries by id; ids that differ in their type alone (7, "7", "007") are one.

    Attributes:
        images, categories: entries as they are written, by id.
        objects: annotations that can be used.
        broken: a line for each entry that cannot be used.
        without_image, without_category: a line for each annotation whose id is not in `images` or `categories`.
        total: number of annotations that are written.
    """

    path: Path
    images: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    categories: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    objects: list[CocoObject] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    without_image: list[str] = field(default_factory=list)
    without_category: list[str] = field(default_factory=list)
    total: int = 0

    def check_joins(self, *, force: bool = False, advice: str = "") -> None:
        """Raise `DataError` where too many annotations have an unknown image or category, unless `force` is given."""
        joins = (("images", self.without_image), ("categories", self.without_category))
        for part, lines in joins:
            problem = f"annotations of {self.path} name an id that its {part!r} lack"
            check_partners(lines, self.total, problem, advice or "correct the ids", force=force)


def check_partners(
    lines: Sequence[str],
    total: int,
    problem: str,
    advice: str,
    *,
    force: bool = False,
) -> None:
    """Raise `DataError` if more than `MOST_WITHOUT_PARTNER` of `total` entries have no partner.

    Args:
        lines: one for each entry without a partner; the first is named.
        problem: the text after 'N of M', such as 'annotations name an unknown image'.
        force: raise nothing.
    """
    if force or len(lines) <= MOST_WITHOUT_PARTNER * total:
        return
    limit = f"at most {MOST_WITHOUT_PARTNER:.0%} may"
    raise DataError(f"{len(lines)} of {total} {problem} (first: {lines[0]}); {limit}; {advice}")


def read_coco(path: Path) -> CocoFile:
    """Read a COCO file in UTF-8, UTF-16 or UTF-32, with or without a byte order mark.

    Raises:
        DataError: it is not a COCO file, or images or categories with different names have one id.
    """
    content = _content(path)
    file = CocoFile(path, total=len(content["annotations"]))
    file.images = _by_id(content["images"], "image", "file_name", file)
    file.categories = _by_id(content["categories"], "category", "name", file)
    for number, entry in enumerate(content["annotations"], 1):
        name = _name(entry, "annotation", number)
        try:
            coco_object = _object(entry, name)
        except ValueError as error:
            file.broken.append(f"{name}: {error}")
            continue
        if coco_object.image not in file.images:
            file.without_image.append(f"{name} of image {short_repr(entry['image_id'])}")
        elif coco_object.category not in file.categories:
            file.without_category.append(f"{name} of category {short_repr(entry['category_id'])}")
        else:
            file.objects.append(coco_object)
    return file


def _content(path: Path) -> Mapping[str, list[Any]]:
    """The mapping that a COCO file holds, with its three lists."""
    expected = f"expected COCO's annotations, a mapping with the lists {', '.join(PARTS)}"
    check_file(path, expected, DataError)
    try:
        content = json.loads(path.read_bytes())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8, UTF-16 or UTF-32 (byte {error.start}); save it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({str(error)[:100]}); {expected}") from error
    for part in PARTS:
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise DataError(f"{path} has no list {part!r}; {expected}")
    lists: dict[str, list[Any]] = content
    return lists


def _by_id(
    entries: list[Any],
    kind: str,
    key: str,
    file: CocoFile,
) -> dict[int | str, dict[str, Any]]:
    """Entries by their ids; those without an id, or without a name under `key`, are broken."""
    by_id: dict[int | str, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        name = _name(entry, kind, number)
        entry_id = id_key(entry.get("id")) if isinstance(entry, dict) else None
        has_text = entry_id is not None and isinstance(entry.get(key), (str, int)) and entry[key] != ""
        if entry_id is None or not has_text:
            file.broken.append(f"{name}: expected 'id' and {key!r}, found {short_repr(entry)}")
            continue
        earlier = by_id.get(entry_id, entry)
        if earlier[key] != entry[key]:
            names = f"{short_repr(earlier[key])} and {short_repr(entry[key])}"
            raise DataError(f"{file.path}: {name} is there twice: {names}; give each an id of its own")
        by_id[entry_id] = entry
    return by_id


def _name(entry: Any, kind: str, number: int) -> str:
    """'annotation 17' by the id of an entry; without an id 'annotation number 17' by its place, from 1."""
    written = entry.get("id") if isinstance(entry, dict) else None
    if written is None:
        return f"{kind} number {number}"
    return f"{kind} {short_repr(written)}"


def id_key(value: Any) -> int | str | None:
    """An id as it is compared: 7, 7.0, "7" and "007" are the same; None for a value that cannot be an id."""
    if isinstance(value, str):
        text = value.strip()
        is_number = text.isascii() and text.removeprefix("-").isdecimal() and len(text) <= LONGEST_ID
        return int(text) if is_number else text or None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def sorted_ids(ids: Iterable[int | str]) -> list[int | str]:
    """Ids in their order, numbers before texts."""
    return sorted(ids, key=lambda entry_id: (isinstance(entry_id, str), entry_id))


def _object(entry: Any, name: str) -> CocoObject:
    """An annotation, checked; raises `ValueError` with what is wrong with it."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected a mapping, found {short_repr(entry)}")
    ids: dict[str, int | str] = {}
    for key in ("image_id", "category_id"):
        entry_id = id_key(entry.get(key))
        if entry_id is None:
            raise ValueError(f"{key!r} is {_written(entry, key)}; expected a number or a text")
        ids[key] = entry_id
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4:
        raise ValueError(f"'bbox' is {_written(entry, 'bbox')}; expected left, top, width, height")
    left, top, width, height = (_number(value, "bbox", float) for value in box)
    area = entry.get("area")
    if area is not None:
        _number(area, "area", float)
    crowd = _number(entry.get("iscrowd") or 0, "iscrowd", int)
    return CocoObject(name, ids["image_id"], ids["category_id"], (left, top, width, height), crowd != 0, entry)


def _written(entry: Mapping[str, Any], key: str) -> str:
    return short_repr(entry[key]) if key in entry else "missing"


def _number(value: Any, key: str, kind: Callable[[Any], Any]) -> Any:
    """A finite number, which may be written as text; raises `ValueError`."""
    try:
        number = kind(value)
        is_finite = math.isfinite(number)
    except (TypeError, ValueError, OverflowError):
        is_finite = False
    if not is_finite:
        raise ValueError(f"{key!r} holds {short_repr(value)}; expected a number")
    return number
