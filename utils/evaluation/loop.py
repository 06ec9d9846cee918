"""The one evaluation loop: a runner and a dataset → AP, precision, recall, times."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from utils.core import distributed
from utils.core.tasks import DISPLAY_CONF
from utils.core.text import plural
from utils.evaluation.batch import Batch, RaggedBatch
from utils.evaluation.bootstrap import group_images
from utils.evaluation.coco import CocoEvaluation, TextWriter
from utils.evaluation.config import EvalConfig
from utils.evaluation.confusion import ConfusionMatrix
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.dataset import ImageDataset, Loader, make_loader
from utils.evaluation.detector import BatchDetections, Detector
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.labels import unlabelled
from utils.evaluation.masks import mask_overlaps
from utils.evaluation.metrics import ClassScores, EvalStatistics
from utils.evaluation.results import ClassResult, EvalResult, Measurement, Reference, as_labels, result_table

if TYPE_CHECKING:
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")


def evaluate(
    runner: Runner,
    data: DataConfig,
    config: EvalConfig,
    *,
    out_dir: Path | None = None,
    progress: bool = True,
    name: str = "model",
    reference: Reference | None = None,
    as_reference: bool = False,
) -> EvalResult:
    """Evaluate a network on a split of a dataset.

    Several processes evaluate their parts of every batch; the main one computes AP of all and writes.

    Args:
        out_dir: where `save_txt` (`labels/`) and `save_json` (`{name}_predictions.json`) write.
        reference: detections of the FP32 model, which this one's agreement and scores are measured against.
        as_reference: keep the detections, for `EvalResult.reference`.

    Raises:
        InputError: the network's inputs, outputs or classes do not fit the dataset or `config`.
        DataError: images, labels or annotations cannot be used.
    """
    start = time.perf_counter()
    plan = InputPlan.of(runner, config.imgsz, config.batch_size, rect=config.rect)
    detector = Detector(
        runner,
        data,
        conf_thres=config.conf_thres,
        iou_thres=config.nms_iou(runner.task),
        max_det=config.max_det,
        single_cls=config.single_cls,
    )
    loader = evaluation_loader(runner, data, config, plan, progress=progress)
    evaluation = Evaluation(
        loader,
        data,
        config,
        out_dir=out_dir,
        name=name,
        reference=reference,
        as_reference=as_reference,
    )
    images = sum(map(len, loader.batch_sampler))
    silent = not (progress and distributed.is_main())
    with torch.inference_mode(), tqdm(total=images, desc="evaluating", unit="image", disable=silent) as bar:
        for batch in filter(len, loader):
            if len(loader) == 1:  # whose times are all that there is
                detector.warm_up(batch)
            evaluation.update(batch, detector(batch))
            bar.update(len(batch))
    evaluation.gather()
    result = evaluation.result(measurement(runner, detector, plan, config))
    return replace(result, seconds=time.perf_counter() - start)


def evaluation_loader(
    runner: Runner,
    data: DataConfig,
    config: EvalConfig,
    plan: InputPlan,
    *,
    progress: bool,
) -> Loader:
    """The images that are evaluated, with their labels; each process loads its part of every batch."""
    with_masks = bool(runner.form.masks) and not config.unlabelled
    return make_loader(
        data,
        config.split,
        imgsz=plan.imgsz,
        batch_size=plan.loaded,
        stride=runner.stride,
        rect=config.rect,
        workers=config.workers,
        single_cls=config.single_cls,
        limit=config.limit,
        masks=with_masks,
        progress=progress,
        share=True,
    )


def measurement(
    runner: Runner,
    detector: Detector,
    plan: InputPlan,
    config: EvalConfig,
) -> Measurement:
    """Measurements beside the scores; every process calls this."""
    processes = distributed.world().size
    words = [runner.description, f"batch {plan.batch_size}", plan.size(config.rect)]
    if processes > 1:
        words.append(plural(processes, "process"))
    return Measurement(
        task=runner.task,
        input_size=plan.size(config.rect),
        measured_on=", ".join(words),
        ms=detector.milliseconds(),
        not_finite=sum(distributed.gather(detector.not_finite)),
    )


class Evaluation:
    """Detections and labels, taken in batch by batch, and the scores and files that follow from them.

        evaluation = Evaluation(loader, data, config)
        for batch in loader:
            evaluation.update(batch, detector(batch))
        evaluation.gather()
        result = evaluation.result(measurement(...))

    Another score is taken in by `update`, brought together by `gather`, and added to the result by `_scored`.

    Attributes:
        statistics: of detections against labels, image by image.
        agreement: of detections against the reference's; empty without a reference.
    """

    def __init__(
        self,
        loader: Loader,
        data: DataConfig,
        config: EvalConfig,
        *,
        out_dir: Path | None = None,
        name: str = "model",
        reference: Reference | None = None,
        as_reference: bool = False,
    ) -> None:
        """See `evaluate` for the arguments.

        Raises:
            DataError: no image has a label file, where labels are needed; or COCO's annotations cannot be used.
            InputError: a file that will be written is one that is read.
        """
        self._data = data
        self._config = config
        self._name = name
        self._reference = reference
        self._as_reference = as_reference
        self._dataset: ImageDataset = loader.dataset
        images = self._dataset.images
        self._paths = [image.path for image in images]
        self._order = [self._paths[index] for indices in loader.batch_sampler.batches for index in indices]
        has_labels = any(image.labelled for image in images)
        if not (has_labels or config.save_json or config.unlabelled):
            raise unlabelled(config.split, self._paths[0])
        self._groups = 0
        if config.groups:
            self._groups = len(set(group_images(self._paths, config.groups)))
        self.statistics = EvalStatistics(groups=config.groups, agreement=config.unlabelled)
        self.agreement = EvalStatistics(groups=config.groups, agreement=True)
        self._confusion = ConfusionMatrix(1 if config.single_cls else data.nc) if config.curves else None
        self._confident: dict[str, Tensor] = {}  # path of each image of this process → its detections as labels
        folder = out_dir or Path()
        self._text: TextWriter | None = None
        if config.save_txt:
            self._text = TextWriter(folder / "labels", config.save_conf, self._paths)
        self._coco: CocoEvaluation | None = None
        if config.save_json:
            json_file = folder / f"{name}_predictions.json"
            self._coco = CocoEvaluation(data, config, images, json_file, self._dataset.masks)

    def update(self, batch: Batch, detections: BatchDetections) -> None:
        """Take in the detections of a batch that is not empty."""
        rows = detections.rows
        labels = batch.labels.to(rows.flat.device)
        if self._config.unlabelled and not self._reference:
            labels = as_labels(rows)
        if self._reference:
            expected = RaggedBatch.of([self._reference.detections[path] for path in batch.paths])
            expected = expected.to(rows.flat.device)
            self.agreement.add(rows, expected, batch.paths)
            if self._config.unlabelled:
                labels = expected
        overlaps = None
        if detections.masks and batch.masks is not None:
            overlaps = mask_overlaps(detections.masks, batch.masks, rows, labels)
        self.statistics.add(rows, labels, batch.paths, overlaps)
        if self._confusion:
            self._confusion.add(rows, labels)
        if self._as_reference:
            self._confident.update(zip(batch.paths, as_labels(rows.to("cpu")), strict=True))
        self._write(batch, detections)

    def gather(self) -> None:
        """Bring together the results of all processes, in the order of one process; every process calls this."""
        for statistics in (self.statistics, self.agreement):
            images = of_all_processes(statistics.images)
            statistics.images.clear()
            statistics.images.update((path, images[path]) for path in self._order if path in images)
        if self._coco:
            self._coco.results = of_all_processes(self._coco.results)
        if self._confusion:
            self._confusion.counts = np.sum(distributed.gather(self._confusion.counts), axis=0)

    def result(self, how: Measurement) -> EvalResult:
        """The scores, in every process; the main one computes and logs them, and alone has `EvalResult.statistics`.

        Raises:
            DataError: no image could be decoded.
        """
        result = distributed.from_main(partial(self._scored, how))
        return replace(
            result,
            statistics=self.statistics if distributed.is_main() else None,
            reference=Reference(result.threshold, self._confident) if self._as_reference else None,
        )

    def _write(self, batch: Batch, detections: BatchDetections) -> None:
        """Take in a batch for text files and COCO's JSON, where these are written."""
        if self._coco:
            self._coco.add(batch, detections)
        if self._text:
            for path, rows, box in zip(batch.paths, detections.rows, batch.letterboxes, strict=True):
                self._text.add(path, rows.tolist(), box.original)

    def _scored(self, how: Measurement) -> EvalResult:
        """The scores of all images; writes COCO's JSON, and logs the table."""
        result = self._with_threshold(self._of_boxes(how))
        if self.statistics.has_masks:
            result = self._with_masks(result)
        if self._coco:
            result = self._with_coco(result, self._coco)
        if self._reference:
            result = self._with_agreement(result)
        if self._confusion:
            result = self._with_curves(result, self._confusion)
        self._log(result)
        return result

    def _of_boxes(self, how: Measurement) -> EvalResult:
        """AP, precision and recall of boxes, of all classes and of each; images left out are logged."""
        scores = self.statistics.class_scores()
        per_class = [self._class_result(scores, row) for row in range(len(scores.classes))]
        result = EvalResult(
            **vars(scores.mean()),
            **vars(how),
            per_class=tuple(per_class),
            images=len(self.statistics.images),
            instances=int(scores.labels.sum()),
            left_out=self._left_out(),
        )
        limited = self._dataset.split.name != self._config.split
        f1 = tuple(scores.f1.tolist())
        return replace(result, groups=self._groups, limited=limited, threshold=scores.threshold, f1=f1)

    def _class_result(self, scores: ClassScores, row: int) -> ClassResult:
        """The scores of the class in a row of `scores`."""
        label = int(scores.classes[row])
        return ClassResult(
            **vars(scores.mean(row)),
            id=label,
            name="object" if self._config.single_cls else self._data.names[label],
            images=len(self.statistics.images),
            instances=int(scores.labels[row]),
        )

    def _left_out(self) -> tuple[str, ...]:
        """A line for each image that cannot be used; the split counts those that could not be decoded from here on."""
        undecodable = [path for path in self._paths if path not in self.statistics.images]
        self._dataset.split.undecodable.update(undecodable)
        lines = [f"{path}: cannot be decoded" for path in undecodable]
        if lines:
            logger.warning("images left out: %d; the first: %s", len(lines), lines[0])
        return (*self._dataset.split.left_out, *lines)

    def _with_threshold(self, result: EvalResult) -> EvalResult:
        """Add precision and recall at the reference's threshold, or at the network's own without a reference."""
        threshold = self._reference.threshold if self._reference else result.threshold
        names = {row.id: row.name for row in result.per_class}
        return replace(result, at=self.statistics.at_threshold(threshold, names))

    def _with_masks(self, result: EvalResult) -> EvalResult:
        """Add AP, precision and recall of masks, of all classes and of each."""
        scores = self.statistics.class_scores(masks=True)
        per_class = tuple(replace(row, masks=scores.mean(number)) for number, row in enumerate(result.per_class))
        return replace(result, masks=scores.mean(), per_class=per_class)

    def _with_coco(self, result: EvalResult, coco: CocoEvaluation) -> EvalResult:
        """Write the JSON, and add pycocotools' statistics of it."""
        boxes, masks = coco.finish(list(self.statistics.images))
        return replace(result, coco=boxes, mask_coco=masks)

    def _with_agreement(self, result: EvalResult) -> EvalResult:
        """Add AP against the reference's detections; None where it detects nothing."""
        scores = self.agreement.class_scores()
        ap = scores.mean().ap if len(scores.classes) else None
        result = replace(result, agreement=ap, agreement_resampled=self.agreement.resampled())
        return replace(result, disagreements=self.agreement.disagreements(DISPLAY_CONF))

    def _with_curves(self, result: EvalResult, confusion: ConfusionMatrix) -> EvalResult:
        """Add the curves and the confusion matrix."""
        names = {row.id: row.name for row in result.per_class}
        classes = ["object"] if self._config.single_cls else list(self._data.names.values())
        return replace(result, curves=self.statistics.class_curves(names, classes, confusion.counts))

    def _log(self, result: EvalResult) -> None:
        """Log the table, and a warning where the network gives no numbers."""
        if result.mark:
            logger.warning("the model %s gives %s: its AP is not meaningful", self._name, result.mark)
        few_classes = 1 < len(result.per_class) < 50
        for line in result_table(result, per_class=self._config.verbose or few_classes):
            logger.info(line)


def of_all_processes(values: Mapping[str, Thing]) -> dict[str, Thing]:
    """Put together the values that each process has for its images, by path, in every process."""
    parts: Sequence[dict[str, Thing]] = distributed.gather(dict(values))
    return dict(ChainMap(*parts))
