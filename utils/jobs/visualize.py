"""Detections to look at: drawn on images, or as samples of a report page."""

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

    from utils.evaluation.split import ImageFile
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

FONT = cv2.FONT_HERSHEY_SIMPLEX
TINT = 0.45  # share of the class's colour in a mask's pixels


class Artist:
    """Runs a network on images and draws its detections."""

    def __init__(
        self,
        runner: Runner,
        names: Mapping[int, str] | None = None,
        *,
        imgsz: int | tuple[int, int] | None = None,
        conf_thres: float = DISPLAY_CONF,
        iou_thres: float = DISPLAY_IOU,
        max_det: int = 300,
    ) -> None:
        """See `detector.Detector` for the thresholds, and `InputPlan.of` for `imgsz`; `names` are by default its own.

        Raises:
            InputError: the network is not a detector, or does not take that size.
        """
        form = runner.form
        if form.has_nms and form.thresholds != {"conf_thres": conf_thres, "iou_thres": iou_thres}:
            own = form.thresholds or "unknown"
            logger.warning("%s is inside the network, at its own thresholds: %s", form.nms_name, own)
        self._plan = InputPlan.of(runner, imgsz, 1)
        self.detector = Detector(runner, None, conf_thres=conf_thres, iou_thres=iou_thres, max_det=max_det)
        self.names = names or runner.names or {}

    def draw(self, image: np.ndarray) -> tuple[np.ndarray, list[list[float]]]:
        """Detect on uint8 BGR `[H, W, 3]`; returns a copy with boxes and masks, and the rows of `detect`."""
        detections, masks = self.detect(image)
        rows = detections.tolist()
        return self.paint(image, rows, masks), rows

    def paint(self, image: np.ndarray, rows: list[list[float]], masks: Sequence[Patch]) -> np.ndarray:
        """Return a copy of uint8 BGR `[H, W, 3]` with detections and their masks, if there are any."""
        if masks:
            image = draw_masks(image, masks, [int(row[5]) for row in rows])
        return draw_boxes(image, rows, self.names)

    def detect(self, image: np.ndarray) -> tuple[Tensor, list[Patch]]:
        """Detect on uint8 BGR `[H, W, 3]`.

        Returns:
            `[n, 6]` of xyxy in the image's pixels, score, and best class of each place; and masks.
        """
        batch = self.batch_of(image)
        self.warm_up(batch)
        return self.detections(batch)

    def batch_of(self, image: np.ndarray) -> Batch:
        """Letterbox uint8 BGR `[H, W, 3]` into a batch that the network takes."""
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
        """Detect on the image of a `batch_of`, see `detect`; without `masks` none are computed."""
        with torch.inference_mode():
            detections = self.detector(batch)
            if not masks:
                detections = replace(detections, masks=None)
            return best_detections(detections, batch.letterboxes[0])


def best_detections(detections: BatchDetections, letterbox: Letterbox) -> tuple[Tensor, list[Patch]]:
    """Rows `[n, 6]` of the best class of each place in the first image, on the CPU, and their masks, if any."""
    rows = detections.rows[0].cpu()
    best = best_class(rows)
    masks: list[Patch] = []
    if detections.masks:
        masks = list(patches(detections.masks, 0, best.to(detections.masks.source.device), letterbox))
    return rows[best], masks


def draw_masks(image: np.ndarray, patches: Iterable[Patch], labels: Sequence[int]) -> np.ndarray:
    """Return a copy of uint8 BGR `[H, W, 3]` with masks tinted in the colours of their classes."""
    image = image.copy()
    for patch, label in zip(patches, labels, strict=True):
        height, width = patch.inside.shape
        under = image[patch.top : patch.top + height, patch.left : patch.left + width]
        tinted = (1 - TINT) * under[patch.inside] + TINT * np.array(_colour(label))
        under[patch.inside] = tinted.round().astype(np.uint8)
    return image


def draw_boxes(image: np.ndarray, rows: Iterable[list[float]], names: Mapping[int, str]) -> np.ndarray:
    """Return a copy of uint8 BGR `[H, W, 3]` with boxes `(x1, y1, x2, y2, score, class)` and labels.

    Lines and labels are sized as the image is.
    """
    image = np.ascontiguousarray(image).copy()
    side = sum(image.shape[:2]) / 2
    for x1, y1, x2, y2, score, label in rows:
        colour = _colour(int(label))
        line = max(round(min(side / 400, (x2 - x1) / 10, (y2 - y1) / 10)), 1)
        cv2.rectangle(image, (round(x1), round(y1)), (round(x2), round(y2)), colour, line, cv2.LINE_AA)
        _draw_label(image, f"{name_of(label, names)} {score:.2f}", x1, y1, colour)
    return image


