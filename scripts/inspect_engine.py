#!/usr/bin/env python3
"""What an engine is made of: layers by precision and time, INT8 coverage, reformatting, the slowest layers.

    python scripts/inspect_engine.py yolov9-c-int8.engine --generate-graph
    python scripts/inspect_engine.py yolov9-c-int8.layers.json          # what it wrote, on any machine
    python scripts/inspect_engine.py trtexec.json                       # of trtexec --exportLayerInfo, without times

Writes ENGINE.layers.json (a list with name, precision, ms, ... of each layer), and ENGINE.svg with --generate-graph.
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

from utils.cli import add_device, run_program
from utils.core.arguments import refuse_idle
from utils.core.bounds import bounded
from utils.core.input_files import check_file
from utils.jobs.dependencies import need, need_tensorrt


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "inspect_engine.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="engine, ENGINE.layers.json, or the inspector's JSON")
    parser.add_argument(
        "--batch-size", type=bounded("batch_size"), metavar="N", help="images (default: what the engine is best for)"
    )
    parser.add_argument("--generate-graph", action="store_true", help="draw the layers as SVG, with graphviz")
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Report."""
    check_file(args.file, "expected an engine or the inspector's JSON")
    recorded = args.file.suffix == ".json"
    if recorded:
        refuse_idle(args, ["batch_size", "device"], "with a record, which has its times or none")
    else:
        need("torch")
        need_tensorrt()
    if args.generate_graph:
        from utils.trt.layer_report import graphviz

        graphviz()
    from utils.jobs import inspect_engine

    if recorded:
        inspect_engine.look_at_record(args.file, draw=args.generate_graph)
    else:
        inspect_engine.look_inside(args.file, batch=args.batch_size, draw=args.generate_graph, device=args.device)
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
