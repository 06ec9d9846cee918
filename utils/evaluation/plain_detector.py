"""Detections of one image in NumPy, to be drawn where there is no torch: what `detector.py` and `nms.py` find."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from utils.core.errors import InputError
from utils.core.input_form import InputForm
from utils.core.number_types import INT8
from utils.core.tasks import DETECTIONS
from utils.core.thresholds import EVERYDAY_NMS_IOU
from utils.evaluation.input_plan import batch_range, has_nms, image_input, output_names
from utils.evaluation.letterbox import Letterbox
from utils.evaluation.nms import CLASS_OFFSET, MAX_CANDIDATES
from utils.runners.base import Runner


def as_feed(image: np.ndarray, form: InputForm, dtype: str) -> np.ndarray:
    """Uint8 RGB `[H, W, 3]` as a batch of one in a network's form, see `utils/runners/feeds.py`."""
    if form.kind == "uint8" and form.layout == "nhwc":
        return image[None]
    planes = image.transpose(2, 0, 1)[None]
    if form.kind == "uint8":
        return planes
    if form.kind == "int8":
        steps = np.floor(planes.astype(np.float32) * np.float32(1 / (255 * form.scale)) + np.float32(0.5))
        return steps.clip(INT8.quant_min, INT8.quant_max).astype(np.int8)
    return planes.astype(dtype) / np.array(255, dtype)


class PlainDetector:
    """Runs a network on letterboxed images, and gives what is to be drawn."""

    def __init__(self, runner: Runner, conf_thres: float, iou_thres: float, max_det: int) -> None:
        """See `detector.Detector`.

        Raises:
            InputError: the network is no detector of export_qat.py's.
        """
        if runner.metadata.get("form") == "deepstream":
            raise InputError("the network's output has DeepStream's form; give a file of export_qat.py's")
        self._runner, self._form, self._input = runner, runner.input_form, image_input(runner)
        self._suppressed = has_nms(runner)
        self._output = "" if self._suppressed else output_names(runner)[runner.task.prediction]
        self._masks = 0 if self._suppressed or not runner.task.prototypes else self._coefficients()
        self._thresholds, self._max_det = (conf_thres, iou_thres), max_det

    def __call__(self, image: np.ndarray, box: Letterbox) -> np.ndarray:
        """Detect.

        Args:
            image: uint8 RGB `[H, W, 3]`, letterboxed as `box` says.

        Returns:
            float32 `[n, 6]`: x1, y1, x2, y2 in pixels of the original, score, class; best first, one for each place.
        """
        feed = as_feed(image, self._form, self._input.dtype)
        feed = np.repeat(feed, batch_range(self._runner)[0], 0)  # of a static batch the others are the same image
        found = self._runner.infer({self._input.name: feed})
        rows = self._table(found) if self._suppressed else self._suppress(found[self._output][0])
        offset, ratio = np.tile(box.pad, 2), np.tile(box.ratio[::-1], 2)
        limit = np.tile(box.original[::-1], 2)
        rows[:, :4] = ((rows[:, :4] - offset) / ratio).clip(0, limit)
        return rows[suppressed(rows[:, :4], EVERYDAY_NMS_IOU)]

    def _coefficients(self) -> int:
        shapes = [spec.shape for spec in self._runner.outputs if len(spec.shape) == 4]
        return (shapes[0][1] or 0) if shapes else 0

    def _table(self, found: Mapping[str, np.ndarray]) -> np.ndarray:
        """Of a network with NMS inside."""
        counts, boxes, scores, classes = (found[name][0] for name in DETECTIONS)
        rows = np.concatenate([boxes, scores[:, None], classes[:, None]], 1).astype(np.float32)[: int(counts[0])]
        rows = rows[np.argsort(-rows[:, 4], kind="stable")]
        return rows[rows[:, 4] > self._thresholds[0]][: self._max_det]

    def _suppress(self, raw: np.ndarray) -> np.ndarray:
        """Of raw predictions `[4 + classes + coefficients, anchors]`: cx, cy, w, h, then scores."""
        confidence, overlap = self._thresholds
        raw = raw[: len(raw) - self._masks].astype(np.float32)
        middle, half, scores = raw[:2].T, raw[2:4].T / 2, raw[4:].T
        anchor, label = np.nonzero(scores > confidence)
        boxes = np.concatenate([middle - half, middle + half], 1)[anchor]
        rows = np.concatenate([boxes, scores[anchor, label, None], label[:, None]], 1).astype(np.float32)
        rows = rows[np.isfinite(rows[:, :4]).all(1)]
        rows = rows[np.argsort(-rows[:, 4], kind="stable")][:MAX_CANDIDATES]
        moved = rows[:, :4] + rows[:, 5:] * np.float32(CLASS_OFFSET)  # boxes of other classes are elsewhere
        return rows[suppressed(moved, overlap, self._max_det)]


def suppressed(boxes: np.ndarray, iou_thres: float, most: int | None = None) -> np.ndarray:
    """Which boxes remain, int64 `[m]`: of two that overlap by more the first, which is to be the better one.

    Args:
        boxes: xyxy `[n, 4]`, best first.
        most: as many are enough.
    """
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left: np.ndarray = np.ones(len(boxes), bool)
    kept: list[int] = []
    for index, box in enumerate(boxes):
        if not left[index]:
            continue
        kept.append(index)
        if len(kept) == most:
            break
        rest = boxes[index + 1 :]
        size = (np.minimum(rest[:, 2:], box[2:]) - np.maximum(rest[:, :2], box[:2])).clip(0)
        shared = size[:, 0] * size[:, 1]
        whole = area[index] + area[index + 1 :] - shared
        left[index + 1 :] &= shared <= iou_thres * whole
    return np.array(kept, np.int64)
