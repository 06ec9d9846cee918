"""Detections of several networks on a few validation images, for drawing them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.reports.schema import Box, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from utils.evaluation.data_yaml import DataConfig
    from utils.runners.base import Runner


def collect(
    runners: Mapping[str, Runner],
    data: DataConfig,
    *,
    imgsz: int,
    count: int = 4,
    confidence: float = EVERYDAY_CONFIDENCE,
    split: str = "val",
) -> list[Sample]:
    """Run every network on `count` images, evenly spread over a split, so that nobody chose them.

    Args:
        runners: by the name that the column gets; the first two are compared with each other.
        imgsz: pixels; images are letterboxed to a square of it.
        confidence: detections below it are not shown.

    Raises:
        DataError: the split has no readable image.
        InputError: a network does not take the images, or its classes are not the dataset's.
    """
    import torch

    from utils.evaluation.dataset import make_loader
    from utils.evaluation.detector import Detector
    from utils.evaluation.loop import labels_in_images
    from utils.evaluation.nms import best_class

    loader = make_loader(data, split, imgsz=imgsz, batch_size=1, workers=0, limit=count)
    detectors = {
        name: Detector(runner, data, conf_thres=confidence, iou_thres=EVERYDAY_NMS_IOU)
        for name, runner in runners.items()
    }
    samples = []
    with torch.inference_mode():
        for batch in loader:
            if not len(batch):
                continue  # the image cannot be decoded
            labels = labels_in_images(batch, batch.labels.device)[0]
            predictions = {
                name: _boxes(best_class(detector(batch.images, batch.shapes).rows[0]), data.names)
                for name, detector in detectors.items()
            }
            truth = _boxes(labels[:, [1, 2, 3, 4, 0]], data.names)
            samples.append(Sample(batch.paths[0], predictions, truth, confidence))
    return samples


def _boxes(rows: Tensor, names: Mapping[int, str]) -> list[Box]:
    """Rows of xyxy in pixels of the image, a score if there is one, and the class."""
    boxes = []
    for x0, y0, x1, y1, *score, label in rows.tolist():
        boxes.append(Box((x0, y0, x1, y1), names[int(label)], *score))
    return boxes
