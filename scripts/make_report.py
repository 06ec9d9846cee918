#!/usr/bin/env python3
"""Put the results of one or several runs on one page: report.html, its data as JSON, and plots.

    python scripts/make_report.py runs/qat/exp
    python scripts/make_report.py --environment model.onnx
    python scripts/make_report.py runs/qat/exp runs/val_trt/exp --output runs/report \\
        --compare gelan-c.pt qat_best_gelan-c.onnx --data data/coco.yaml

A run is a folder with a report.json, as qat.py and val_trt.py leave it, or that file. No run's report.json is written
over: in a run's folder the page's data goes to report-merged.json, elsewhere to report.json. With --compare both
networks run on a few validation images, and the page shows their detections side by side.

With --environment nothing is written: versions, GPU and driver are printed, and what each .onnx, .engine or .pt that is
given says of itself, for a bug report.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import add_device, add_image_size, run_program
from utils.core.arguments import refuse_idle, refuse_others
from utils.core.bounds import bounded
from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.input_files import check_file, check_files
from utils.core.output_paths import refuse_overwrite
from utils.core.shown import printable
from utils.core.thresholds import EVERYDAY_CONFIDENCE
from utils.jobs.dependencies import need, need_for

if TYPE_CHECKING:
    from utils.reports.schema import Sample

logger = logging.getLogger(__name__)

OF_IMAGES = ("data", "samples", "imgsz", "conf_thres", "device")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "make_report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folders, or their report.json; rows keep this order; a row compares with the float row before it",
    )
    parser.add_argument(
        "--environment", action="store_true",
        help="print what a bug report needs instead: versions, GPU, driver, and the metadata of the files given as RUN",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="where the files go (default: the first run's folder)")
    parser.add_argument("--title", help="heading of the page")
    parser.add_argument(
        "--note", action="append", default=[], metavar="TEXT", help="a sentence for the reader; several times"
    )
    images = parser.add_argument_group("images")
    images.add_argument("--compare", nargs=2, metavar=("FLOAT", "INT8"), help="networks to draw: .pt, .onnx or .engine")
    images.add_argument("--data", metavar="FILE", help="the dataset's YAML, whose val images are shown")
    images.add_argument("--samples", type=bounded("samples"), default=4, metavar="N", help="images (default: 4)")
    add_image_size(images)
    images.add_argument(
        "--conf-thres",
        type=bounded("conf_thres"),
        default=EVERYDAY_CONFIDENCE,
        metavar="F",
        help=f"lowest score shown (default: {EVERYDAY_CONFIDENCE})",
    )
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Make the report as `args` say, and log its table."""
    if args.environment:
        return print_environment(args)
    if not args.runs:
        raise InputError("give run folders, or their report.json; or --environment")
    if not args.compare:
        refuse_idle(args, OF_IMAGES, "without --compare, whose networks it is for")
    elif not args.data:
        raise InputError("--compare needs --data, the dataset whose images are shown")
    need("matplotlib", *["torch"] * bool(args.compare))
    for network in args.compare or ():
        check_file(network, "--compare takes a .pt, .onnx or .engine")
        need_for(network)
    check_files(data=args.data)
    for run in args.runs:
        if not Path(run).is_dir():
            check_file(run, "give run folders, or their report.json")
    from utils.core.run_folder import held
    from utils.reports import files
    from utils.reports.files import PAGE_NAME, merged, write_all
    from utils.reports.schema import Report
    from utils.reports.tables import terminal_table

    first = Path(args.runs[0])
    folder = Path(args.output) if args.output else first if first.is_dir() else first.parent
    read = [files.json_of(run) for run in args.runs]
    own = (folder / files.JSON_NAME).resolve() in [path.resolve() for path in read]
    name = files.MERGED_NAME if own else files.JSON_NAME
    refuse_overwrite(files.planned(folder, name), [*read, *(args.compare or ()), args.data])
    report = merged([Report.load(path) for path in read])
    report.title = args.title or report.title
    report.notes += [note for note in args.note if note not in report.notes]
    if args.compare:
        report.samples = compare(args)
    with held(folder) if folder.is_dir() else nullcontext():
        write_all(report, folder, name)
    logger.info("%s\n\nreport: %s", terminal_table(report), folder / PAGE_NAME)
    return 0


def print_environment(args: argparse.Namespace) -> int:
    """Print what a bug report needs to know of this machine, and of the files in `args.runs`."""
    refuse_others(args, ["environment"], "with --environment, which makes no report")
    from utils.jobs import environment

    print(printable(environment.describe(args.runs)))
    return 0


def compare(args: argparse.Namespace) -> list[Sample]:
    """Detections of both networks on the same images."""
    from utils.evaluation.dataset import load_data
    from utils.jobs.open import open_runner
    from utils.jobs.samples import collect

    device = select_device(args.device)
    with ExitStack() as stack:
        names = ("float", "INT8")
        runners = {
            name: stack.enter_context(open_runner(path, device)) for name, path in zip(names, args.compare, strict=True)
        }
        return collect(runners, load_data(args.data), imgsz=args.imgsz, count=args.samples, confidence=args.conf_thres)


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
