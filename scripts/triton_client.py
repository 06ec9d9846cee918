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

from collections.abc import Sequence
from pathlib import Path

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import refuse_overwrite
from utils.jobs.dependencies import need
from utils.serving.options import TritonClientOptions


def main(options: TritonClientOptions) -> None:
    """Draw."""
    if options.source is None:
        raise InputError("give --source, an image, a video or a folder to draw detections on")
    need("torch", "tritonclient", "grpc", *["geventhttpclient"] * (options.protocol == "http"))
    from utils.evaluation.sources import check_readable, check_source, target_names

    files = check_source(options.source)
    check_readable(files)
    if options.exist_ok:
        targets = [Path(options.project) / options.name / name for name in target_names(files)]
        refuse_overwrite(targets, files, "choose another --name or --project")
    from utils.jobs.ask_server import draw

    draw(options, files)


def run(argv: Sequence[str] | None = None) -> int:
    return run_program("triton_client.py", (TritonClientOptions, main), argv, about=__doc__)


if __name__ == "__main__":
    sys.exit(run())
