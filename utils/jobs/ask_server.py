"""A model on a Triton server, asked as a network in a file is: detections drawn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from utils.core.run_folder import new_run
from utils.jobs.visualize import Artist, show
from utils.serving.options import TritonClientOptions
from utils.serving.runner import TritonRunner

logger = logging.getLogger(__name__)


def draw(options: TritonClientOptions, files: Sequence[Path]) -> list[Path]:
    """Draw what the served model finds on `files` into a run folder; and return what was written.

    Raises:
        InputError: no server answers, it has no such model, or the model is no detector.
    """
    with TritonRunner(options.model, options.protocol, options.url) as runner:
        logger.info("%s: %s", options.model, runner.description)
        artist = Artist(
            runner, imgsz=options.imgsz, conf_thres=options.conf_thres, iou_thres=options.iou_thres,
            max_det=options.max_det,
        )  # fmt: skip
        with new_run(options.project, options.name, options.exist_ok) as folder:
            written = show(artist, files, folder)
    logger.info("results: %s", folder)
    return written
