"""Evaluate networks in PyTorch and turn results into report rows; the job behind `qat.py eval`."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.quantize.checkpoint import QuantizedCheckpoint
from models.quantize.modules import rounded_weights
from utils.cli import command_line
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
from utils.jobs import evaluate_file
from utils.jobs.inputs import Inputs, from_training
from utils.jobs.open import load_checkpoint
from utils.jobs.options import EvalOptions, ValOptions
from utils.jobs.visualize import collect_samples
from utils.reports.schema import Report, Row, Sample
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

    def measure(self, model: nn.Module, name: str, *, as_reference: bool = False) -> EvalResult:
        """Evaluate `model` as it is; `name` is for the log."""
        limit = "" if self.config.limit is None else f" on up to {plural(self.config.limit, 'image')}"
        logger.info("evaluating %s%s", name, limit)
        with TorchRunner(model, self.device) as runner, rounded_weights(model):
            reference = None if as_reference else self.reference
            result = evaluate(runner, self.data, self.config, name=name, reference=reference, as_reference=as_reference)
        self.reference = result.reference if as_reference else self.reference
        return result

    def row(self, stage: str, file: str | Path, result: EvalResult | None, seconds: float) -> Row:
        """A report row; without a result its scores are unknown."""
        return evaluate_file.make_row(self.device, self.config, result, file, stage, seconds)

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
    """Evaluate a float or quantized checkpoint on the val split as `val_trt.py` does, and say what comes next.

    Raises:
        InputError: or one of its kinds: the checkpoint or the dataset cannot be used, or they do not fit each other.
    """
    source, _ = load_checkpoint(options.weights)
    options = from_training(options, source)
    names = load_data(options.data or "").names
    same = {name: getattr(options, name) for name in EvalOptions.model_fields if name in ValOptions.model_fields}
    reference = float_weights(options.weights, getattr(source, "extra", {})) if options.unlabelled else None
    with new_run(options.project, options.name, options.exist_ok, options.WRITTEN) as folder:
        known = {**same, "file": options.weights, "imgsz": [options.imgsz], "reference": reference}
        report = evaluate_file.run(ValOptions(**known), command_line(), folder)
    if not options.unlabelled:
        logger.info("\n%s", terminal_table(report))
    wrong = report.rows[-1].finds_nothing or [*source.names.values()] != [*names.values()]
    if isinstance(source, QuantizedCheckpoint):
        command = shlex.join(export_command(options.weights))
    elif wrong or any(counts.lacks_labels for counts in report.splits):
        command = WRONG
    else:
        words = ["--weights", options.weights, "--data", str(options.data), "--imgsz", size_text(options.imgsz or 640)]
        command = shlex.join(["python", "qat.py", "quantize", *words])
    logger.info("next: %s", command)
    return report
