"""AP of a network as a row of a report: of a stage of quantization, of a checkpoint, of an engine or an ONNX file.

A row is marked if its AP cannot be compared with that of other rows.
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
from utils.core.output_form import OutputForm
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
        reference: the detections of the FP32 model; those of later networks are compared with them.
    """

    data: DataConfig
    device: torch.device
    config: EvalConfig
    reference: Reference | None = None

    @classmethod
    def of(cls, inputs: Inputs[Any], limit: int | None = None) -> Measurer:
        """Return one for a run's val images, `limit` at most."""
        options = inputs.options
        config = EvalConfig(
            imgsz=inputs.imgsz,
            batch_size=options.batch_size,
            workers=options.workers,
            limit=limit,
            groups=options.image_groups,
            unlabelled=options.unlabelled,
        )
        return cls(inputs.data, inputs.device, config)

    def measure(self, model: nn.Module, name: str, *, as_reference: bool = False, curves: bool = False) -> EvalResult:
        """Evaluate `model` as it is; `name` is for the log. See `evaluate` and `EvalConfig.curves`."""
        limit = "" if self.config.limit is None else f" on up to {plural(self.config.limit, 'image')}"
        logger.info("evaluating %s%s", name, limit)
        config = replace(self.config, curves=curves)
        reference = None if as_reference else self.reference
        size = weight_bytes(model)
        with TorchRunner(model, self.device) as runner, rounded_weights(model):
            result = evaluate(runner, self.data, config, name=name, reference=reference, as_reference=as_reference)
        if as_reference:
            self.reference = result.reference
        return replace(result, weights_bytes=size)

    def row(self, stage: str, file: str | Path, result: EvalResult | None, seconds: float) -> Row:
        """Return a report row; without a result its scores are unknown."""
        return make_row(stage, file, result, self.config, self.device, seconds)

    def samples(self, models: Mapping[str, nn.Module], images: Sequence[str] = ()) -> list[Sample]:
        """Sample detections of each of `models` (by stage), on these images or a few others: see `collect_samples`."""
        with ExitStack() as stack:
            runners = {stage: stack.enter_context(TorchRunner(model, self.device)) for stage, model in models.items()}
            first = next(iter(runners.values()))
            imgsz = InputPlan.of(first, self.config.imgsz, 1).imgsz
            return collect_samples(runners, self.data, imgsz=imgsz, split=self.config.split, images=images)


def without_tables() -> AbstractContextManager[None]:
    """Leave the evaluation's own tables out of the log: a run of many evaluations reports them itself."""
    return log_level("utils.evaluation.loop", logging.WARNING)


# qat.py eval


def run(options: EvalOptions) -> Report:
    """`qat.py eval`: evaluate an FP32 or quantized checkpoint on the val split as `val_trt.py` does."""
    network = load_network(options.weights, auxiliary=False)
    options = from_training(options, network.source)
    names = EvalOptions.model_fields.keys() & ValOptions.model_fields.keys()
    values = {name: getattr(options, name) for name in names}
    values["file"] = options.weights
    if options.unlabelled:
        values["reference"] = float_weights(options.weights, network.extra)
    runner = torch_runner(network, select_device(options.device))
    return evaluate_file(ValOptions(**values), runner)


def float_weights(weights: str, extra: Mapping[str, Any]) -> str:
    """Return the file of the FP32 model that a checkpoint was quantized from.

    Raises:
        InputError: the file is gone or has changed, or the checkpoint does not name it.
    """
    file = str(extra.get("float_weights", ""))
    if os.path.isfile(file) and extra.get("float_sha256") in (None, file_hash(file)):
        logger.info("labels: the detections of %s, from which %s was quantized", file, weights)
        return file
    reason = f"{file} is gone, or has changed" if file else f"{weights} does not name it"
    raise InputError(
        f"--unlabelled compares a model with the FP32 model that it was quantized from, and {reason}; "
        "give both: python val_trt.py INT8 --reference FLOAT.pt --unlabelled"
    )


# val_trt.py


@dataclass(frozen=True)
class OpenFile:
    """A file that is evaluated, open.

    Attributes:
        weights_bytes: bytes of the file's weights when it computes; None if they are not known.
    """

    path: Path
    runner: Runner
    weights_bytes: int | None

    @classmethod
    def of(cls, path: Path, runner: Runner) -> OpenFile:
        """Return an open file, its weights measured."""
        return cls(path, runner, weights_of(path, runner))

    @property
    def data(self) -> str | None:
        """The dataset's YAML that the file names; None if it does not name one."""
        return self.runner.metadata.get("data")

    def evaluate(self, data: DataConfig, config: EvalConfig, **keywords: Any) -> EvalResult:
        """Evaluate the file on a split of a dataset; `keywords` are those of `loop.evaluate`."""
        result = evaluate(self.runner, data, config, name=self.path.stem, **keywords)
        return replace(result, weights_bytes=self.weights_bytes)

    def row(self, stage: str, file: str | Path, result: EvalResult, config: EvalConfig) -> Row:
        """Return the report row of a result of this file, which the report calls `file`."""
        return make_row(stage, file, result, config, self.runner.device, result.seconds, self.runner)


