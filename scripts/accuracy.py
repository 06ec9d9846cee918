#!/usr/bin/env python3
"""What INT8 costs networks of real size, and what it gains: train, quantize, export, build, evaluate, time, report.

    python scripts/accuracy.py --data datasets/digits-640/data.yaml

    python scripts/accuracy.py --data data/coco.yaml --weights yolov9-c.pt

Run it in a patched checkout. A step whose result lies in --output is not run again, so that an interrupted comparison
goes on, and a training with it. Without TensorRT or a GPU there are no engines, and ONNX Runtime runs the exported
files. --output/accuracy.html can be shared: it says versions, GPU, driver and commands, and names nothing private.

ENGINE_PYTHON=/path/to/python3 is an interpreter that has TensorRT, if the environment's own does not.
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
from utils.core.arguments import refuse_idle
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_file, check_files
from utils.jobs.dependencies import need

NETWORKS = ["yolov9-t", "yolov9-s", "yolov9-m", "yolov9-c"]
OF_TRAINING = ("epochs", "batch_size", "lr")
STEPS = ("train", "float", "quantize", "export", "time", "evaluate", "page")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "accuracy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="dataset's YAML")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--networks", nargs="+", metavar="NAME", default=NETWORKS,
                        help=f"of upstream's, to train (default: {' '.join(NETWORKS)})")  # fmt: skip
    chosen.add_argument("--weights", nargs="+", metavar="FILE", type=Path,
                        help="trained networks instead: .pt of upstream's train.py or train_dual.py")  # fmt: skip
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS),
                        help=f"of {', '.join(STEPS)} (default: all); the page is written after any")  # fmt: skip
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
    after = parser.add_argument_group("quantization and engines")
    after.add_argument("--qat-epochs", type=bounded("epochs"), metavar="N", help="default: that of qat.py quantize")
    after.add_argument("--qat-iters", type=bounded("iters"), metavar="N", help="an epoch, at most (default: as there)")
    after.add_argument("--typing", choices=("weak", "strong"),
                       help="of exported files (default: as TensorRT here wants it, or weak)")  # fmt: skip
    after.add_argument("--optimization-level", type=bounded("optimization_level"), metavar="N",
                       help="of engines, 0 to 5 (default: TensorRT's)")  # fmt: skip
    return parser


def main(args: argparse.Namespace) -> int:
    """Run what is missing, and write the page."""
    if args.weights:
        refuse_idle(args, OF_TRAINING, "with --weights, whose networks are trained")
    check_files(data=args.data)
    need("torch", "matplotlib", "jinja2")
    from utils.jobs.accuracy import measure, run
    from utils.jobs.accuracy.networks import network
    from utils.jobs.accuracy.train import TrainOptions

    if args.epochs == 0:
        raise InputError("--epochs 0 trains nothing; leave it out, or give trained networks with --weights")
    if args.weights:
        for file in args.weights:
            check_file(file, "--weights takes float checkpoints (.pt)")
        sources = [run.Source(file.stem, weights=file.resolve()) for file in args.weights]
    else:
        sources = [run.Source(name, network=network(name)) for name in args.networks]
    if len({source.name for source in sources}) != len(sources):
        raise InputError("two networks have the same name; rename a file, or leave one out")
    gpus = run.devices(args.device)
    data, python = Path(args.data).resolve(), os.environ.get("ENGINE_PYTHON") or sys.executable
    typing, reason = measure.tensorrt(python, data, bool(gpus))
    if reason:
        refuse_idle(args, ["optimization_level"], f"where no engines are built ({reason})")
    training = TrainOptions(data, args.imgsz, args.epochs, args.batch_size, args.lr, args.workers, len(gpus))
    options = measure.MeasureOptions(
        data, args.imgsz, args.workers, bool(gpus), args.qat_epochs, args.qat_iters, args.optimization_level,
        args.typing or typing or "weak", reason,
    )  # fmt: skip
    run.run(sources, args.steps, training, options, args.output.resolve(), gpus, python)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(make_parser(), main))
