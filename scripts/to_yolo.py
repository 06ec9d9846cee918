#!/usr/bin/env python3
"""Convert Pascal VOC or COCO annotations to a dataset in YOLO's layout.

    python scripts/to_yolo.py Annotations/ --images JPEGImages/ --output cards        # VOC's XML files
    python scripts/to_yolo.py instances_train2017.json --images train2017/ --output coco --val 0

Writes OUTPUT/data.yaml, images/ (copies) and labels/, with boxes alone. Boxes are clipped to the image; what is left
out is counted, also the outlines of COCO's objects.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from xml.etree import ElementTree

from utils.cli import run_program
from utils.core.errors import DataError, InputError
from utils.core.files import read_json
from utils.core.options import Fraction, Options, option

# what its image may be called; width and height; of each object the class, x1, y1, x2, y2 in pixels, whether it counts
Annotation = tuple[list[str], tuple[float, float], list[tuple[str, list[float], bool]]]


class ConvertOptions(Options):
    """What is converted."""

    annotations: Path = option(..., "folder of VOC's XML files, or COCO's JSON file", positional=True, metavar="SOURCE")
    images: Path = option(..., "folder of the images", metavar="DIR")
    output: Path = option(..., "folder for the dataset, which must not exist", metavar="DIR")
    val: Fraction = option(0.2, "share of the images for validation (default: 0.2)", metavar="F")


def read_voc(folder: Path, names: list[str], counts: Counter[str]) -> Iterator[Annotation]:
    """The annotation of each XML file of a folder; difficult objects do not count."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".xml"):
        try:
            root, objects = ElementTree.parse(path).getroot(), []
            for item in root.iter("object"):
                box = [float(item.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")]
                objects.append((item.findtext("name", "").strip(), box, "1" not in item.findtext("difficult", "")))
            size = float(root.findtext("size/width") or 0), float(root.findtext("size/height") or 0)
        except (ElementTree.ParseError, ValueError) as error:
            raise DataError(f"{path} is not a Pascal VOC annotation: {error}") from error
        yield [path.stem, PureWindowsPath(root.findtext("filename", "")).stem], size, objects


def read_coco(path: Path, names: list[str], counts: Counter[str]) -> Iterator[Annotation]:
    """The annotation of each image of a COCO file; crowds do not count.

    `names` gets the classes in the order of their ids, `counts` what is left out.
    """
    content, objects = read_json(path, "expected a COCO file, or a folder of XML files", DataError), defaultdict(list)
    try:
        classes = {category["id"]: str(category["name"]) for category in content["categories"]}
        names += dict.fromkeys(classes[key] for key in sorted(classes))  # several of one name are one
        for item in content["annotations"]:
            if item["category_id"] not in classes:
                number, category = item.get("id", "without an id"), item["category_id"]
                raise DataError(f"{path}: annotation {number} is of category {category!r}, which 'categories' lacks")
            name, (x, y, w, h) = classes[item["category_id"]], map(float, item["bbox"])
            objects[item["image_id"]].append((name, [x, y, x + w, y + h], not item.get("iscrowd")))
            if item.get("segmentation"):
                counts["outlines left out (labels are boxes)"] += 1
        for image in content["images"]:
            size = float(image.get("width") or 0), float(image.get("height") or 0)
            yield [PureWindowsPath(image["file_name"]).stem], size, objects[image["id"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a COCO annotation file: {type(error).__name__}: {error}") from error


def convert_annotations(options: ConvertOptions) -> None:
    """Read everything, then write the dataset."""
    import yaml

    from utils.evaluation.images import SUFFIXES, read_header

    source, output, names, counts = options.annotations, options.output, list[str](), Counter[str]()
    for path in (source, options.images, output):
        if path.exists() == (path is output):
            raise InputError(f"{path} {'exists; --output names a new folder' if path is output else 'does not exist'}")
    paths = sorted(path for path in options.images.rglob("*") if path.suffix.lower() in SUFFIXES)
    images, annotated = {path.stem: path for path in paths}, dict[Path, Annotation]()
    if len(images) < len(paths):
        raise DataError(f"{options.images} has several images of one name; convert its folders one by one (--images)")
    read = read_voc if source.is_dir() else read_coco
    for stems, size, objects in read(source, names, counts):
        image = next((images[stem] for stem in stems if stem in images), None)
        if image in annotated:
            raise DataError(f"{source} annotates {image} twice; leave one of the annotations out")
        counts["annotations without an image left out"] += image is None
        if image is not None:
            if isinstance(found := size if min(size) > 0 else read_header(str(image)), str):
                raise DataError(f"{found}; remove it, or give its width and height in {source}")
            annotated[image] = stems, found, objects
    if not annotated:
        raise DataError(f"{source} annotates no image in {options.images}; --images names the folder of the images")
    counts["images without an annotation left out"] = len(images) - len(annotated)
    names = names or sorted({name for _, _, objects in annotated.values() for name, *_ in objects})
    validation = set(random.Random(0).sample(sorted(annotated), round(options.val * len(annotated))))
    for image, (_, size, objects) in annotated.items():
        split, lines, (width, height) = "val" if image in validation else "train", "", size
        for name, box, single in objects:
            x1, y1, x2, y2 = inside = [min(max(value, 0), size[i % 2]) for i, value in enumerate(box)]
            w, h = (x2 - x1) / width, (y2 - y1) / height
            kept = single and w > 0 and h > 0
            counts["objects"] += kept
            counts["boxes clipped"] += kept and inside != box
            counts["difficult objects and crowds left out"] += not single
            counts["boxes of no size left out"] += single and not kept
            lines += kept * f"{names.index(name)} {x1 / width + w / 2:.6f} {y1 / height + h / 2:.6f} {w:.6f} {h:.6f}\n"
        for kind in ("images", "labels"):
            (output / kind / split).mkdir(parents=True, exist_ok=True)
        (output / "images" / split / image.name).write_bytes(image.read_bytes())
        (output / "labels" / split / f"{image.stem}.txt").write_text(lines)
    splits = {path.name: f"images/{path.name}" for path in (output / "images").iterdir()}
    (output / "data.yaml").write_text(yaml.safe_dump({"path": str(output.resolve()), **splits, "names": names}))
    told = "".join(f", {what}: {count}" for what, count in counts.items() if count)
    print(f"{output}/data.yaml: images: {len(annotated)} (validation: {len(validation)}), classes: {len(names)}{told}")


if __name__ == "__main__":
    sys.exit(run_program("to_yolo.py", (ConvertOptions, convert_annotations), about=__doc__))
