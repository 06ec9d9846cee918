"""From a checkpoint to checked files: what export_qat.py and export_yoloV9.py share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch

from models.quantize.modules import limit_weights_to_7_bits
from utils.core.device import select_device
from utils.core.errors import InputError, QatError
from utils.core.files import refuse_overwrite
from utils.core.input_spec import channels_of
from utils.core.options import height_width, size_text
from utils.evaluation.data_yaml import check_classes, load_data
from utils.evaluation.input_plan import fitting_size
from utils.jobs.commands import AfterExport
from utils.jobs.compare_outputs import check_images, check_onnx
from utils.jobs.open import Network, load_network
from utils.onnx_graph.export import ExportConfig, ExportResult, export_forms
from utils.onnx_graph.output_formats import OutputFormat
from utils.onnx_graph.passes.for_openvino import SEVEN_BIT_TARGET
from utils.onnx_graph.verify import table
from utils.onnx_graph.view import metadata_of

logger = logging.getLogger(__name__)


def engine_commands(network: Network, config: ExportConfig, results: Sequence[ExportResult]) -> Iterator[str]:
    """Give the lines with the next commands: see `advice.after_export`."""
    extra, data = getattr(network.source, "extra", {}), network.source.data or ""
    known = AfterExport(
        has_gpu=torch.cuda.is_available(),
        data=data if os.path.isfile(data) else "",  # it may have been trained elsewhere
        reference=str(extra.get("float_weights", "")),
        unlabelled="labels_of" in extra,
    )
    for result in results:
        nms = metadata_of(onnx.load(result.path)).get("nms", "")
        yield from known.lines(str(result.path), engine_only="efficient" in nms, for_openvino=config.for_openvino)


def output_files(
    weights: str, output: str | None, forms: Sequence[OutputFormat], config: ExportConfig | None = None,
    quantized: bool = False,
) -> dict[Path, OutputFormat]:  # fmt: skip
    """Where each form goes: `output`, or beside the weights, where the name says what is in the file.

    These are NAME.onnx (FP32), NAME-fp16.onnx, NAME-int8.onnx (weakly typed), NAME-int8-strong.onnx and
    NAME-int8-openvino-avx2.onnx; of several forms with their suffixes.

    Raises:
        InputError: `output` is not the name of an ONNX file.
    """
    stem = Path(weights).stem
    if quantized:
        stem = f"{stem.removesuffix('-int8')}-int8"
    if config is not None and config.half:
        stem += "-strong" if quantized else "-fp16"
    if config is not None and config.for_openvino:
        stem += f"-{config.target}"
    path = Path(output) if output else Path(weights).with_name(f"{stem}.onnx")
    if path.suffix != ".onnx" or path.is_dir():
        raise InputError(f"--output {path} is not the name of an .onnx file")
    if output and len(forms) == 1:
        return {path: forms[0]}
    return {path.with_name(f"{path.stem}{form.suffix}.onnx"): form for form in forms}


def export_checkpoint(
    options: Any, forms: Sequence[OutputFormat], config: ExportConfig,
    check_network: Callable[[Network, list[Path]], None],
    then: Callable[[Network, ExportConfig, Sequence[ExportResult]], Iterator[str]] = engine_commands,
) -> None:  # fmt: skip
    """Load, export, verify, compare with PyTorch; and log a few lines for each file, what comes next, and a verdict.

    Args:
        options: of a program: `weights`, `output`, `imgsz`, `device`, `check` and perhaps `data`, a dataset's YAML,
            whose classes must fit, and whose images are used to check the files.
        config: without `imgsz` a network is exported for the size of its calibration or training, not for that here.
        check_network: gets the network and the files before the long part, and may refuse them.
        then: gives the lines in front of the verdict.

    Raises:
        InputError: or one of its kinds, for what cannot be used.
        QatError: a file does not compute what the network computes, or a property of its Q/DQ graph does not hold.
    """
    weights, data = options.weights, getattr(options, "data", None)
    refuse_overwrite(output_files(weights, options.output, forms), [weights, data])
    dataset = load_data(data) if data else None
    network = load_network(weights, select_device(options.device))
    source = network.source
    if dataset is not None:
        check_classes(source.names, dataset, weights)
    size = source.imgsz if options.imgsz is None and source.imgsz else config.imgsz
    if source.imgsz and height_width(size) != height_width(source.imgsz):
        texts = size_text(size), size_text(source.imgsz)
        logger.warning("--imgsz %s was given, and %s is for %s", texts[0], weights, texts[1])
    config = replace(config, imgsz=fitting_size(size, source.stride)).resolved(network.quantized)
    files = output_files(weights, options.output, forms, config, network.quantized)
    refuse_overwrite(files, [weights, data])
    check_network(network, list(files))
    seven_bits = config.target == SEVEN_BIT_TARGET
    if seven_bits:
        limit_weights_to_7_bits(network.model)  # the files are compared with this network
    channels, count = channels_of(network.model), options.check
    images = check_images(count, config.imgsz, dataset, channels) if count else None
    for path in filter(Path.exists, files):
        logger.info("replaces %s", path)
    results = export_forms(network.model, config, files, network.metadata())
    model, problems = network.model.cpu(), []
    for result in results:
        logger.info("%s", "\n".join(export_lines(network, config, result)))
        if images is not None:
            parity = check_onnx(result.path, model, images, result.quantizers, half=config.half)
            logger.debug("%s", parity)
            problems += [f"{result.path}: {problem}" for problem in parity.problems]
    if problems:
        raise QatError(f"differs from PyTorch, see --debug: {'; '.join(problems)}")
    matches = f"matches PyTorch{' with weights of 7 bits' if seven_bits else ''} (rounding only)"
    verdict = matches if count else "not compared with PyTorch (--check 0)"
    if breaches := [str(result.path) for result in results if result.report and not result.report.ok]:
        raise QatError(f"{', '.join(breaches)}: {verdict}, but breaches the properties of the table above")
    for line in then(network, config, results):
        logger.info("%s", line)
    logger.info("%s", verdict)


def export_lines(network: Network, config: ExportConfig, result: ExportResult) -> list[str]:
    """What was written, and whether a Q/DQ graph has its properties."""
    kind = {"qat": "QAT", "ptq": "PTQ", "float": "not quantized"}[network.kind]
    floats, taken = "FP16" if config.half else "FP32", "" if config.input.kind == "float" else f"{config.input.kind} "
    typing = f"INT8 and {floats} ({config.typing}ly typed)" if network.quantized else floats
    if config.for_openvino:
        typing = f"INT8 and {floats} for {config.target}"
    inputs, outputs = (
        ", ".join(f"{name} {word}[{', '.join(map(str, shape))}]" for name, shape in side.items())
        for side, word in ((result.inputs, taken), (result.outputs, ""))
    )
    size = f"opset {result.opset}, {inputs} -> {outputs}, {result.size_bytes / 1e6:.1f} MB"
    lines = [f"{result.path}: {kind}, {network.head}, {typing}, {size}"]
    if result.report is not None:
        lines.append(result.report.summary() if result.report.ok else table(result.report))
    return lines
