"""The one evaluation loop: a runner and a dataset → AP, precision, recall, times."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from utils.core import distributed
from utils.core.tasks import AP_CONFIDENCE, Task
from utils.core.text import plural
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.bootstrap import group_images
from utils.evaluation.coco import CocoEvaluation, TextWriter
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.dataset import ImageDataset, make_loader
from utils.evaluation.detector import Detector
from utils.evaluation.images import unlabelled
from utils.evaluation.input_plan import InputPlan, compares_masks
from utils.evaluation.masks import mask_overlaps
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.results import ClassResult, EvalResult, Reference, as_labels, result_table

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
    runner: Runner, data: DataConfig, config: EvalConfig, *, out_dir: Path | None = None, progress: bool = True,
    name: str = "model", reference: Reference | None = None, as_reference: bool = False,
) -> EvalResult:  # fmt: skip
    """Evaluate a network on a split of a dataset.

    Several processes evaluate their parts of every batch; the main one computes AP of all and writes.

    Args:
        out_dir: where `save_txt` (`labels/`) and `save_json` (`{name}_predictions.json`) write.
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
    with_masks = compares_masks(runner) and not config.unlabelled
    loader = make_loader(data, config.split, imgsz=plan.imgsz, batch_size=plan.loaded, stride=runner.stride,
                         rect=config.rect, workers=config.workers, single_cls=config.single_cls,
                         limit=config.limit, masks=with_masks, progress=progress, share=True)  # fmt: skip
    dataset: ImageDataset = loader.dataset
    paths = [image.path for image in dataset.images]
    if not (config.save_json or config.unlabelled or any(image.labelled for image in dataset.images)):
        raise unlabelled(config.split, paths[0])
    groups = len(set(group_images(paths, config.groups))) if config.groups else 0
    folder = out_dir or Path()
    text = TextWriter(folder / "labels", config.save_conf, paths) if config.save_txt else None
    json_file = folder / f"{name}_predictions.json"
    coco = CocoEvaluation(data, config, paths, json_file, with_masks) if config.save_json else None

    statistics, agreement = EvalStatistics(groups=config.groups), EvalStatistics(groups=config.groups)
    confident: dict[str, Tensor] = {}  # of each image the detections as labels, if this is to be a reference
    bar = tqdm(total=sum(map(len, loader.batch_sampler)), desc="evaluating", unit="image",
               disable=not (progress and distributed.is_main()))  # fmt: skip
    with torch.inference_mode(), bar:
        for batch in filter(len, loader):
            if len(loader) == 1:  # whose times are all that there is
                detector.warm_up(batch)
            detections = detector(batch)
            labels = batch.labels.to(detector.device)
            if reference:
                expected = RaggedBatch.of([reference.detections[path] for path in batch.paths]).to(detector.device)
                agreement.add(detections.rows, expected, batch.paths)
                labels = expected if config.unlabelled else labels
            elif config.unlabelled:
                labels = as_labels(detections.rows)
            overlaps = None
            if detections.masks and batch.masks is not None:
                overlaps = mask_overlaps(detections.masks, batch.masks, detections.rows, labels)
            statistics.add(detections.rows, labels, batch.paths, overlaps)
            if as_reference:
                confident.update(zip(batch.paths, as_labels(detections.rows.to("cpu")), strict=True))
            if coco:
                coco.add(batch, detections)
            if text:
                for path, rows, box in zip(batch.paths, detections.rows, batch.letterboxes, strict=True):
                    text.add(path, rows.tolist(), box.original)
            bar.update(len(batch))
    order = [paths[index] for indices in loader.batch_sampler.batches for index in indices]
    for of_process in (statistics, agreement):  # those of all processes in the main one, as one process comes to them
        images = dict(ChainMap(*distributed.gather(of_process.images)))
        of_process.images.clear()
        of_process.images.update((path, images[path]) for path in order if path in images)
    if coco:
        coco.results = dict(ChainMap(*distributed.gather(coco.results)))
    processes = distributed.world().size
    not_finite = sum(distributed.gather(detector.not_finite))

    def summary() -> EvalResult:
        scores = statistics.class_scores()
        mask_scores = statistics.class_scores(masks=True) if statistics.has_masks else None
        evaluated = list(statistics.images)
        lost = [path for path in paths if path not in statistics.images]
        left_out = [f"{path}: cannot be decoded" for path in lost]
        dataset.split.undecodable.update(lost)
        if lost:
            logger.warning("images left out: %d; the first: %s", len(lost), left_out[0])
        box_coco, mask_coco = coco.finish(evaluated) if coco else (None, None)
        per_class = tuple(
            ClassResult(
                **vars(scores.mean(row)), id=label, name="object" if config.single_cls else data.names[label],
                images=len(evaluated), instances=int(scores.labels[row]),
                masks=mask_scores.mean(row) if mask_scores else None,
            )
            for row, label in enumerate(scores.classes.tolist())
        )  # fmt: skip
        result = EvalResult(
            **vars(scores.mean()), per_class=per_class, images=len(evaluated), instances=int(scores.labels.sum()),
            ms=detector.milliseconds(), coco=box_coco,
            seconds=time.perf_counter() - start, left_out=(*dataset.split.left_out, *left_out),
            measured_on=f"{runner.description}, batch {plan.batch_size}, {plan.size(config.rect)}"
            + (f", {plural(processes, 'process')}" if processes > 1 else ""),
            not_finite=not_finite, masks=mask_scores.mean() if mask_scores else None, mask_coco=mask_coco,
            threshold=scores.threshold, f1=tuple(scores.f1.tolist()),
            agreement=found.mean().ap if reference and len((found := agreement.class_scores()).classes) else None,
            agreement_resampled=agreement.resampled() if reference else None,
            groups=groups, limited=dataset.split.name != config.split,
            at=statistics.at_threshold(reference.threshold if reference else scores.threshold,
                                       {of_class.id: of_class.name for of_class in per_class}),
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
