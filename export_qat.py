#!/usr/bin/env python3
"""Export a quantized (or FP32) YOLOv9 checkpoint to ONNX, and verify Q/DQ graphs.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c.pt --imgsz 640 --simplify
    python export_qat.py --verify runs/qat/exp/weights/qat_best_yolov9-c.onnx

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_file, check_files, read_onnx
from utils.core.options import (
    COMPATIBILITY,
    BatchSize,
    CheckImages,
    Field,
    InputSize,
    height_width,
    option,
    size_option,
)
from utils.jobs.export_options import InputOptions, NmsOptions
from utils.jobs.open import need

if TYPE_CHECKING:
    from pathlib import Path

    from utils.jobs.open import Network
    from utils.onnx_graph.export_config import ExportConfig
    from utils.onnx_graph.output_formats import OutputFormat

OF_NMS = ("nms", "topk_all", "iou_thres", "conf_thres", "class_agnostic")
OF_MASKS = ("mask_resolution", "pooler_scale", "sampling_ratio")
OF_QUANTIZERS = ("int8_weights", "no_int8_rewrites", "target")
NMS = "NMS in the file"


class ExportOptions(NmsOptions, InputOptions):
    """Export a quantized (or FP32) YOLOv9 checkpoint to ONNX, and verify Q/DQ graphs."""

    OFTEN = ("weights", "imgsz", "batch_size", "dynamic", "typing", "include", "output", "verify")
    weights: str | None = option(None, "checkpoint (.pt): quantized by qat.py, or FP32", metavar="FILE")
    data: str | None = option(None, "dataset's YAML, to check that the classes fit (optional)", metavar="FILE")
    imgsz: InputSize | None = size_option("what a quantized model was calibrated at, an FP32 model trained at, or 640")
    batch_size: BatchSize = option(1, "images a batch", metavar="N")
    include: list[Literal["onnx", "onnx_end2end"]] = option(
        ["onnx"], "one or both: onnx, raw predictions (default); onnx_end2end, with NMS inside"
    )
    dynamic: Literal["none", "all", "batch"] = option(
        "none",
        "dynamic batch, height and width; '--dynamic batch': dynamic batch only (default: neither)",
        nargs="?",
        const="all",
    )
    simplify: bool = option(False, "simplify the graph with onnxslim")
    inplace: bool = option(False, "upstream's switch of the same name on the head", group=COMPATIBILITY)
    typing: Literal["weak", "strong"] | None = option(
        None,
        "of a quantized model. strong: layers that are not INT8 in FP16, for TensorRT 10.12 and later, 11 and "
        "RTX (default); weak: FP32, for TensorRT 8.6 to 10.11 (default where one of these is installed)",
    )
    opset: int | None = option(
        None,
        "ONNX operator set (default: 17, the last that TensorRT 8.6 reads; strong: 19, the first with FP16 "
        "scales). Without --typing it decides: strong from 19 on",
        metavar="N",
    )
    half: bool = option(
        False, "store FP32 weights in FP16, of a quantized model as --typing strong; inputs and outputs stay FP32"
    )
    target: Literal["tensorrt", "openvino", "openvino-avx2"] = option(
        "tensorrt",
        "what runs the INT8 file. tensorrt: engines, and with --typing weak OpenVINO, too; openvino: "
        "OpenVINO on CPUs with VNNI, closer to FP32, since activations have zero points; openvino-avx2: the same on "
        "CPUs without VNNI, with weights of 7 bits (default: tensorrt)",
    )
    int8_weights: bool = option(
        False,
        "store quantized weights as INT8, for ONNX Runtime and TensorRT 10 and later: a third of a weakly typed "
        "file's size, half of a strongly typed one's",
    )
    no_int8_rewrites: bool = option(
        False,
        "skip the graph rewrites that speed up INT8 kernels on GPUs: parts of Concats and Splits in whole "
        "blocks of 32 channels, the halves of an ELAN block's first convolution apart, average pools as convolutions, "
        "a first convolution of 64 channels as two",
        "--no-int8-rewrites",
        "--keep-layers",
    )
    input_layout: Literal["nchw", "nhwc"] = option(
        "nchw", "images [B, 3, H, W] (default), or of uint8 [B, H, W, 3], as decoders and cameras give them"
    )
    class_agnostic: bool = option(False, "boxes suppress each other across classes", group=NMS)
    mask_resolution: Annotated[int, Field(ge=0, le=1024)] | None = option(
        None,
        "segmentation: a mask has N rows and columns, which lie over its box (default: 160); 0: it lies on the "
        "prototypes' grid, a quarter of the input's size",
        group=NMS,
        metavar="N",
    )
    pooler_scale: Literal["0.25"] | None = option(None, "of the prototypes; there is no other", group=COMPATIBILITY)
    sampling_ratio: Literal["0", "1"] | None = option(None, "of masks: both are one sample a bin", group=COMPATIBILITY)
    check: CheckImages = option(
        4,
        "compare with PyTorch on N images in ONNX Runtime, those of --data if given (default: 4; 0: do not)",
        metavar="N",
    )
    output: str | None = option(
        None,
        "the file to write (default: beside the weights, NAME.onnx, NAME-fp16.onnx, NAME-int8.onnx, "
        "NAME-int8-strong.onnx or NAME-int8-openvino-avx2.onnx, and NAME-int8-end2end.onnx with NMS)",
        metavar="FILE",
    )
    verify: str | None = option(None, "check an exported Q/DQ ONNX instead of exporting", metavar="FILE")


def export_qat(options: ExportOptions) -> int:
    """Verify a file, or export a checkpoint; return 1 where a property of the verified file does not hold."""
    if options.verify:
        return verify_file(options, options.verify)
    check_options(options)
    from utils.jobs.export import export_checkpoint

    export_checkpoint(options, output_formats_of(options), config_of(options), partial(check_network, options))
    return 0


def verify_file(options: ExportOptions, file: str) -> int:
    """Print the properties of a Q/DQ file; 1 where one does not hold."""
    options.reject_others(["verify"], "with --verify, which reads a file and exports nothing")
    check_file(file, "--verify takes an ONNX file")
    need("onnx")
    from utils.onnx_graph import verify

    report = verify.verify(read_onnx(file, check=True))
    print(verify.table(report))
    return 0 if report.ok else 1


def check_options(options: ExportOptions) -> None:
    """Raise `InputError` for options that contradict each other, or a file or library that is missing."""
    if "onnx_end2end" not in options.include:
        options.reject_unused([*OF_NMS, *OF_MASKS], "without --include onnx_end2end, which puts NMS into the file")
    if options.half and options.typing == "weak":
        raise InputError("--half asks for FP16 and --typing weak for FP32; give one of them")
    if options.target != "tensorrt":
        options.reject_unused(["no_int8_rewrites"], f"with --target {options.target}, whose files have none")
        if "onnx_end2end" in options.include and options.nms in (None, "efficient"):
            raise InputError(
                f"--target {options.target}: OpenVINO lacks TensorRT's NMS plugin; give --nms onnx, or --nms none"
            )
    if options.input_layout == "nhwc" and options.input != "uint8":
        raise InputError("--input-layout nhwc is for --input uint8; float has nchw")
    if not options.weights:
        raise InputError("--weights is missing; give the checkpoint to export, or --verify an ONNX file")
    check_files(weights=options.weights, data=options.data)
    need("torch", "onnx")
    if options.check:
        need("onnxruntime")
    if options.simplify:
        need("onnxslim")


def config_of(options: ExportOptions) -> ExportConfig:
    """Return how the model is traced and what the graph passes do."""
    from utils.core.input_spec import InputSpec
    from utils.onnx_graph.export_config import ExportConfig

    size = height_width(options.imgsz)
    typing = options.typing or ("strong" if options.half else "auto")
    spec = InputSpec(options.input, options.input_layout)
    rewrites = not options.no_int8_rewrites
    return ExportConfig(
        imgsz=size,
        batch_size=options.batch_size,
        dynamic=options.dynamic,
        simplify=options.simplify,
        typing=typing,
        opset=options.opset,
        inplace=options.inplace,
        int8_weights=options.int8_weights,
        for_int8_kernels=rewrites,
        input=spec,
        target=options.target,
    )


def output_formats_of(options: ExportOptions) -> list[OutputFormat]:
    """Return the formats of --include, each once."""
    from utils.onnx_graph import output_formats

    nms = output_formats.NmsSettings(**options.nms_settings(), agnostic=options.class_agnostic)
    resolution = output_formats.RESOLUTION if options.mask_resolution is None else options.mask_resolution
    formats = {"onnx": output_formats.plain(), "onnx_end2end": output_formats.end2end(nms, resolution)}
    return [formats[name] for name in dict.fromkeys(options.include)]


def check_network(options: ExportOptions, network: Network, files: list[Path]) -> None:
    """Raise `InputError` for an option that does nothing for this kind of model."""
    if not network.task.prototypes:
        options.reject_unused(OF_MASKS, f"to a detector, and {options.weights} ends in {network.head}")
    if not network.quantized:
        options.reject_unused(OF_QUANTIZERS, f"to an FP32 model, and {options.weights} is one")


main = partial(run_program, "export_qat.py", (ExportOptions, export_qat), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
