"""Detections of several networks on a few validation images, with masks, for drawing them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU
from utils.reports.detections import outline_of
from utils.reports.schema import Box, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from utils.evaluation.data_yaml import DataConfig
    from utils.evaluation.detector import BatchDetections
    from utils.runners.base import Runner


def collect(
    runners: Mapping[str, Runner], data: DataConfig, *, imgsz: int, count: int = 4,
    confidence: float = DISPLAY_CONF, split: str = "val",
) -> list[Sample]:  # fmt: skip
    """Run every network on `count` images, evenly spread over a split, so that nobody chose them.

    Args:
        runners: by the name that the column gets; the first two are compared with each other.
        imgsz: pixels; images are letterboxed to a square of it.
        confidence: detections below it are not shown.

    Raises:
        DataError: the split has no readable image, or boxes as labels where a network has masks.
        InputError: a network does not take the images, or its classes are not the dataset's.
    """
    import torch

    from utils.evaluation.dataset import make_loader
    from utils.evaluation.detector import Detector
    from utils.evaluation.gt_masks import filled
    from utils.evaluation.input_plan import gives_masks, has_nms
    from utils.evaluation.loop import labels_in_images

    masks = any(runner.task.masks and (gives_masks(runner) or not has_nms(runner)) for runner in runners.values())
    loader = make_loader(
        data, split, imgsz=imgsz, batch_size=1, workers=0, limit=count, mask_stride=1 if masks else None
    )
    files = {file.path: file for file in loader.dataset.images}
    detectors = {
        name: Detector(runner, data, conf_thres=confidence, iou_thres=DISPLAY_IOU) for name, runner in runners.items()
    }
    samples = []
    with torch.inference_mode():
        for batch in loader:
            if not len(batch):
                continue  # the image cannot be decoded
            labels = labels_in_images(batch, batch.labels.device)[0]
            predictions = {
                name: _found(detector(batch.images, batch.shapes), batch.shapes[0], data.names)
                for name, detector in detectors.items()
            }
            file = files[batch.paths[0]]
            polygons = (filled(points * np.float32(file.size), file.size[::-1]) for points in file.polygons)
            truth = _boxes(labels[:, [1, 2, 3, 4, 0]], data.names, list(map(outline_of, polygons)))
            samples.append(Sample(image=batch.paths[0], predictions=predictions, truth=truth, confidence=confidence))
    return samples


def _found(found: BatchDetections, shapes: Any, names: Mapping[int, str]) -> list[Box]:
    """What is in the only image of a batch, without objects that stand in the place of a better one."""
    from utils.evaluation.masks import patches
    from utils.evaluation.nms import best_class

    chosen = best_class(found.rows[0])
    masks = () if found.masks is None else patches(found.masks, 0, chosen, shapes)
    outlines = [outline_of(patch.inside, patch.left, patch.top) for patch in masks]
    return _boxes(found.rows[0][chosen], names, outlines)


def _boxes(rows: Tensor, names: Mapping[int, str], outlines: Sequence[tuple[str, ...]]) -> list[Box]:
    """Rows of xyxy in pixels of the image, a score if there is one, and the class; with outlines, if there are any."""
    return [
        Box(xyxy=(x0, y0, x1, y1), name=names[int(label)], score=score[0] if score else None, outline=outline)
        for (x0, y0, x1, y1, *score, label), outline in zip(rows.tolist(), outlines or [()] * len(rows), strict=True)
    ]
