#!/usr/bin/env python3
"""Export a quantized (or float) YOLOv9 checkpoint to ONNX, and verify Q/DQ graphs.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c.pt --imgsz 640 --simplify
    python export_qat.py --verify runs/qat/exp/weights/qat_best_yolov9-c.onnx

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.quantize.errors import InputError
from utils.cli import IMAGE_SIZE_FLAGS, add_device, run_program, select_device

if TYPE_CHECKING:
    from utils.onnx_graph.export import ExportConfig, ExportResult
    from utils.onnx_graph.network import Network

FORMATS = ("onnx",)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("export_qat.py", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", metavar="FILE", help="checkpoint (.pt): quantized by qat.py, or float")
    parser.add_argument("--data", metavar="FILE", help="data set's YAML, to check that the classes fit (optional)")
    parser.add_argument(
        *IMAGE_SIZE_FLAGS, dest="imgsz", type=int, nargs="+", default=[640], metavar="PX",
        help="input size in pixels: one side, or height and width (default: 640)",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="pictures a batch (default: 1)")
    add_device(parser)
    parser.add_argument("--include", nargs="+", default=["onnx"], metavar="FORMAT", help="onnx (default)")
    parser.add_argument(
        "--dynamic", nargs="?", const="all", default="none", choices=("all", "batch"),
        help="free batch, height and width; '--dynamic batch': free batch only",
    )  # fmt: skip
    parser.add_argument("--simplify", action="store_true", help="simplify the graph with onnxslim")
    parser.add_argument("--inplace", action="store_true", help="upstream's switch of the same name on the head")
    parser.add_argument(
        "--opset", type=int, default=17, metavar="N",
        help="ONNX operator set (default: 17, the last that TensorRT 8.6 reads)",
    )  # fmt: skip
    parser.add_argument("--half", action="store_true", help="float weights in FP16; inputs and outputs stay FP32")
    parser.add_argument(
        "--int8-weights", action="store_true",
        help="store quantized weights as INT8: a quarter of the size, for ONNX Runtime and TensorRT 10 and later",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="the file to write (default: beside the weights, .onnx)")
    parser.add_argument("--verify", metavar="FILE", help="check an exported Q/DQ ONNX instead of exporting")
    return parser


def verify(path: str) -> int:
    """`--verify`: print what holds; 1 if something does not."""
    from utils.onnx_graph.verify import table, verify_file

    report = verify_file(path)
    print(table(report))
    return 0 if report.ok else 1


def export(args: argparse.Namespace) -> None:
    """Check the request, load, export, say what was written."""
    output = _output(args)
    unknown = [name for name in args.include if name.lower() not in FORMATS]
    if unknown:
        raise InputError(f"--include {unknown[0]} is not available here; available: {', '.join(FORMATS)}")
    if len(args.imgsz) > 2:
        raise InputError(f"--imgsz takes one side or height and width, not {len(args.imgsz)} numbers")
    from models.quantize.inputs import check_classes, fitting_size
    from utils.evaluation.data_yaml import load_data
    from utils.onnx_graph.export import ExportConfig, export_onnx
    from utils.onnx_graph.network import load_network

    config = ExportConfig(
        imgsz=(args.imgsz[0], args.imgsz[-1]), batch_size=args.batch_size, dynamic=args.dynamic,
        simplify=args.simplify, opset=args.opset, half=args.half, inplace=args.inplace, int8_weights=args.int8_weights,
    )  # fmt: skip
    data = load_data(args.data) if args.data else None
    network = load_network(args.weights, select_device(args.device))
    if data is not None:
        check_classes(args.weights, network.names, data)
    config = config.with_size([fitting_size(size, network.stride) for size in config.imgsz])
    result = export_onnx(network.model, config, output, network.metadata())
    print(summary(network, config, result))


def summary(network: Network, config: ExportConfig, result: ExportResult) -> str:
    """What was written, and whether a Q/DQ graph has its properties."""
    from utils.onnx_graph.verify import table

    kind = {"qat": "QAT", "float": "float, FP16" if config.half else "float"}[network.kind]
    shapes = [f"{name} [{', '.join(map(str, shape))}]" for name, shape in {**result.inputs, **result.outputs}.items()]
    line = f"{result.path}: {kind}, opset {result.opset}, {' -> '.join(shapes)}, {result.size_bytes / 1e6:.1f} MB"
    if result.report is None:
        return line
    return f"{line}\n{result.report.summary() if result.report.ok else table(result.report)}"


def _output(args: argparse.Namespace) -> Path:
    if not args.weights:
        raise InputError("--weights is missing; give the checkpoint to export, or --verify an ONNX file")
    path = Path(args.output) if args.output else Path(args.weights).with_suffix(".onnx")
    if path.suffix != ".onnx" or path.is_dir():
        raise InputError(f"--output {path} is not the name of an .onnx file")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""

    def handle(args: argparse.Namespace) -> int:
        if args.verify:
            return verify(args.verify)
        export(args)
        return 0

    return run_program(build_parser(), handle, argv)


if __name__ == "__main__":
    sys.exit(main())
