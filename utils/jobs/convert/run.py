"""The conversion: read annotations, join them with the images, place boxes and outlines in the image, write."""

from __future__ import annotations

import logging
import random
import shutil
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from utils.core.errors import DataError, InputError
from utils.evaluation.coco_file import check_partners
from utils.evaluation.image_files import SUFFIXES, read_header
from utils.jobs.convert.coco import read_coco_annotations
from utils.jobs.convert.outlines import area_of, clipped_ring, joined_ring
from utils.jobs.convert.records import NAMED, AnnotatedImage, AnnotatedObject, Tally, in_words
from utils.jobs.convert.voc import read_voc, visible_files

logger = logging.getLogger(__name__)

Size = tuple[float, float]  # width, height
FRACTIONS_TO = 1.01  # coordinates up to here can be fractions of the image
MOST_STRETCHED = 0.05  # by rounding the sides of a small copy
LEAST_OVERLAP = 0.5  # IoU of a box with the bounds of its outline; below it one of them is wrong
ROUNDING = 1e-5  # of the image: boxes that reach so far outside are not said to be clipped
FORCE = "--force leaves them out"


@dataclass(frozen=True)
class PlacedObject:
    """A class, its box `[2, 2]` (low x, y; high x, y) and its outline, if any; float64, in fractions of the image."""

    name: str
    box: np.ndarray
    outline: np.ndarray | None


def convert_to_yolo(source: Path, folder: Path, output: Path, *, val: float, boxes: bool, force: bool) -> None:
    """Convert annotations to a dataset in `output`, and print what it holds and what was left out.

    Args:
        source: a COCO file, or a folder of Pascal VOC's XML files.
        folder: the images.
        val: share of the images for validation.
        boxes: write boxes where there are outlines, too.
        force: leave out entries that find no partner, however many they are.

    Raises:
        InputError: `output` is there, or `source` or `folder` is not.
        DataError: the annotations cannot be read, or do not fit the images.
    """
    for path in (source, folder):
        if not path.exists():
            raise InputError(f"{path} does not exist")
    if output.exists():
        raise InputError(f"{output} exists; --output names a new folder")
    tally = Tally()
    if source.is_dir():
        annotations = read_voc(source, tally)
    else:
        annotations = read_coco_annotations(source, tally, force=force)
    annotated = join(annotations.images, source, folder, tally, force=force)
    sizes = read_sizes(annotated, tally, force=force)
    annotated = {path: annotated[path] for path in sizes}
    fractions = in_fractions(annotated.values(), tally)
    placed = {path: placed_objects(path, annotated[path], sizes[path], fractions, tally) for path in annotated}
    names = annotations.names or sorted({thing.name for objects in placed.values() for thing in objects})
    if not names:
        raise DataError(f"{source} holds no object that can be used, so that no class is known")
    labels = label_texts(placed, names, tally, boxes=boxes)
    chosen = random.Random(0).sample(sorted(labels), round(val * len(labels)))
    write_dataset(output, labels, set(chosen), names)
    objects = sum(map(len, placed.values()))
    if not objects:
        logger.warning("no image has an object: the network would learn from backgrounds alone")
    logger.info("%s/data.yaml", output)
    if tally.changed:
        logger.info("changed: %s", in_words(tally.changed))
    logger.info("images: %d (validation: %d), objects: %d, classes: %d", len(labels), len(chosen), objects, len(names))
    logger.info("left out: %s", in_words(tally.left_out))


def join(
    images: Sequence[AnnotatedImage], source: Path, folder: Path, tally: Tally, *, force: bool
) -> dict[Path, AnnotatedImage]:
    """Join image files with their annotations, by names without suffix; what finds no partner goes to the tally.

    Raises:
        DataError: too much finds no partner, or a name is ambiguous.
    """
    paths = [path for path in visible_files(folder) if path.suffix.lower() in SUFFIXES]
    by_stem = _by_stem(paths, folder)
    annotated: dict[Path, AnnotatedImage] = {}
    lost: list[str] = []
    for image in images:
        file = _file_of(image, by_stem)
        if file is None:
            lost.append(f"{image.source}, {image.stems[-1] or image.stems[0]}")
        elif file in annotated:
            twice = f"{annotated[file].source} and {image.source}"
            raise DataError(f"{source} annotates {file} twice ({twice}); leave one of the annotations out")
        else:
            annotated[file] = image
    if not annotated:
        reason = f"the first is {lost[0]}" if lost else "it holds no annotations"
        raise DataError(f"{source} annotates no image in {folder}: {reason}; --images names the folder of the images")
    bare = [str(path) for path in paths if path not in annotated]
    check_partners(lost, len(images), f"annotations of {source} have no image in {folder}", FORCE, force=force)
    check_partners(bare, len(paths), f"images in {folder} have no annotation in {source}", FORCE, force=force)
    if lost:
        tally.left_out["annotations without an image"] = lost
    if bare:
        tally.left_out["images without an annotation"] = bare
    return {path: image for path, image in annotated.items() if not image.broken}


