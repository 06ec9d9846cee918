#!/usr/bin/env python3
"""Compare forms of QAT by AP, with controls: starts x losses x fixed or learned ranges x seeds.

    python scripts/compare_qat.py --weights data/demo/gelan-digits.pt --data datasets/digits/data.yaml --imgsz 320

Run it in a patched checkout. Each training writes a small JSON into --output as soon as it ends, and what is there is
not trained again, so that an interrupted comparison goes on. --part 2/8 takes the second of eight parts of the
trainings, so that several processes can share them; --table prints what is there, and draws it.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import logging
from pathlib import Path

from utils.cli import add_data, add_device, add_image_size, run_program
from utils.core.arguments import refuse_others
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.jobs.dependencies import need
from utils.jobs.options import QuantizeOptions

logger = logging.getLogger("utils.jobs.compare_qat")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "compare_qat.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", metavar="FILE", help="float checkpoint (.pt)")
    add_data(parser)
    add_image_size(parser)
    add_device(parser)
    parser.add_argument("--batch-size", type=bounded("batch_size"), default=10, metavar="N", help="default: 10")
    parser.add_argument("--steps", type=bounded("iters"), default=1000, metavar="N", help="of each (default: 1000)")
    parser.add_argument("--seeds", type=bounded("rounds"), default=3, metavar="N", help="default: 3")
    parser.add_argument("--workers", type=bounded("workers"), default=2, metavar="N", help="default: 2")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="default: 1/1, all of it")
    parser.add_argument("--output", type=Path, default=Path("runs/compare_qat"), metavar="DIR",
                        help="where results lie (default: runs/compare_qat)")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="train nothing; print and draw what is in --output")
    return parser


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts) <= 1000):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no part such as 2/8")
    return int(number), int(parts)


def main(args: argparse.Namespace) -> int:
    """Train and measure, or show."""
    if args.table:
        refuse_others(args, ["table", "output"], "with --table, which trains nothing")
    need("torch")
    from utils.jobs import compare_qat

    if args.table:
        results = compare_qat.load_results(args.output)
        if not results:
            raise InputError(f"there are no results in {args.output}")
        logger.info("%s", "\n".join(compare_qat.table(results)))
        compare_qat.draw(results, args.output / "ap_per_step.png")
        return 0
    check_files(weights=args.weights, data=args.data)
    if not args.weights:
        raise InputError("--weights is missing; give the float checkpoint")
    options = QuantizeOptions(
        weights=args.weights, data=args.data, device=args.device, imgsz=args.imgsz, batch_size=args.batch_size,
        workers=args.workers,
    )  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    number, parts = args.part
    compare_qat.Comparison(options, args.steps, args.output).run(compare_qat.all_runs(args.seeds)[number - 1 :: parts])
    return 0


if __name__ == "__main__":
    sys.exit(run_program(make_parser(), main))
