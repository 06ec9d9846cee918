"""AP of a network as a row of a report: of a stage of quantization, of a checkpoint, of an engine or an ONNX file.

A row is marked where its AP does not compare with that of other rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.quantize import checkpoint
from models.quantize.modules import rounded_weights, weight_bytes
from utils.cli import command_line
from utils.core.device import device_name, select_device
from utils.core.errors import DataError, InputError
from utils.core.files import file_hash, read_onnx
from utils.core.logging import log_level, warn_once, warnings_until_now
from utils.core.run_folder import new_run
from utils.core.score import AGREEMENT
from utils.core.tasks import AP_CONFIDENCE
from utils.core.text import plural, short_repr
from utils.core.weights import FLOAT_HASH, is_quantized, onnx_weight_bytes
from utils.evaluation.coco import CocoEvaluation
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import DataConfig, check_classes, load_data
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import evaluate
from utils.evaluation.results import EvalResult, Reference
from utils.jobs.advice import advise
from utils.jobs.inputs import Inputs, check_left_out, doubts_about, from_training
from utils.jobs.open import dataset_of, load_network, open_runner, torch_runner
from utils.jobs.options import EvalOptions, ValOptions
from utils.jobs.visualize import collect_samples
from utils.reports.curve_figures import curve_figures
from utils.reports.figures import save_figure
from utils.reports.schema import LOW_AP, SIZES, Report, Row, Sample
from utils.reports.tables import terminal_table
from utils.runners.base import Runner
from utils.runners.pytorch import TorchRunner
from utils.trt.engine_file import EngineNote

logger = logging.getLogger(__name__)
FLOAT_MODEL = "the FP32 model"


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

    def measure(self, model: nn.Module, name: str, *, as_reference: bool = False, curves: bool = False) -> EvalResult:
        """Evaluate `model` as it is; `name` is for the log. See `evaluate` and `EvalConfig.curves`."""
        limit = "" if self.config.limit is None else f" on up to {plural(self.config.limit, 'image')}"
        logger.info("evaluating %s%s", name, limit)
        size = weight_bytes(model)
        with TorchRunner(model, self.device) as runner, rounded_weights(model):
            reference = None if as_reference else self.reference
            config = replace(self.config, curves=curves)
            result = evaluate(runner, self.data, config, name=name, reference=reference, as_reference=as_reference)
        if as_reference:
            self.reference = result.reference
        return replace(result, weights_bytes=size)

    def row(self, stage: str, file: str | Path, result: EvalResult | None, seconds: float) -> Row:
        """A report row; without a result its scores are unknown."""
        return make_row(stage, file, result, self.config, self.device, seconds)

    def samples(self, models: Mapping[str, nn.Module], images: Sequence[str] = ()) -> list[Sample]:
        """Sample detections of each of `models` (by stage), on these images or a few others: see `collect_samples`."""
        with ExitStack() as stack:
            runners = {stage: stack.enter_context(TorchRunner(model, self.device)) for stage, model in models.items()}
            imgsz = InputPlan.of(next(iter(runners.values())), self.config.imgsz, 1).imgsz
            return collect_samples(runners, self.data, imgsz=imgsz, split=self.config.split, images=images)


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
    """Evaluate a file, before it the FP32 model to compare with, and write a report: `val_trt.py`.

    `runner` is the file's, where it is open already. The run's folder is made when both are open.

    Raises:
        InputError: the file or the dataset cannot be used, they do not fit each other, or the FP32 model is another one
            than the file was made from.
    """
    file, float_file = Path(options.network), Path(options.reference) if options.reference else None
    with ExitStack() as stack:
        runner = stack.enter_context(
            runner or open_runner(file, options.select_device(), options.openvino, options.float_precision)
        )
        sizes = {file: weights_of(file, runner)}
        if isinstance(runner, TorchRunner):
            stack.enter_context(rounded_weights(runner.model))
        known, float_runner, caveat = {file: runner.metadata.get("data")}, None, ""
        if float_file:
            float_runner = stack.enter_context(open_reference(float_file, file, runner, options))
            caveat = check_same_weights(float_file, float_runner, file, runner, options.force)
            sizes[float_file] = weights_of(float_file, float_runner)
            known[float_file] = float_runner.metadata.get("data")
        options = options.model_copy(update={"data": dataset_of(options.data, known)})
        data = load_data(options.data or "", options.task)
        config = make_config(options, data)
        same_names = True
        if runner.names and not options.single_cls:  # before images are read: their labels would be blamed
            same_names = check_classes(runner.names, data, str(file))
        data.read(config.split, config.limit, progress=True)
        check_left_out(data, options.force)
        report = Report(command=command_line(), title="Evaluation", data=str(options.data))
        report.target_drop = options.target_drop
        report.data_splits = [*data.splits]
        reference, own = None, stage(file, options.openvino)
        folder = stack.enter_context(new_run(options.project, options.name, options.exist_ok, options.WRITTEN))
        if float_file and float_runner:
            if config.save_json:  # the annotations are checked before the FP32 model is evaluated
                images = data.read(config.split, config.limit).images
                masks = bool(runner.form.masks) and not config.unlabelled
                CocoEvaluation(data, config, images, folder / f"{file.stem}_predictions.json", masks)
            plan = InputPlan.of(runner, config.imgsz, config.batch_size, rect=config.rect)
            float_config = replace(config, imgsz=plan.imgsz, save_json=False, save_txt=False, curves=False)
            result = evaluate(float_runner, data, float_config, name=float_file.stem, as_reference=True)
            result = replace(result, weights_bytes=sizes[float_file])
            row = make_row("float", float_file, result, float_config, runner.device, result.seconds, float_runner)
            report.rows.append(row)
            reference = result.reference
            if own == "float":  # a row that compares with the float row
                own = f"float ({file.suffix[1:]})"
        result = evaluate(runner, data, config, out_dir=folder, name=file.stem, reference=reference)
        result = replace(result, weights_bytes=sizes[file])
        row = make_row(own, options.network, result, config, runner.device, result.seconds, runner)
        report.rows.append(row.model_copy(update={"caveat": caveat}))
        if result.curves:
            for name, figure in curve_figures(result.curves, own).items():
                save_figure(figure, folder / name)
        report.splits = data.counts()
        report.doubts = doubts_about(data, same_names, options.unlabelled)
        for what, coco in (("", result.coco), (" on masks", result.mask_coco)):
            if coco:
                report.notes.append(f"pycocotools{what}: AP {coco['ap']:.4f}, AP50 {coco['ap50']:.4f}")
        report.warnings = warnings_until_now()
        report.save(folder / "report.json")
        advice = advise(report)
        lines = [terminal_table(report), *([advice.text] if advice.text else []), f"results: {folder}"]
        logger.info("\n%s\nnext: %s", "\n".join(lines), advice.next_line)
    return report


def open_reference(file: Path, network: Path, runner: Runner, options: ValOptions) -> Runner:
    """The FP32 model that `network` is compared with; `InputError` if it is quantized, or has other classes."""
    if (kind := stage(file)) != "float" and not kind.endswith(("FP16", "FP32")):
        todo = "expected the FP32 model; export_qat.py --check compares a file with its own checkpoint"
        raise InputError(f"--reference {file} is quantized ({kind}); {todo}")
    float_runner = open_runner(file, runner.device, options.openvino, options.float_precision)
    if runner.names and float_runner.names and runner.names != float_runner.names:
        first, second = (short_repr([*(one.names or {}).values()]) for one in (float_runner, runner))
        raise InputError(f"--reference {file} detects {first} and {network} {second}; give the FP32 model of it")
    return float_runner


def check_same_weights(float_file: Path, float_runner: Runner, file: Path, runner: Runner, force: bool) -> str:
    """Compare the hash of the FP32 weights that a file was made from with that of `--reference`.

    Returns:
        A caveat for the row where they differ and `force` is given; '' elsewhere, also where a hash is not recorded.

    Raises:
        InputError: they differ, and `force` is not given.
    """
    own, other = runner.metadata.get(FLOAT_HASH), float_runner.metadata.get(FLOAT_HASH)
    if not own or not other:
        unknown = float_file if own else file
        logger.warning(
            "%s does not record its FP32 weights: whether --reference %s is the model that %s was made from is not "
            "known", unknown, float_file, file,
        )  # fmt: skip
        return ""
    if own == other:
        return ""
    if not force:
        raise InputError(
            f"{file} was not made from the weights of --reference {float_file} (another training, or one that "
            "reparameterization.py has not converted); give its own FP32 weights, or compare all the same with --force"
        )
    logger.warning("%s was not made from the weights of %s: they are compared because of --force", file, float_file)
    return f"it was not made from the weights of {float_file}"


def weights_of(file: Path, runner: Runner) -> int | None:
    """Bytes that a file's weights take as they are computed with; None for an engine whose note does not say it."""
    if isinstance(runner, TorchRunner):
        return weight_bytes(runner.model)
    if file.suffix.lower() == ".onnx":
        return onnx_weight_bytes(read_onnx(file))
    return EngineNote.load(file).weights_bytes


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
    values["curves"] = options.plots
    return EvalConfig(**values)


