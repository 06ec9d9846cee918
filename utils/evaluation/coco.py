"""Predictions as files: text for each image, COCO JSON with the annotations' ids; and pycocotools' own AP."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.core.errors import DataError, DependencyError, QatError
from utils.core.files import distinct_names, refuse_overwrite, write_text
from utils.core.logging import warn_once
from utils.core.tasks import DETECT, SEGMENT
from utils.core.text import short_repr
from utils.evaluation.coco_file import CocoFile, CocoObject, check_partners, id_key, read_coco, sorted_ids
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.image_files import source_name
from utils.evaluation.labels import label_file
from utils.evaluation.masks import run_lengths
from utils.evaluation.split import ImageFile

if TYPE_CHECKING:
    from utils.evaluation.batch import Batch
    from utils.evaluation.config import EvalConfig
    from utils.evaluation.detector import BatchDetections

logger = logging.getLogger(__name__)

UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # COCO numbers its 80 categories up to 90 without these
COCO_CATEGORIES = [number for number in range(1, 91) if number not in UNUSED]
STATISTICS = (
    "ap",
    "ap50",
    "ap75",
    "ap_small",
    "ap_medium",
    "ap_large",
    "ar_1",
    "ar_10",
    "ar_100",
    "ar_small",
    "ar_medium",
    "ar_large",
)
PARTNER_IOU = 0.5  # of a label and the annotation of the same object
NAMED = 3  # classes in a message
ADVICE = "correct them, or move the annotations away: then only the predictions are written"


@dataclass
class Boxes:
    """Boxes with the names of their classes: left, top, width and height in pixels."""

    names: list[str] = field(default_factory=list)
    boxes: list[list[float]] = field(default_factory=list)

    def extend(self, other: Boxes) -> None:
        """Add those of another image."""
        self.names += other.names
        self.boxes += other.boxes

    def differences(self, annotations: Boxes) -> str:
        """Numbers of labels and annotations of the first classes that differ in their number, in words."""
        labels = Counter(self.names)
        others = Counter(annotations.names)
        differing = [name for name in {**labels, **others} if labels[name] != others[name]]
        if not differing:
            return "equally many of each class, in other places"
        words = [f"{name}: {labels[name]} labels, {others[name]} annotations" for name in differing[:NAMED]]
        text = "; ".join(words)
        if len(differing) > NAMED:
            text += f", and {len(differing) - NAMED} more classes"
        return text

    def are_fractions(self) -> bool:
        """True if all of them lie in 0..1."""
        return bool(self.boxes) and bool(np.array(self.boxes).max() <= 1)


def without_partner(first: Boxes, second: Boxes) -> int:
    """Number of boxes of one image that no box of the same class in the other source overlaps."""
    from pycocotools import mask as coco_masks

    if not first.names or not second.names:
        return len(first.names) + len(second.names)
    no_crowds = [0] * len(second.names)
    overlaps = coco_masks.iou(np.array(first.boxes), np.array(second.boxes), no_crowds)
    is_same_class = np.array(first.names)[:, None] == np.array(second.names)
    are_partners = is_same_class & (overlaps >= PARTNER_IOU)
    alone_in_first = ~are_partners.any(1)
    alone_in_second = ~are_partners.any(0)
    return int(alone_in_first.sum() + alone_in_second.sum())


def _numbered(entries: Mapping[int | str, dict[str, Any]]) -> dict[int | str, int]:
    """A number from 1 on for each id as it is written, in the order of the ids."""
    return {entries[key]["id"]: number for number, key in enumerate(sorted_ids(entries), 1)}


def _renumbered(entries: Mapping[int | str, dict[str, Any]], numbers: Mapping[int | str, int]) -> list[dict[str, Any]]:
    """Entries with the numbers of their ids in place of these."""
    return [{**entry, "id": numbers[entry["id"]]} for entry in entries.values()]


def _categories_by_name(content: CocoFile, data: DataConfig) -> list[int | str]:
    """The category id of each class; `DataError` for a class whose name the annotations lack."""
    by_name = {str(category["name"]): category["id"] for category in content.categories.values()}
    missing = [name for name in data.names.values() if name not in by_name]
    if missing:
        names = short_repr(list(by_name))
        raise DataError(f"{content.path} has no category {missing[0]!r}, which {data.file} names; it has {names}")
    return [by_name[name] for name in data.names.values()]


def _ordered(box: Sequence[float]) -> list[float]:
    """A box with positive width and height."""
    left, top, width, height = box
    return [min(left, left + width), min(top, top + height), abs(width), abs(height)]


class CocoEvaluation:
    """Predictions in COCO's form, and the annotations to compare them with, if there are any.

    Attributes:
        file: the annotations, or None: then a category is its class id, and an image its number or name.
        category_ids: category id of each class.
        results: path of each image → COCO's list of `image_id`, `category_id`, `bbox` (left, top, width, height in
            pixels) and `score`; for a segmentation network with a `segmentation`, too, as run lengths.
    """

    def __init__(
        self,
        data: DataConfig,
        config: EvalConfig,
        images: Sequence[ImageFile],
        json_file: Path,
        masks: bool,
    ) -> None:
        """Read the annotations of a split, before the evaluation; with `masks` each must have a segmentation.

        Raises:
            DataError: the annotations cannot be read, lack a category that the dataset names or one of the `images`,
                or have other objects than the label files.
            DependencyError: pycocotools is not installed.
            InputError: `json_file`, which `finish` writes, is the annotations.
        """
        try:
            from pycocotools.coco import COCO
        except ImportError as error:
            raise DependencyError("COCO JSON needs pycocotools; install it with: pip install pycocotools") from error
        self.file = data.annotations_of(config.split)
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.category_ids: list[int | str] = list(COCO_CATEGORIES if data.is_coco else range(data.nc))
        self._json_file = json_file
        self._masks = masks
        self._single_cls = config.single_cls
        self._coco = COCO()
        self._ids: dict[str, list[int | str]] = {}  # by the image's name without folder and suffix
        if not self.file:
            return
        refuse_overwrite([json_file], [self.file], "choose another --name or --project")
        objects = self._read(self.file, data)
        self._check_images(images)
        if not config.unlabelled:
            self._compare([image for image in images if image.labelled], objects)
        if masks:
            with self._in_one_line():
                self._read_masks(images)

    def _check_images(self, images: Sequence[ImageFile]) -> None:
        """Raise `DataError` for an image that the annotations lack, or that is there several times."""
        stems = Counter(Path(image.path).stem for image in images)
        for stem, count in stems.items():
            if count > 1 or len(self._ids.get(stem, ())) != 1:
                raise DataError(f"the image {stem} is not in {self.file}, or there are several of that name")

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[io.StringIO]:
        """Turn pycocotools' errors on odd annotations into one `DataError`; yield the text that it prints."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                yield printed
        except QatError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{self.file}: pycocotools cannot read these annotations: {reason}") from error

    def _read(self, file: Path, data: DataConfig) -> list[CocoObject]:
        """Give pycocotools the annotations, with what it relies on; return them without crowds.

        Its ids are numbers from 1 on, in the order of those that are written: it takes 0 for "no match", and cannot
        compare numbers with text.
        """
        content = read_coco(file)
        if content.broken:
            count = len(content.broken)
            raise DataError(f"{file}: {count} entries cannot be used (first: {content.broken[0]}); {ADVICE}")
        content.check_joins(advice=ADVICE)
        lost = [*content.without_image, *content.without_category]
        if lost:
            text = f"annotations of {file} have an unknown image or category and do not count (first: {lost[0]})"
            warn_once(logger, f"{len(lost)} {text}")
        self._image_numbers = _numbered(content.images)
        self._category_numbers = _numbered(content.categories)
        for image in content.images.values():
            stem = PureWindowsPath(str(image["file_name"])).stem
            self._ids.setdefault(stem, []).append(image["id"])
        annotations = []
        for number, thing in enumerate(content.objects, 1):
            annotations.append({"id": number, **self._annotation(thing, content)})
        self._coco.dataset = {
            "info": {},  # loadRes copies this one and the next
            "licenses": [],
            "images": _renumbered(content.images, self._image_numbers),
            "categories": _renumbered(content.categories, self._category_numbers),
            "annotations": annotations,
        }
        with self._in_one_line():
            self._coco.createIndex()
        self._set_categories(content, data)
        return [thing for thing in content.objects if not thing.crowd]

    def _annotation(self, thing: CocoObject, content: CocoFile) -> dict[str, Any]:
        """An annotation as pycocotools takes it; its area is that of its box if it is not written."""
        image = content.images[thing.image]
        category = content.categories[thing.category]
        box = _ordered(thing.box)
        area = thing.entry.get("area")
        if area is None:
            area = box[2] * box[3]
        return {
            "image_id": self._image_numbers[image["id"]],
            "category_id": self._category_numbers[category["id"]],
            "bbox": box,
            "area": float(area),
            "iscrowd": int(thing.crowd),
            "segmentation": thing.entry.get("segmentation"),
        }

    def _set_categories(self, content: CocoFile, data: DataConfig) -> None:
        """Find the category of each class, by name but for COCO's own; `DataError` where there is none."""
        self._category_names = {key: str(part["name"]) for key, part in content.categories.items()}
        if self._single_cls:  # any category will do, as long as the annotations have it
            self.category_ids = [category["id"] for category in content.categories.values()][:1]
        elif data.is_coco:
            written_ids = {key: category["id"] for key, category in content.categories.items()}
            self.category_ids = [written_ids.get(number, number) for number in COCO_CATEGORIES]
        else:
            self.category_ids = _categories_by_name(content, data)
        self._class_names = [self._category_name(category) for category in self.category_ids]

    def _category_name(self, category: int | str) -> str:
        """The name of a category by its id; the id itself where the annotations lack it."""
        key = id_key(category)
        return str(key) if key is None else self._category_names.get(key, str(key))

    def _compare(self, images: Sequence[ImageFile], objects: Iterable[CocoObject]) -> None:
        """Compare annotations with label files, class by class and box by box, on these images.

        A warning says which classes differ. `DataError` where more than `MOST_WITHOUT_PARTNER` of the objects have no
        partner: an object of their class in the other source, with an IoU of at least `PARTNER_IOU`.
        """
        by_image: dict[int | str | None, list[CocoObject]] = defaultdict(list)
        for thing in objects:
            by_image[thing.image].append(thing)
        labels = Boxes()
        annotations = Boxes()
        alone: list[str] = []  # the image's path for each object without a partner
        for image in images:
            image_labels = self._labels(image)
            image_annotations = self._annotated(by_image[id_key(self.image_id(image.path))])
            alone.extend(repeat(image.path, without_partner(image_labels, image_annotations)))
            labels.extend(image_labels)
            annotations.extend(image_annotations)
        if not alone:
            return
        numbers = labels.differences(annotations)
        total = len(labels.names) + len(annotations.names)
        problem = f"objects of the label files and of {self.file} have no partner of their class in the other"
        hint = "its boxes are fractions, and COCO's are pixels; " if annotations.are_fractions() else ""
        check_partners(alone, total, problem, f"{numbers}; {hint}{ADVICE}")
        warn_once(logger, f"{len(alone)} of {total} {problem} (first: {alone[0]}); {numbers}")

    def _labels(self, image: ImageFile) -> Boxes:
        """The boxes of a label file, in pixels."""
        rows: np.ndarray = image.labels.rows.astype(np.float64)
        corner = rows[:, 1:3] - rows[:, 3:] / 2
        boxes = np.concatenate([corner, rows[:, 3:]], 1) * (*image.size, *image.size)
        classes = [0 if self._single_cls else int(label) for label in rows[:, 0]]
        return Boxes([self._class_names[label] for label in classes], boxes.tolist())

    def _annotated(self, things: Sequence[CocoObject]) -> Boxes:
        """The boxes of annotations."""
        if self._single_cls:
            names = [self._class_names[0]] * len(things)
        else:
            names = [self._category_names[thing.category] for thing in things]
        return Boxes(names, [_ordered(thing.box) for thing in things])

    def _read_masks(self, images: Sequence[ImageFile]) -> None:
        """Turn the outlines of these images into run lengths, in the images' own pixels."""
        sizes = {self.image_id(image.path): image.size for image in images}
        for annotation in self._coco.dataset["annotations"]:
            size = sizes.get(annotation["image_id"])
            if size is None:
                continue
            mask = self._coco.annToRLE(annotation)
            height, width = mask["size"]
            if (width, height) != size:
                raise DataError(
                    f"{self.file}: annotation {annotation['id']}, counted from 1, is a mask of {width}x{height} "
                    f"pixels, and the image has {size[0]}x{size[1]}"
                )
            annotation["segmentation"] = mask

    def image_id(self, path: str) -> int | str:
        """The id of an image: the annotations', or else its name as upstream takes it: a number if it is one."""
        stem = Path(path).stem
        if self.file:
            return self._ids[stem][0]
        return int(stem) if stem.isdecimal() else stem

    def add(self, batch: Batch, detections: BatchDetections) -> None:
        """Take in the detections of a batch."""
        masks = detections.masks
        for index, (path, rows) in enumerate(zip(batch.paths, detections.rows, strict=True)):
            entries = [self._entry(path, row) for row in rows.tolist()]
            if masks is not None:
                segmentations = run_lengths(masks, index, batch.letterboxes[index])
                for entry, segmentation in zip(entries, segmentations, strict=True):
                    entry["segmentation"] = segmentation
            self.results[path] = entries

    def _entry(self, path: str, row: Sequence[float]) -> dict[str, Any]:
        """COCO's entry of a detection: xyxy in pixels of the image, score, class."""
        x1, y1, x2, y2, score, label = row
        box = (x1, y1, x2 - x1, y2 - y1)
        return {
            "image_id": self.image_id(path),
            "category_id": self.category_ids[int(label)],
            "bbox": [round(value, 3) for value in box],
            "score": round(score, 5),
        }

    def finish(self, paths: Sequence[str]) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        """Write the JSON; return pycocotools' statistics of boxes and of masks on images at `paths`, if it can run."""
        results = [entry for path in paths for entry in self.results[path]]
        write_text(self._json_file, json.dumps(results))
        if not self.file:
            logger.info("pycocotools: no annotations for this split, so only the predictions were written")
            return None, None
        numbers = {self._image_numbers[self.image_id(path)] for path in paths}
        annotations = self._coco.dataset["annotations"]
        has_objects = any(thing["image_id"] in numbers and not thing["iscrowd"] for thing in annotations)
        if not has_objects:
            text = "pycocotools: %s has no object on these images, so only the predictions were written"
            logger.warning(text, self.file)
            return None, None
        numbered = [self._with_numbers(entry) for entry in results]
        boxes = self._evaluate(sorted(numbers), numbered, DETECT.iou_type)
        if not self._masks:
            return boxes, None
        # the areas of results with boxes would be those of the boxes
        without_boxes = [{key: value for key, value in entry.items() if key != "bbox"} for entry in numbered]
        return boxes, self._evaluate(sorted(numbers), without_boxes, SEGMENT.iou_type)

    def _with_numbers(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A result with pycocotools' ids; 0 for a category that the annotations lack."""
        category = self._category_numbers.get(entry["category_id"], 0)
        return {**entry, "image_id": self._image_numbers[entry["image_id"]], "category_id": category}

    def _evaluate(self, images: list[int], results: list[dict[str, Any]], iou_type: str) -> dict[str, float]:
        """Pycocotools' 12 statistics on images; -1 where there is no object of a size."""
        if not results:
            return dict.fromkeys(STATISTICS, 0.0)
        from pycocotools.cocoeval import COCOeval

        with self._in_one_line() as printed:
            evaluator = COCOeval(self._coco, self._coco.loadRes(results), iou_type)
            evaluator.params.imgIds = images
            evaluator.params.useCats = int(not self._single_cls)
            evaluator.evaluate()
            evaluator.accumulate()
            evaluator.summarize()
        logger.info("pycocotools, %s:", iou_type)
        for line in printed.getvalue().splitlines():
            if line.startswith(" Average"):
                logger.info(line.replace("= -1.000", "= no objects"))
        return {name: float(value) for name, value in zip(STATISTICS, evaluator.stats, strict=True)}


class TextWriter:
    """`folder/{image's stem}.txt`: lines of `class cx cy w h [score]`, as fractions of the image, as upstream's.

    An image without detections gets no file. Of several images with one stem the later ones get a number. Frame 3 of a
    video has the file `{stem}_3.txt`.
    """

    def __init__(self, folder: Path, with_scores: bool, paths: Sequence[str]) -> None:
        """Write into `folder` of the images at `paths`; `InputError` if it would be over the labels of one of them."""
        names = distinct_names(f"{Path(source_name(path)).stem}.txt" for path in paths)
        self._files = {path: folder / name for path, name in zip(paths, names, strict=True)}
        self._with_scores = with_scores
        refuse_overwrite(self._files.values(), map(label_file, paths), "choose another --name or --project")
        folder.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        path: str,
        detections: list[list[float]],
        size: Sequence[int],
        frame: int = 0,
    ) -> None:
        """Write one image's detections `[n, 6]` (xyxy in pixels, score, class); `size` is its (height, width)."""
        file = self._file(path, frame)
        lines = [self._line(row, size) for row in detections]
        if lines:
            write_text(file, "".join(lines))
        else:
            file.unlink(missing_ok=True)  # of an earlier run

    def _file(self, path: str, frame: int) -> Path:
        """The file of an image, or of a frame of a video, counted from 1."""
        file = self._files[path]
        if not frame:
            return file
        file = file.with_stem(f"{file.stem}_{frame}")
        if file in self._files.values():
            file = file.with_stem(f"{file.stem}-2")
        return file

    def _line(self, row: Sequence[float], size: Sequence[int]) -> str:
        """The line of a detection in an image of this (height, width)."""
        x1, y1, x2, y2, score, label = row
        height, width = size
        x, y = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
        w, h = (x2 - x1) / width, (y2 - y1) / height
        line = f"{label:g} {x:g} {y:g} {w:g} {h:g}"  # one step, since a frame may have hundreds of detections
        return f"{line} {score:g}\n" if self._with_scores else f"{line}\n"
