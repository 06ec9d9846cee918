"""Detections of an engine drawn where there is no torch: NumPy and cuda-python."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from utils.core.errors import InputError
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.letterbox import letterbox
from utils.evaluation.plain_detector import PlainDetector
from utils.runners.base import Runner
from utils.trt.plain_runner import PlainRunner

logger = logging.getLogger(__name__)


def open_plain(path: str | Path, device: str) -> PlainRunner:
    """Open an engine on the GPU that `--device` names.

    Raises:
        InputError: or one of its kinds: the device is no GPU, or the engine cannot be used.
    """
    number = device.strip().lower().removeprefix("cuda:") or "0"
    if not number.isdigit():
        raise InputError(
            f"--device {device}: without torch only engines run, on a GPU; give its number, or install torch"
        )
    return PlainRunner(path, int(number))


class PlainArtist:
    """As `visualize.Artist`, without masks."""

    def __init__(
        self, runner: Runner, names: Mapping[int, str] | None = None, *, imgsz: int | None = None,
        conf_thres: float, iou_thres: float, max_det: int = 300,
    ) -> None:  # fmt: skip
        """See `Artist`.

        Raises:
            InputError: the network is no detector, or does not take that size.
        """
        if runner.task.masks:
            logger.warning("without torch the boxes of a segmentation network are drawn, and not its masks")
        self._imgsz = InputPlan.of(runner, imgsz, 1).imgsz
        self._detector = PlainDetector(runner, conf_thres, iou_thres, max_det)
        self._names = names or runner.names or {}
        self._seconds: list[float] = []

    def find(self, image: np.ndarray) -> np.ndarray:
        """Uint8 BGR `[H, W, 3]` → float32 `[n, 6]` xyxy in its pixels, score, class; the best class of each place."""
        began = time.perf_counter()
        fitted, box = letterbox(image, self._imgsz, self._imgsz)
        found = self._detector(np.ascontiguousarray(fitted[..., ::-1]), box)
        self._seconds.append(time.perf_counter() - began)
        return found

    def draw(self, image: np.ndarray) -> tuple[np.ndarray, int]:
        """Uint8 BGR `[H, W, 3]` → the same with boxes, and how many."""
        from utils.jobs.visualize import draw_boxes

        rows = self.find(image).tolist()
        return draw_boxes(image, rows, self._names), len(rows)

    def milliseconds(self) -> dict[str, float]:
        """Per image, all parts together; the first, which warms everything up, counts only if it is the only one."""
        counted = self._seconds[1:] or self._seconds
        return {"preprocess, inference and nms": 1000 * sum(counted) / max(len(counted), 1)}
