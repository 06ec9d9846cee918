"""From a checkpoint to checked files: the job of export_qat.py and export_yoloV9.py."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

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
from utils.onnx_graph.export import ExportResult, export_forms
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.output_formats import OutputFormat
from utils.onnx_graph.passes.for_openvino import SEVEN_BIT_TARGET
from utils.onnx_graph.verify import table
from utils.onnx_graph.view import metadata_of

logger = logging.getLogger(__name__)


class ExportRequest(Protocol):
    """The options of a program that exports; some programs also have `data`, a dataset's YAML."""

    @property
    def weights(self) -> str | None:
        """The checkpoint."""

    @property
    def output(self) -> str | None:
        """The file to write; None for a name beside the weights."""

    @property
    def imgsz(self) -> int | tuple[int, int] | None:
        """Side, or (height, width), in pixels; None for the size of calibration or training."""

    @property
    def device(self) -> str:
        """'cpu', or a CUDA device such as '0'."""

    @property
    def check(self) -> int:
        """Number of images on which files are compared with PyTorch."""


def engine_commands(network: Network, config: ExportConfig, results: Sequence[ExportResult]) -> Iterator[str]:
    """Yield the lines with the next commands: see `commands.AfterExport`."""
    data = network.source.data or ""
    place = AfterExport(
        has_gpu=torch.cuda.is_available(),
        data=data if os.path.isfile(data) else "",  # it may have been trained elsewhere
        reference=str(network.extra.get("float_weights", "")),
        unlabelled="labels_of" in network.extra,
    )
    for result in results:
        nms = metadata_of(onnx.load(result.path)).get("nms", "")
        yield from place.lines(str(result.path), engine_only="efficient" in nms, for_openvino=config.for_openvino)


def output_files(
    weights: str,
    output: str | None,
    forms: Sequence[OutputFormat],
    config: ExportConfig | None = None,
    quantized: bool = False,
) -> dict[Path, OutputFormat]:
    """Return the file of each form: `output`, or one beside the weights, whose name tells what is in it.

    These are NAME.onnx (FP32), NAME-fp16.onnx, NAME-int8.onnx (weakly typed), NAME-int8-strong.onnx and
    NAME-int8-openvino-avx2.onnx; several forms add their suffixes.

    Raises:
        InputError: `output` is not the name of an ONNX file.
    """
    path = Path(output) if output else _default_file(Path(weights), config, quantized)
    if path.suffix != ".onnx" or path.is_dir():
        raise InputError(f"--output {path} is not the name of an .onnx file")
    if output and len(forms) == 1:
        return {path: forms[0]}
    return {path.with_name(f"{path.stem}{form.suffix}.onnx"): form for form in forms}


def _default_file(weights: Path, config: ExportConfig | None, quantized: bool) -> Path:
    """Return the file beside the weights that is written without `--output`."""
    stem = weights.stem
    if quantized:
        stem = f"{stem.removesuffix('-int8')}-int8"
    if config is not None and config.floats == "FP16":
        stem += "-strong" if quantized else "-fp16"
    if config is not None and config.for_openvino:
        stem += f"-{config.target}"
    return weights.with_name(f"{stem}.onnx")


def export_checkpoint(
    options: ExportRequest,
    forms: Sequence[OutputFormat],
    config: ExportConfig,
    check_network: Callable[[Network, list[Path]], None],
    then: Callable[[Network, ExportConfig, Sequence[ExportResult]], Iterator[str]] = engine_commands,
) -> None:
    """Load, export, verify, compare with PyTorch; and log a few lines for each file, what comes next, and a verdict.

    Args:
        options: `data`, if there is one, is a dataset whose classes must fit, and whose images check the files.
        config: settings; without `options.imgsz`, the size of the network's calibration or training replaces their
            image size.
        check_network: gets the network and the files before the long part, and may refuse them.
        then: gives the lines in front of the verdict.

    Raises:
        InputError: an input cannot be used; a subclass names its kind.
        QatError: a file does not compute what the network computes, or a property of its Q/DQ graph does not hold.
    """
    weights = options.weights or ""
    data = getattr(options, "data", None)
    refuse_overwrite(output_files(weights, options.output, forms), [weights, data])
    dataset = load_data(data) if data else None
    network = load_network(weights, select_device(options.device))
    if dataset is not None:
        check_classes(network.source.names, dataset, weights)
    config = _for_network(config, network, options)
    files = output_files(weights, options.output, forms, config, network.quantized)
    refuse_overwrite(files, [weights, data])
    check_network(network, list(files))
    if config.target == SEVEN_BIT_TARGET:
        limit_weights_to_7_bits(network.model)  # the files are compared with this network
    images = None
    if options.check:
        images = check_images(options.check, config.imgsz, dataset, channels_of(network.model))
    for path in files:
        if path.exists():
            logger.info("replaces %s", path)
    results = export_forms(network.model, config, files, network.metadata())
    _compare(network, config, results, images)
    verdict = _verdict(config, is_compared=images is not None)
    _check_properties(results, verdict)
    for line in then(network, config, results):
        logger.info("%s", line)
    logger.info("%s", verdict)


