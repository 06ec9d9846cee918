"""Evaluate networks in PyTorch and turn results into report rows; the job behind `qat.py eval`."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.quantize import checkpoint
from models.quantize.modules import rounded_weights
from utils import upstream
from utils.cli import command_line
from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.files import file_hash
from utils.core.logging import log_level
from utils.core.options import size_text
from utils.core.run_folder import new_run
from utils.core.text import plural
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.results import EvalResult, Reference
from utils.jobs.evaluate_file import make_row, warn_of_a_cut_curve, warn_of_low_ap
from utils.jobs.inputs import Inputs, check_classes, fitting_size, from_training
from utils.jobs.options import EvalOptions
from utils.jobs.visualize import collect_samples
from utils.reports.schema import LOW_AP, Report, Row, Sample
from utils.reports.tables import WRONG, export_command, terminal_table
from utils.runners.pytorch import TorchRunner

logger = logging.getLogger(__name__)
FLOAT_MODEL = "the float model"


@dataclass
class Measurer:
    """Evaluates networks on one dataset's val split, all in the same way.

    Attributes:
        reference: the detections of the float network, which those after it are compared with.
    """

    data: DataConfig
    device: torch.device
    config: EvalConfig
    reference: Reference | None = None

    @classmethod
    def of(cls, inputs: Inputs[Any], limit: int | None = None) -> Measurer:
        """Of a run's val images, `limit` at most."""
        options = inputs.options
        config = EvalConfig(imgsz=inputs.imgsz, batch_size=options.batch_size, workers=options.workers, limit=limit,
                            groups=getattr(options, "groups", None), unlabelled=options.unlabelled)  # fmt: skip
        return cls(inputs.data, inputs.device, config)

    def measure(
        self, model: nn.Module, name: str, out_dir: Path | None = None, *, as_reference: bool = False
    ) -> EvalResult:
        """Evaluate `model` as it is; `name` is for the log and for files in `out_dir`."""
        limit = "" if self.config.limit is None else f" on up to {plural(self.config.limit, 'image')}"
        logger.info("evaluating %s%s", name, limit)
        with TorchRunner(model, self.device) as runner, rounded_weights(model):
            reference = None if as_reference else self.reference
            result = evaluate(runner, self.data, self.config, out_dir=out_dir, name=name, reference=reference,
                              as_reference=as_reference)  # fmt: skip
        self.reference = result.reference if as_reference else self.reference
        if name == FLOAT_MODEL:
            warn_of_low_ap(result.score.decides)
        return result

    def row(self, stage: str, file: str | Path, result: EvalResult | None, seconds: float) -> Row:
        """A report row; without a result its scores are unknown."""
        return make_row(self.device, self.config, result, file, stage, seconds)

    def samples(self, models: Mapping[str, nn.Module]) -> list[Sample]:
        """What each of `models` (by stage) detects on a few images, see `collect_samples`."""
        with ExitStack() as stack:
            runners = {stage: stack.enter_context(TorchRunner(model, self.device)) for stage, model in models.items()}
            imgsz = InputPlan.of(next(iter(runners.values())), self.config.imgsz, 1).imgsz
            return collect_samples(runners, self.data, imgsz=imgsz, split=self.config.split)


def without_tables() -> AbstractContextManager[None]:
    """Leave the evaluation's own tables out of the log: a run of many evaluations reports them itself."""
    return log_level("utils.evaluation.loop", logging.WARNING)


def float_weights(weights: str, extra: Mapping[str, Any]) -> str:
    """The file of the float network that a checkpoint was quantized from; `InputError` if it is gone or has changed."""
    file = str(extra.get("float_weights", ""))
    if not os.path.isfile(file) or extra.get("float_sha256") not in (None, file_hash(file)):
        why = f"{file} is gone, or has changed" if file else f"{weights} names none"
        raise InputError(
            f"--unlabelled compares a network with the float one that it was quantized from, and {why}; "
            "give both: python val_trt.py INT8 --reference FLOAT.pt --unlabelled"
        )
    logger.info("labels: what %s detects, from which %s was quantized", file, weights)
    return file


def run(options: EvalOptions) -> Report:
    """Evaluate a float or quantized checkpoint on the val split; the report also goes to the run folder.

    Raises:
        InputError: or one of its kinds: the checkpoint or the dataset cannot be used, or they do not fit each other.
    """
    began = time.perf_counter()
    source: checkpoint.QuantizedCheckpoint | upstream.FloatCheckpoint
    if checkpoint.kind(options.weights) == "quantized":
        source = checkpoint.load_quantized(options.weights)
        model, stage = source.model, str(source.extra.get("stage", "quantized"))
    else:
        source = upstream.load_float(options.weights)
        model, stage = upstream.call_fused(upstream.fuse(source.model)), "float"
    options = from_training(options, source)
    config = EvalConfig(
        imgsz=fitting_size(options.imgsz or 640, source.stride), batch_size=options.batch_size,
        conf_thres=options.conf_thres, iou_thres=options.iou_thres, workers=options.workers,
        save_json=options.save_json, upsample_masks=options.upsample_masks, groups=options.groups,
        unlabelled=options.unlabelled,
    )  # fmt: skip
    data = load_data(options.data or "", options.strict_labels)
    data.paths("val")
    check_classes(options.weights, source.names, data)
    device = select_device(options.device)
    measurer = Measurer(data, device, replace(config, save_json=False))
    warn_of_a_cut_curve(config)
    report = Report(command=command_line(), data=str(options.data), title="YOLOv9 evaluation")
    float_file = float_weights(options.weights, getattr(source, "extra", {})) if options.unlabelled else ""
    with new_run(options.project, options.name, options.exist_ok, options.WRITTEN) as folder:
        if float_file:
            float_model = upstream.call_fused(upstream.fuse(upstream.load_float(float_file).model))
            result = measurer.measure(float_model, FLOAT_MODEL, as_reference=True)
            report.add(measurer.row("float", float_file, result, result.seconds))
        measurer.config = config
        result = measurer.measure(model, Path(options.weights).stem, folder)
        report.splits = data.counts()
        if stage == "float":
            warn_of_low_ap(result.score.decides)
        report.add(measurer.row(stage, options.weights, result, time.perf_counter() - began))
        for what, found in (("", result.coco), (" on masks", result.mask_coco)):
            if found:
                values = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
                report.notes.append(f"pycocotools{what}: {values}")
                logger.info("%s", report.notes[-1])
        path = folder / "report.json"
        report.save(path)
    wrong = result.score.decides < LOW_AP or [*source.names.values()] != [*data.names.values()]
    wrong = wrong or any(counts.lacks_labels for counts in report.splits)
    quantize = ["python", "qat.py", "quantize", "--weights", options.weights, "--data", str(options.data)]
    command = (
        [*quantize, "--imgsz", size_text(config.imgsz or 640)] if stage == "float" else export_command(options.weights)
    )
    step = WRONG if wrong and stage == "float" else shlex.join(command)
    logger.info("\n%s\nreport: %s\nnext: %s", terminal_table(report), path, step)
    return report
