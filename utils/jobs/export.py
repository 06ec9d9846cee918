"""From a checkpoint to checked files: what export_qat.py and export_yoloV9.py share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from utils.core.device import select_device
from utils.core.errors import InputError, QatError
from utils.core.files import refuse_overwrite
from utils.evaluation.data_yaml import load_data
from utils.jobs import compare_outputs
from utils.jobs.compare_outputs import check_images
from utils.jobs.inputs import check_classes, fitting_size
from utils.jobs.open import Network, load_network
from utils.onnx_graph.export import ExportResult, export_forms
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.output_formats import OutputFormat
from utils.onnx_graph.verify import table

logger = logging.getLogger(__name__)


def output_files(weights: str | None, output: str | None, forms: Sequence[OutputFormat]) -> dict[Path, OutputFormat]:
    """Where each form goes: `output`, or beside the weights; several get their forms' suffixes.

    Raises:
        InputError: `weights` is missing, or `output` is not the name of an ONNX file.
    """
    if not weights:
        raise InputError("--weights is missing; give the checkpoint to export, or --verify an ONNX file")
    path = Path(output) if output else Path(weights).with_suffix(".onnx")
    if path.suffix != ".onnx" or path.is_dir():
        raise InputError(f"--output {path} is not the name of an .onnx file")
    if output and len(forms) == 1:
        return {path: forms[0]}
    return {path.with_name(f"{path.stem}{form.suffix}.onnx"): form for form in forms}


def export_checkpoint(
    weights: str, config: ExportConfig, files: Mapping[Path, OutputFormat], check_network: Callable[[Network], None], *,
    device: str = "", data: str | None = None, check: int = 4, own_size: bool = False,
) -> tuple[Network, list[ExportResult]]:  # fmt: skip
    """Load, export, verify, compare with PyTorch; and log a few lines for each file.

    Args:
        weights: checkpoint, quantized or float.
        config: how; image sizes that are no multiples of the network's stride are rounded up.
        files: what to write, and in which form.
        check_network: gets the network before the long part, and may refuse it.
        data: dataset's YAML: its classes must fit, and its images are used to check the files.
        check: run the files on so many images beside PyTorch; 0: do not.
        own_size: a quantized network is exported for the size that it was calibrated at, not for that of `config`.

    Raises:
        InputError: or one of its kinds, for what cannot be used.
        QatError: a file does not compute what the network computes.
    """
    refuse_overwrite(files, [weights, data])
    dataset = load_data(data) if data else None
    network = load_network(weights, select_device(device))
    if dataset is not None:
        check_classes(weights, network.names, dataset)
    check_network(network)
    own = (network.imgsz, network.imgsz) if own_size and network.imgsz else config.imgsz
    sides = {side: fitting_size(side, network.stride) for side in own}
    config = config.with_size([sides[side] for side in own]).resolved(network.quantized)
    images = check_images(check, config.imgsz, dataset) if check else None
    problems = []
    results = export_forms(network.model, config, files, network.metadata())
    model = network.model.cpu()
    for result in results:
        logger.info("%s", "\n".join(export_lines(network, config, result)))
        if images is not None:
            limits = compare_outputs.HALF if config.half else compare_outputs.FULL
            parity = compare_outputs.check_onnx(result.path, model, images, result.quantizers, limits)
            logger.info("%s", parity)
            problems += [f"{result.path}: {problem}" for problem in parity.problems]
    if problems:
        raise QatError(f"what was exported does not compute what {weights} computes: {'; '.join(problems)}")
    return network, results


def refuse_flags_of_masks(network: Network, weights: str, flags: Sequence[str]) -> None:
    """Refuse options that only mean something for a segmentation network.

    Raises:
        InputError: there are some, and the network is a detector.
    """
    if flags and not network.task.prototypes:
        raise InputError(f"{weights} ends in {network.head}: a detector, and {flags[0]} is for segmentation networks")


def export_lines(network: Network, config: ExportConfig, result: ExportResult) -> list[str]:
    """What was written, and whether a Q/DQ graph has its properties."""
    kind = {"qat": "QAT", "ptq": "PTQ", "float": "standard"}[network.kind]
    floats = "FP16" if config.half else "FP32"
    typing = f"INT8 and {floats} ({config.typing}ly typed)" if network.quantized else floats
    taken = "" if config.input.kind == "float" else f"{config.input.kind} "
    shapes = [
        ", ".join(f"{name} {word}[{', '.join(map(str, shape))}]" for name, shape in side.items())
        for side, word in ((result.inputs, taken), (result.outputs, ""))
    ]
    line = (
        f"{result.path}: {kind}, {network.head}, {typing}, opset {result.opset}, {' -> '.join(shapes)}, "
        f"{result.size_bytes / 1e6:.1f} MB"
    )
    if result.report is None:
        return [line]
    return [line, result.report.summary() if result.report.ok else table(result.report)]