def _draw_label(image: np.ndarray, text: str, x1: float, y1: float, colour: tuple[int, int, int]) -> None:
    """Draw text on a bar of a colour: above the corner (x1, y1) of a box, or inside if there is no room above."""
    side = sum(image.shape[:2]) / 2
    scale = max(side / 1300, 0.35)
    weight = max(round(side / 900), 1)
    (width, ascent), descent = cv2.getTextSize(text, FONT, scale, weight)
    height = ascent + descent
    x = round(max(min(x1, image.shape[1] - width), 0))
    y = round(y1 - height) if y1 >= height else round(max(y1, 0))
    cv2.rectangle(image, (x, y), (x + width - 1, y + height - 1), colour, -1)
    cv2.putText(image, text, (x, y + ascent), FONT, scale, (255, 255, 255), weight, cv2.LINE_AA)


def name_of(label: float, names: Mapping[int, str]) -> str:
    """The name of a class, or its number."""
    return names.get(int(label), f"class {int(label)}")


def _colour(label: int) -> tuple[int, int, int]:
    """Return a dark colour, BGR, that is far from those of the classes with neighbouring numbers."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.85, 0.75)
    return round(blue * 255), round(green * 255), round(red * 255)


def collect_samples(
    runners: Mapping[str, Runner],
    data: DataConfig,
    *,
    imgsz: int | tuple[int, int],
    count: int = 4,
    confidence: float = DISPLAY_CONF,
    split: str = "val",
    images: Sequence[str] = (),
) -> list[Sample]:
    """Collect the detections of several networks, by name, on the same images of a split.

    Args:
        images: paths of these images; without any, `count` images are spread evenly over the split.

    Raises:
        DataError: the split has no readable image, or boxes as labels where a network has masks.
        InputError: a network does not take the images, or its classes are not the dataset's.
    """
    has_masks = any(runner.form.masks for runner in runners.values())
    keep = frozenset(images).__contains__ if images else None
    limit = None if images else count
    with log_level("utils.evaluation.data_yaml", logging.WARNING):  # the counts of so few images help nobody
        loader = make_loader(data, split, imgsz=imgsz, batch_size=1, workers=0, limit=limit, masks=has_masks, keep=keep)
    files = {file.path: file for file in loader.dataset.images}
    detectors = {
        name: Detector(runner, data, conf_thres=confidence, iou_thres=DISPLAY_IOU) for name, runner in runners.items()
    }
    samples = []
    with torch.inference_mode():
        for batch in loader:
            if not len(batch):
                continue  # an image that cannot be decoded
            path = batch.paths[0]
            predictions = {name: _predicted_boxes(detector, batch, data) for name, detector in detectors.items()}
            truth = _true_boxes(batch.labels[0], files[path], data, has_masks)
            samples.append(Sample(image=path, predictions=predictions, truth=truth, confidence=confidence))
    places = {path: place for place, path in enumerate(images)}
    return sorted(samples, key=lambda sample: places.get(sample.image, 0))


def _predicted_boxes(detector: Detector, batch: Batch, data: DataConfig) -> list[Box]:
    """Detect on the only image of a batch."""
    rows, masks = best_detections(detector(batch), batch.letterboxes[0])
    outlines = [outline_of(mask.inside, mask.left, mask.top) for mask in masks]
    return report_boxes(rows, data.names, outlines)


def _true_boxes(labels: Tensor, file: ImageFile, data: DataConfig, has_masks: bool) -> list[Box]:
    """The labels of an image, `[n, 5]` of class and xyxy, with their outlines if networks have masks."""
    outlines = []
    if has_masks:
        height, width = file.size[::-1]
        for polygon in file.labels.polygons:
            mask = filled(polygon * np.float32(file.size), (height, width))
            outlines.append(outline_of(mask))
    return report_boxes(labels[:, [1, 2, 3, 4, 0]], data.names, outlines)


def report_boxes(rows: Tensor, names: Mapping[int, str], outlines: Sequence[tuple[str, ...]]) -> list[Box]:
    """Convert rows of xyxy in pixels of the image, a score if there is one, and the class; outlines may be empty."""
    boxes = []
    for place, (x0, y0, x1, y1, *scores, label) in enumerate(rows.tolist()):
        outline = outlines[place] if outlines else ()
        score = scores[0] if scores else None
        boxes.append(Box(xyxy=(x0, y0, x1, y1), name=names[int(label)], score=score, outline=outline))
    return boxes
