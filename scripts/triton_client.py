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

import logging
from functools import partial

from utils.cli import run_program
from utils.core.errors import InputError
from utils.jobs.open import need
from utils.serving.options import TritonClientOptions

logger = logging.getLogger("utils.triton_client")


def main(options: TritonClientOptions) -> None:
    """Draw."""
    if options.source is None:
        raise InputError("give --source, an image, a video or a folder to draw detections on")
    need("torch", "tritonclient", "grpc", *["geventhttpclient"] * (options.protocol == "http"))
    from utils.evaluation.images import find_sources

    files = find_sources([options.source])
    from utils.core.run_folder import new_run
    from utils.jobs.visualize import Artist, show
    from utils.serving.runner import TritonRunner

    with TritonRunner(options.model, options.protocol, options.url) as runner:
        logger.info("%s: %s", options.model, runner.description)
        artist = Artist(
            runner, imgsz=options.imgsz, conf_thres=options.conf_thres, iou_thres=options.iou_thres,
            max_det=options.max_det,
        )  # fmt: skip
        with new_run(options.project, options.name, options.exist_ok) as folder:
            show(artist, files, folder)
    logger.info("results: %s", folder)


run = partial(run_program, "triton_client.py", (TritonClientOptions, main), about=__doc__)

if __name__ == "__main__":
    sys.exit(run())
