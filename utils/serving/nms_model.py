# Copyright of the authors of this overlay for YOLOv9. Licensed under the Apache License, Version 2.0.
"""Detections from the raw predictions of a YOLOv9 network: a model for Triton's Python backend, with NumPy alone.

    in     output0 [B, 4 + classes, anchors]: cx, cy, w, h in pixels of the input, scores in 0..1
    out    num_dets [B, 1], det_boxes [B, K, 4]: xyxy in pixels of the input, det_scores [B, K], det_classes [B, K]

`scripts/make_triton.py` copies this file as it stands into the model NAME_nms; conf_thres, iou_thres, max_det (K) and
class_agnostic are parameters in the config.pbtxt of it. It keeps the detections that `utils/evaluation/nms.py` keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_CANDIDATES = 30_000  # per image, the best ones
CLASS_OFFSET = np.float32(7680.0)  # pixels: moves the boxes of different classes apart


@dataclass(frozen=True)
class Settings:
    """Of NMS, by the names of the parameters in config.pbtxt."""

    conf_thres: float = 0.25
    iou_thres: float = 0.45
    max_det: int = 100
    class_agnostic: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Settings:
        """What a model's configuration says."""
        parameters = config.get("parameters", {})
        return cls(**{name: json.loads(entry["string_value"]) for name, entry in parameters.items()})


def batch_detections(raw: np.ndarray, settings: Settings) -> dict[str, np.ndarray]:
    """What a network detects in a batch, by the names of the outputs; `raw` is float `[B, 4 + classes, anchors]`."""
    table: np.ndarray = np.zeros((len(raw), settings.max_det, 6), np.float32)
    counts: np.ndarray = np.zeros((len(raw), 1), np.int32)
    for place, image in enumerate(raw.astype(np.float32, copy=False)):
        rows = suppressed(image, settings)
        table[place, : len(rows)], counts[place] = rows, len(rows)
    boxes, scores = np.ascontiguousarray(table[..., :4]), np.ascontiguousarray(table[..., 4])
    return {"num_dets": counts, "det_boxes": boxes, "det_scores": scores, "det_classes": table[..., 5].astype(np.int32)}


def suppressed(raw: np.ndarray, settings: Settings) -> np.ndarray:
    """Detections of an image, float32 `[4 + classes, anchors]`, as `[n, 6]` xyxy, score, class, best first.

    A box counts once for each class whose score suffices. Boxes that are not finite are left out.
    """
    scores = raw[4:].T
    anchors, label = np.nonzero(scores > np.float32(settings.conf_thres))
    cx, cy, w, h = raw[:4, anchors]
    half_w, half_h = np.float32(0.5) * w, np.float32(0.5) * h
    columns = [cx - half_w, cy - half_h, cx + half_w, cy + half_h, scores[anchors, label], label.astype(np.float32)]
    rows = np.stack(columns, 1)
    rows = rows[np.isfinite(rows[:, :4]).all(1)]
    rows = rows[np.argsort(-rows[:, 4], kind="stable")[:MAX_CANDIDATES]]
    boxes = rows[:, :4] if settings.class_agnostic else rows[:, :4] + rows[:, 5:6] * CLASS_OFFSET
    return rows[greedy(boxes, settings.iou_thres, settings.max_det)]


def greedy(boxes: np.ndarray, iou_thres: float, most: int) -> np.ndarray:
    """Which of float32 boxes `[n, 4]`, best first, no better one that stays overlaps: int64, at most `most`."""
    x1, y1, x2, y2 = boxes.T
    area = (x2 - x1) * (y2 - y1)
    left = np.arange(len(boxes))
    keep: list[int] = []
    while len(left) and len(keep) < most:
        best, left = left[0], left[1:]
        keep.append(int(best))
        wide = np.minimum(x2[best], x2[left]) - np.maximum(x1[best], x1[left])
        high = np.minimum(y2[best], y2[left]) - np.maximum(y1[best], y1[left])
        shared = np.maximum(wide, np.float32(0)) * np.maximum(high, np.float32(0))
        with np.errstate(invalid="ignore", divide="ignore"):  # two boxes without an area do not overlap
            overlap = shared / (area[best] + area[left] - shared)
        left = left[~(overlap.astype(np.float64) > iou_thres)]
    return np.array(keep, np.int64)


class TritonPythonModel:
    """What the Python backend makes an instance of; it gives `triton_python_backend_utils` beside it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters."""
        import triton_python_backend_utils as pb_utils

        self._pb_utils = pb_utils
        config = json.loads(args["model_config"])
        self._settings, self._input = Settings.of(config), config["input"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request; outputs that were not requested are not sent."""
        utils, responses = self._pb_utils, []
        for request in requests:
            raw = utils.get_input_tensor_by_name(request, self._input).as_numpy()
            results = batch_detections(raw, self._settings)
            tensors = [utils.Tensor(name, results[name]) for name in request.requested_output_names()]
            responses.append(utils.InferenceResponse(output_tensors=tensors))
        return responses
