"""AP of a network as a row of a report: of a stage of quantization, of a checkpoint, of an engine or an ONNX file.

A row is marked where its AP does not compare with that of other rows.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.quantize import checkpoint
from models.quantize.modules import rounded_weights
from utils.cli import command_line
from utils.core.device import device_name, select_device
from utils.core.errors import InputError
from utils.core.files import file_hash, read_onnx
from utils.core.logging import log_level
from utils.core.options import size_text
from utils.core.run_folder import new_run
from utils.core.score import AGREEMENT
from utils.core.tasks import AP_CONFIDENCE
from utils.core.text import plural, short_repr
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.evaluation.input_plan import InputPlan, has_nms, mask_frame, nms_words
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.results import EvalResult, Reference
from utils.jobs.inputs import Inputs, from_training
from utils.jobs.open import dataset_of, load_network, open_runner, torch_runner
from utils.jobs.options import EvalOptions, ValOptions
from utils.jobs.visualize import collect_samples
from utils.reports.schema import LOW_AP, SIZES, AnyAp, Report, Row, Sample
from utils.reports.tables import WRONG, export_command, terminal_table
from utils.runners.base import Runner
from utils.runners.pytorch import TorchRunner
from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote

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
        return make_row(stage, file, result, self.config, self.device, seconds)

    def samples(self, models: Mapping[str, nn.Module]) -> list[Sample]:
        """What each of `models` (by stage) detects on a few images, see `collect_samples`."""
        with ExitStack() as stack:
            runners = {stage: stack.enter_context(TorchRunner(model, self.device)) for stage, model in models.items()}
            imgsz = InputPlan.of(next(iter(runners.values())), self.config.imgsz, 1).imgsz
            return collect_samples(runners, self.data, imgsz=imgsz, split=self.config.split)


def without_tables() -> AbstractContextManager[None]:
    """Leave the evaluation's own tables out of the log: a run of many evaluations reports them itself."""
    return log_level("utils.evaluation.loop", logging.WARNING)


def run(options: EvalOptions) -> Report:
    """Evaluate a float or quantized checkpoint on the val split as `val_trt.py` does: `qat.py eval`."""
    network = load_network(options.weights, auxiliary=False)
    options = from_training(options, network.source)
    same = {name: getattr(options, name) for name in EvalOptions.model_fields if name in ValOptions.model_fields}
    reference = float_weights(options.weights, getattr(network.source, "extra", {})) if options.unlabelled else None
    runner = torch_runner(network, select_device(options.device))
    return evaluate_file(ValOptions(**{**same, "file": options.weights, "reference": reference}), runner)


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


def evaluate_file(options: ValOptions, runner: Runner | None = None) -> Report:
    """Evaluate a file, before it the float network to compare with, and write a report: `val_trt.py`.

    `runner` is the file's, where it is open already. `InputError`, or one of its kinds, if the file or the dataset
    cannot be used, or they do not fit each other. The run's folder is made when both are open.
    """
    file, float_file = Path(options.network), Path(options.reference) if options.reference else None
    with ExitStack() as stack:
        runner = stack.enter_context(runner or open_runner(file, select_device(options.device)))
        if isinstance(runner, TorchRunner):
            stack.enter_context(rounded_weights(runner.model))
        known, float_runner = {file: runner.metadata.get("data")}, None
        if float_file:
            float_runner = stack.enter_context(open_reference(float_file, file, runner))
            known[float_file] = float_runner.metadata.get("data")
        options = options.model_copy(update={"data": dataset_of(options.data, known)})
        data = load_data(options.data or "")
        config = make_config(options, data)
        report = Report(command=command_line(), title="Evaluation", data=str(options.data))
        reference, own = None, stage(file)
        folder = stack.enter_context(new_run(options.project, options.name, options.exist_ok, options.WRITTEN))
        if float_file and float_runner:
            plan = InputPlan.of(runner, config.imgsz, config.batch_size, rect=config.rect)
            float_config = replace(config, imgsz=plan.imgsz, save_json=False, save_txt=False)
            result = evaluate(float_runner, data, float_config, name=float_file.stem, as_reference=True)
            report.rows.append(
                make_row("float", float_file, result, float_config, runner.device, result.seconds, float_runner)
            )
            reference = result.reference
            own = f"float ({file.suffix[1:]})" if own == "float" else own  # a row that compares with the float row
        result = evaluate(runner, data, config, out_dir=folder, name=file.stem, reference=reference)
        report.rows.append(make_row(own, options.network, result, config, runner.device, result.seconds, runner))
        report.splits = data.counts()
        for what, coco in (("", result.coco), (" on masks", result.mask_coco)):
            if coco:
                report.notes.append(f"pycocotools{what}: AP {coco['ap']:.4f}, AP50 {coco['ap50']:.4f}")
        report.save(folder / "report.json")
    logger.info("\n%s\nresults: %s", terminal_table(report), folder)
    same_classes = not runner.names or [*runner.names.values()] == [*data.names.values()]
    logger.info("next: %s", next_command(options, report, same_classes))
    return report