def evaluate_file(options: ValOptions, runner: Runner | None = None) -> Report:
    """`val_trt.py`: evaluate a file, before it the FP32 model to compare with, and write a report.

    `runner` is the file's, where it is open already. The run's folder is made when both are open.

    Raises:
        InputError: the file or the dataset cannot be used, they do not fit each other, or the FP32 model is another one
            than the file was made from.
    """
    with ExitStack() as stack:
        file = open_evaluated(options, runner, stack)
        float_file = open_float(options, file, stack)
        caveat = check_same_weights(float_file, file, options.force) if float_file else ""
        options = options.model_copy(update={"data": choose_data(options, file, float_file)})
        data = load_data(options.data or "", options.task)
        config = make_config(options, data)
        has_same_names = read_split(data, config, file)
        check_left_out(data, options.force)
        report = new_report(options, data)
        folder = stack.enter_context(new_run(options.project, options.name, options.exist_ok, options.WRITTEN))
        reference = None
        if float_file:
            check_annotations(data, config, file, folder)
            result = evaluate_float(float_file, file, data, config, report)
            reference = result.reference
        name = row_name(file, options, is_compared=float_file is not None)
        result = file.evaluate(data, config, out_dir=folder, reference=reference)
        row = file.row(name, options.network, result, config)
        report.rows.append(row.model_copy(update={"caveat": caveat}))
        report.splits = data.counts()
        report.doubts = doubts_about(data, has_same_names, options.unlabelled)
        report.notes += coco_notes(result)
        save_curves(result, name, folder)
        finish_report(report, folder)
    return report


def open_evaluated(options: ValOptions, runner: Runner | None, stack: ExitStack) -> OpenFile:
    """Open the file that is evaluated until `stack` is closed; `runner` is its runner, where it is open already."""
    path = Path(options.network)
    if runner is None:
        runner = open_runner(path, options.select_device(), options.openvino, options.float_precision)
    runner = stack.enter_context(runner)
    file = OpenFile.of(path, runner)
    if isinstance(runner, TorchRunner):
        stack.enter_context(rounded_weights(runner.model))
    return file


def open_float(options: ValOptions, file: OpenFile, stack: ExitStack) -> OpenFile | None:
    """Open the FP32 model that a file is compared with until `stack` is closed; None without `--reference`.

    Raises:
        InputError: it is quantized, or has other classes.
    """
    if not options.reference:
        return None
    path = Path(options.reference)
    kind = stage(path)
    if kind != "float" and not kind.endswith(("FP16", "FP32")):
        raise InputError(
            f"--reference {path} is quantized ({kind}); expected the FP32 model; export_qat.py --check compares a file "
            "with its own checkpoint"
        )
    runner = open_runner(path, file.runner.device, options.openvino, options.float_precision)
    names = runner.names
    file_names = file.runner.names
    if names and file_names and names != file_names:
        first = short_repr([*names.values()])
        second = short_repr([*file_names.values()])
        raise InputError(f"--reference {path} detects {first} and {file.path} {second}; give the FP32 model of it")
    return OpenFile.of(path, stack.enter_context(runner))


def check_same_weights(float_file: OpenFile, file: OpenFile, force: bool) -> str:
    """Compare the hash of the FP32 weights that a file was made from with that of `--reference`.

    Returns:
        A caveat for the row where they differ and `force` is given; '' elsewhere, also where a hash is not recorded.

    Raises:
        InputError: they differ, and `force` is not given.
    """
    own_hash = file.runner.metadata.get(FLOAT_HASH)
    float_hash = float_file.runner.metadata.get(FLOAT_HASH)
    if not own_hash or not float_hash:
        unknown = float_file.path if own_hash else file.path
        text = "%s does not record its FP32 weights, so %s may not have been made from the model of --reference %s"
        logger.warning(text, unknown, file.path, float_file.path)
        return ""
    if own_hash == float_hash:
        return ""
    if not force:
        raise InputError(
            f"{file.path} was not made from the weights of --reference {float_file.path} (another training, or weights "
            "that reparameterization.py has not converted); give its own FP32 weights, or compare them with --force"
        )
    text = "%s was not made from the weights of %s: they are compared because of --force"
    logger.warning(text, file.path, float_file.path)
    return f"it was not made from the weights of {float_file.path}"


