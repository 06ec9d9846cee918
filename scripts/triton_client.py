#!/usr/bin/env python3
"""Draw what a model on NVIDIA Triton Inference Server finds.

    python scripts/triton_client.py yolov9-c-int8 --source images/
    python scripts/triton_client.py yolov9-c-int8 --url server:8001 --source video.mp4

The model is one that scripts/make_triton.py wrote. docs/triton.md has more, also how to measure a server.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import logging
from functools import partial
from typing import Annotated

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.options import Field, Fraction, InputSize, RunFolderOptions, option, project_option, size_option
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU
from utils.jobs.open import need

logger = logging.getLogger("utils.triton_client")


class TritonClientOptions(RunFolderOptions):
    """Draw what a model on NVIDIA Triton Inference Server finds."""

    model: str = option(..., "its name on the server", positional=True, metavar="MODEL")
    source: str | None = option(None, "draw detections on this image, video or folder (required)", metavar="PATH")
    url: str = option("", "of its gRPC port (default: localhost:8001)", metavar="HOST:PORT")
    imgsz: InputSize | None = size_option("the model's")
    conf_thres: Fraction = option(DISPLAY_CONF, "least score that is drawn", metavar="P")
    iou_thres: Fraction = option(DISPLAY_IOU, "of NMS here, behind raw predictions", metavar="P")
    max_det: Annotated[int, Field(ge=1, le=30_000)] = option(300, "detections per image", metavar="N")
    project: str = project_option("runs/triton")


def ask_server(options: TritonClientOptions) -> None:
    """Draw what a model on the server detects."""
    if options.source is None:
        raise InputError("give --source, an image, a video or a folder to draw detections on")
    need("torch", "tritonclient", "grpc")
    from utils.jobs.sources import find_sources

    files = find_sources([options.source])
    from utils.core.run_folder import new_run
    from utils.jobs.draw import show
    from utils.jobs.visualize import Artist
    from utils.serving.runner import TritonRunner

    with TritonRunner(options.model, options.url) as runner:
        logger.info("%s: %s", options.model, runner.description)
        artist = Artist(
            runner,
            imgsz=options.imgsz,
            conf_thres=options.conf_thres,
            iou_thres=options.iou_thres,
            max_det=options.max_det,
        )
        with new_run(options.project, options.name, options.exist_ok) as folder:
            show(artist, files, folder)
    logger.info("results: %s", folder)


main = partial(run_program, "triton_client.py", (TritonClientOptions, ask_server), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
