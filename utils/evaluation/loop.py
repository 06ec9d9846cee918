"""The one evaluation loop: a runner and a dataset → AP, precision, recall, times."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from utils.core import distributed
from utils.core.device import sent
from utils.core.tasks import AP_CONFIDENCE, Prediction, Task
from utils.core.text import plural
from utils.evaluation.batch import Batch, RaggedBatch
from utils.evaluation.bootstrap import group_images
from utils.evaluation.coco import PredictionFiles
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.dataset import ImageDataset, make_loader
from utils.evaluation.detector import BatchDetections, Detector, in_images
from utils.evaluation.images import unlabelled
from utils.evaluation.input_plan import InputPlan, check_shapes, mask_stride
from utils.evaluation.masks import Masks, mask_overlaps
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.nms import non_max_suppression
from utils.evaluation.results import (
    AgreementScore,
    EvalResult,
    Reference,
    as_labels,
    per_class_results,
    result_table,
)

if TYPE_CHECKING:
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)
Row = TypeVar("Row")


@dataclass(frozen=True)
class EvalConfig:
    """How to evaluate.

    Attributes:
        imgsz: longer side of the input, or (height, width), in pixels; None takes the network's own, or 640.
        batch_size: images at a time, unless the network has a static batch.
        conf_thres, iou_thres, max_det: see `nms.non_max_suppression`; without `iou_thres` it is the task's.
        workers: processes that read images ahead.
        rect: smallest input that holds an image instead of a square; only for networks of dynamic size.
        pad: border in rectangular inference, in strides; upstream's val.py has 0.5.
        single_cls: all classes count as one.
        split: `val`, `test` or `train`.
        save_txt, save_conf, save_json: write detections, see `results.py`; save_json also runs pycocotools.
        verbose: log a row for each class.
        limit: only so many images, evenly spread.
        upsample_masks: compare masks at the input's size, see `masks.py`.
        overlap: let the network compute the next batch during NMS and matching; on a GPU. Times of parts overlap too.
        groups: which images are resampled together, see `metrics.group_images`; None: each by itself.
        unlabelled: the labels are the detections of the reference, or of the network itself where there is none.
    """

    imgsz: int | tuple[int, int] | None = None
    batch_size: int = 32
    conf_thres: float = AP_CONFIDENCE
    iou_thres: float | None = None
    max_det: int = 300
    workers: int = 8
    rect: bool = False
    pad: float = 0.5
    single_cls: bool = False
    split: str = "val"
    save_txt: bool = False
    save_conf: bool = False
    save_json: bool = False
    verbose: bool = False
    limit: int | None = None
    upsample_masks: bool = False
    overlap: bool = False
    groups: str | None = None
    unlabelled: bool = False

    def nms_iou(self, task: Task) -> float:
        """IoU of NMS for a network of this task."""
        return task.nms_iou if self.iou_thres is None else self.iou_thres


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
        progress: show a progress bar.
        name: of the network, for file names.
        reference: what the float network detects, which this one's agreement and scores are measured against.
        as_reference: keep the detections, for `EvalResult.reference`.

    Raises:
        InputError: the network's inputs, outputs or classes do not fit the dataset or `config`.
        DataError: images, labels or annotations cannot be used.
    """
    start = time.perf_counter()
    plan = InputPlan.of(runner, config.imgsz, config.batch_size, rect=config.rect)
    detector = Detector(runner, data, conf_thres=config.conf_thres, iou_thres=config.nms_iou(runner.task),
                        max_det=config.max_det, single_cls=config.single_cls, upsample_masks=config.upsample_masks,
                        overlap=config.overlap)  # fmt: skip
    stride = None if config.unlabelled else mask_stride(runner, plan.imgsz, upsampled=config.upsample_masks)
    loader = make_loader(data, config.split, imgsz=plan.imgsz, batch_size=plan.batch_size, together=plan.together,
                         stride=runner.stride, rect=config.rect, pad=config.pad, workers=config.workers,
                         single_cls=config.single_cls, limit=config.limit, mask_stride=stride,
                         progress=progress, share=True)  # fmt: skip
    dataset: ImageDataset = loader.dataset
    if not (dataset.labelled or config.save_json or config.unlabelled):
        raise unlabelled(config.split, dataset.images[0].path)
    paths = [image.path for image in dataset.images]
    groups = len(set(group_images(paths, config.groups))) if config.groups else 0
    files = PredictionFiles(config, data, out_dir, name, paths, masks=stride is not None)
    if config.rect:
        check_shapes(runner, dataset.shapes)

    statistics = EvalStatistics(correct_masks=None if stride is None else [], groups=config.groups)
    agreement = None if reference is None else EvalStatistics(groups=config.groups)
    kept: list[RaggedBatch] = []
    ends: list[tuple[int, int]] = []  # of the rows of each batch in `statistics` and in `files`
    matching = 0.0  # seconds
    bar = tqdm(total=sum(map(len, loader.batch_sampler)), desc="evaluating", unit="image",
               disable=not (progress and distributed.is_main()))  # fmt: skip
    with torch.inference_mode(), bar:
        for batch, detections in detector.detect(loader):
            clock = time.perf_counter()
            if detections is not None:
                if config.unlabelled:
                    device = detections.rows.flat.device
                    labels = reference.labels(batch.paths, device) if reference else as_labels(detections.rows)
                    batch = replace(batch, truth=labels)
                add_detections(statistics, detections, batch)
                if agreement is not None and reference is not None:
                    agreement.add(
                        detections.rows, reference.labels(batch.paths, detections.rows.flat.device), batch.paths
                    )
                if as_reference:
                    kept.append(detections.rows)
                files.add(batch, detections)
                bar.update(len(batch))
            ends.append((len(statistics.paths), len(files.coco.results) if files.coco else 0))
            matching += time.perf_counter() - clock
    own_paths = list(statistics.paths)
    statistics = _of_all_processes(statistics, files, ends)
    agreement = None if agreement is None else _of_all_processes(agreement, None, ends)
    processes = distributed.world().size
    not_finite = int(sum(number for (number,) in distributed.all_numbers([detector.not_finite])))

    def summary() -> EvalResult:
        clock = time.perf_counter()
        scores, mask_scores = statistics.scores(), statistics.mask_scores()
        seconds = {"metrics": matching + time.perf_counter() - clock, **detector.seconds()}
        decoded = set(statistics.paths)
        undecodable = [f"{path}: cannot be decoded" for path in paths if path not in decoded]
        dataset.split.undecodable.update(path for path in paths if path not in decoded)
        if undecodable:
            logger.warning("images left out: %d; the first: %s", len(undecodable), undecodable[0])
        coco, mask_coco = files.finish(statistics.paths)
        agreed = None if agreement is None else AgreementScore(agreement.scores().mean().ap, agreement.resampled())
        per_class = per_class_results(scores, mask_scores, data, len(statistics.paths), config.single_cls)
        threshold = reference.threshold if reference else scores.threshold
        result = EvalResult(
            **vars(scores.mean()),
            ap_coco=float(np.mean(scores.ap_coco)) if len(scores.classes) else 0.0,
            ap50_coco=float(np.mean(scores.ap_coco[:, 0])) if len(scores.classes) else 0.0,
            per_class=per_class,
            images=len(statistics.paths), instances=int(scores.labels.sum()), ms=detector.milliseconds(), coco=coco,
            seconds=time.perf_counter() - start, left_out=(*dataset.split.left_out, *undecodable), parts=seconds,
            measured_on=f"{runner.description}, {plan.describe(config.rect)}"
            + (f", {plural(processes, 'process')}" if processes > 1 else ""),
            not_finite=not_finite, masks=mask_scores.mean() if mask_scores else None, mask_coco=mask_coco,
            threshold=scores.threshold, f1=tuple(scores.f1.tolist()), agreement=agreed,
            groups=groups, limited=dataset.split.name != config.split,
            at=statistics.at(threshold, {one.id: one.name for one in per_class}),
        )  # fmt: skip
        if result.mark:
            logger.warning("the network %s gives %s: its AP means nothing", name, result.mark)
        for line in result_table(result, per_class=config.verbose or 1 < len(result.per_class) < 50):
            logger.info(line)
        return result

    whole = statistics if distributed.is_main() else None
    result = replace(
        distributed.from_main(summary), statistics=whole, task=runner.task, input_size=plan.size(config.rect)
    )
    return replace(result, reference=Reference.of(own_paths, kept, result.threshold)) if as_reference else result


