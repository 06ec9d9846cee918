#!/usr/bin/env python3
"""Export a YOLOv9 checkpoint, quantized or float, to ONNX for DeepStream, with labels and configuration.

    python export_yoloV9.py --weights yolov9-c.pt --size 640 --dynamic

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite
from utils.core.options import BatchSize, CheckImages, InputOptions, NmsOptions, OneOrTwoSizes, height_width, option
from utils.jobs.open import need

if TYPE_CHECKING:
    from utils.jobs.open import Network


class DeepStreamOptions(NmsOptions, InputOptions):
    """Export a YOLOv9 checkpoint, quantized or float, to ONNX for DeepStream, with labels and configuration."""

    weights: str = option(
        ..., "checkpoint (.pt): quantized by qat.py, or float, also with its auxiliary branch", "-w", "--weights",
        metavar="FILE",
    )  # fmt: skip
    imgsz: OneOrTwoSizes | None = option(
        None, "input size in pixels: one side, or height and width (default: what a quantized network was calibrated "
        "at, or 640)", "-s", "--size", "--imgsz", metavar="PX",
    )  # fmt: skip
    opset: int = option(
        17, "ONNX operator set (default: 17, for TensorRT 8.6 to 10.11); from 19 on quantized weights are strongly "
        "typed, for TensorRT 10.12 and later", metavar="N",
    )  # fmt: skip
    simplify: bool = option(False, "simplify the graph with onnxslim")
    dynamic: bool = option(False, "dynamic batch; not together with --batch")
    batch: BatchSize | None = option(None, "images a batch (default: 1)", "--batch", "--batch-size", metavar="N")
    check: CheckImages = option(
        4, "compare with PyTorch on N images in ONNX Runtime (default: 4; 0: do not)", metavar="N"
    )
    output: str | None = option(
        None, "the file to write (default: beside the weights, NAME-deepstream.onnx)", metavar="FILE"
    )


def export_deepstream(options: DeepStreamOptions) -> None:
    """Check the request, export, write what DeepStream wants beside the file."""
    if options.dynamic and options.batch is not None:
        raise InputError(
            f"--dynamic asks for a dynamic batch size and --batch {options.batch} for a static one; give one of them"
        )
    check_files(weights=options.weights)
    need("torch", "onnx", *["onnxruntime"] * (options.check > 0), *["onnxslim"] * options.simplify)
    from utils.core.input_spec import InputSpec
    from utils.jobs.export import export_checkpoint, output_files, refuse_flags_of_masks
    from utils.onnx_graph import deepstream, output_formats
    from utils.onnx_graph.export_config import ExportConfig

    batch = options.batch or 1
    config = ExportConfig(
        imgsz=height_width(options.imgsz), batch_size=batch, dynamic="batch" if options.dynamic else "none",
        simplify=options.simplify, typing="auto", opset=options.opset, input=InputSpec(options.input),
    )  # fmt: skip
    nms = output_formats.NmsSettings(**options.nms_settings())
    files = output_files(options.weights, options.output, [output_formats.deepstream(nms)])
    (path,) = files
    refuse_overwrite([path, *deepstream.paths(path)], [options.weights])
    deepstream.check_name(path)
    deepstream.check_config(path)

    def check(network: Network) -> None:
        refuse_flags_of_masks(network, options.weights, options.given(*NmsOptions.model_fields))
        deepstream.check_labels(path, deepstream.labels(network.names))

    network, (result,) = export_checkpoint(
        options.weights, config, files, check, device=options.device, check=options.check,
        own_size=options.imgsz is None,
    )  # fmt: skip
    height, width = result.inputs["images"][2:]
    text = deepstream.infer_config(
        path, (int(height), int(width)), batch, len(network.names), dynamic=options.dynamic,
        typing=config.resolved(True).typing if network.quantized else "", nms=nms if network.task.prototypes else None,
        takes_bytes=options.input == "uint8",
    )  # fmt: skip
    for written in deepstream.write(path, deepstream.labels(network.names), text):
        print(written)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return run_program("export_yoloV9.py", (DeepStreamOptions, export_deepstream), argv)


if __name__ == "__main__":
    sys.exit(main())