def _for_network(config: ExportConfig, network: Network, options: ExportRequest) -> ExportConfig:
    """Return the settings for a network, with the input size that fits it; warn of another size than its own."""
    own_size = network.source.imgsz
    size: int | tuple[int, int] = config.imgsz
    if options.imgsz is None and own_size:
        size = own_size
    if own_size and height_width(size) != height_width(own_size):
        text = "--imgsz %s was given, and %s is for %s"
        logger.warning(text, size_text(size), options.weights, size_text(own_size))
    imgsz = fitting_size(size, network.source.stride)
    return replace(config, imgsz=imgsz).resolved(network.quantized)


def _compare(
    network: Network, config: ExportConfig, results: Sequence[ExportResult], images: torch.Tensor | None
) -> None:
    """Log what is in each file, and compare the files with PyTorch on `images`, if there are any.

    Raises:
        QatError: a file does not compute what the network computes.
    """
    model = network.model.cpu()
    problems: list[str] = []
    for result in results:
        logger.info("%s", "\n".join(export_lines(network, config, result)))
        if images is None:
            continue
        parity = check_onnx(result.path, model, images, result.quantizers, half=config.floats == "FP16")
        logger.debug("%s", parity)
        problems += [f"{result.path}: {problem}" for problem in parity.problems]
    if problems:
        raise QatError(f"differs from PyTorch, see --debug: {'; '.join(problems)}")


def _verdict(config: ExportConfig, *, is_compared: bool) -> str:
    """Return the last line of a program, about files that do not differ from PyTorch."""
    if not is_compared:
        return "not compared with PyTorch (--check 0)"
    if config.target == SEVEN_BIT_TARGET:
        return "matches PyTorch with weights of 7 bits (rounding only)"
    return "matches PyTorch (rounding only)"


def _check_properties(results: Sequence[ExportResult], verdict: str) -> None:
    """Raise `QatError` if a property of a Q/DQ graph does not hold."""
    breaches = [str(result.path) for result in results if result.report and not result.report.ok]
    if breaches:
        raise QatError(f"{', '.join(breaches)}: {verdict}, but breaches the properties of the table above")


def export_lines(network: Network, config: ExportConfig, result: ExportResult) -> list[str]:
    """Return what was written, and whether a Q/DQ graph has its properties."""
    kind = {"qat": "QAT", "ptq": "PTQ", "float": "not quantized"}[network.kind]
    word = "" if config.input.kind == "float" else f"{config.input.kind} "
    inputs = _shapes(result.inputs, word)
    outputs = _shapes(result.outputs)
    size = f"{result.size_bytes / 1e6:.1f} MB"
    precision = _precision(network, config)
    line = f"{result.path}: {kind}, {network.head}, {precision}, opset {result.opset}, {inputs} -> {outputs}, {size}"
    if result.report is None:
        return [line]
    return [line, result.report.summary() if result.report.ok else table(result.report)]


def _precision(network: Network, config: ExportConfig) -> str:
    """Return the types that a file computes in, in words: 'FP16', 'INT8 and FP32 (weakly typed)'."""
    floats = config.floats
    if config.for_openvino:
        return f"INT8 and {floats} for {config.target}"
    if network.quantized:
        return f"INT8 and {floats} ({config.typing}ly typed)"
    return floats


def _shapes(tensors: Mapping[str, Sequence[object]], word: str = "") -> str:
    """Return names and shapes in words: 'images [1, 3, 640, 640]'; `word` stands before the shape."""
    texts = []
    for name, shape in tensors.items():
        sides = ", ".join(str(side) for side in shape)
        texts.append(f"{name} {word}[{sides}]")
    return ", ".join(texts)