def _by_stem(paths: Iterable[Path], folder: Path) -> dict[str, Path]:
    """Image files by their names without suffix; `DataError` if two have the same."""
    by_stem: dict[str, Path] = {}
    for path in paths:
        first = by_stem.setdefault(_name_key(path.stem), path)
        if first != path:
            advice = "convert the folders one by one (--images), or rename one"
            raise DataError(f"{folder} has several images of one name, {first} and {path}; {advice}")
    return by_stem


def _file_of(image: AnnotatedImage, by_stem: Mapping[str, Path]) -> Path | None:
    """The file of an annotated image; None if there is none."""
    for stem in image.stems:
        path = by_stem.get(_name_key(stem))
        if path is not None:
            return path
    return None


def _name_key(stem: str) -> str:
    """Normalize a name for comparison, since macOS writes accents as characters of their own."""
    return unicodedata.normalize("NFC", stem)


def read_sizes(annotated: Mapping[Path, AnnotatedImage], tally: Tally, *, force: bool) -> dict[Path, Size]:
    """The size of each image as it is shown; images that cannot be read go to the tally.

    Raises:
        DataError: too many cannot be read.
    """
    paths = list(annotated)
    with ThreadPoolExecutor(8) as pool:  # disks are waited for
        headers = list(pool.map(read_header, map(str, paths)))
    damaged = [header for header in headers if isinstance(header, str)]
    check_partners(damaged, len(paths), "images cannot be used", FORCE, force=force)
    if damaged:
        tally.left_out["images that cannot be used"] = damaged
        tally.warn("images that cannot be used")
    return {path: header for path, header in zip(paths, headers, strict=True) if not isinstance(header, str)}


def in_fractions(images: Iterable[AnnotatedImage], tally: Tally) -> bool:
    """Return whether coordinates are fractions of the image: all boxes lie in 0..1, not all of them on whole numbers.

    Raises:
        DataError: some boxes do, and too many do not.
    """
    things = [thing for image in images for thing in image.objects]
    fractions = [thing.source for thing in things if _is_fraction(thing)]
    if fractions and all(_is_within_one(thing) for thing in things):
        tally.changed["coordinates taken as fractions of the image"] = [thing.source for thing in things]
        return True
    what = "boxes lie in 0..1, and the others are in pixels"
    check_partners(fractions, len(things), what, "write all of them in pixels")
    return False


def _is_within_one(thing: AnnotatedObject) -> bool:
    return bool((thing.corners >= 0).all() and (thing.corners <= FRACTIONS_TO).all())


def _is_fraction(thing: AnnotatedObject) -> bool:
    """Return whether a box lies in 0..1, and not on whole numbers as in pixels."""
    return _is_within_one(thing) and bool((thing.corners % 1).any())


def placed_objects(path: Path, image: AnnotatedImage, size: Size, fractions: bool, tally: Tally) -> list[PlacedObject]:
    """The objects of an image in fractions of it, clipped to it.

    Raises:
        DataError: the annotation is of an image of another shape.
    """
    unit = reference_size(path, image, size, tally)
    divisor = np.ones(2) if fractions else np.array(unit, np.float64)
    placed: list[PlacedObject] = []
    for thing in image.objects:
        if not fractions and _is_fraction(thing):
            tally.left_out["boxes in 0..1 among boxes in pixels"].append(thing.source)
            continue
        corners = thing.corners / divisor
        box = np.stack([corners.min(0), corners.max(0)])
        if (box[0] != corners[0]).any():
            tally.changed["corners put in order"].append(thing.source)
        clipped = box.clip(0, 1)
        if not (clipped[0] < clipped[1]).all():
            tally.left_out["boxes without an area in the image"].append(thing.source)
            continue
        if np.abs(clipped - box).max() > ROUNDING:
            tally.changed["boxes clipped"].append(thing.source)
        outline = placed_outline(thing, divisor, box, tally)
        placed.append(PlacedObject(thing.name, clipped, outline))
    return placed


def reference_size(path: Path, image: AnnotatedImage, size: Size, tally: Tally) -> Size:
    """The width and height that coordinates of an annotation count in.

    An image's own size wins over a stated one, but for copies in another resolution.

    Raises:
        DataError: the stated size has another shape, or is exchanged with coordinates that are so, too.
    """
    stated = image.size
    if stated is None or stated == size:
        return size
    sizes = f"{path} has {_in_words(size)} pixels as it is shown, and {image.source} states {_in_words(stated)}"
    if stated == (size[1], size[0]):
        outside = [thing.source for thing in image.objects if _is_outside(thing, size)]
        if outside:
            advice = "it was annotated as it was before it was turned: save it without EXIF orientation"
            raise DataError(f"{sizes}; {outside[0]} lies outside of the image ({advice})")
        exchanged = tally.changed["sizes that are exchanged in the annotation"]
        exchanged.append(path.name)
        if len(exchanged) <= NAMED:
            logger.warning("%s: width and height are exchanged; the image's are taken", sizes)
        return size
    if not is_scaled(stated, size):
        raise DataError(f"{sizes}, another shape; correct the size, or give the image that was annotated")
    tally.changed["annotations of another resolution (coordinates are scaled)"].append(path.name)
    return stated


