"""A model on a Triton server, asked as a network in a file is: detections drawn, and how fast they come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from utils.core.bounds import check_bounds
from utils.core.errors import InputError
from utils.core.run_folder import new_run
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.evaluation.input_plan import InputPlan, image_input
from utils.evaluation.letterbox import letterboxed_planes
from utils.evaluation.sources import is_video
from utils.jobs.visualize import Artist, show
from utils.runners.feeds import as_feed
from utils.serving import load, protocol
from utils.serving.protocol import Way
from utils.serving.runner import TritonRunner

logger = logging.getLogger(__name__)

WARM_UP = 0.2  # of the time that is measured


@dataclass(frozen=True)
class Asked:
    """Which model, and how.

    Attributes:
        model: its name.
        way: http or grpc.
        address: HOST:PORT; Triton's own port on this machine if it is empty.
        imgsz: longer side of the input in pixels, for a model of dynamic size.
    """

    model: str
    way: Way = "http"
    address: str = ""
    imgsz: int | None = None
    conf_thres: float = EVERYDAY_CONFIDENCE
    iou_thres: float = EVERYDAY_NMS_IOU
    max_det: int = 300
    project: str = "runs/triton"
    name: str = "exp"
    exist_ok: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "imgsz", "conf_thres", "iou_thres", "max_det")


def draw(asked: Asked, files: Sequence[Path]) -> list[Path]:
    """Draw what the server's model finds on `files` into a run folder.

    Raises:
        InputError: no server answers, it has no such model, or the model is no detector.
    """
    with TritonRunner(asked.model, asked.way, asked.address) as runner:
        logger.info("%s: %s", asked.model, runner.description)
        artist = Artist(
            runner, imgsz=asked.imgsz, conf_thres=asked.conf_thres, iou_thres=asked.iou_thres, max_det=asked.max_det
        )
        with new_run(asked.project, asked.name, asked.exist_ok) as folder:
            written = show(artist, files, folder)
    logger.info("results: %s", folder)
    return written


def time_requests(
    asked: Asked, seconds: float, concurrency: Sequence[int], batch: int, files: Sequence[Path] = ()
) -> list[load.Load]:
    """Measure latency and throughput for each number of clients, and say them.

    Args:
        files: the first image among them is sent; noise if there is none.

    Raises:
        InputError: as `draw`; or the model does not take so many images.
    """
    with TritonRunner(asked.model, asked.way, asked.address) as runner:
        plan = InputPlan.of(runner, asked.imgsz, batch)
        if plan.batch_size != batch:
            raise InputError(f"--batch-size is {batch}, and {asked.model} takes {plan.batch_size} images in a request")
        spec, names = image_input(runner), [one.name for one in runner.outputs]
        images = torch.from_numpy(_image(plan.imgsz, files)).expand(batch, -1, -1, -1)
        feeds = {spec.name: as_feed(images, runner.input_form, spec.dtype).contiguous().numpy()}
        logger.info("%s: %s; %s", asked.model, runner.description, _sent(feeds))
    address = asked.address or protocol.WAYS[asked.way]
    found = [
        load.measure(
            lambda: protocol.connect(asked.way, address), asked.model, feeds, names,
            concurrency=clients, seconds=seconds, warm_up=WARM_UP * seconds,
        )
        for clients in concurrency
    ]  # fmt: skip
    for line in load.table(found):
        logger.info("%s", line)
    logger.info("latency is a client's: its request on the way, in the server's queue, computed, and the answer read")
    return found


def _sent(feeds: dict[str, np.ndarray]) -> str:
    return ", ".join(
        f"{name} {array.dtype} {list(array.shape)}, {array.nbytes:,} bytes" for name, array in feeds.items()
    )


def _image(size: tuple[int, int], files: Sequence[Path]) -> np.ndarray:
    """Uint8 `[3, H, W]` RGB: the first image among `files`, letterboxed, or noise."""
    from utils.evaluation.dataset import decode

    for file in files:
        image = None if is_video(file) else decode(str(file))
        if image is not None:
            return letterboxed_planes(image, size, size)[0]
    return np.random.default_rng(0).integers(0, 256, (3, *size), dtype=np.uint8)