def choose_data(options: ValOptions, file: OpenFile, float_file: OpenFile | None) -> str:
    """Return the dataset's YAML: that of the options, or the first that a file names; `InputError` without one."""
    own_data = {file.path: file.data}
    if float_file:
        own_data[float_file.path] = float_file.data
    return dataset_of(options.data, own_data)


def read_split(data: DataConfig, config: EvalConfig, file: OpenFile) -> bool:
    """Read the images and labels of the split; return whether the file's classes have the dataset's names.

    Raises:
        InputError: the file has another number of classes; checked first, since labels would be blamed for it.
    """
    has_same_names = True
    if file.runner.names and not config.single_cls:
        has_same_names = check_classes(file.runner.names, data, str(file.path))
    data.read(config.split, config.limit, progress=True)
    return has_same_names


def new_report(options: ValOptions, data: DataConfig) -> Report:
    """Return the report of an evaluation, without its results."""
    report = Report(command=command_line(), title="Evaluation", data=str(options.data))
    report.target_drop = options.target_drop
    report.data_splits = [*data.splits]
    return report


def check_annotations(data: DataConfig, config: EvalConfig, file: OpenFile, folder: Path) -> None:
    """Check the annotations of `--save-json` before the FP32 model is evaluated, which takes long."""
    if config.save_json:
        images = data.read(config.split, config.limit).images
        has_masks = bool(file.runner.form.masks) and not config.unlabelled
        CocoEvaluation(data, config, images, folder / f"{file.path.stem}_predictions.json", has_masks)


def evaluate_float(
    float_file: OpenFile, file: OpenFile, data: DataConfig, config: EvalConfig, report: Report
) -> EvalResult:
    """Evaluate the FP32 model as the file will be evaluated, at its input size, and add the row to the report."""
    plan = InputPlan.of(file.runner, config.imgsz, config.batch_size, rect=config.rect)
    float_config = replace(config, imgsz=plan.imgsz, save_json=False, save_txt=False, curves=False)
    result = float_file.evaluate(data, float_config, as_reference=True)
    report.rows.append(float_file.row("float", float_file.path, result, float_config))
    return result


def row_name(file: OpenFile, options: ValOptions, *, is_compared: bool) -> str:
    """Return the stage of the file's row, which is another than that of the FP32 model it is compared with."""
    name = stage(file.path, options.openvino)
    if is_compared and name == "float":
        return f"float ({file.path.suffix[1:]})"
    return name


def coco_notes(result: EvalResult) -> list[str]:
    """Return a sentence for each result of pycocotools."""
    notes = []
    if result.coco:
        notes.append(f"pycocotools: AP {result.coco['ap']:.4f}, AP50 {result.coco['ap50']:.4f}")
    if result.mask_coco:
        notes.append(f"pycocotools on masks: AP {result.mask_coco['ap']:.4f}, AP50 {result.mask_coco['ap50']:.4f}")
    return notes


def save_curves(result: EvalResult, title: str, folder: Path) -> None:
    """Write the plots of `--plots`."""
    if result.curves:
        for name, figure in curve_figures(result.curves, title).items():
            save_figure(figure, folder / name)


def finish_report(report: Report, folder: Path) -> None:
    """Write the report, and log the last lines of the program."""
    report.warnings = warnings_until_now()
    report.save(folder / "report.json")
    advice = advise(report)
    lines = [terminal_table(report)]
    if advice.text:
        lines.append(advice.text)
    lines.append(f"results: {folder}")
    logger.info("\n%s\nnext: %s", "\n".join(lines), advice.next_line)


def weights_of(file: Path, runner: Runner) -> int | None:
    """Bytes of a file's weights when it computes; None for an engine whose note does not hold them."""
    if isinstance(runner, TorchRunner):
        return weight_bytes(runner.model)
    if file.suffix.lower() == ".onnx":
        return onnx_weight_bytes(read_onnx(file))
    return EngineNote.load(file).weights_bytes


def make_config(options: ValOptions, data: DataConfig) -> EvalConfig:
    """Return how to evaluate: a field of `EvalConfig` that has the name of an option is that option."""
    conf_thres = AP_CONFIDENCE if options.conf_thres is None else options.conf_thres
    if conf_thres > AP_CONFIDENCE:
        text = "AP is only comparable at --conf-thres %g; this is %g: the curve is cut off"
        logger.warning(text, AP_CONFIDENCE, conf_thres)
    names = {field.name for field in fields(EvalConfig)} & type(options).model_fields.keys()
    values = {name: getattr(options, name) for name in names}
    has_coco = data.file.name == "coco.yaml" and data.annotations_of(options.task) is not None  # as upstream's val.py
    values["conf_thres"] = conf_thres
    values["split"] = options.task
    values["save_json"] = options.save_json or has_coco
    values["curves"] = options.plots
    return EvalConfig(**values)


