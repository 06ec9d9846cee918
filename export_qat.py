#!/usr/bin/env python3
"""Export a quantized (or float) YOLOv9 checkpoint to ONNX, and verify Q/DQ graphs.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c.pt --imgsz 640 --simplify
    python export_qat.py --verify runs/qat/exp/weights/qat_best_yolov9-c.onnx

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from utils.cli import IMAGE_SIZE_FLAGS, add_device, add_input, add_nms, given_nms, run_program
from utils.core.arguments import idle, refuse_idle, refuse_others
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_file, check_files
from utils.jobs.dependencies import need

if TYPE_CHECKING:
    from utils.jobs.open import Network

FORMATS = ("onnx", "onnx_end2end")
OF_NMS = ("nms", "topk_all", "iou_thres", "conf_thres", "class_agnostic")
OF_MASKS = ("mask_resolution", "pooler_scale", "sampling_ratio")
OF_QUANTIZERS = ("int8_weights", "keep_layers")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("export_qat.py", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", metavar="FILE", help="checkpoint (.pt): quantized by qat.py, or float")
    parser.add_argument("--data", metavar="FILE", help="dataset's YAML, to check that the classes fit (optional)")
    parser.add_argument(
        *IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), nargs="+", metavar="PX",
        help="input size in pixels: one side, or height and width (default: what a quantized network was calibrated "
        "at, or 640)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=bounded("batch_size"), default=1, metavar="N", help="images a batch (default: 1)"
    )
    add_device(parser)
    parser.add_argument(
        "--include", nargs="+", default=["onnx"], metavar="FORMAT",
        help="one or several of: onnx, raw predictions (default); onnx_end2end, with NMS inside",
    )  # fmt: skip
    parser.add_argument(
        "--dynamic", nargs="?", const="all", default="none", choices=("all", "batch"),
        help="dynamic batch, height and width; '--dynamic batch': dynamic batch only",
    )  # fmt: skip
    parser.add_argument("--simplify", action="store_true", help="simplify the graph with onnxslim")
    parser.add_argument("--inplace", action="store_true", help="upstream's switch of the same name on the head")
    parser.add_argument(
        "--typing", choices=("weak", "strong"),
        help="quantized weights. strong: the float part in FP16, for TensorRT 10.12 and later, 11 and RTX (default); "
        "weak: FP32, for TensorRT 8.6 to 10.11 (default where one of these is installed)",
    )  # fmt: skip
    parser.add_argument(
        "--opset", type=int, metavar="N",
        help="ONNX operator set (default: 17, the last that TensorRT 8.6 reads; strong: 19, the first with FP16 "
        "scales). Without --typing it decides: strong from 19 on",
    )  # fmt: skip
    parser.add_argument(
        "--half", action="store_true", help="float weights in FP16, as --typing strong; inputs and outputs stay FP32"
    )
    parser.add_argument(
        "--int8-weights", action="store_true",
        help="store quantized weights as INT8: a quarter of the size, for ONNX Runtime and TensorRT 10 and later",
    )  # fmt: skip
    parser.add_argument(
        "--keep-layers", action="store_true",
        help="without what is there for the speed of INT8 kernels on GPUs: parts of Concats and Splits in whole blocks "
        "of 32 channels, the halves of an ELAN block's first convolution one by one, average pools as convolutions, a "
        "first convolution of 64 channels as two",
    )  # fmt: skip
    add_input(parser)
    parser.add_argument(
        "--input-layout", choices=("nchw", "nhwc"), default="nchw",
        help="images [B, 3, H, W] (default), or of uint8 [B, H, W, 3], as decoders and cameras give them",
    )  # fmt: skip
    _add_end2end(parser)
    parser.add_argument(
        "--check", type=bounded("check"), default=4, metavar="N",
        help="compare with PyTorch on N images in ONNX Runtime, those of --data if given (default: 4; 0: do not)",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE",
        help="the file to write (default: beside the weights, NAME.onnx and NAME-end2end.onnx)",
    )  # fmt: skip
    parser.add_argument("--verify", metavar="FILE", help="check an exported Q/DQ ONNX instead of exporting")
    return parser


def _add_end2end(parser: argparse.ArgumentParser) -> None:
    group = add_nms(parser, "NMS in the file", "for --include onnx_end2end")
    group.add_argument("--class-agnostic", action="store_true", help="boxes suppress each other across classes")
    group.add_argument(
        "--mask-resolution", type=bounded("mask_resolution"), metavar="N",
        help="segmentation: a mask has N rows and columns, which lie over its box (default: 160); 0: it lies on the "
        "prototypes' grid, a quarter of the input's size",
    )  # fmt: skip
    group.add_argument("--pooler-scale", choices=("0.25",), help="of the prototypes; there is no other")
    group.add_argument("--sampling-ratio", choices=("0", "1"), help="of masks: both are one sample a bin")


def verify(path: str) -> int:
    """`--verify`: print what holds; 1 if something does not."""
    check_file(path, "--verify takes an ONNX file")
    need("onnx")
    from utils.onnx_graph.verify import table, verify_file

    report = verify_file(path)
    print(table(report))
    return 0 if report.ok else 1


def export(args: argparse.Namespace) -> None:
    """Check the request, load, export, say what was written."""
    names = list(dict.fromkeys(name.lower() for name in args.include))
    unknown = [name for name in names if name not in FORMATS]
    if "triton" in unknown:
        raise InputError(
            "--include triton is a step of its own: scripts/make_triton.py FILE, for an ONNX file or an engine"
        )
    if unknown:
        raise InputError(f"--include {unknown[0]} is not available here; available: {', '.join(FORMATS)}")
    sides = args.imgsz or [640]
    if len(sides) > 2:
        raise InputError(f"--imgsz takes one side or height and width, not {len(sides)} numbers")
    if "onnx_end2end" not in names:
        refuse_idle(args, OF_NMS, "without --include onnx_end2end, which puts NMS into the file")
        refuse_idle(args, OF_MASKS, "without --include onnx_end2end, which puts masks into the file")
    if args.half and args.typing == "weak":
        raise InputError("--half asks for FP16 and --typing weak for FP32; give one of them")
    if args.input_layout == "nhwc" and args.input != "uint8":
        raise InputError("--input-layout nhwc is for --input uint8; float has nchw")
    check_files(weights=args.weights, data=args.data)
    need("torch", "onnx", *["onnxruntime"] * (args.check > 0), *["onnxslim"] * args.simplify)
    from utils.core.input_form import InputForm
    from utils.jobs.export import Request, deliver, output_files, refuse_flags_of_masks
    from utils.onnx_graph import output_formats
    from utils.onnx_graph.export_config import ExportConfig

    config = ExportConfig(
        imgsz=(sides[0], sides[-1]), batch_size=args.batch_size, dynamic=args.dynamic,
        simplify=args.simplify, typing=args.typing or ("strong" if args.half else "auto"), opset=args.opset,
        inplace=args.inplace, int8_weights=args.int8_weights, for_int8_kernels=not args.keep_layers,
        input=InputForm(args.input, args.input_layout),
    )  # fmt: skip
    nms = output_formats.NmsSettings(**given_nms(args), agnostic=args.class_agnostic)
    resolution = output_formats.RESOLUTION if args.mask_resolution is None else args.mask_resolution
    known = {"onnx": output_formats.plain(), "onnx_end2end": output_formats.end2end(nms, resolution)}
    files = output_files(args.weights, args.output, [known[name] for name in names])

    def check(network: Network) -> None:
        refuse_flags_of_masks(network, args.weights, idle(args, *OF_MASKS))
        if not network.quantized:
            refuse_idle(args, OF_QUANTIZERS, f"to a float network, and {args.weights} is one")

    request = Request(args.weights, config, files, args.device, args.data, args.check, args.imgsz is None)
    deliver(request, print, check)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""

    def handle(args: argparse.Namespace) -> int:
        if args.verify:
            refuse_others(args, ["verify"], "with --verify, which reads a file and exports nothing")
            return verify(args.verify)
        export(args)
        return 0

    return run_program(build_parser(), handle, argv)


if __name__ == "__main__":
    sys.exit(main())
