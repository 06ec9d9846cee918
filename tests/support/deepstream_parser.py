"""What DeepStream-Yolo's parser does with a file's output since DeepStream 7.1, after its documentation.

For each image it gets a flat float buffer, six numbers an anchor: x1, y1, x2, y2 in pixels of the input, score and
class. Boxes are clipped to the input; those under a pixel, or under the threshold of their class, are dropped.

DeepStream-Yolo-Seg's gets six numbers a detection too, and behind them its mask, row by row: as many rows and columns
as a quarter of the input's pixels, which lie over the box.
"""

from collections.abc import Iterable, Sequence

import numpy as np

Object = tuple[float, ...]  # left, top, width, height, score, class; in pixels


def clipped(rows: Iterable[Sequence[float]], width: int, height: int, thresholds: Sequence[float]) -> list[Object]:
    """The objects of rows of x1, y1, x2, y2, score, class."""
    objects = []
    for x1, y1, x2, y2, score, label in rows:
        left, right = (min(max(x, 0.0), width) for x in (x1, x2))
        top, bottom = (min(max(y, 0.0), height) for y in (y1, y2))
        if score >= thresholds[int(label)] and right - left >= 1 and bottom - top >= 1:
            objects.append((left, top, right - left, bottom - top, score, int(label)))
    return objects


def parse_as_deepstream(buffer: np.ndarray, width: int, height: int, thresholds: Sequence[float]) -> list[Object]:
    """The objects of an image."""
    return clipped(buffer.astype(np.float32).reshape(-1, 6).tolist(), width, height, thresholds)


def objects_in(prediction: np.ndarray, width: int, height: int, thresholds: Sequence[float]) -> list[Object]:
    """What it should find, from raw predictions `[4 + classes, anchors]`."""
    prediction = prediction.astype(np.float64)
    middle, half, scores = prediction[:2], prediction[2:4] / 2, prediction[4:]
    rows = np.concatenate([middle - half, middle + half, scores.max(0)[None], scores.argmax(0)[None]])
    return clipped(rows.T.tolist(), width, height, thresholds)


def parse_masks_as_deepstream(buffer, width: int, height: int, thresholds) -> list[tuple[Object, np.ndarray]]:
    """Each object of DeepStream-Yolo-Seg as above, and its mask float32 `[height / 4, width / 4]`."""
    rows = buffer.astype(np.float32).reshape(-1, 6 + (height // 4) * (width // 4))
    return masked_objects_in(rows[:, :6], rows[:, 6:].reshape(-1, height // 4, width // 4), width, height, thresholds)


def masked_objects_in(rows, masks, width: int, height: int, thresholds) -> list[tuple[Object, np.ndarray]]:
    """What it should find, from detections `[n, 6]`: xyxy, score, class; and masks `[n, height / 4, width / 4]`."""
    found = [clipped([row], width, height, thresholds) for row in rows.tolist()]
    return [(one[0], mask) for one, mask in zip(found, masks, strict=True) if one]
