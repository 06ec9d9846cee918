#!/usr/bin/env python3
"""Check what evaluating an engine needs before export and build, which take minutes: data, TensorRT, a GPU.

Prints how this TensorRT wants a file to be typed: weak or strong.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse

from utils.cli import add_device, run_program
from utils.jobs.dependencies import need, need_tensorrt


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("check_engine_setup.py", description=__doc__)
    parser.add_argument("data", metavar="DATA", help="dataset's YAML")
    parser.add_argument("--generate-graph", action="store_true", help="is graphviz there too?")
    add_device(parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Check, and print the typing."""
    from utils.evaluation.data_yaml import load_data
    from utils.trt import layer_graph, tensorrt_api
    from utils.trt.decision import check_target

    load_data(args.data).paths("val")
    need_tensorrt()
    if args.generate_graph:
        layer_graph.program()
    need("torch")
    tensorrt_api.use_device(args.device)
    api = tensorrt_api.load()
    check_target(api, tensorrt_api.gpu(), ())
    print(api.typing)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(make_parser(), main))
