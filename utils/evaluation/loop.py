"""The one evaluation loop: a runner and a dataset → AP, precision, recall, times."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
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
from utils.evaluation.input_plan import InputPlan, compares_masks
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


@dataclass(frozen=True)
class EvalConfig:
    """How to evaluate.

    Attributes:
        imgsz: longer side of the input, or (height, width), in pixels; None takes the network's own, or 640.
        batch_size: images at a time, unless the network has a static batch.
        conf_thres, iou_thres, max_det: see `nms.non_max_suppression`; without `iou_thres` it is the task's.
        workers: processes that read images ahead.
        rect: smallest input that holds an image instead of a square; only for networks of dynamic size.
        single_cls: all classes count as one.
        split: `val`, `test` or `train`.
        save_txt, save_conf, save_json: write detections, see `coco.py`; save_json also runs pycocotools.
        verbose: log a row for each class.
        limit: only so many images, evenly spread.
        groups: which images are resampled together, see `bootstrap.group_images`; None: each by itself.
        unlabelled: the labels are the detections of the reference, or of the network itself where there is none.
    """

    imgsz: int | tuple[int, int] | None = None
    batch_size: int = 32
    conf_thres: float = AP_CONFIDENCE
    iou_thres: float | None = None
    max_det: int = 300
    workers: int = 8
    rect: bool = False
    single_cls: bool = False
    split: str = "val"
    save_txt: bool = False
    save_conf: bool = False
    save_json: bool = False
    verbose: bool = False
    limit: int | None = None
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
                        max_det=config.max_det, single_cls=config.single_cls)  # fmt: skip
    masks = compares_masks(runner) and not config.unlabelled
    loader = make_loader(data, config.split, imgsz=plan.imgsz, batch_size=plan.loaded, stride=runner.stride,
                         rect=config.rect, workers=config.workers, single_cls=config.single_cls,
                         limit=config.limit, masks=masks, progress=progress, share=True)  # fmt: skip
    dataset: ImageDataset = loader.dataset
    if not (dataset.labelled or config.save_json or config.unlabelled):
        raise unlabelled(config.split, dataset.images[0].path)
    paths = [image.path for image in dataset.images]
    groups = len(set(group_images(paths, config.groups))) if config.groups else 0
    files = PredictionFiles(config, data, out_dir, name, paths, masks=masks)

    statistics = EvalStatistics(correct_masks=[] if masks else None, groups=config.groups)
    agreement = EvalStatistics(groups=config.groups)
    confident: dict[str, Tensor] = {}  # of each image the detections as labels, if this is to be a reference
    bar = tqdm(total=sum(map(len, loader.batch_sampler)), desc="evaluating", unit="image",
               disable=not (progress and distributed.is_main()))  # fmt: skip
    with torch.inference_mode(), bar:
        for batch in filter(len, loader):
            if len(loader) == 1:  # whose times are all that there is
                detector.warm_up(batch.images, batch.shapes)
            detections = detector(batch.images, batch.shapes)
            labels = batch.labels
            if reference:
                labels = reference.labels(batch.paths, detector.device)
                agreement.add(detections.rows, labels, batch.paths)
            elif config.unlabelled:
                labels = as_labels(detections.rows)
            add_detections(statistics, detections, replace(batch, labels=labels) if config.unlabelled else batch)
            if as_reference:
                confident.update(zip(batch.paths, as_labels(detections.rows.cpu()), strict=True))
            files.add(batch, detections)
            bar.update(len(batch))
    statistics, agreement = (_of_all_processes(one, dataset, loader.batch_sampler) for one in (statistics, agreement))
    if files.coco:
        files.coco.results = dict(ChainMap(*distributed.gather(files.coco.results)))
    processes = distributed.world().size
    not_finite = sum(distributed.gather(detector.not_finite))

    def summary() -> EvalResult:
        scores, mask_scores = statistics.scores(), statistics.mask_scores()
        decoded = set(statistics.paths)
        lost = [path for path in paths if path not in decoded]
        undecodable = [f"{path}: cannot be decoded" for path in lost]
        dataset.split.undecodable.update(lost)
        if undecodable:
            logger.warning("images left out: %d; the first: %s", len(undecodable), undecodable[0])
        coco, mask_coco = files.finish(statistics.paths)
        per_class = per_class_results(scores, mask_scores, data, len(statistics.paths), config.single_cls)
        threshold = reference.threshold if reference else scores.threshold
        result = EvalResult(
            **vars(scores.mean()),
            ap_coco=float(np.mean(scores.ap_coco)) if len(scores.classes) else 0.0,
            ap50_coco=float(np.mean(scores.ap_coco[:, 0])) if len(scores.classes) else 0.0,
            per_class=per_class,
            images=len(statistics.paths), instances=int(scores.labels.sum()), ms=detector.milliseconds(), coco=coco,
            seconds=time.perf_counter() - start, left_out=(*dataset.split.left_out, *undecodable),
            measured_on=f"{runner.description}, batch {plan.batch_size}, {plan.size(config.rect)}"
            + (f", {plural(processes, 'process')}" if processes > 1 else ""),
            not_finite=not_finite, masks=mask_scores.mean() if mask_scores else None, mask_coco=mask_coco,
            threshold=scores.threshold, f1=tuple(scores.f1.tolist()),
            agreement=AgreementScore(agreement.scores().mean().ap, agreement.resampled()) if reference else None,
            groups=groups, limited=dataset.split.name != config.split,
            at=statistics.at(threshold, {one.id: one.name for one in per_class}),
        )  # fmt: skip
        if result.mark:
            logger.warning("the network %s gives %s: its AP means nothing", name, result.mark)
        for line in result_table(result, per_class=config.verbose or 1 < len(result.per_class) < 50):
            logger.info(line)
        return result

    result = distributed.from_main(summary)
    return replace(
        result, statistics=statistics if distributed.is_main() else None, task=runner.task,
        input_size=plan.size(config.rect), reference=Reference(result.threshold, confident) if as_reference else None,
    )  # fmt: skip


def _of_all_processes(statistics: EvalStatistics, dataset: ImageDataset, sampler: Any) -> EvalStatistics:
    """The statistics of all processes in the main one, in the order in which one process comes to the images."""
    if distributed.world().size == 1:
        return statistics
    rows = {name: list(chain(*distributed.gather(own))) for name, own in statistics.to_plain().items()}
    paths = [dataset.images[index].path for batch in sampler.batches for index in batch]
    position = {path: place for place, path in enumerate(paths)}
    order = sorted(range(len(rows["paths"])), key=lambda row: position[rows["paths"][row]])
    whole = EvalStatistics(groups=statistics.groups)
    whole.extend({name: [of_name[row] for row in order] for name, of_name in rows.items()})
    return whole


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
    """A batch's labels for each image: class, xyxy in the original's pixels, `[m, 5]` on `device`."""
    assert batch.labels is not None, "images that are put together of several have no originals"
    return RaggedBatch(sent(batch.labels.flat, device), batch.labels.counts)