def open_reference(file: Path, network: Path, runner: Runner) -> Runner:
    """The float network that `network` is compared with; `InputError` if it is quantized, or has other classes."""
    if (kind := stage(file)) != "float" and not kind.endswith(("FP16", "FP32")):
        todo = "expected the float network; export_qat.py --check compares a file with its own checkpoint"
        raise InputError(f"--reference {file} is quantized ({kind}); {todo}")
    float_runner = open_runner(file, runner.device)
    if runner.names and float_runner.names and runner.names != float_runner.names:
        first, second = (short_repr([*(one.names or {}).values()]) for one in (float_runner, runner))
        raise InputError(f"--reference {file} detects {first} and {network} {second}; give the float network of it")
    return float_runner


def make_config(options: ValOptions, data: DataConfig) -> EvalConfig:
    """How to evaluate, as `options` say: a field of `EvalConfig` that has the name of an option is that option."""
    coco = data.file.name == "coco.yaml" and data.annotations_of(options.task) is not None  # as upstream's val.py
    conf_thres = AP_CONFIDENCE if options.conf_thres is None else options.conf_thres
    if conf_thres > AP_CONFIDENCE:
        what = "AP is only comparable at --conf-thres %g; this is %g: the curve is cut off"
        logger.warning(what, AP_CONFIDENCE, conf_thres)
    same = {field.name for field in fields(EvalConfig)} & set(type(options).model_fields)
    values = {name: getattr(options, name) for name in same}
    values |= {"conf_thres": conf_thres, "split": options.task, "save_json": options.save_json or coco}
    return EvalConfig(**values)


def next_command(options: ValOptions, report: Report, same_classes: bool) -> str:
    """What comes after the evaluation of a file, or that something has to be corrected first."""
    file, suffix = options.network, Path(options.network).suffix.lower()
    if suffix == ".pt" and not report.rows[-1].stage.startswith("float"):
        return shlex.join(export_command(file))
    lacks_labels = not options.unlabelled and any(counts.lacks_labels for counts in report.splits)
    if report.rows[-1].finds_nothing or lacks_labels or not same_classes:
        return WRONG
    if suffix == ".onnx":
        return shlex.join(["scripts/generate_trt_engine.sh", file])
    if suffix in ENGINE_SUFFIXES:
        return shlex.join(["python", "scripts/benchmark_trt.py", file])
    size = ["--imgsz", size_text(options.imgsz)] if options.imgsz else []
    return shlex.join(["python", "qat.py", "quantize", "--weights", file, "--data", str(options.data), *size])


def stage(file: Path) -> str:
    """What a report calls a file: float, PTQ or QAT, ONNX, or TensorRT with its precision."""
    suffix = file.suffix.lower()
    if suffix == ".pt":
        quantized = checkpoint.summary(file)
        return str(quantized["extra"].get("stage", "PyTorch")) if quantized else "float"
    if suffix == ".onnx":
        return "ONNX" if any(node.op_type == "QuantizeLinear" for node in read_onnx(file).graph.node) else "float"
    return f"TensorRT {EngineNote.load(file).precision.upper()}".strip()


