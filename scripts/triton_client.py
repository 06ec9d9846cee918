#!/usr/bin/env python3
"""Ask a model on NVIDIA Triton Inference Server: draw what it finds, measure how fast it answers.

    python scripts/triton_client.py yolov9-c-int8 --source images/
    python scripts/triton_client.py yolov9-c-int8 --measure 10 --concurrency 1 4 16
    python scripts/triton_client.py yolov9-c-int8 --protocol grpc --url server:8001 --source video.mp4

The model is one that scripts/make_triton.py wrote. docs/triton.md says more.
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

from utils.cli import IMAGE_SIZE_FLAGS, add_run_dir, run_program
from utils.core.arguments import refuse_idle
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.output_paths import refuse_overwrite
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.jobs.dependencies import need

OF_DRAWING = ("conf_thres", "iou_thres", "max_det", "project", "name", "exist_ok")
OF_MEASURING = ("concurrency", "batch_size")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "triton_client.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="its name on the server")
    parser.add_argument("--source", metavar="PATH", help="draw detections on this image, video or folder")
    parser.add_argument("--measure", type=bounded("duration"), metavar="SECONDS",
                        help="measure latency and throughput so long, for each --concurrency")  # fmt: skip
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http",
                        help="http (default) needs nothing of Triton's, grpc needs tritonclient")  # fmt: skip
    parser.add_argument(
        "--url", default="", metavar="HOST:PORT", help="default: localhost:8000; of grpc localhost:8001"
    )
    parser.add_argument("--concurrency", type=bounded("concurrency"), nargs="+", default=[1], metavar="N",
                        help="clients that ask side by side (default: 1)")  # fmt: skip
    parser.add_argument("--batch-size", type=bounded("batch_size"), default=1, metavar="N",
                        help="images in a request of --measure (default: 1)")  # fmt: skip
    parser.add_argument(*IMAGE_SIZE_FLAGS, type=bounded("imgsz"), metavar="PX",
                        help="longer side of the input, if its size is dynamic (default: the model's)")  # fmt: skip
    parser.add_argument("--conf-thres", type=bounded("conf_thres"), default=EVERYDAY_CONFIDENCE, metavar="P",
                        help=f"least score that is drawn (default: {EVERYDAY_CONFIDENCE})")  # fmt: skip
    parser.add_argument("--iou-thres", type=bounded("iou_thres"), default=EVERYDAY_NMS_IOU, metavar="P",
                        help=f"of NMS here, behind raw predictions (default: {EVERYDAY_NMS_IOU})")  # fmt: skip
    parser.add_argument(
        "--max-det", type=bounded("max_det"), default=300, metavar="N", help="detections per image (default: 300)"
    )
    add_run_dir(parser, "runs/triton")
    return parser


def main(args: argparse.Namespace) -> int:
    """Draw, measure, or both."""
    if args.source is None and args.measure is None:
        raise InputError("give --source to draw detections, --measure SECONDS to time requests, or both")
    if args.source is None:
        refuse_idle(args, OF_DRAWING, "without --source, whose detections are drawn")
    if args.measure is None:
        refuse_idle(args, OF_MEASURING, "without --measure")
    need("torch", *["tritonclient"] * (args.protocol == "grpc"))
    from utils.evaluation.sources import check_readable, check_source, target_names

    files = [] if args.source is None else check_source(args.source)
    if files:
        check_readable(files)
        if args.exist_ok:
            targets = [Path(args.project) / args.name / name for name in target_names(files)]
            refuse_overwrite(targets, files, "choose another --name or --project")
    from utils.jobs import ask_server

    asked = ask_server.Asked(
        args.model, args.protocol, args.url, args.imgsz, args.conf_thres, args.iou_thres, args.max_det,
        args.project, args.name, args.exist_ok,
    )  # fmt: skip
    if files:
        ask_server.draw(asked, files)
    if args.measure is not None:
        ask_server.time_requests(asked, args.measure, args.concurrency, args.batch_size, files)
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
