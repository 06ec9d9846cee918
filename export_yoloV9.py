#!/usr/bin/env python3
"""Export a YOLOv9 checkpoint, quantized or FP32, to ONNX for DeepStream, with labels and configuration.

    python export_yoloV9.py --weights yolov9-c.pt --size 640 --dynamic
    python export_yoloV9.py --weights yolov9-c.pt --dynamic --end2end    # NMS inside: for nvdsinfer_yolo's parser

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite
from utils.core.options import (
    BatchSize,
    CheckImages,
    DeviceOptions,
    InputSize,
    height_width,
    option,
    size_option,
)
from utils.jobs.export_options import NmsOptions
from utils.jobs.open import need

if TYPE_CHECKING:
    from utils.jobs.open import Network
    from utils.onnx_graph.export import ExportResult
    from utils.onnx_graph.export_config import ExportConfig
    from utils.onnx_graph.output_formats import NmsSettings


class DeepStreamOptions(NmsOptions, DeviceOptions):
    """Export a YOLOv9 checkpoint, quantized or FP32, to ONNX for DeepStream, with labels and configuration."""

    OFTEN = ("weights", "imgsz", "dynamic", "batch", "opset", "end2end", "output")
    weights: str = option(
        ...,
        "checkpoint (.pt): quantized by qat.py, or FP32, also with its auxiliary branch",
        "-w",
        "--weights",
        metavar="FILE",
    )
    imgsz: InputSize | None = size_option(
        "what a quantized model was calibrated at, an FP32 model trained at, or 640", "-s", "--size", "--imgsz"
    )
    opset: int = option(
        17,
        "ONNX operator set (default: 17, for TensorRT 8.6 to 10.11); from 19 on quantized weights are strongly "
        "typed, for TensorRT 10.12 and later",
        metavar="N",
    )
    simplify: bool = option(False, "simplify the graph with onnxslim")
    dynamic: bool = option(False, "dynamic batch; not together with --batch")
    batch: BatchSize | None = option(None, "images a batch (default: 1)", "--batch", "--batch-size", metavar="N")
    end2end: bool = option(
        False,
        "NMS in the file: num_dets, det_boxes, det_scores, det_classes and det_masks, for the parsers of "
        "nvdsinfer_yolo; with --dynamic Gst-nvinferserver's configuration, too",
    )
    check: CheckImages = option(
        4, "compare with PyTorch on N images in ONNX Runtime (default: 4; 0: do not)", metavar="N"
    )
    output: str | None = option(
        None,
        "the file to write (default: beside the weights, NAME-deepstream.onnx, of a quantized model "
        "NAME-int8-deepstream.onnx or NAME-int8-strong-deepstream.onnx; of --end2end NAME-end2end.onnx and so on)",
        metavar="FILE",
    )
    engine: str | None = option(
        None,
        "the engine that the configuration names, which trtexec builds beside the file (default: of a quantized "
        "model the file's name with .engine; that of an FP32 model is built by nvinfer)",
        metavar="FILE",
    )


def export_deepstream(options: DeepStreamOptions) -> None:
    """Check the request, export, write what DeepStream wants beside the file."""
    check_deepstream_options(options)
    from utils.jobs.export import export_checkpoint
    from utils.onnx_graph import deepstream, output_formats
    from utils.onnx_graph.export_config import ExportConfig

    batch = options.batch or 1
    config = ExportConfig(
        imgsz=height_width(options.imgsz),
        batch_size=batch,
        dynamic="batch" if options.dynamic else "none",
        simplify=options.simplify,
        typing="auto",
        opset=options.opset,
    )
    nms = output_formats.NmsSettings(**options.nms_settings())
    beside = Path(options.output or options.weights)  # the file gets a name of its own in that folder
    refuse_overwrite(deepstream.paths(beside), [options.weights])
    deepstream.check_name(beside.name)
    deepstream.check_name(options.engine or "", "--engine")
    form = output_formats.end2end(nms) if options.end2end else output_formats.deepstream(nms)
    export_checkpoint(options, [form], config, partial(check_model, options), partial(write_beside, options, nms))


def check_deepstream_options(options: DeepStreamOptions) -> None:
    """Raise `InputError` for two batch sizes, or a file or library that is missing."""
    if options.dynamic and options.batch is not None:
        raise InputError(
            f"--dynamic asks for a dynamic batch size and --batch {options.batch} for a static one; give one of them"
        )
    check_files(weights=options.weights)
    need("torch", "onnx")
    if options.check:
        need("onnxruntime")
    if options.simplify:
        need("onnxslim")


def check_model(options: DeepStreamOptions, network: Network, files: list[Path]) -> None:
    """Raise `InputError` for options of NMS without NMS, files that are read, and class names of several lines."""
    from utils.onnx_graph import deepstream

    if not (options.end2end or network.task.prototypes):
        options.reject_unused(NmsOptions.model_fields, "to a detector without --end2end, which puts NMS into it")
    refuse_overwrite([*files, *deepstream.paths(files[0])], [options.weights])
    deepstream.label_lines(network.source.names)


def write_beside(
    options: DeepStreamOptions,
    nms: NmsSettings,
    network: Network,
    config: ExportConfig,
    results: Sequence[ExportResult],
) -> Iterator[str]:
    """Write labels and configuration beside the exported file; yield their paths, and the command that comes next."""
    from utils.core.input_spec import channels_of
    from utils.onnx_graph import deepstream
    from utils.serving.options import ServingOptions

    path = results[0].path
    typing = config.typing if network.quantized else ""
    engine = options.engine or ""
    if typing and not engine:
        engine = path.with_suffix(".engine").name
    channels = channels_of(network.model)
    masks = bool(network.task.prototypes)
    nms_inside = nms if masks or options.end2end else None
    model = ServingOptions(file=path).model_name if options.end2end else ""
    names = network.source.names
    texts = deepstream.configs(
        path,
        config.imgsz,
        config.batch_size,
        len(names),
        typing=typing,
        dynamic=options.dynamic,
        engine=engine,
        nms=nms_inside,
        masks=masks,
        model=model,
        channels=channels,
    )
    for written in deepstream.write(path, deepstream.label_lines(names), texts):
        yield str(written)
    if not engine:
        yield "next: a pipeline, such as those of docs/deepstream.md of the overlay"
        return
    build = deepstream.trtexec_command(
        path.name, engine, config.imgsz, typing=typing, dynamic=options.dynamic, channels=channels
    )
    enter = "" if path.parent == Path() else f"cd {shlex.quote(str(path.parent))} && "
    yield f"next, on the machine with the GPU: {enter}{build}"


main = partial(run_program, "export_yoloV9.py", (DeepStreamOptions, export_deepstream), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