def _in_words(size: Size) -> str:
    return f"{size[0]:g}x{size[1]:g}"


def _is_outside(thing: AnnotatedObject, size: Size) -> bool:
    """Return whether corners in pixels lie outside of an image by more than a label may."""
    return bool((thing.corners > np.array(size) * FRACTIONS_TO + 1).any())


def is_scaled(first: Size, second: Size) -> bool:
    """Return whether two sizes have one shape: the smaller is the larger one, scaled and rounded to whole pixels."""
    (width, height), (large_width, large_height) = sorted([first, second], key=lambda size: size[0] * size[1])
    across = abs(large_width * height / large_height - width)
    down = abs(large_height * width / large_width - height)
    stretched = abs(width * large_height / (height * large_width) - 1)
    return min(across, down) <= 1 and stretched <= MOST_STRETCHED


def placed_outline(thing: AnnotatedObject, divisor: np.ndarray, box: np.ndarray, tally: Tally) -> np.ndarray | None:
    """Return the outline of an object as one polygon in fractions of the image; None if it has none that fits its box.

    Args:
        divisor: width and height that coordinates count in.
        box: float64 `[2, 2]`, the object's in fractions of the image, before it is clipped.
    """
    if not thing.outline:
        return None
    points = np.concatenate(thing.outline) / divisor
    if _overlap(np.stack([points.min(0), points.max(0)]), box) < LEAST_OVERLAP:
        tally.changed["outlines that do not fit their box (the box is written)"].append(thing.source)
        return None
    rings = [clipped_ring(ring / divisor) for ring in thing.outline]
    rings = [ring for ring in rings if len(ring) > 2 and area_of(ring) > 0]
    return joined_ring(rings) if rings else None


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """IoU of two boxes `[2, 2]`."""
    sides = np.minimum(first[1], second[1]) - np.maximum(first[0], second[0])
    shared = sides.clip(0).prod()
    union = (first[1] - first[0]).prod() + (second[1] - second[0]).prod() - shared
    return float(shared / union) if union > 0 else 0.0


def label_texts(
    placed: Mapping[Path, Sequence[PlacedObject]], names: Sequence[str], tally: Tally, *, boxes: bool
) -> dict[Path, str]:
    """Make the text of each image's label file: polygons if any object has one, unless `boxes` are wanted."""
    classes = {name: number for number, name in enumerate(names)}
    polygons = not boxes and any(thing.outline is not None for objects in placed.values() for thing in objects)
    texts: dict[Path, str] = {}
    for path, objects in placed.items():
        lines = []
        for thing in objects:
            if not polygons:
                values = np.concatenate([thing.box.mean(0), thing.box[1] - thing.box[0]])
            elif thing.outline is not None:
                values = thing.outline.ravel()
            else:
                values = _corners(thing.box).ravel()
                tally.changed["objects without an outline, written as rectangles"].append(f"one in {path.name}")
            numbers = " ".join(f"{value:.6f}" for value in values)
            lines.append(f"{classes[thing.name]} {numbers}\n")
        texts[path] = "".join(lines)
    return texts


def _corners(box: np.ndarray) -> np.ndarray:
    """The four corners of a box `[2, 2]` as `[4, 2]`, in turn."""
    (left, top), (right, bottom) = box
    corners: np.ndarray = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
    return corners


def write_dataset(output: Path, labels: Mapping[Path, str], validation: set[Path], names: Sequence[str]) -> None:
    """Write images, labels and data.yaml: the whole folder or nothing."""
    temporary = output.with_name(f".{output.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        splits: dict[str, str] = {}
        for image, text in labels.items():
            split = "val" if image in validation else "train"
            splits[split] = f"images/{split}"
            labels_folder = temporary / "labels" / split
            images_folder = temporary / "images" / split
            labels_folder.mkdir(parents=True, exist_ok=True)
            images_folder.mkdir(parents=True, exist_ok=True)
            (labels_folder / f"{image.stem}.txt").write_text(text, encoding="utf-8")
            shutil.copyfile(image, images_folder / image.name)
        content = {"path": str(output.resolve()), **splits, "names": list(names)}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (temporary / "data.yaml").write_text(text, encoding="utf-8")
        temporary.rename(output)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