def make_row(
    stage: str, file: str | Path, result: EvalResult | None, config: EvalConfig, device: torch.device, seconds: float,
    runner: Runner | None = None,
) -> Row:  # fmt: skip
    """A report row of a file that exists and took so many seconds; without a result its scores are unknown.

    `runner` is what ran the file; None for a network in PyTorch.
    """
    values: dict[str, Any] = dict.fromkeys(("ap", "ap50", "precision", "recall", "ms_per_image"))
    values |= {"stage": stage, "file": str(file), "device": device_name(device), "seconds": seconds,
               "size_bytes": Path(file).stat().st_size, "measured_on": "not evaluated"}  # fmt: skip
    if result is None:
        return Row(**values)
    if stage == "float":
        warn_of_low_ap(result.ap)
    marks, statistics = ap_with(config, result, runner), result.statistics
    values |= {name: getattr(result, name) for name in ("ap", "ap50", "precision", "recall", "input_size")} | {
        "at_threshold": result.at,
        "ms_per_image": result.ms["inference"],
        "measured_on": "; ".join(filter(None, (result.measured_on, marks))),
        "ap_with": marks,
        "ap_by_class": {one.name: one.ap for one in result.per_class},
        "resampled_over": f"{result.groups} groups" if result.groups else "images",
    }
    if result.masks:
        values |= {f"mask_{name}": getattr(result.masks, name) for name in ("ap", "ap50", "precision", "recall")}
    if statistics:
        values |= {"ap_resampled": statistics.resampled(), "mask_ap_resampled": statistics.resampled(masks=True)}
    if result.agreement is not None:
        values |= {"agreement": result.agreement, "agreement_resampled": result.agreement_resampled}
    if result.f1:
        values |= {"best_threshold": result.threshold, "f1": tuple(result.f1[round(i * 9.99)] for i in range(101))}
    if result.coco:  # pycocotools says -1 where there are no objects of a size
        values["ap_by_size"] = {size: ap for size in SIZES if (ap := result.coco[f"ap_{size}"]) >= 0}
    return Row(**values)


def ap_with(config: EvalConfig, result: EvalResult, runner: Runner | None = None) -> str:
    """What makes this AP differ from the usual one, such as '30 images, NMS in the file'; empty for nothing."""
    usual = EvalConfig()
    side = mask_frame(runner) if runner is not None and result.masks is not None else None
    marks = {
        plural(result.images, "image"): result.limited,
        AGREEMENT: config.unlabelled,
        f"split {config.split}": config.split != usual.split,
        f"confidence {config.conf_thres:g}": config.conf_thres != AP_CONFIDENCE,
        f"NMS IoU {config.nms_iou(result.task):g}": config.nms_iou(result.task) != result.task.nms_iou,
        f"at most {plural(config.max_det, 'detection')}": config.max_det != usual.max_det,
        f"{nms_words(runner)} in the file" if runner and has_nms(runner) else "": True,
        f"masks {side}×{side}": bool(side),
        "one class": config.single_cls,
        result.mark: True,
    }
    return ", ".join(text for text, holds in marks.items() if text and holds)


def warn_of_low_ap(ap: float) -> None:
    """Say so when the AP of a float model is near 0, with the usual reasons: its INT8 network can only be as bad."""
    if ap < LOW_AP:
        logger.warning(
            "the float model has AP %.4f, so that nothing can be said of INT8; usual reasons: --imgsz or --data is not "
            "that of its training, classes are in another order, labels are missing, images are rotated, or the "
            "weights are not trained", ap,
        )  # fmt: skip


def lost_by_qat(rows: Sequence[Row]) -> str:
    """A sentence where QAT's AP or agreement is below PTQ's by two standard errors of the difference; empty elsewhere.

    The best state is chosen by the loss on training images, so that AP on validation images stays a fair score.
    """
    stages = {row.stage: row for row in rows}
    ptq, qat = stages.get("PTQ"), stages.get("QAT")
    if ptq is None or qat is None:
        return ""
    scores: tuple[AnyAp, ...] = ("ap", "agreement")
    for score in scores:
        less = qat.difference(ptq, score)
        if less and less.significant and less.value < 0:
            by_agreement = score == "agreement" or AGREEMENT in ptq.ap_with
            words = "agrees more with the float network" if by_agreement else "has the higher AP"
            return f"PTQ {words} on these validation images (QAT {less} against it): {ptq.file}"
    return ""
