"""Evaluate networks in PyTorch and turn results into report rows; the job behind `qat.py eval`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from models.quantize import checkpoint
from utils import upstream
from utils.core.device import device_name, select_device
from utils.core.run_folder import new_run
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.detector import Detector, InputPlan
from utils.evaluation.loop import EvalConfig, EvalResult, evaluate, labels_in_images
from utils.jobs.inputs import check_classes
from utils.jobs.options import EvalOptions
from utils.reports.schema import Box, Report, Row, Sample, versions
from utils.reports.tables import terminal_table
from utils.runners.pytorch import TorchRunner

if TYPE_CHECKING:
    import torch
    from torch import nn

    from utils.evaluation.data_yaml import DataConfig
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

SAMPLE_SCORE = 0.25  # detections below it are not drawn


class Measurer:
    """Evaluates networks on one dataset's val split, all in the same way."""

    def __init__(self, data: DataConfig, device: torch.device, config: EvalConfig) -> None:
        self._data, self._device, self._config = data, device, config

    def measure(self, model: nn.Module, name: str, out_dir: Path | None = None) -> EvalResult:
        """Evaluate `model` as it is; `name` is for the log and for files in `out_dir`."""
        logger.info("evaluating %s", name)
        with TorchRunner(model, self._device) as runner:
            return evaluate(runner, self._data, self._config, out_dir=out_dir, name=name)

    def row(self, stage: str, file: str | Path, result: EvalResult | None, seconds: float) -> Row:
        """A report row; without a result its scores are unknown."""
        return Row(
            stage=stage,
            file=str(file),
            ap=result.ap if result else None,
            ap50=result.ap50 if result else None,
            precision=result.precision if result else None,
            recall=result.recall if result else None,
            seconds=seconds,
            device=device_name(self._device),
            versions=versions(),
            size_bytes=Path(file).stat().st_size,
            ms_per_image=result.ms["inference"] if result else None,
            measured_on="; ".join(filter(None, (result.measured_on, result.mark))) if result else "not evaluated",
            ap_with=result.mark if result else "",
        )

    def samples(self, models: Mapping[str, nn.Module], count: int = 4) -> list[Sample]:
        """What each of `models` (by stage) detects on a few images, evenly spread over the split."""
        samples: dict[str, Sample] = {}
        for stage, model in models.items():
            with TorchRunner(model, self._device) as runner:
                for path, boxes, truth in self._detections(runner, count):
                    samples.setdefault(path, Sample(path, {}, truth)).predictions[stage] = boxes
        return list(samples.values())

    def _detections(self, runner: Runner, count: int) -> Iterator[tuple[str, list[Box], list[Box]]]:
        """Path, detections and labels of each image."""
        import torch

        config, names = self._config, self._data.names
        detector = Detector(runner, self._data, conf_thres=SAMPLE_SCORE, iou_thres=config.iou_thres)
        plan = InputPlan.of(runner, config.imgsz, count)
        loader = make_loader(
            self._data, config.split, imgsz=plan.imgsz, batch_size=count, stride=runner.stride, workers=0, limit=count
        )
        for images, targets, paths, shapes in loader:
            labels = labels_in_images(targets, images.shape, shapes, torch.device("cpu"))
            for path, found, truth in zip(paths, detector(images, shapes), labels, strict=True):
                yield (
                    path,
                    [Box((a, b, c, d), names[int(kind)], score) for a, b, c, d, score, kind in found.tolist()],
                    [Box((a, b, c, d), names[int(kind)]) for kind, a, b, c, d in truth.tolist()],
                )


@contextmanager
def without_tables() -> Iterator[None]:
    """Leave the evaluation's own tables out of the log: a run of many evaluations reports them itself."""
    log = logging.getLogger("utils.evaluation.loop")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def evaluate_checkpoint(options: EvalOptions, command: str) -> Report:
    """Evaluate a float or quantized checkpoint on the val split; the report also goes to the run folder.

    Raises:
        InputError: or one of its kinds: the checkpoint or the dataset cannot be used, or they do not fit each other.
    """
    began = time.perf_counter()
    config = EvalConfig(
        imgsz=options.imgsz, batch_size=options.batch_size, conf_thres=options.conf_thres, iou_thres=options.iou_thres,
        workers=options.workers, save_json=options.save_json,
    )  # fmt: skip
    source: checkpoint.QuantizedCheckpoint | upstream.FloatCheckpoint
    if checkpoint.kind(options.weights) == "quantized":
        source = checkpoint.load(options.weights)
        model, stage = source.model, str(source.extra.get("stage", "quantized"))
    else:
        source = upstream.load_float(options.weights)
        model, stage = upstream.call_fused(upstream.fuse(source.model)), "float"
    data = load_data(options.data)
    data.paths("val")
    check_classes(options.weights, source.names, data)
    device = select_device(options.device)
    measurer = Measurer(data, device, config)
    report = Report(command, data=str(options.data), title="YOLOv9 evaluation")
    with new_run(options.project, options.name, options.exist_ok) as folder:
        result = measurer.measure(model, Path(options.weights).stem, folder)
        report.add(measurer.row(stage, options.weights, result, time.perf_counter() - began))
        if result.coco:
            report.notes.append(f"pycocotools: {', '.join(f'{key} {value:.4f}' for key, value in result.coco.items())}")
            logger.info("%s", report.notes[-1])
        path = report.save(folder / "report.json")
    logger.info("\n%s\nreport: %s", terminal_table(report), path)
    return report
