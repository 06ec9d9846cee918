# Copyright of the authors of this overlay for YOLOv9. Licensed under the Apache License, Version 2.0.
"""Detections from the raw predictions of a YOLOv9 network: a model for Triton's Python backend, with NumPy alone.

    in     output0 [B, 4 + classes + nm, anchors]: cx, cy, w, h in pixels of the input, scores in 0..1, coefficients
           output1 [B, nm, h, w]: prototypes of masks, of a segmentation network (nm is 0 for a detector)
    out    num_dets [B, 1], det_boxes [B, K, 4]: xyxy in pixels of the input, det_scores [B, K], det_classes [B, K];
           det_masks [B, n, h, w] in 0..1, cropped to their boxes; n is the largest number of detections, at least one

`scripts/make_triton.py` copies this file as it stands into the model NAME_nms; conf_thres, iou_thres, max_det (K) and
class_agnostic are parameters in the config.pbtxt of it. It keeps the detections that `utils/evaluation/nms.py` keeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_CANDIDATES = 30_000  # per image, the best ones
FIRST_CANDIDATES = 4  # times max_det: how many take part at first
CLASS_OFFSET = np.float32(7680.0)  # pixels: moves the boxes of different classes apart
SCALE = np.float32(0.25)  # cells of the prototypes' grid in a pixel of the input


@dataclass(frozen=True)
class Settings:
    """Of NMS, by the names of the parameters in config.pbtxt."""

    conf_thres: float = 0.25
    iou_thres: float = 0.45
    max_det: int = 100
    class_agnostic: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Settings:
        """What a model's configuration says; raises ValueError if that is no number within its bounds."""
        entries = {key: str(value["string_value"]) for key, value in config.get("parameters", {}).items()}
        settings = cls(
            float(entries.get("conf_thres", cls.conf_thres)), float(entries.get("iou_thres", cls.iou_thres)),
            int(entries.get("max_det", cls.max_det)), entries.get("class_agnostic", "false") == "true",
        )  # fmt: skip
        if not (
            0 <= settings.conf_thres <= 1 and 0 <= settings.iou_thres <= 1 and 1 <= settings.max_det <= MAX_CANDIDATES
        ):
            raise ValueError(f"conf_thres and iou_thres are 0 to 1, max_det 1 to {MAX_CANDIDATES}; found {settings}")
        return settings


def batch_detections(raw: np.ndarray, prototypes: np.ndarray | None, settings: Settings) -> dict[str, np.ndarray]:
    """What a network detects in a batch.

    Args:
        raw: float `[B, 4 + classes + nm, anchors]`.
        prototypes: float `[B, nm, h, w]`, or None.
    """
    nm = 0 if prototypes is None else prototypes.shape[1]
    per_image = [suppressed(image, nm, settings) for image in raw.astype(np.float32, copy=False)]
    shape = len(raw), settings.max_det
    boxes: np.ndarray = np.zeros((*shape, 4), np.float32)
    scores: np.ndarray = np.zeros(shape, np.float32)
    labels: np.ndarray = np.zeros(shape, np.int32)
    for place, (rows, _) in enumerate(per_image):
        boxes[place, : len(rows)], scores[place, : len(rows)] = rows[:, :4], rows[:, 4]
        labels[place, : len(rows)] = rows[:, 5]
    counts = np.array([[len(rows)] for rows, _ in per_image], np.int32).reshape(-1, 1)
    results = {"num_dets": counts, "det_boxes": boxes, "det_scores": scores, "det_classes": labels}
    if prototypes is not None:
        parts: list[np.ndarray] = [
            raw[place, -nm:, anchors].astype(np.float32) for place, (_, anchors) in enumerate(per_image)
        ]
        results["det_masks"] = _masks(parts, [rows[:, :4] for rows, _ in per_image], prototypes)
    return results


def suppressed(raw: np.ndarray, nm: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Detections of an image, best first; a box counts once for each class whose score suffices.

    Args:
        raw: float32 `[4 + classes + nm, anchors]`.

    Returns:
        float32 `[n, 6]` xyxy, score, class, and the anchor of each, int64 `[n]`. Boxes that are not finite are left
        out.
    """
    threshold = np.float32(settings.conf_thres)
    scores = raw[4 : len(raw) - nm]
    some = np.flatnonzero(~(scores.max(0) <= threshold))  # also where a class is NaN: the others are looked at
    chosen = scores[:, some].T
    row, label = np.nonzero(chosen > threshold)
    cx, cy, w, h = raw[:4, some[row]]
    half_w, half_h = np.float32(0.5) * w, np.float32(0.5) * h
    columns = [cx - half_w, cy - half_h, cx + half_w, cy + half_h, chosen[row, label], label.astype(np.float32)]
    rows, anchors = np.stack(columns, 1), some[row]
    finite = np.isfinite(rows[:, :4]).all(1)
    rows, anchors = rows[finite], anchors[finite]
    order = np.argsort(-rows[:, 4], kind="stable")[:MAX_CANDIDATES]
    rows, anchors = rows[order], anchors[order]
    boxes = rows[:, :4] if settings.class_agnostic else rows[:, :4] + rows[:, 5:6] * CLASS_OFFSET
    size = FIRST_CANDIDATES * settings.max_det
    while True:  # whether a box remains depends on better ones alone, so more take part only while too few remain
        keep = greedy(boxes[:size], settings.iou_thres, settings.max_det)
        if len(keep) >= settings.max_det or size >= len(boxes):
            return rows[keep], anchors[keep]
        size *= FIRST_CANDIDATES


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


def _masks(coefficients: Sequence[np.ndarray], boxes: Sequence[np.ndarray], prototypes: np.ndarray) -> np.ndarray:
    """Masks of each image's detections `[n, nm]`, `[n, 4]`, zero outside of their boxes: float32 `[B, n, h, w]`."""
    height, width = prototypes.shape[2:]
    most = max([1, *map(len, boxes)])
    masks = np.zeros((len(boxes), most, height, width), np.float32)
    for place, (weights, corners) in enumerate(zip(coefficients, boxes, strict=True)):
        if len(corners) == 0:
            continue
        sums = weights @ prototypes[place].astype(np.float32).reshape(-1, height * width)
        with np.errstate(over="ignore"):
            share = (1 / (1 + np.exp(-sums))).reshape(-1, height, width)
        x1, y1, x2, y2 = (side[:, None] for side in (corners * SCALE).T)
        columns, lines = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)
        inside = ((lines >= y1) & (lines < y2))[:, :, None] & ((columns >= x1) & (columns < x2))[:, None, :]
        masks[place, : len(corners)] = np.where(inside, share, np.float32(0))
    return masks


class TritonPythonModel:
    """What the Python backend makes an instance of; it gives `triton_python_backend_utils` beside it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters."""
        import triton_python_backend_utils as pb_utils

        self._pb_utils = pb_utils
        config = json.loads(args["model_config"])
        self._settings = Settings.of(config)
        self._inputs = [one["name"] for one in config["input"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request; outputs that were not requested are not sent."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        utils = self._pb_utils
        try:
            arrays = [utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs]
            requested = set(request.requested_output_names())
            prototypes = arrays[1] if len(arrays) > 1 else None
            results = batch_detections(arrays[0], prototypes, self._settings)
        except (ValueError, IndexError) as error:
            return utils.InferenceResponse(output_tensors=[], error=utils.TritonError(f"NMS failed: {error}"))
        return utils.InferenceResponse(
            output_tensors=[utils.Tensor(name, value) for name, value in results.items() if name in requested]
        )
