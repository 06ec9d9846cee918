"""COCO's annotation files: read, and checked whole, so that nothing breaks inside pycocotools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.core.errors import DataError
from utils.core.input_files import read_json
from utils.core.shown import shown


def read_annotations(file: Path, *, masks: bool = False) -> dict[str, Any]:
    """COCO annotations, with what pycocotools relies on filled in; with `masks` each must have a segmentation.

    Raises:
        DataError: no such file, or an entry lacks a field or holds something else in it.
    """
    content = read_json(file, "expected COCO's annotations", DataError)
    if not isinstance(content, dict):
        raise DataError(f"{file} is no COCO annotation file: it holds {shown(content)}; expected an object")
    checks = (("images", _image), ("categories", _category), ("annotations", _outlined if masks else _annotation))
    for key, check in checks:
        entries = content.get(key)
        if not isinstance(entries, list):
            raise DataError(f"{file} is no COCO annotation file: its '{key}' is {shown(entries)}; expected a list")
        for number, entry in enumerate(entries):
            problem = check(entry) if isinstance(entry, dict) else f"is {shown(entry)}; expected an object"
            if problem:
                raise DataError(f"{file} is no COCO annotation file: entry {number} of '{key}' {problem}")
    if not all(content[key] for key in ("images", "categories")):
        raise DataError(f"{file} lists no images or no categories")
    for number, annotation in enumerate(content["annotations"], 1):
        annotation["id"] = number  # pycocotools takes the id 0 for "no match"
        annotation.setdefault("iscrowd", 0)
        annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
    content.setdefault("info", {})
    content.setdefault("licenses", [])
    return content


def _image(entry: Mapping[str, Any]) -> str:
    if not isinstance(entry.get("file_name"), str):
        return f"has the file_name {shown(entry.get('file_name'))}; expected a text"
    return _wrong_id(entry, "id")


def _category(entry: Mapping[str, Any]) -> str:
    if not isinstance(entry.get("name"), (str, int, float)):
        return f"has the name {shown(entry.get('name'))}; expected a text"
    return _wrong_id(entry, "id")


def _annotation(entry: Mapping[str, Any]) -> str:
    box = entry.get("bbox")
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        return f"has the bbox {shown(box)}; expected left, top, width and height in pixels"
    if "area" in entry and not _is_number(entry["area"]):
        return f"has the area {shown(entry['area'])}; expected a number of pixels"
    if not isinstance(entry.get("iscrowd", 0), int):
        return f"has the iscrowd {shown(entry['iscrowd'])}; expected 0 or 1"
    return _wrong_id(entry, "image_id") or _wrong_id(entry, "category_id")


def _outlined(entry: Mapping[str, Any]) -> str:
    """An annotation with polygons, or run lengths of a size."""
    found = entry.get("segmentation")
    polygons = isinstance(found, list) and bool(found) and all(map(_is_polygon, found))
    lengths = isinstance(found, dict) and isinstance(found.get("counts"), (list, str)) and _is_size(found.get("size"))
    if not (polygons or lengths):
        return f"has the segmentation {shown(found)}; expected polygons in pixels, or run lengths"
    return _annotation(entry)


def _is_polygon(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 6 and len(value) % 2 == 0 and all(map(_is_number, value))


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(one) is int and one > 0 for one in value)


def _wrong_id(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    right = isinstance(value, (int, str)) and not isinstance(value, bool)
    return "" if right else f"has the {key} {shown(value)}; expected a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
