"""What DeepStream-Yolo's parser does with a file's output since DeepStream 7.1, after its documentation.

For each image it gets a flat float buffer, six numbers an anchor: x1, y1, x2, y2 in pixels of the input, score and
class. Boxes are clipped to the input; those under a pixel, or under the threshold of their class, are dropped.

DeepStream-Yolo-Seg's gets six numbers a detection too, and behind them its mask, row by row: as many rows and columns
as a quarter of the input's pixels, which lie over the box.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def parse_as_deepstream(
    buffer: np.ndarray, width: int, height: int, thresholds: Sequence[float]
) -> list[tuple[float, ...]]:
    """(left, top, width, height, score, class) of each object, in pixels."""
    values, objects = buffer.astype(np.float32).ravel().tolist(), []
    for start in range(0, len(values), 6):
        x1, y1, x2, y2, score, label = values[start : start + 6]
        if score < thresholds[int(label)]:
            continue
        left, right = (min(max(x, 0.0), width) for x in (x1, x2))
        top, bottom = (min(max(y, 0.0), height) for y in (y1, y2))
        if right - left >= 1 and bottom - top >= 1:
            objects.append((left, top, right - left, bottom - top, score, int(label)))
    return objects


def objects_in(prediction: np.ndarray, width: int, height: int, thresholds: Sequence[float]) -> list[tuple[float, ...]]:
    """What it should find, from raw predictions `[4 + classes, anchors]`."""
    objects = []
    for x, y, w, h, *scores in prediction.T.tolist():
        label = int(np.argmax(scores))
        left, right = (min(max(value, 0.0), width) for value in (x - w / 2, x + w / 2))
        top, bottom = (min(max(value, 0.0), height) for value in (y - h / 2, y + h / 2))
        if scores[label] >= thresholds[label] and right - left >= 1 and bottom - top >= 1:
            objects.append((left, top, right - left, bottom - top, scores[label], label))
    return objects


def parse_masks_as_deepstream(
    buffer: np.ndarray, width: int, height: int, thresholds: Sequence[float]
) -> list[tuple[tuple[float, ...], np.ndarray]]:
    """Each object of DeepStream-Yolo-Seg as above, and its mask float32 `[height / 4, width / 4]`."""
    mask_height, mask_width = height // 4, width // 4
    step, values, objects = 6 + mask_height * mask_width, buffer.astype(np.float32).ravel(), []
    assert len(values) % step == 0
    for start in range(0, len(values), step):
        mask = values[start + 6 : start + step].reshape(mask_height, mask_width)
        boxes = parse_as_deepstream(values[start : start + 6], width, height, thresholds)
        objects += [(box, mask) for box in boxes]
    return objects


def masked_objects_in(
    rows: np.ndarray, masks: np.ndarray, width: int, height: int, thresholds: Sequence[float]
) -> list[tuple[tuple[float, ...], np.ndarray]]:
    """What it should find, from detections `[n, 6]`: xyxy, score, class; and masks `[n, height / 4, width / 4]`."""
    objects = []
    for (x1, y1, x2, y2, score, label), mask in zip(rows.tolist(), masks, strict=True):
        left, right = (min(max(value, 0.0), width) for value in (x1, x2))
        top, bottom = (min(max(value, 0.0), height) for value in (y1, y2))
        if score >= thresholds[int(label)] and right - left >= 1 and bottom - top >= 1:
            objects.append(((left, top, right - left, bottom - top, score, int(label)), mask))
    return objects
