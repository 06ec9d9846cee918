"""Predictions as files: text for each image, COCO JSON with the annotations' ids; and pycocotools' own AP."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.core.errors import DataError, DependencyError, QatError
from utils.core.files import distinct_names, read_json, refuse_overwrite, write_text
from utils.core.tasks import DETECT, SEGMENT
from utils.core.text import short_repr
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.images import label_file, source_name
from utils.evaluation.masks import run_lengths

if TYPE_CHECKING:
    from torch import Tensor

    from utils.evaluation.batch import Batch
    from utils.evaluation.detector import BatchDetections
    from utils.evaluation.loop import EvalConfig

logger = logging.getLogger(__name__)

# COCO numbers its 80 categories up to 90; these numbers were never used.
_UNUSED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_CATEGORIES = [number for number in range(1, 91) if number not in _UNUSED]

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
        self, data: DataConfig, split: str, paths: Sequence[str], *, single_cls: bool = False, masks: bool = False
    ) -> None:
        """Read the annotations of a split, before the evaluation; with `masks` each must have a segmentation.

        Raises:
            DataError: the annotations cannot be read, or lack a category that the dataset names or one of the images
                at `paths`.
            DependencyError: masks cannot be written.
        """
        self._installed = importlib.util.find_spec("pycocotools") is not None
        if masks and not self._installed:
            raise DependencyError(
                "writing masks as COCO JSON needs pycocotools; install it with: pip install pycocotools"
            )
        self.file = data.annotations_of(split)
        self.results: dict[str, list[dict[str, Any]]] = {}
        self._single_cls = single_cls
        self._coco: Any = None  # pycocotools' index of the annotations
        self._ids: dict[str, list[int]] = {}  # by the image's name without folder and suffix
        self.category_ids = COCO_CATEGORIES if data.is_coco else list(range(data.nc))
        if self.file:
            content = read_json(self.file, "expected COCO's annotations", DataError)
            with self._in_one_line():
                self._read(content, masks)
                if not data.is_coco:
                    self.category_ids = self._categories(content["categories"], data)
            stems = Counter(Path(path).stem for path in paths)
            if wrong := [stem for stem in stems if len(self._ids.get(stem, ())) != 1 or stems[stem] > 1]:
                raise DataError(f"the image {wrong[0]} is not in {self.file}, or there are several of that name")

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """Turn whatever annotations of another form make pycocotools (and us) raise into one `DataError`."""
        try:
            yield
        except QatError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{self.file}: pycocotools cannot read these annotations: {reason}") from error

    def _read(self, content: dict[str, Any], masks: bool) -> None:
        """Fill in what pycocotools relies on, and let it read boxes and masks now, not after the evaluation."""
        annotations = content["annotations"]
        for number, annotation in enumerate(annotations, 1):
            annotation["id"] = number  # pycocotools takes the id 0 for "no match"
            annotation.setdefault("iscrowd", 0)
            annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
        np.array([annotation["bbox"] for annotation in annotations], float).reshape(len(annotations), 4)
        for image in content["images"]:
            self._ids.setdefault(Path(image["file_name"]).stem, []).append(image["id"])
        if not self._installed:
            return
        from pycocotools.coco import COCO

        self._coco = COCO()
        self._coco.dataset = {"info": {}, "licenses": [], **content}  # loadRes copies both
        with contextlib.redirect_stdout(io.StringIO()):
            self._coco.createIndex()
        for annotation in annotations if masks else ():
            if annotation["image_id"] in self._coco.imgs:
                annotation["segmentation"] = self._coco.annToRLE(annotation)

    def _categories(self, categories: Sequence[dict[str, Any]], data: DataConfig) -> list[int]:
        if self._single_cls:  # any category will do, as long as the annotations have it
            return [categories[0]["id"]]
        by_name = {str(category["name"]): category["id"] for category in categories}
        missing = [name for name in data.names.values() if name not in by_name]
        if missing:
            known = short_repr(list(by_name))
            raise DataError(f"{self.file} has no category {missing[0]!r}, which {data.file} names; it has {known}")
        return [by_name[name] for name in data.names.values()]

    def image_id(self, path: str) -> int | str:
        """The id of an image: the annotations', or else its name as upstream takes it: a number if it is one."""
        stem = Path(path).stem
        return self._ids[stem][0] if self.file else int(stem) if stem.isdecimal() else stem

    def add(self, path: str, found: Tensor, masks: Sequence[dict[str, Any]] | None = None) -> None:
        """Remember one image's detections `[n, 6]`: xyxy in pixels, score, class; and run lengths of their masks."""
        image_id, entries = self.image_id(path), []
        for index, (x1, y1, x2, y2, score, label) in enumerate(found.tolist()):
            bbox = [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]
            category = self.category_ids[int(label)]
            entry = {"image_id": image_id, "category_id": category, "bbox": bbox, "score": round(score, 5)}
            entries.append(entry if masks is None else {**entry, "segmentation": masks[index]})
        self.results[path] = entries

    def results_of(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """COCO's list for images at `paths`, in their order."""
        return [entry for path in paths for entry in self.results[path]]

    def evaluate(self, paths: Sequence[str], iou_type: str, heading: str = "") -> dict[str, float] | None:
        """Compute pycocotools' 12 statistics on images at `paths`; None, and a line in the log, if it cannot run.

        Args:
            iou_type: what it compares, `bbox` or `segm`.
            heading: a line of the log in front of the statistics.

        Raises:
            DataError: pycocotools cannot read the annotations.
        """
        if not self.file:
            logger.info("pycocotools: no annotations for this split, so only the predictions were written")
            return None
        if self._coco is None:
            logger.warning("pycocotools is not installed (pip install pycocotools); only the predictions were written")
            return None
        results = self.results_of(paths)
        if not results:
            return dict.fromkeys(STATISTICS, 0.0)
        from pycocotools.cocoeval import COCOeval

        printed = io.StringIO()
        with self._in_one_line(), contextlib.redirect_stdout(printed):
            if iou_type != "bbox":  # the areas of results with boxes would be those of the boxes
                results = [{key: value for key, value in one.items() if key != "bbox"} for one in results]
            evaluator = COCOeval(self._coco, self._coco.loadRes(results), iou_type)
            evaluator.params.imgIds = [self.image_id(path) for path in paths]
            evaluator.params.useCats = int(not self._single_cls)
            evaluator.evaluate()
            evaluator.accumulate()
            evaluator.summarize()
        if heading:
            logger.info(heading)
        for line in printed.getvalue().splitlines():
            if line.startswith(" Average"):
                logger.info(line)
        return {name: float(value) for name, value in zip(STATISTICS, evaluator.stats, strict=True)}


class PredictionFiles:
    """The files of predictions that `save_txt` and `save_json` ask for: text for each image, and COCO's JSON."""

    def __init__(
        self, config: EvalConfig, data: DataConfig, out_dir: Path | None, name: str, paths: Sequence[str], masks: bool
    ) -> None:
        """Check, before the evaluation, that what is asked for can be written; `paths` are the images that will come.

        Raises:
            DataError: the annotations do not fit the dataset.
            InputError: a file would be written over one that is read.
            ValueError: there is no `out_dir` to write into.
        """
        if out_dir is None and (config.save_txt or config.save_json):
            raise ValueError("save_txt and save_json need out_dir")
        folder = out_dir or Path()
        self._masks = masks
        self.text = TextWriter(folder / "labels", config.save_conf, paths) if config.save_txt else None
        self.coco: CocoEvaluation | None = None
        self.json_file = folder / f"{name}_predictions.json"
        if config.save_json:
            self.coco = CocoEvaluation(data, config.split, paths, single_cls=config.single_cls, masks=masks)
            refuse_overwrite(
                [self.json_file], [self.coco.file] if self.coco.file else [], "choose another --name or --project"
            )

    def add(self, batch: Batch, detections: BatchDetections) -> None:
        """Take in what is detected in a batch."""
        if not (self.text or self.coco):
            return
        for index, (path, rows) in enumerate(zip(batch.paths, detections.rows, strict=True)):
            rows, size = rows.cpu(), batch.shapes[index][0]
            if self.text:
                self.text.add(path, rows.tolist(), size)
            if self.coco:
                masks = None if detections.masks is None else run_lengths(detections.masks, index, batch.shapes[index])
                self.coco.add(path, rows, masks)

    def finish(self, paths: Sequence[str]) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        """Write the JSON; return pycocotools' statistics of boxes and of masks on images at `paths`, if it can run."""
        if not self.coco:
            return None, None
        write_text(self.json_file, json.dumps(self.coco.results_of(paths)))
        boxes = self.coco.evaluate(paths, DETECT.iou_type, "pycocotools, boxes:" if self._masks else "")
        masks = self.coco.evaluate(paths, SEGMENT.iou_type, "pycocotools, masks:") if boxes and self._masks else None
        return boxes, masks


class TextWriter:
    """`folder/{image's stem}.txt`: lines of `class cx cy w h [score]`, as fractions of the image, as upstream's.

    An image without detections gets no file. Of several images with one stem the later ones get a number. Frame 3 of a
    video has the file `{stem}_3.txt`.
    """

    def __init__(self, folder: Path, with_scores: bool, paths: Sequence[str]) -> None:
        """Write into `folder`; `paths` are the images that will come.

        Raises:
            InputError: a file would be written over the labels of one of them.
        """
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