def _of_all_processes(
    statistics: EvalStatistics, files: PredictionFiles | None, ends: Sequence[tuple[int, int]]
) -> EvalStatistics:
    """What all processes have found, in the order of the images, in the main one; nothing elsewhere."""
    if distributed.world().size == 1:
        return statistics
    images, results = zip(*ends, strict=True)
    whole = EvalStatistics(groups=statistics.groups)
    for rows, own in statistics.to_plain().items():
        whole.extend({rows: in_order(distributed.gather((own, images)))})
    if files and files.coco:
        files.coco.results = in_order(distributed.gather((files.coco.results, results)))
    return whole


def in_order(parts: Sequence[tuple[Sequence[Row], Sequence[int]]]) -> list[Row]:
    """The rows of all processes in the order in which one would have come to them.

    Args:
        parts: of each process, by rank, its rows, and how many it had after each batch.

    >>> in_order([("abe", [2, 3, 3]), ("cd", [1, 1, 2])])
    ['a', 'b', 'c', 'e', 'd']
    """
    found: list[Row] = []
    starts: Sequence[int] = [0] * len(parts)
    for ends in zip(*(after for _, after in parts), strict=True):
        for (rows, _), start, end in zip(parts, starts, ends, strict=True):
            found += rows[start:end]
        starts = ends
    return found


def detections_of(prediction: Prediction, batch: Batch) -> BatchDetections:
    """What a network detects in a batch, with the usual thresholds of AP.

    Args:
        prediction: in the pixels of the batch's images.
        batch: as the loader gives it.
    """
    config = EvalConfig()
    rows = non_max_suppression(prediction, config.conf_thres, config.nms_iou(prediction.task), max_det=config.max_det)
    height, width = batch.images.shape[2:]
    return BatchDetections(in_images(rows, batch.shapes), Masks.of(prediction, rows, (height, width)))


def add_detections(statistics: EvalStatistics, detections: BatchDetections, batch: Batch) -> None:
    """Take in what a network detects in a batch."""
    labels = labels_in_images(batch, detections.rows.flat.device)
    overlaps = None
    if detections.masks is not None and batch.masks is not None:
        overlaps = mask_overlaps(detections.masks, batch.masks, detections.rows, labels)
    statistics.add(detections.rows, labels, batch.paths, overlaps)


def labels_in_images(batch: Batch, device: torch.device) -> RaggedBatch:
    """A batch's labels for each image: class, xyxy in the original's pixels, `[m, 5]` on `device`.

    Raises:
        ValueError: its images have no originals, see `Batch.truth`.
    """
    if batch.truth is None:
        raise ValueError("images that are put together of several have no originals, in which labels could lie")
    return RaggedBatch(sent(batch.truth.flat, device), batch.truth.counts)
