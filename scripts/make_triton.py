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
from dataclasses import fields
from pathlib import Path

from utils.cli import IMAGE_SIZE_FLAGS, run_program
from utils.core.arguments import refuse_idle, refuse_others
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.jobs.dependencies import need

PLATFORMS = ("onnxruntime_onnx", "tensorrt_plan")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "make_triton.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE", help=".onnx, .engine or .plan")
    add("--check", type=Path, metavar="FOLDER", help="check a model repository instead of writing one")
    text = "the model repository; models are added to one that is there (default: model_repository)"
    add("--output", type=Path, default=Path("model_repository"), metavar="FOLDER", help=text)
    add("--name", help="of the model, by which clients ask for it (default: the file's)")
    text = "what runs an ONNX file: ONNX Runtime (default), or TensorRT, with an engine that is built later"
    add("--platform", choices=PLATFORMS, help=text)
    text = "of an engine that is built later, or has no note: its profile, one or min opt max (default: 1 8 16)"
    add("--batch-size", type=bounded("batch_size"), nargs="+", metavar="N", help=text)
    text = "the same of its image size (default: the file's own)"
    add(*IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), nargs="+", metavar="PX", help=text)
    add("--onnx", type=Path, metavar="FILE", help="what an engine without a note was built from")
    add = parser.add_argument_group("how it is served").add_argument
    text = "images that the server puts together (default: what the engine takes; of an ONNX file 16)"
    add("--max-batch-size", type=bounded("batch_size"), metavar="N", help=text)
    text = "of the network on each GPU (default: 1)"
    add("--instances", type=bounded("instances"), default=1, metavar="N", help=text)
    text = "microseconds that a request waits for others to share a batch (default: 0)"
    add("--queue-delay", type=bounded("queue_delay"), default=0, metavar="US", help=text)
    add("--no-warmup", dest="warmup", action="store_false", help="do not run the network before the server is ready")
    add("--cuda-graphs", action="store_true", help="of an engine: let the server record CUDA graphs")
    add = parser.add_argument_group("NMS behind raw predictions").add_argument
    add("--no-nms", dest="nms", action="store_false", help="serve raw predictions")
    text = f"confidence threshold (default: {EVERYDAY_CONFIDENCE})"
    add("--conf-thres", type=bounded("conf_thres"), metavar="P", help=text)
    add("--iou-thres", type=bounded("iou_thres"), metavar="P", help=f"overlap (default: {EVERYDAY_NMS_IOU})")
    add("--max-det", type=bounded("max_det"), metavar="N", help="detections an image (default: 100)")
    add("--class-agnostic", action="store_true", default=None, help="boxes suppress each other across classes")
    text = "processes that do it side by side (default: 1)"
    add("--nms-instances", type=bounded("nms_instances"), metavar="N", help=text)
    return parser


def main(args: argparse.Namespace) -> int:
    """Write, or check."""
    if (args.file is None) == (args.check is None):
        raise InputError("give an ONNX file or an engine to serve, or --check a model repository")
    if args.check is not None:
        refuse_others(args, ["check"], "with --check, which writes nothing")
    elif args.file.suffix.lower() == ".onnx":
        refuse_idle(args, ["onnx"], "with an ONNX file; it says what an engine was built from")
    need("tritonclient", "grpc")
    from utils.jobs import model_repository
    from utils.serving.config import ServingOptions

    if args.check is not None:
        model_repository.check(args.check)
    else:
        options = {item.name: getattr(args, item.name) for item in fields(ServingOptions)}
        model_repository.make(ServingOptions(**options))
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
