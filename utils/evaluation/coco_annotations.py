"""COCO's annotation files: read, and checked whole, so that nothing breaks inside pycocotools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from utils.core.errors import DataError
from utils.core.input_files import read_json
from utils.core.shown import shown
from utils.evaluation import coco_segmentations as limits
from utils.evaluation.coco_segmentations import is_number, outline_length, wrong_segmentation


def read_annotations(file: Path, *, masks: bool = False) -> dict[str, Any]:
    """COCO annotations, with what pycocotools relies on filled in; with `masks` each must have a segmentation.

    Raises:
        DataError: no such file, or an entry lacks a field or holds something else in it.
    """
    content = read_json(file, "expected COCO's annotations", DataError)
    if not isinstance(content, dict):
        raise DataError(f"{file} is no COCO annotation file: it holds {shown(content)}; expected an object")
    checks = (
        ("images", _sized_image if masks else _image),
        ("categories", _category),
        ("annotations", _outlined(content) if masks else _annotation),
    )
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
    if not (isinstance(box, list) and len(box) == 4 and all(map(is_number, box))):
        return f"has the bbox {shown(box)}; expected left, top, width and height in pixels"
    if "area" in entry and not is_number(entry["area"]):
        return f"has the area {shown(entry['area'])}; expected a number of pixels"
    if not isinstance(entry.get("iscrowd", 0), int):
        return f"has the iscrowd {shown(entry['iscrowd'])}; expected 0 or 1"
    return _wrong_id(entry, "image_id") or _wrong_id(entry, "category_id")


def _sized_image(entry: Mapping[str, Any]) -> str:
    for key in ("height", "width"):
        if not (type(entry.get(key)) is int and 0 < entry[key] <= limits.LARGEST_SIDE):
            return f"has the {key} {shown(entry.get(key))}; expected pixels, which masks are measured in"
    if entry["height"] * entry["width"] > limits.LARGEST_AREA:
        return f"has {entry['height']} x {entry['width']} pixels; expected {limits.LARGEST_AREA:,} at most"
    return _image(entry)


def _outlined(content: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """A check of annotations with masks, for after the check of the images."""
    sizes: dict[int | str, tuple[int, int]] = {}
    total = 0.0

    def check(entry: Mapping[str, Any]) -> str:
        nonlocal total
        if not sizes:
            sizes.update((image["id"], (image["height"], image["width"])) for image in content["images"])
        problem = _annotation(entry)
        if problem or entry["image_id"] not in sizes:  # of an image that is not listed, and never looked at
            return problem
        if problem := wrong_segmentation(entry.get("segmentation"), sizes[entry["image_id"]]):
            return problem
        length = outline_length(entry["segmentation"])
        if length > limits.LONGEST_OUTLINE:
            return f"has polygons of {length:,.0f} pixels' length; expected {limits.LONGEST_OUTLINE:,} at most"
        total += length
        if total > limits.LONGEST_OUTLINES:
            return f"brings the length of all polygons to more than {limits.LONGEST_OUTLINES:,} pixels"
        return ""

    return check


def _wrong_id(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    right = isinstance(value, (int, str)) and not isinstance(value, bool)
    return "" if right else f"has the {key} {shown(value)}; expected a number"
