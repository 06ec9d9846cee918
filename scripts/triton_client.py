#!/usr/bin/env python3
"""Draw what a model on NVIDIA Triton Inference Server finds.

    python scripts/triton_client.py yolov9-c-int8 --source images/
    python scripts/triton_client.py yolov9-c-int8 --protocol grpc --url server:8001 --source video.mp4

The model is one that scripts/make_triton.py wrote. docs/triton.md says more, also how to measure a server.
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

from utils.cli import IMAGE_SIZE_FLAGS, add_run_dir, run_program
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.output_paths import refuse_overwrite
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.jobs.dependencies import need


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "triton_client.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="its name on the server")
    add("--source", metavar="PATH", help="draw detections on this image, video or folder (required)")
    add("--protocol", choices=("http", "grpc"), default="http", help="how the server is asked (default: http)")
    add("--url", default="", metavar="HOST:PORT", help="default: localhost:8000; of grpc localhost:8001")
    text = "longer side of the input, if its size is dynamic (default: the model's)"
    add(*IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), metavar="PX", help=text)
    text = f"least score that is drawn (default: {EVERYDAY_CONFIDENCE})"
    add("--conf-thres", type=bounded("conf_thres"), default=EVERYDAY_CONFIDENCE, metavar="P", help=text)
    text = f"of NMS here, behind raw predictions (default: {EVERYDAY_NMS_IOU})"
    add("--iou-thres", type=bounded("iou_thres"), default=EVERYDAY_NMS_IOU, metavar="P", help=text)
    add("--max-det", type=bounded("max_det"), default=300, metavar="N", help="detections per image (default: 300)")
    add_run_dir(parser, "runs/triton")
    return parser


def main(args: argparse.Namespace) -> int:
    """Draw."""
    if args.source is None:
        raise InputError("give --source, an image, a video or a folder to draw detections on")
    need("torch", "tritonclient", "grpc", *["geventhttpclient"] * (args.protocol == "http"))
    from utils.evaluation.sources import check_readable, check_source, target_names

    files = check_source(args.source)
    check_readable(files)
    if args.exist_ok:
        targets = [Path(args.project) / args.name / name for name in target_names(files)]
        refuse_overwrite(targets, files, "choose another --name or --project")
    from utils.jobs.ask_server import TritonClientOptions, draw

    draw(TritonClientOptions(**{item.name: getattr(args, item.name) for item in fields(TritonClientOptions)}), files)
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
