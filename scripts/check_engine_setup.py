#!/usr/bin/env python3
"""Check what evaluating an engine needs before export and build, which take minutes: data, TensorRT, a GPU.

Prints how this TensorRT wants a file to be typed: weak or strong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that models/ and utils/ lie in

from utils.cli import add_device, run_program
from utils.dependencies import need, need_tensorrt


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "check_engine_setup.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", metavar="DATA", help="data set's YAML")
    parser.add_argument("--generate-graph", action="store_true", help="is graphviz there too?")
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Check, and print the typing."""
    from utils.engine import tensorrt_api
    from utils.engine.build_plan import check_target
    from utils.engine.engine_graph import program
    from utils.evaluation.data_yaml import load_data

    load_data(args.data).paths("val")
    need_tensorrt()
    if args.generate_graph:
        program()
    need("torch")
    tensorrt_api.use_device(args.device)
    api = tensorrt_api.load()
    check_target(api, tensorrt_api.gpu(), ())
    print("weak" if api.weakly_typed else "strong")
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    return run_program(make_parser(), main, argv)


if __name__ == "__main__":
    sys.exit(run())
