#!/usr/bin/env python3
"""Export a YOLOv9 checkpoint, quantized or float, to ONNX for DeepStream, with labels and configuration.

    python export_yoloV9.py --weights yolov9-c.pt --size 640 --dynamic

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from utils.cli import NMS_FLAGS, add_device, add_input, add_nms, given_nms, run_program
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.core.output_paths import refuse_overwrite
from utils.jobs.dependencies import need

if TYPE_CHECKING:
    from utils.jobs.open import Network


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("export_yoloV9.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "-w", "--weights", required=True, metavar="FILE",
        help="checkpoint (.pt): quantized by qat.py, or float, also with its auxiliary branch",
    )  # fmt: skip
    parser.add_argument(
        "-s", "--size", "--imgsz", type=bounded("imgsz"), nargs="+", metavar="PX",
        help="input size in pixels: one side, or height and width (default: what a quantized network was calibrated "
        "at, or 640)",
    )  # fmt: skip
    parser.add_argument(
        "--opset", type=int, default=17, metavar="N",
        help="ONNX operator set (default: 17, for TensorRT 8.6 to 10.11); from 19 on quantized weights are strongly "
        "typed, for TensorRT 10.12 and later",
    )  # fmt: skip
    parser.add_argument("--simplify", action="store_true", help="simplify the graph with onnxslim")
    parser.add_argument("--dynamic", action="store_true", help="dynamic batch; not together with --batch")
    parser.add_argument(
        "--batch", "--batch-size", type=bounded("batch_size"), metavar="N", help="images a batch (default: 1)"
    )
    parser.add_argument(
        "--check", type=bounded("check"), default=4, metavar="N",
        help="compare with PyTorch on N images in ONNX Runtime (default: 4; 0: do not)",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE", help="the file to write (default: beside the weights, NAME-deepstream.onnx)"
    )
    add_input(parser)
    add_device(parser)
    add_nms(parser, "NMS in the file", "segmentation networks only: DeepStream has no NMS for masks")
    return parser


def export(args: argparse.Namespace) -> None:
    """Check the request, export, write what DeepStream wants beside the file."""
    if args.dynamic and args.batch is not None:
        raise InputError(
            f"--dynamic asks for a dynamic batch size and --batch {args.batch} for a static one; give one of them"
        )
    sides = args.size or [640]
    if len(sides) > 2:
        raise InputError(f"--size takes one side or height and width, not {len(sides)} numbers")
    check_files(weights=args.weights)
    need("torch", "onnx", *["onnxruntime"] * (args.check > 0), *["onnxslim"] * args.simplify)
    from utils.core.input_form import InputForm
    from utils.jobs.export import Request, deliver, output_files, refuse_flags_of_masks
    from utils.onnx_graph import deepstream, deepstream_files, output_formats
    from utils.onnx_graph.export_config import ExportConfig

    batch = 1 if args.batch is None else args.batch
    config = ExportConfig(
        imgsz=(sides[0], sides[-1]), batch_size=batch, dynamic="batch" if args.dynamic else "none",
        simplify=args.simplify, typing="auto", opset=args.opset, input=InputForm(args.input),
    )  # fmt: skip
    given = given_nms(args)
    nms = output_formats.NmsSettings(**given)
    files = output_files(args.weights, args.output, [output_formats.deepstream(nms)])
    (path,) = files
    refuse_overwrite([path, *deepstream_files.paths(path)], [args.weights])
    deepstream_files.check_name(path)
    deepstream_files.check_config(path)

    def check(network: Network) -> None:
        refuse_flags_of_masks(network, args.weights, [NMS_FLAGS[name] for name in given])
        deepstream_files.check_labels(path, deepstream.labels(network.names))

    request = Request(args.weights, config, files, args.device, check=args.check, own_size=args.size is None)
    network, (result,) = deliver(request, print, check)
    height, width = result.inputs["images"][2:]
    text = deepstream.infer_config(
        path, (int(height), int(width)), batch, len(network.names), dynamic=args.dynamic,
        typing=config.resolved(True).typing if network.quantized else "", nms=nms if network.task.prototypes else None,
        takes_bytes=args.input == "uint8",
    )  # fmt: skip
    for written in deepstream_files.write(path, deepstream.labels(network.names), text):
        print(written)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return run_program(build_parser(), export, argv)


if __name__ == "__main__":
    sys.exit(main())
