#!/usr/bin/env python3
"""What INT8 costs networks of real size, and what it gains: train, quantize, export, build, evaluate, time, report.

    python scripts/accuracy.py --data datasets/digits-640/data.yaml

Run it in a patched checkout. A step whose result lies in --output is not run again, so that an interrupted comparison
goes on, and a training with it.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
from pathlib import Path

from utils.cli import add_image_size, run_program
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.jobs.dependencies import need

NETWORKS = ["yolov9-t", "yolov9-s", "yolov9-m", "yolov9-c"]
STEPS = ("train",)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "accuracy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="dataset's YAML")
    parser.add_argument("--networks", nargs="+", metavar="NAME", default=NETWORKS,
                        help=f"of upstream's (default: {' '.join(NETWORKS)})")  # fmt: skip
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="default: all")
    add_image_size(parser)
    parser.add_argument("--device", default="", metavar="D",
                        help="'cpu', or CUDA devices such as 0 or 0,1 (default: all; training uses each)")  # fmt: skip
    parser.add_argument("--workers", type=bounded("workers"), default=8, metavar="N",
                        help="processes that read images, for each GPU (default: 8)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("runs/accuracy"), metavar="DIR",
                        help="where results lie (default: runs/accuracy)")  # fmt: skip
    training = parser.add_argument_group("training", "for each network the defaults are its own")
    training.add_argument("--epochs", type=bounded("epochs"), metavar="N", help="passes over the training images")
    training.add_argument("--batch-size", type=bounded("batch_size"), metavar="N", help="of all GPUs together")
    training.add_argument("--lr", type=bounded("lr"), metavar="LR", help="highest learning rate")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run what is missing."""
    check_files(data=args.data)
    need("torch")
    from utils.jobs.accuracy import run
    from utils.jobs.accuracy.networks import network
    from utils.jobs.accuracy.train import TrainOptions

    networks = [network(name) for name in args.networks]
    if len(set(args.networks)) != len(args.networks):
        raise InputError("--networks names one twice")
    devices = run.devices(args.device)
    options = TrainOptions(
        Path(args.data).resolve(), args.imgsz, args.epochs, args.batch_size, args.lr, args.workers, len(devices)
    )
    run.run(networks, options, args.output.resolve(), devices)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(make_parser(), main))
