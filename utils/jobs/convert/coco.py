"""A COCO file."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path, PureWindowsPath

import numpy as np

from utils.evaluation.coco_file import CocoFile, read_coco, sorted_ids
from utils.jobs.convert.outlines import rings_of
from utils.jobs.convert.records import (
    UNREADABLE_OUTLINES,
    AnnotatedImage,
    AnnotatedObject,
    Annotations,
    Tally,
    stated_size,
)


def read_coco_annotations(path: Path, tally: Tally, *, force: bool) -> Annotations:
    """Read the images of a COCO file with their objects; crowds are left out.

    Classes are in the order of the ids of their categories; several categories of one name are one class.

    Raises:
        DataError: it is not a COCO file; or, without `force`, too many annotations lack their image or category.
    """
    file = read_coco(path)
    file.check_joins(force=force, advice="correct the ids, or leave those annotations out by --force")
    for reason, lines in (
        ("broken annotations", file.broken),
        ("annotations of no image", file.without_image),
        ("annotations of no category", file.without_category),
    ):
        if lines:
            tally.left_out[reason] = lines
            tally.warn(reason)
    class_names = _class_names(file, tally)
    objects: dict[int | str, list[AnnotatedObject]] = defaultdict(list)
    for thing in file.objects:
        if thing.crowd:
            tally.left_out["crowds"].append(thing.name)
            continue
        left, top, width, height = thing.box
        corners = np.array([[left, top], [left + width, top + height]])
        try:
            outline = rings_of(thing.entry.get("segmentation"))
        except ValueError as error:
            outline = ()
            tally.changed[UNREADABLE_OUTLINES].append(f"{thing.name}: {error}")
        objects[thing.image].append(AnnotatedObject(thing.name, class_names[thing.category], corners, outline))
    images: list[AnnotatedImage] = []
    for key, entry in file.images.items():
        stem = PureWindowsPath(str(entry["file_name"])).stem
        size = stated_size(entry.get("width"), entry.get("height"))
        images.append(AnnotatedImage(f"image {entry['id']} of {path}", (stem,), size, tuple(objects[key])))
    return Annotations(images, list(dict.fromkeys(class_names.values())))


def _class_names(file: CocoFile, tally: Tally) -> dict[int | str, str]:
    """Category id → class, in the order of the ids.

    A category that no annotation uses, and that is the supercategory of another one, is left out: some exports have
    the project's name as category 0.
    """
    used = {thing.category for thing in file.objects}
    parents: dict[str, set[int | str]] = defaultdict(set)
    for key, entry in file.categories.items():
        parents[str(entry.get("supercategory"))].add(key)
    names: dict[int | str, str] = {}
    for key in sorted_ids(file.categories):
        name = str(file.categories[key]["name"])
        if key in used or not parents[name] - {key}:
            names[key] = name
        else:
            tally.left_out["unused supercategories"].append(repr(name))
    return names
