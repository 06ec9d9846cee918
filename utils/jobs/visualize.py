"""What networks detect, to look at: drawn on images, or for report pages."""

from __future__ import annotations

import colorsys
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch

from utils.core.logging import log_level
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU
from utils.evaluation.batch import Batch, filled
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.dataset import make_loader
from utils.evaluation.detector import BatchDetections, Detector
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.letterbox import Letterbox, letterboxed_planes
from utils.evaluation.masks import Patch, patches
from utils.evaluation.nms import best_class
from utils.reports.detections import outline_of
from utils.reports.schema import Box, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

TINT = 0.45  # how much of a mask's pixels is the colour of its class


class Artist:
    """Runs a network on images and draws its detections."""

    def __init__(
        self, runner: Runner, names: Mapping[int, str] | None = None, *,
        imgsz: int | tuple[int, int] | None = None, conf_thres: float = DISPLAY_CONF, iou_thres: float = DISPLAY_IOU,
        max_det: int = 300,
    ) -> None:  # fmt: skip
        """See `detector.Detector` for the thresholds, and `InputPlan.of` for `imgsz`; `names` are by default its own.

        Raises:
            InputError: the network is no detector, or does not take that size.
        """
        form = runner.form
        if form.has_nms and form.thresholds != {"conf_thres": conf_thres, "iou_thres": iou_thres}:
            own = form.thresholds or "unknown"
            logger.warning("%s is inside the network, at its own thresholds: %s", form.nms_name, own)
        self._plan = InputPlan.of(runner, imgsz, 1)
        self.detector = Detector(runner, None, conf_thres=conf_thres, iou_thres=iou_thres, max_det=max_det)
        self.names = names or runner.names or {}

    def draw(self, image: np.ndarray) -> tuple[np.ndarray, list[list[float]]]:
        """Uint8 BGR `[H, W, 3]` → the same with boxes and masks, and the rows of `detect`."""
        detections, masks = self.detect(image)
        rows = detections.tolist()
        return self.paint(image, rows, masks), rows

    def paint(self, image: np.ndarray, rows: list[list[float]], masks: Sequence[Patch]) -> np.ndarray:
        """A copy of uint8 BGR `[H, W, 3]` with detections and their masks, if there are any."""
        image = draw_masks(image, masks, [int(row[5]) for row in rows]) if masks else image
        return draw_boxes(image, rows, self.names)

    def detect(self, image: np.ndarray) -> tuple[Tensor, list[Patch]]:
        """Uint8 BGR `[H, W, 3]` → `[n, 6]` xyxy in its pixels, score, best class of each place; and masks."""
        batch = self.batch_of(image)
        self.warm_up(batch)
        return self.detections(batch)

    def batch_of(self, image: np.ndarray) -> Batch:
        """Uint8 BGR `[H, W, 3]`, letterboxed, as the batch that the network takes."""
        planes, box = letterboxed_planes(image, self._plan.imgsz, self._plan.imgsz)
        images = torch.from_numpy(planes)[None]
        if self.detector.device.type == "cuda":
            images = images.pin_memory()  # whose upload does not wait
        return Batch(images, ("",), (box,))

    def warm_up(self, batch: Batch) -> None:
        """See `Detector.warm_up`."""
        with torch.inference_mode():
            self.detector.warm_up(batch)

    def detections(self, batch: Batch, masks: bool = True) -> tuple[Tensor, list[Patch]]:
        """Those of a `batch_of` an image, see `detect`; without `masks` none are computed."""
        with torch.inference_mode():
            detections = self.detector(batch)
            return best_detections(detections if masks else replace(detections, masks=None), batch.letterboxes[0])


def best_detections(detections: BatchDetections, letterbox: Letterbox) -> tuple[Tensor, list[Patch]]:
    """Of the first image the rows `[n, 6]` of the best class of each place, on the CPU, and their masks, maybe none."""
    rows = detections.rows[0].cpu()
    best = best_class(rows)
    masks: list[Patch] = []
    if detections.masks:
        masks = list(patches(detections.masks, 0, best.to(detections.masks.source.device), letterbox))
    return rows[best], masks


def draw_masks(image: np.ndarray, patches: Iterable[Patch], labels: Sequence[int]) -> np.ndarray:
    """A copy of uint8 BGR `[H, W, 3]` with masks tinted in the colours of their classes."""
    image = image.copy()
    for patch, label in zip(patches, labels, strict=True):
        height, width = patch.inside.shape
        under = image[patch.top : patch.top + height, patch.left : patch.left + width]
        tinted = (1 - TINT) * under[patch.inside] + TINT * np.array(_colour(label))
        under[patch.inside] = tinted.round().astype(np.uint8)
    return image