def stage(file: Path, openvino: str | None = None) -> str:
    """Name of a file in a report: float, PTQ or QAT, ONNX, or OpenVINO or TensorRT with its precision."""
    suffix = file.suffix.lower()
    if suffix == ".pt":
        quantized = checkpoint.summary(file)
        return str(quantized["extra"].get("stage", "PyTorch")) if quantized else "float"
    if suffix == ".onnx":
        if not is_quantized(read_onnx(file)):
            return "float"
        return "OpenVINO INT8" if openvino else "ONNX"
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
    if stage == "float" and (text := low_ap(result.ap)):
        warn_once(logger, text)
    marks, statistics = ap_with(config, result, runner), result.statistics
    values |= {name: getattr(result, name) for name in ("ap", "ap50", "precision", "recall", "input_size")} | {
        "at_threshold": result.at,
        "ms_per_image": result.ms["inference"],
        "measured_on": "; ".join(filter(None, (result.measured_on, marks))),
        "ap_with": marks,
        "ap_by_class": {one.name: one.ap for one in result.per_class},
        "ap_coco": result.ap_coco,
        "images": result.images,
        "weights_bytes": result.weights_bytes,
        "resampled_over": f"{result.groups} groups" if result.groups else "images",
    }
    if result.masks:
        names = ("ap", "ap50", "precision", "recall", "ap_coco")
        values |= {f"mask_{name}": getattr(result.masks, name) for name in names}
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
    form = runner.form if runner is not None else None
    side = form.mask_side if form is not None and result.masks is not None else None
    marks = {
        plural(result.images, "image"): result.limited,
        AGREEMENT: config.unlabelled,
        f"split {config.split}": config.split != usual.split,
        f"confidence {config.conf_thres:g}": config.conf_thres != AP_CONFIDENCE,
        f"NMS IoU {config.nms_iou(result.task):g}": config.nms_iou(result.task) != result.task.nms_iou,
        f"at most {plural(config.max_det, 'detection')}": config.max_det != usual.max_det,
        f"{form.nms_name} in the file" if form is not None and form.has_nms else "": True,
        f"masks {side}×{side}": bool(side),
        "one class": config.single_cls,
        result.mark: True,
    }
    return ", ".join(text for text, holds in marks.items() if text and holds)


def low_ap(ap: float) -> str:
    """A sentence where the AP of an FP32 model is near 0, with the usual reasons; empty elsewhere."""
    if ap >= LOW_AP:
        return ""
    return (
        f"the FP32 model has AP {ap:.4f}, so that INT8 cannot be judged; usual reasons: --imgsz or --data is not that "
        "of its training, classes are in another order, labels are missing, images are rotated, or the weights are "
        "not trained"
    )


def check_float_ap(ap: float, force: bool) -> None:
    """Stop before calibrating where the FP32 model finds nothing: its INT8 network can only be as bad.

    Raises:
        DataError: AP is near 0, and `force` is not given.
    """
    if (text := low_ap(ap)) and not force:
        raise DataError(f"{text}; correct it, or go on with --force")
