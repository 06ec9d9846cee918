"""Predictions as files: text for each image, COCO JSON with the annotations' ids; and pycocotools' own AP."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.errors import DataError, DependencyError, QatError
from utils.core.files import distinct_names, read_json, refuse_overwrite, write_text
from utils.core.tasks import DETECT, SEGMENT
from utils.core.text import short_repr
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.images import label_file, source_name
from utils.evaluation.masks import run_lengths

if TYPE_CHECKING:
    from utils.evaluation.batch import Batch
    from utils.evaluation.config import EvalConfig
    from utils.evaluation.detector import BatchDetections

logger = logging.getLogger(__name__)

UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # COCO numbers its 80 categories up to 90 without these
COCO_CATEGORIES = [number for number in range(1, 91) if number not in UNUSED]
STATISTICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large",
              "ar_1", "ar_10", "ar_100", "ar_small", "ar_medium", "ar_large")  # fmt: skip


class CocoEvaluation:
    """Predictions in COCO's form, and the annotations to compare them with, if there are any.

    Attributes:
        file: the annotations, or None: then a category is its class id, and an image its number or name.
        category_ids: category id of each class.
        results: of each image by path, COCO's list of `image_id`, `category_id`, `bbox` (left, top, width, height in
            pixels) and `score`; of a segmentation network with a `segmentation`, too, as run lengths.
    """

    def __init__(
        self, data: DataConfig, config: EvalConfig, paths: Sequence[str], json_file: Path, masks: bool
    ) -> None:
        """Read the annotations of a split, before the evaluation; with `masks` each must have a segmentation.

        Raises:
            DataError: the annotations cannot be read, or lack a category that the dataset names or one of the images
                at `paths`.
            DependencyError: pycocotools is not installed.
            InputError: `json_file`, which `finish` writes, is the annotations.
        """
        try:
            from pycocotools.coco import COCO
        except ImportError as error:
            raise DependencyError("COCO JSON needs pycocotools; install it with: pip install pycocotools") from error
        self.file = data.annotations_of(config.split)
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.category_ids = COCO_CATEGORIES if data.is_coco else list(range(data.nc))
        self._json_file, self._masks, self._single_cls, self._coco = json_file, masks, config.single_cls, COCO()
        self._ids: dict[str, list[int]] = {}  # by the image's name without folder and suffix
        if self.file:
            refuse_overwrite([json_file], [self.file], "choose another --name or --project")
            with self._in_one_line():
                self._read(self.file, data)
            stems = Counter(Path(path).stem for path in paths)
            if wrong := [stem for stem in stems if len(self._ids.get(stem, ())) != 1 or stems[stem] > 1]:
                raise DataError(f"the image {wrong[0]} is not in {self.file}, or there are several of that name")

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[io.StringIO]:
        """Make one `DataError` of what pycocotools raises on other annotations; yields what it prints."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                yield printed
        except QatError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{self.file}: pycocotools cannot read these annotations: {reason}") from error

    def _read(self, file: Path, data: DataConfig) -> None:
        """Fill in what pycocotools relies on, and let it read boxes and masks now, not after the evaluation."""
        content = read_json(file, "expected COCO's annotations", DataError)
        annotations = content["annotations"]
        for number, annotation in enumerate(annotations, 1):
            _, _, width, height = annotation["bbox"]
            annotation["id"] = number  # pycocotools takes the id 0 for "no match"
            annotation.setdefault("iscrowd", 0)
            annotation.setdefault("area", width * height)
        for image in content["images"]:
            self._ids.setdefault(Path(image["file_name"]).stem, []).append(image["id"])
        self._coco.dataset = {"info": {}, "licenses": [], **content}  # loadRes copies both
        self._coco.createIndex()
        for annotation in annotations if self._masks else ():
            if annotation["image_id"] in self._coco.imgs:
                annotation["segmentation"] = self._coco.annToRLE(annotation)
        if self._single_cls:  # any category will do, as long as the annotations have it
            self.category_ids = [content["categories"][0]["id"]]
        elif not data.is_coco:
            by_name = {str(category["name"]): category["id"] for category in content["categories"]}
            if missing := [name for name in data.names.values() if name not in by_name]:
                known = short_repr(list(by_name))
                raise DataError(f"{file} has no category {missing[0]!r}, which {data.file} names; it has {known}")
            self.category_ids = [by_name[name] for name in data.names.values()]

    def image_id(self, path: str) -> int | str:
        """The id of an image: the annotations', or else its name as upstream takes it: a number if it is one."""
        stem = Path(path).stem
        return self._ids[stem][0] if self.file else int(stem) if stem.isdecimal() else stem

    def add(self, batch: Batch, detections: BatchDetections) -> None:
        """Take in what is detected in a batch."""
        for index, (path, rows) in enumerate(zip(batch.paths, detections.rows, strict=True)):
            masks = detections.masks
            coded = [] if masks is None else run_lengths(masks, index, batch.letterboxes[index])
            entries = self.results[path] = []
            for number, (x1, y1, x2, y2, score, label) in enumerate(rows.tolist()):
                entries.append({
                    "image_id": self.image_id(path), "category_id": self.category_ids[int(label)],
                    "bbox": [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)], "score": round(score, 5),
                    **({"segmentation": coded[number]} if coded else {}),
                })  # fmt: skip

    def finish(self, paths: Sequence[str]) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        """Write the JSON; return pycocotools' statistics of boxes and of masks on images at `paths`, if it can run."""
        results = [entry for path in paths for entry in self.results[path]]
        write_text(self._json_file, json.dumps(results))
        if not self.file:
            logger.info("pycocotools: no annotations for this split, so only the predictions were written")
            return None, None
        boxes = self._evaluate(paths, results, DETECT.iou_type)
        # the areas of results with boxes would be those of the boxes
        without = [{key: value for key, value in entry.items() if key != "bbox"} for entry in results]
        return boxes, self._evaluate(paths, without, SEGMENT.iou_type) if self._masks else None

    def _evaluate(self, paths: Sequence[str], results: list[dict[str, Any]], iou_type: str) -> dict[str, float]:
        """Pycocotools' 12 statistics on images at `paths`."""
        if not results:
            return dict.fromkeys(STATISTICS, 0.0)
        from pycocotools.cocoeval import COCOeval

        with self._in_one_line() as printed:
            evaluator = COCOeval(self._coco, self._coco.loadRes(results), iou_type)
            evaluator.params.imgIds = [self.image_id(path) for path in paths]
            evaluator.params.useCats = int(not self._single_cls)
            evaluator.evaluate()
            evaluator.accumulate()
            evaluator.summarize()
        logger.info("pycocotools, %s:", iou_type)
        for line in printed.getvalue().splitlines():
            if line.startswith(" Average"):
                logger.info(line)
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

    def add(self, path: str, detections: list[list[float]], size: Sequence[int], frame: int = 0) -> None:
        """Write one image's detections `[n, 6]` (xyxy in pixels, score, class); `size` is its (height, width)."""
        (height, width), file, lines = size, self._files[path], []
        if frame:
            file = file.with_stem(f"{file.stem}_{frame}")
            file = file.with_stem(f"{file.stem}-2") if file in self._files.values() else file
        for x1, y1, x2, y2, score, label in detections:
            values = [label, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
            lines.append(" ".join(f"{value:g}" for value in values + [score] * self._with_scores) + "\n")
        if lines:
            write_text(file, "".join(lines))
        else:
            file.unlink(missing_ok=True)  # of an earlier run
