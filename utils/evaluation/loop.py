"""The one evaluation loop: a runner and a dataset → AP, precision, recall, times."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from utils.core import distributed
from utils.core.device import sent
from utils.core.files import distinct_names, refuse_overwrite, write_text
from utils.core.tasks import AP_CONFIDENCE, DETECT, SEGMENT, Prediction, Task
from utils.evaluation.batch import Batch, RaggedBatch
from utils.evaluation.coco import CocoEvaluation
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.dataset import ImageDataset, make_loader
from utils.evaluation.detector import Detector, Found, OverlappingDetector, awaited, detections, in_images, on_device
from utils.evaluation.images import label_file, unlabelled
from utils.evaluation.input_plan import InputPlan, check_shapes, mask_stride
from utils.evaluation.masks import Masks, mask_overlaps, run_lengths
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.nms import non_max_suppression
from utils.evaluation.results import EvalResult, averages, per_class_results, table

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

    from utils.runners.base import Runner

logger = logging.getLogger(__name__)
Row = TypeVar("Row")

ELSEWHERE = "choose another --name or --project"


@dataclass(frozen=True)
class EvalConfig:
    """How to evaluate.

    Attributes:
        imgsz: longer side of the input in pixels; None takes the network's own, or 640.
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
    """

    imgsz: int | None = None
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
) -> EvalResult:
    """Evaluate a network on a split of a dataset.

    Several processes evaluate their parts of every batch; the main one computes AP of all and writes.

    Args:
        out_dir: where `save_txt` (`labels/`) and `save_json` (`{name}_predictions.json`) write.
        progress: show a progress bar.
        name: of the network, for file names.

    Raises:
        InputError: the network's inputs, outputs or classes do not fit the dataset or `config`.
        DataError: images, labels or annotations cannot be used.
    """
    start = time.perf_counter()
    plan = InputPlan.of(runner, config.imgsz, config.batch_size, rect=config.rect)
    kind = OverlappingDetector if config.overlap else Detector
    detector = kind(runner, data, conf_thres=config.conf_thres, iou_thres=config.nms_iou(runner.task),
                        max_det=config.max_det, single_cls=config.single_cls,
                        upsample_masks=config.upsample_masks)  # fmt: skip
    stride = mask_stride(runner, plan.imgsz, upsampled=config.upsample_masks)
    loader = make_loader(data, config.split, imgsz=plan.imgsz, batch_size=plan.batch_size, together=plan.together,
                         stride=runner.stride, rect=config.rect, pad=config.pad, workers=config.workers,
                         single_cls=config.single_cls, limit=config.limit, mask_stride=stride,
                         progress=progress, share=True)  # fmt: skip
    dataset: ImageDataset = loader.dataset
    if not dataset.labelled and not config.save_json:
        raise unlabelled(config.split, dataset.images[0].path)
    outputs = _Outputs(config, data, out_dir, name, [image.path for image in dataset.images], stride is not None)
    if config.rect:
        check_shapes(runner, dataset.shapes)
    statistics = _run(loader, detector, outputs, progress and distributed.is_main())
    not_finite = int(sum(number for (number,) in distributed.all_numbers([detector.not_finite])))

    def result() -> EvalResult:
        measured_on = f"{runner.description}, {plan.describe(config.rect)}"
        return _result(start, statistics, dataset, data, config, detector, outputs, not_finite, name, measured_on)

    whole = statistics if distributed.is_main() else None
    size = plan.size(config.rect)
    return replace(distributed.from_main(result), statistics=whole, task=runner.task, input_size=size)


def _result(
    start: float, statistics: EvalStatistics, dataset: ImageDataset, data: DataConfig, config: EvalConfig,
    detector: Detector, outputs: _Outputs, not_finite: int, name: str, measured_on: str,
) -> EvalResult:  # fmt: skip
    """What follows from the detections of all images: AP, files, and the lines for the log."""
    before = time.perf_counter()
    scores, mask_scores = statistics.scores(), statistics.mask_scores()
    statistics.seconds["metrics"] += time.perf_counter() - before
    seen = set(statistics.paths)
    undecodable = [f"{p.path}: cannot be decoded" for p in dataset.images if p.path not in seen]
    for line in undecodable:
        logger.warning("left out: %s", line)
    coco = mask_coco = None
    if outputs.coco:
        outputs.coco.save(outputs.json_file)
        coco = outputs.coco.evaluate(statistics.paths, DETECT.iou_type, "pycocotools, boxes:" if mask_scores else "")
        if coco and mask_scores:
            mask_coco = outputs.coco.evaluate(statistics.paths, SEGMENT.iou_type, "pycocotools, masks:")
    precision, recall, ap50, ap = scores.mean()
    processes = distributed.world().size
    result = EvalResult(
        ap=ap, ap50=ap50, precision=precision, recall=recall,
        ap_coco=float(np.mean(scores.ap_coco)) if len(scores.classes) else 0.0,
        ap50_coco=float(np.mean(scores.ap_coco[:, 0])) if len(scores.classes) else 0.0,
        per_class=per_class_results(scores, mask_scores, data, len(statistics.paths), config.single_cls),
        images=len(statistics.paths), instances=int(scores.labels.sum()), ms=detector.milliseconds(), coco=coco,
        seconds=time.perf_counter() - start, left_out=(*dataset.left_out, *undecodable),
        measured_on=measured_on + (f", {processes} processes" if processes > 1 else ""),
        parts={**statistics.seconds, **detector.seconds()}, not_finite=not_finite,
        masks=averages(mask_scores) if mask_scores else None, mask_coco=mask_coco,
    )  # fmt: skip
    if result.mark:
        logger.warning("the network %s gives %s: its AP means nothing", name, result.mark)
    for line in table(result, per_class=config.verbose or 1 < len(result.per_class) < 50):
        logger.info(line)
    return result


class _Outputs:
    """The files that were asked for."""

    def __init__(
        self, config: EvalConfig, data: DataConfig, out_dir: Path | None, name: str, paths: Sequence[str], masks: bool
    ) -> None:
        if out_dir is None and (config.save_txt or config.save_json):
            raise ValueError("save_txt and save_json need out_dir")
        folder = out_dir or Path()
        self.text = TextWriter(folder / "labels", config.save_conf, paths) if config.save_txt else None
        self.coco: CocoEvaluation | None = None
        self.json_file = folder / f"{name}_predictions.json"
        if config.save_json:
            self.coco = CocoEvaluation(data, config.split, single_cls=config.single_cls, masks=masks)
            self.coco.check(paths)
            refuse_overwrite([self.json_file], [self.coco.file] if self.coco.file else [], ELSEWHERE)

    def add(self, batch: Batch, found: Found) -> None:
        """Take in what is detected in a batch."""
        if not (self.text or self.coco):
            return
        for index, (path, rows) in enumerate(zip(batch.paths, found.rows, strict=True)):
            rows, size = rows.cpu(), batch.shapes[index][0]
            if self.text:
                self.text.add(path, rows, size)
            if self.coco:
                masks = None if found.masks is None else run_lengths(found.masks, index, batch.shapes[index])
                self.coco.add(path, rows, masks)


class TextWriter:
    """`folder/{image's stem}.txt`: lines of `class cx cy w h [score]`, as fractions of the image, as upstream's.

    An image without detections gets no file. Of several images with one stem the later ones get a number.
    """

    def __init__(self, folder: Path, with_scores: bool, paths: Sequence[str]) -> None:
        """Write into `folder`; `paths` are the images that will come.

        Raises:
            InputError: a file would be written over the labels of one of them.
        """
        names = distinct_names(f"{Path(path).stem}.txt" for path in paths)
        self._files = {path: folder / name for path, name in zip(paths, names, strict=True)}
        self._with_scores = with_scores
        refuse_overwrite(self._files.values(), map(label_file, paths), ELSEWHERE)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, path: str, found: Tensor, size: tuple[int, int]) -> None:
        """Write one image's detections `[n, 6]` (xyxy in pixels, score, class); `size` is its (height, width)."""
        height, width = size
        lines = []
        for x1, y1, x2, y2, score, label in found.tolist():
            values = [label, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
            lines.append(" ".join(f"{value:g}" for value in values + [score] * self._with_scores) + "\n")
        if lines:
            write_text(self._files[path], "".join(lines))


def _run(loader: DataLoader[Any], detector: Detector, outputs: _Outputs, progress: bool) -> EvalStatistics:
    from tqdm import tqdm

    statistics = EvalStatistics(correct_masks=None if loader.dataset.mask_stride is None else [])
    ends: list[tuple[int, int]] = []  # of the rows of each batch
    bar = tqdm(total=sum(map(len, loader.batch_sampler)), desc="evaluating", unit="image", disable=not progress)
    with torch.inference_mode(), bar:
        batches = awaited(on_device(loader, detector.device), statistics.seconds)
        for batch, found in detections(batches, detector):
            if found is not None:
                clock = time.perf_counter()
                add_found(statistics, found, batch)
                outputs.add(batch, found)
                bar.update(len(batch))
                statistics.seconds["metrics"] += time.perf_counter() - clock
            ends.append((len(statistics.paths), len(outputs.coco.results) if outputs.coco else 0))
    return _of_all(statistics, outputs, ends)


def _of_all(statistics: EvalStatistics, outputs: _Outputs, ends: Sequence[tuple[int, int]]) -> EvalStatistics:
    """What all processes have found, in the order of the images, in the main one; nothing elsewhere."""
    if distributed.world().size == 1:
        return statistics
    images, results = zip(*ends, strict=True)
    whole = EvalStatistics(seconds=statistics.seconds)
    for rows, own in statistics.to_plain().items():
        whole.extend({rows: in_order(distributed.gather((own, images)))})
    if outputs.coco:
        outputs.coco.results = in_order(distributed.gather((outputs.coco.results, results)))
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


def add_predictions(statistics: EvalStatistics, prediction: Prediction, batch: Batch) -> None:
    """Take in what a network predicts for a batch, with the usual thresholds of AP.

    Args:
        prediction: in the pixels of the batch's images.
        batch: as the loader gives it.
    """
    config = EvalConfig()
    rows = non_max_suppression(prediction, config.conf_thres, config.nms_iou(prediction.task), max_det=config.max_det)
    height, width = batch.images.shape[2:]
    add_found(statistics, Found(in_images(rows, batch.shapes), Masks.of(prediction, rows, (height, width))), batch)


def add_found(statistics: EvalStatistics, found: Found, batch: Batch) -> None:
    """Take in what a network detects in a batch."""
    labels = labels_in_images(batch, found.rows.flat.device)
    overlaps = None
    if found.masks is not None and batch.masks is not None:
        overlaps = mask_overlaps(found.masks, batch.masks, found.rows, labels)
    statistics.add(found.rows, labels, batch.paths, overlaps)


def labels_in_images(batch: Batch, device: torch.device) -> RaggedBatch:
    """A batch's labels for each image: class, xyxy in the original's pixels, `[m, 5]` on `device`.

    Raises:
        ValueError: its images have no originals, see `Batch.truth`.
    """
    if batch.truth is None:
        raise ValueError("images that are put together of several have no originals, in which labels could lie")
    return RaggedBatch(sent(batch.truth.flat, device), batch.truth.counts)