# Rows


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
    stage: str,
    file: str | Path,
    result: EvalResult | None,
    config: EvalConfig,
    device: torch.device,
    seconds: float,
    runner: Runner | None = None,
) -> Row:
    """Return a report row of a file that exists and took so many seconds; without a result its scores are unknown.

    `runner` is what ran the file; None for a network in PyTorch.
    """
    values: dict[str, Any] = dict.fromkeys(("ap", "ap50", "precision", "recall", "ms_per_image"))
    values["stage"] = stage
    values["file"] = str(file)
    values["device"] = device_name(device)
    values["seconds"] = seconds
    values["size_bytes"] = Path(file).stat().st_size
    values["measured_on"] = "not evaluated"
    if result is None:
        return Row(**values)
    if stage == "float":
        _warn_of_low_ap(result.ap)
    values |= _scores(result)
    values |= _conditions(config, result, runner)
    return Row(**values)


def _warn_of_low_ap(ap: float) -> None:
    """Warn where the AP of an FP32 model is near 0."""
    text = low_ap(ap)
    if text:
        warn_once(logger, text)


def _scores(result: EvalResult) -> dict[str, Any]:
    """Return the fields of a row that hold scores."""
    values: dict[str, Any] = {"at_threshold": result.at}
    for name in ("ap", "ap50", "precision", "recall", "ap_coco"):
        values[name] = getattr(result, name)
        if result.masks:
            values[f"mask_{name}"] = getattr(result.masks, name)
    values["ap_by_class"] = {scores.name: scores.ap for scores in result.per_class}
    if result.statistics:
        values["ap_resampled"] = result.statistics.resampled()
        values["mask_ap_resampled"] = result.statistics.resampled(masks=True)
    if result.agreement is not None:
        values["agreement"] = result.agreement
        values["agreement_resampled"] = result.agreement_resampled
    if result.f1:
        values["best_threshold"] = result.threshold
        values["f1"] = tuple(result.f1[round(percent * 9.99)] for percent in range(101))
    if result.coco:
        sizes = {size: result.coco[f"ap_{size}"] for size in SIZES}
        values["ap_by_size"] = {size: ap for size, ap in sizes.items() if ap >= 0}  # -1: no objects of this size
    return values


def _conditions(config: EvalConfig, result: EvalResult, runner: Runner | None) -> dict[str, Any]:
    """Return the fields of a row that hold how it was measured, and how long an image took."""
    marks = ap_with(config, result, runner)
    parts = [text for text in (result.measured_on, marks) if text]
    return {
        "ap_with": marks,
        "measured_on": "; ".join(parts),
        "input_size": result.input_size,
        "images": result.images,
        "resampled_over": f"{result.groups} groups" if result.groups else "images",
        "ms_per_image": result.ms["inference"],
        "weights_bytes": result.weights_bytes,
    }


def ap_with(config: EvalConfig, result: EvalResult, runner: Runner | None = None) -> str:
    """Return the settings by which this AP differs from the usual one, such as '30 images, NMS in the file'; or ''."""
    usual = EvalConfig()
    marks: list[str] = []
    if result.limited:
        marks.append(plural(result.images, "image"))
    if config.unlabelled:
        marks.append(AGREEMENT)
    if config.split != usual.split:
        marks.append(f"split {config.split}")
    if config.conf_thres != AP_CONFIDENCE:
        marks.append(f"confidence {config.conf_thres:g}")
    nms_iou = config.nms_iou(result.task)
    if nms_iou != result.task.nms_iou:
        marks.append(f"NMS IoU {nms_iou:g}")
    if config.max_det != usual.max_det:
        marks.append(f"at most {plural(config.max_det, 'detection')}")
    if runner is not None:
        marks += _marks_of_form(runner.form, result)
    if config.single_cls:
        marks.append("one class")
    if result.mark:
        marks.append(result.mark)
    return ", ".join(marks)


def _marks_of_form(form: OutputForm, result: EvalResult) -> list[str]:
    """Return the parts of a file's outputs by which AP differs from the usual one."""
    marks = []
    if form.has_nms:
        marks.append(f"{form.nms_name} in the file")
    if form.mask_side and result.masks is not None:
        marks.append(f"masks {form.mask_side}×{form.mask_side}")
    return marks


def low_ap(ap: float) -> str:
    """Return a sentence where the AP of an FP32 model is near 0, with the usual reasons; empty elsewhere."""
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
    text = low_ap(ap)
    if text and not force:
        raise DataError(f"{text}; correct it, or go on with --force")
