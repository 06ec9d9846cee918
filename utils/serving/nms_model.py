# Copyright of the authors of this overlay for YOLOv9. Licensed under the Apache License, Version 2.0.
"""Detections from the raw predictions of a YOLOv9 network: a model for Triton's Python backend, with NumPy alone.

    in     output0 [B, 4 + classes, anchors]: cx, cy, w, h in pixels of the input, scores in 0..1
    out    num_dets [B, 1], det_boxes [B, K, 4]: xyxy in pixels of the input, det_scores [B, K], det_classes [B, K]

`scripts/make_triton.py` copies this file as it stands into the model NAME_nms; conf_thres, iou_thres, max_det (K) and
class_agnostic are parameters in the model's config.pbtxt. It keeps the detections that `utils/evaluation/nms.py` keeps.
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
    """Settings of NMS, by the names of the parameters in config.pbtxt."""

    conf_thres: float = 0.25
    iou_thres: float = 0.45
    max_det: int = 100
    class_agnostic: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Settings:
        """Read the parameters of a model's configuration."""
        parameters = config.get("parameters", {})
        return cls(**{name: json.loads(entry["string_value"]) for name, entry in parameters.items()})


def batch_detections(raw: np.ndarray, settings: Settings) -> dict[str, np.ndarray]:
    """Detections of a batch, by the names of the outputs, from raw predictions, float `[B, 4 + classes, anchors]`."""
    table: np.ndarray = np.zeros((len(raw), settings.max_det, 6), np.float32)
    counts: np.ndarray = np.zeros((len(raw), 1), np.int32)
    for place, image in enumerate(raw.astype(np.float32, copy=False)):
        rows = suppressed(image, settings)
        counts[place] = len(rows)
        table[place, : len(rows)] = rows
    return {
        "num_dets": counts,
        "det_boxes": np.ascontiguousarray(table[..., :4]),
        "det_scores": np.ascontiguousarray(table[..., 4]),
        "det_classes": table[..., 5].astype(np.int32),
    }


def suppressed(raw: np.ndarray, settings: Settings) -> np.ndarray:
    """Detections `[n, 6]` of an image, xyxy, score, class, best first, from float32 `[4 + classes, anchors]`.

    A box counts once for each class whose score suffices. Boxes that are not finite are left out.
    """
    rows = _candidates(raw, settings.conf_thres)
    boxes = rows[:, :4]
    if not settings.class_agnostic:
        boxes = boxes + rows[:, 5:6] * CLASS_OFFSET
    detections: np.ndarray = rows[greedy(boxes, settings.iou_thres, settings.max_det)]
    return detections


def _candidates(raw: np.ndarray, conf_thres: float) -> np.ndarray:
    """Rows `[n, 6]` of xyxy, score and class with scores above the threshold, best first."""
    scores = raw[4:].T
    anchors, label = np.nonzero(scores > np.float32(conf_thres))
    cx, cy, w, h = raw[:4, anchors]
    half_w = np.float32(0.5) * w
    half_h = np.float32(0.5) * h
    corners = [cx - half_w, cy - half_h, cx + half_w, cy + half_h]
    rows = np.stack([*corners, scores[anchors, label], label.astype(np.float32)], 1)
    rows = rows[np.isfinite(rows[:, :4]).all(1)]
    best_first = np.argsort(-rows[:, 4], kind="stable")
    best: np.ndarray = rows[best_first[:MAX_CANDIDATES]]
    return best


def greedy(boxes: np.ndarray, iou_thres: float, most: int) -> np.ndarray:
    """Indices, int64, of the boxes that NMS keeps, at most `most`; boxes `[n, 4]` are sorted, best first."""
    x1, y1, x2, y2 = boxes.T
    area = (x2 - x1) * (y2 - y1)
    others = np.arange(len(boxes))
    stay: list[int] = []
    while len(others) and len(stay) < most:
        best = others[0]
        others = others[1:]
        stay.append(int(best))
        wide = np.minimum(x2[best], x2[others]) - np.maximum(x1[best], x1[others])
        high = np.minimum(y2[best], y2[others]) - np.maximum(y1[best], y1[others])
        shared = np.maximum(wide, np.float32(0)) * np.maximum(high, np.float32(0))
        with np.errstate(invalid="ignore", divide="ignore"):  # two boxes without an area do not overlap
            overlap = shared / (area[best] + area[others] - shared)
        others = others[~(overlap.astype(np.float64) > iou_thres)]
    indices: np.ndarray = np.array(stay, np.int64)
    return indices


class TritonPythonModel:
    """The class that Triton's Python backend instantiates; the backend provides `triton_python_backend_utils`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters."""
        import triton_python_backend_utils as pb_utils

        self._pb_utils = pb_utils
        config = json.loads(args["model_config"])
        self._settings = Settings.of(config)
        self._input = config["input"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; outputs that were not requested are not sent."""
        utils = self._pb_utils
        responses = []
        for request in requests:
            raw = utils.get_input_tensor_by_name(request, self._input).as_numpy()
            results = batch_detections(raw, self._settings)
            tensors = [utils.Tensor(name, results[name]) for name in request.requested_output_names()]
            responses.append(utils.InferenceResponse(output_tensors=tensors))
        return responses
