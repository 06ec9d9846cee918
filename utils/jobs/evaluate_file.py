"""Evaluate an engine, an ONNX file or a float checkpoint, the job behind `val_trt.py`; and evaluations as report rows.

A row is marked where its AP does not compare with that of other rows.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.quantize import checkpoint
from models.quantize.modules import rounded_weights
from utils.core.device import device_name, select_device
from utils.core.errors import InputError
from utils.core.files import read_onnx
from utils.core.score import AGREEMENT
from utils.core.tasks import AP_CONFIDENCE
from utils.core.text import plural, short_repr
from utils.evaluation.data_yaml import load_data
from utils.evaluation.input_plan import InputPlan, has_nms, mask_frame, nms_words
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.results import EvalResult
from utils.jobs.open import dataset_of, open_runner
from utils.reports.schema import LOW_AP, SIZES, AnyAp, Report, Row
from utils.reports.tables import terminal_table
from utils.runners.base import Runner
from utils.runners.pytorch import TorchRunner
from utils.trt.engine_file import EngineNote

if TYPE_CHECKING:
    import torch

    from utils.jobs.options import ValOptions

logger = logging.getLogger(__name__)


def run(options: ValOptions, command: str, folder: Path) -> Report:
    """Evaluate as `options` say; the report goes to the run folder `folder`, too.

    Raises:
        InputError: or one of its kinds: the file or the dataset cannot be used, or they do not fit each other.
    """
    file = Path(options.network)
    with ExitStack() as stack:
        runner = stack.enter_context(open_runner(file, select_device(options.device)))
        if isinstance(runner, TorchRunner):
            stack.enter_context(rounded_weights(runner.model))
        known = {file: runner.metadata.get("data")}
        if options.reference:
            float_file = Path(options.reference)
            if (kind := stage(float_file)) != "float" and not kind.endswith(("FP16", "FP32")):
                todo = "expected the float network; export_qat.py --check compares a file with its own checkpoint"
                raise InputError(f"--reference {float_file} is quantized ({kind}); {todo}")
            float_runner = stack.enter_context(open_runner(float_file, runner.device))
            known[float_file] = float_runner.metadata.get("data")
            if runner.names and float_runner.names and runner.names != float_runner.names:
                first, second = (short_repr([*(one.names or {}).values()]) for one in (float_runner, runner))
                raise InputError(
                    f"--reference {float_file} detects {first} and {file} {second}; give the float network of {file}"
                )
        options = options.model_copy(update={"data": dataset_of(options.data, known)})
        data = load_data(options.data or "", options.strict_labels)
        config = make_config(options, runner)
        report = Report(command=command, title="Evaluation", data=str(options.data))
        reference, own = None, stage(file)
        if options.reference:
            plan = InputPlan.of(runner, config.imgsz, config.batch_size, rect=options.rect)
            float_config = replace(config, imgsz=plan.imgsz, save_json=False, save_txt=False)
            try:
                result = evaluate(float_runner, data, float_config, name=float_file.stem, as_reference=True)
            except InputError as error:
                raise InputError(f"--reference {float_file}: {error}") from error
            report.rows.append(make_row(float_runner, float_config, result, float_file, "float", result.seconds))
            reference = result.reference
            own = f"float ({file.suffix[1:]})" if own == "float" else own  # a row that compares with the float row
        result = evaluate(runner, data, config, out_dir=folder, name=file.stem, reference=reference)
        report.rows.append(make_row(runner, config, result, options.network, own, result.seconds))
        report.splits = data.counts()
        for what, coco in (("", result.coco), (" on masks", result.mask_coco)):
            if coco:
                report.notes.append(f"pycocotools{what}: AP {coco['ap']:.4f}, AP50 {coco['ap50']:.4f}")
        report.save(folder / "report.json")
    if reference:
        logger.info("\n%s", terminal_table(report))
    logger.info("results: %s", folder)
    return report


def make_config(options: ValOptions, runner: Runner) -> EvalConfig:
    """How to evaluate, as `options` say: a field of `EvalConfig` that has the name of an option is that option."""
    coco = not options.save_json and Path(options.data or "").name == "coco.yaml"  # as upstream's val.py
    if coco and runner.task.prototypes and importlib.util.find_spec("pycocotools") is None:
        logger.warning("pycocotools is not installed (pip install pycocotools); masks are not written as COCO JSON")
        coco = False
    names = {field.name for field in fields(EvalConfig)} & set(type(options).model_fields)
    given: dict[str, Any] = {name: getattr(options, name) for name in names} | {
        "imgsz": options.size,
        "conf_thres": AP_CONFIDENCE if options.conf_thres is None else options.conf_thres,
        "split": options.task,
        "save_json": options.save_json or coco,
    }
    config = EvalConfig(**given)
    warn_of_a_cut_curve(config)
    return config


def stage(file: Path) -> str:
    """What a report calls a file: float, PTQ or QAT, ONNX, or TensorRT with its precision.

    Raises:
        InputError: it cannot be read, or the note beside an engine is damaged.
    """
    suffix = file.suffix.lower()
    if suffix == ".pt":
        quantized = checkpoint.summary(file)
        return str(quantized["extra"].get("stage", "PyTorch")) if quantized else "float"
    if suffix == ".onnx":
        return "ONNX" if any(node.op_type == "QuantizeLinear" for node in read_onnx(file).graph.node) else "float"
    return f"TensorRT {EngineNote.load(file).precision.upper()}".strip()


def make_row(
    runner_or_device: Runner | torch.device, config: EvalConfig, result: EvalResult | None, file: str | Path,
    stage: str, seconds: float,
) -> Row:  # fmt: skip
    """A report row; without a result its scores are unknown.

    Args:
        runner_or_device: the runner that was evaluated, or the device of a network in PyTorch.
        file: what was evaluated, as the user would type it; it exists.
        seconds: wall time of the stage.
    """
    runner = runner_or_device if isinstance(runner_or_device, Runner) else None
    row = Row(
        stage=stage, file=str(file), ap=None, ap50=None, precision=None, recall=None, seconds=seconds,
        device=device_name(runner_or_device.device if isinstance(runner_or_device, Runner) else runner_or_device),
        size_bytes=Path(file).stat().st_size, ms_per_image=None, measured_on="not evaluated",
    )  # fmt: skip
    if result is None:
        return row
    if stage == "float":
        warn_of_low_ap(result.ap)
    marks = ap_with(config, result, runner)

    scores: dict[str, Any] = {
        **{name: getattr(result, name) for name in ("ap", "ap50", "precision", "recall", "input_size")},
        "at_threshold": result.at,
        "ms_per_image": result.ms["inference"],
        "measured_on": "; ".join(filter(None, (result.measured_on, marks))),
        "ap_with": marks,
        "ap_by_class": {one.name: one.ap for one in result.per_class},
        "resampled_over": f"{result.groups} groups" if result.groups else "images",
    }
    if result.masks:
        scores |= {f"mask_{name}": getattr(result.masks, name) for name in ("ap", "ap50", "precision", "recall")}
    if result.statistics:
        scores["ap_resampled"] = result.statistics.resampled()
        scores["mask_ap_resampled"] = result.statistics.mask_resampled()
    if result.f1:
        scores |= {"best_threshold": result.threshold, "f1": tuple(result.f1[round(i * 9.99)] for i in range(101))}
    if agreement := result.agreement:
        scores |= {"agreement": agreement.ap, "agreement_resampled": agreement.resampled}
    if result.coco:  # pycocotools says -1 where there are no objects of a size
        scores["ap_by_size"] = {size: ap for size in SIZES if (ap := result.coco[f"ap_{size}"]) >= 0}
    return Row(**{**row.model_dump(), **scores})


def ap_with(config: EvalConfig, result: EvalResult, runner: Runner | None = None) -> str:
    """What makes this AP differ from the usual one, such as '30 images, NMS in the file'; empty for nothing.

    `runner` is what ran the network, None for one in PyTorch.
    """
    usual = EvalConfig()
    side = mask_frame(runner) if runner is not None and result.masks is not None else None
    inside = f"{nms_words(runner)} in the file" if runner is not None and has_nms(runner) else ""
    marks = {
        plural(result.images, "image"): result.limited,
        AGREEMENT: config.unlabelled,
        f"split {config.split}": config.split != usual.split,
        f"confidence {config.conf_thres:g}": config.conf_thres != AP_CONFIDENCE,
        f"NMS IoU {config.nms_iou(result.task):g}": config.nms_iou(result.task) != result.task.nms_iou,
        f"at most {plural(config.max_det, 'detection')}": config.max_det != usual.max_det,
        inside: bool(inside),
        f"masks {side}×{side}": bool(side),
        "one class": config.single_cls,
        result.mark: bool(result.mark),
    }
    return ", ".join(text for text, holds in marks.items() if holds)


def warn_of_low_ap(ap: float) -> None:
    """Say so when the AP of a float model is near 0, with the usual reasons: its INT8 network can only be as bad."""
    if ap < LOW_AP:
        logger.warning(
            "the float model has AP %.4f, so that nothing can be said of INT8; usual reasons: --imgsz or --data is not "
            "that of its training, classes are in another order, labels are missing, images are rotated, or the "
            "weights are not trained", ap,
        )  # fmt: skip


def warn_of_a_cut_curve(config: EvalConfig) -> None:
    """Say so when the confidence threshold leaves out detections that AP counts."""
    if config.conf_thres > AP_CONFIDENCE:
        what = "AP is only comparable at --conf-thres %g; this is %g: the curve is cut off"
        logger.warning(what, AP_CONFIDENCE, config.conf_thres)


def lost_by_qat(rows: Sequence[Row]) -> str:
    """A sentence where QAT's AP or agreement is below PTQ's by two standard errors of the difference; empty elsewhere.

    The best state is chosen by the loss on training images, so that AP on validation images stays a fair score.
    """
    stages = {row.stage: row for row in rows}
    ptq, qat, agrees = stages.get("PTQ"), stages.get("QAT"), "agrees more with the float network"
    if ptq and qat:
        higher = agrees if AGREEMENT in ptq.ap_with else "has the higher AP"
        scores: dict[AnyAp, str] = {"ap": higher, "agreement": agrees}
        for score, words in scores.items():
            less = qat.difference(ptq, score)
            if less and less.significant and less.value < 0:
                return f"PTQ {words} on these validation images (QAT {less} against it): {ptq.file}"
    return ""
