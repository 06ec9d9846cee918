#!/usr/bin/env python3
"""Write a model repository for NVIDIA Triton Inference Server from an ONNX file or a TensorRT engine, or check one.

    python scripts/make_triton.py yolov9-c-int8.engine --output model_repository
    python scripts/make_triton.py yolov9-c-int8.onnx --output model_repository
    python scripts/make_triton.py yolov9-c-int8.onnx --platform tensorrt_plan --batch-size 1 8 16    # built later
    python scripts/make_triton.py --check model_repository

A file of raw predictions gets an ensemble with NMS behind it. docs/triton.md says what is written.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
from collections.abc import Sequence
from pathlib import Path

from utils.cli import IMAGE_SIZE_FLAGS, run_program
from utils.core.arguments import refuse_idle, refuse_others
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU

PLATFORMS = ("onnxruntime_onnx", "tensorrt_plan")
NMS_OPTIONS = ("conf_thres", "iou_thres", "max_det", "nms_instances")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "make_triton.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=".onnx, .engine or .plan")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="check a model repository instead of writing one")
    parser.add_argument(
        "--output", type=Path, default=Path("model_repository"), metavar="FOLDER",
        help="the model repository; models are added to one that is there (default: model_repository)",
    )  # fmt: skip
    parser.add_argument("--name", help="of the model, by which clients ask for it (default: the file's)")
    parser.add_argument("--platform", choices=PLATFORMS, help="what runs an ONNX file: ONNX Runtime (default), or "
                        "TensorRT, with an engine that is built into the repository later")  # fmt: skip
    parser.add_argument(
        "--batch-size", type=bounded("batch_size"), nargs="+", metavar="N",
        help="of an engine that is built later, or has no note: its profile, one or min opt max (default: 1 8 16)",
    )  # fmt: skip
    parser.add_argument(*IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), nargs="+", metavar="PX",
                        help="the same of its image size (default: the file's own)")  # fmt: skip
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="what an engine without a note was built from")
    _add_serving(parser)
    _add_nms(parser)
    return parser


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is served")
    group.add_argument(
        "--max-batch-size", type=bounded("batch_size"), metavar="N",
        help="images that the server puts together (default: what the engine takes; of an ONNX file 16)",
    )  # fmt: skip
    group.add_argument("--instances", type=bounded("instances"), default=1, metavar="N",
                       help="of the network on each GPU (default: 1)")  # fmt: skip
    group.add_argument("--queue-delay", type=bounded("queue_delay"), default=0, metavar="US",
                       help="microseconds that a request waits for others to share a batch (default: 0)")  # fmt: skip
    group.add_argument("--no-warmup", action="store_true", help="do not run the network before the server is ready")
    group.add_argument("--cuda-graphs", action="store_true", help="of an engine: let the server record CUDA graphs")


def _add_nms(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("NMS behind raw predictions")
    group.add_argument("--no-nms", action="store_true", help="serve raw predictions")
    group.add_argument("--conf-thres", type=bounded("conf_thres"), metavar="P",
                       help=f"confidence threshold (default: {EVERYDAY_CONFIDENCE})")  # fmt: skip
    group.add_argument(
        "--iou-thres", type=bounded("iou_thres"), metavar="P", help=f"overlap (default: {EVERYDAY_NMS_IOU})"
    )
    group.add_argument("--max-det", type=bounded("max_det"), metavar="N", help="detections an image (default: 100)")
    group.add_argument("--class-agnostic", action="store_true", help="boxes suppress each other across classes")
    group.add_argument("--nms-instances", type=bounded("nms_instances"), metavar="N",
                       help="processes that do it side by side (default: 1)")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Write, or check."""
    if (args.file is None) == (args.check is None):
        raise InputError("give an ONNX file or an engine to serve, or --check a model repository")
    if args.check is not None:
        refuse_others(args, ["check"], "with --check, which writes nothing")
    elif args.file.suffix.lower() == ".onnx":
        refuse_idle(args, ["onnx"], "with an ONNX file; it says what an engine was built from")
    from utils.jobs import model_repository

    if args.check is not None:
        model_repository.check(args.check)
        return 0
    given = {name: value for name in NMS_OPTIONS if (value := getattr(args, name)) is not None}
    from utils.serving.config import Wishes

    wishes = Wishes(
        name=args.name or model_repository.default_name(args.file), max_batch=args.max_batch_size,
        instances=args.instances, queue_delay=args.queue_delay, warmup=not args.no_warmup,
        cuda_graphs=args.cuda_graphs, nms=not args.no_nms, agnostic=args.class_agnostic,
        given=(*given, *["class_agnostic"] * args.class_agnostic), **given,
    )  # fmt: skip
    batch = model_repository.three(args.batch_size, "--batch-size")
    sides = model_repository.three(args.imgsz, "--imgsz")
    model_repository.make(
        args.file, args.output, wishes, platform=args.platform or "", onnx=args.onnx, batch=batch, sides=sides
    )
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