def draw_boxes(image: np.ndarray, rows: Iterable[list[float]], names: Mapping[int, str]) -> np.ndarray:
    """A copy of uint8 BGR `[H, W, 3]` with boxes `(x1, y1, x2, y2, score, class)` and labels, sized as the image is.

    A label is above its box, or inside where there is no room above.
    """
    image = np.ascontiguousarray(image).copy()
    side, font = sum(image.shape[:2]) / 2, cv2.FONT_HERSHEY_SIMPLEX
    scale, weight = max(side / 1300, 0.35), max(round(side / 900), 1)
    for x1, y1, x2, y2, score, label in rows:
        line = max(round(min(side / 400, (x2 - x1) / 10, (y2 - y1) / 10)), 1)
        cv2.rectangle(image, (round(x1), round(y1)), (round(x2), round(y2)), _colour(int(label)), line, cv2.LINE_AA)
        text = f"{name_of(label, names)} {score:.2f}"
        (width, ascent), descent = cv2.getTextSize(text, font, scale, weight)
        height = ascent + descent
        x, y = round(max(min(x1, image.shape[1] - width), 0)), round(y1 - height if y1 >= height else max(y1, 0))
        cv2.rectangle(image, (x, y), (x + width - 1, y + height - 1), _colour(int(label)), -1)
        cv2.putText(image, text, (x, y + ascent), font, scale, (255, 255, 255), weight, cv2.LINE_AA)
    return image


def name_of(label: float, names: Mapping[int, str]) -> str:
    """The name of a class, or its number."""
    return names.get(int(label), f"class {int(label)}")


def _colour(label: int) -> tuple[int, int, int]:
    """A dark colour for each class, far from those of its neighbours."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.85, 0.75)
    return round(blue * 255), round(green * 255), round(red * 255)


def collect_samples(
    runners: Mapping[str, Runner], data: DataConfig, *, imgsz: int | tuple[int, int], count: int = 4,
    confidence: float = DISPLAY_CONF, split: str = "val", images: Sequence[str] = (),
) -> list[Sample]:  # fmt: skip
    """Detections of several networks, by name, on the same images of a split.

    Args:
        images: paths of these images; without any, `count` images are evenly spread over the split: nobody chose them.

    Raises:
        DataError: the split has no readable image, or boxes as labels where a network has masks.
        InputError: a network does not take the images, or its classes are not the dataset's.
    """
    with_masks = any(runner.form.masks for runner in runners.values())
    keep = frozenset(images).__contains__ if images else None
    limit = None if images else count
    with log_level("utils.evaluation.data_yaml", logging.WARNING):  # the counts of so few images help nobody
        loader = make_loader(
            data, split, imgsz=imgsz, batch_size=1, workers=0, limit=limit, masks=with_masks, keep=keep
        )
    files = {file.path: file for file in loader.dataset.images}
    detectors = {
        name: Detector(runner, data, conf_thres=confidence, iou_thres=DISPLAY_IOU) for name, runner in runners.items()
    }

    def predictions(detector: Detector, batch: Batch) -> list[Box]:
        rows, masks = best_detections(detector(batch), batch.letterboxes[0])
        outlines = [outline_of(mask.inside, mask.left, mask.top) for mask in masks]
        return report_boxes(rows, data.names, outlines)

    samples = []
    with torch.inference_mode():
        for batch in filter(len, loader):  # without images that cannot be decoded
            labels, file = batch.labels[0], files[batch.paths[0]]
            polygons = [filled(one * np.float32(file.size), file.size[::-1]) for one in file.labels.polygons]
            outlines = list(map(outline_of, polygons)) if with_masks else []
            truth = report_boxes(labels[:, [1, 2, 3, 4, 0]], data.names, outlines)
            found = {name: predictions(detector, batch) for name, detector in detectors.items()}
            samples.append(Sample(image=batch.paths[0], predictions=found, truth=truth, confidence=confidence))
    places = {path: place for place, path in enumerate(images)}
    return sorted(samples, key=lambda sample: places.get(sample.image, 0))


def report_boxes(rows: Tensor, names: Mapping[int, str], outlines: Sequence[tuple[str, ...]]) -> list[Box]:
    """Rows of xyxy in pixels of the image, a score if there is one, and the class; with outlines, if there are any."""
    return [
        Box(xyxy=(x0, y0, x1, y1), name=names[int(label)], score=score[0] if score else None, outline=outline)
        for (x0, y0, x1, y1, *score, label), outline in zip(rows.tolist(), outlines or [()] * len(rows), strict=True)
    ]
