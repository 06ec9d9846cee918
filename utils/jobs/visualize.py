"""What networks detect, to look at: drawn on images and videos (`val_trt.py --source`), or for report pages."""

from __future__ import annotations

import colorsys
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch
from tqdm import tqdm

from utils.core.errors import DataError, QatError
from utils.core.files import atomic_path, refuse_overwrite, write_bytes
from utils.core.logging import log_level
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU
from utils.core.text import plural
from utils.evaluation.batch import Batch, filled
from utils.evaluation.coco import TextWriter
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.detector import BatchDetections, Detector
from utils.evaluation.images import decode, frames, is_stream, is_video, open_video, shown, target_names
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.letterbox import Letterbox, letterboxed_planes
from utils.evaluation.masks import Patch, patches
from utils.evaluation.nms import best_class
from utils.jobs.open import open_runner
from utils.reports.detections import outline_of
from utils.reports.schema import Box, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from utils.jobs.options import ValOptions
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

TINT = 0.45  # how much of a mask's pixels is the colour of its class


def run(options: ValOptions, sources: Sequence[str], folder: Path) -> None:
    """Draw detections on `sources` into a run folder; class names are the network's, or else the dataset's."""
    with open_runner(options.network, options.select_device(), options.openvino, options.float_precision) as runner:
        names: Mapping[int, str] | None = runner.names
        if not names and options.data and Path(options.data).is_file():
            names = load_data(options.data).names
        artist = Artist(
            runner, names, imgsz=options.imgsz, max_det=options.max_det,
            conf_thres=DISPLAY_CONF if options.conf_thres is None else options.conf_thres,
            iou_thres=DISPLAY_IOU if options.iou_thres is None else options.iou_thres,
        )  # fmt: skip
        show(artist, sources, folder, texts=options.save_txt, scores=options.save_conf)
    logger.info("results: %s", folder)


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
        image = draw_masks(image, masks, [int(row[5]) for row in rows]) if masks else image
        return draw_boxes(image, rows, self.names), rows

    def detect(self, image: np.ndarray) -> tuple[Tensor, list[Patch]]:
        """Uint8 BGR `[H, W, 3]` → `[n, 6]` xyxy in its pixels, score, best class of each place; and masks."""
        planes, box = letterboxed_planes(image, self._plan.imgsz, self._plan.imgsz)
        batch = Batch(torch.from_numpy(planes)[None], ("",), (box,))
        with torch.inference_mode():
            self.detector.warm_up(batch)
            return best_detections(self.detector(batch), box)


def best_detections(detections: BatchDetections, letterbox: Letterbox) -> tuple[Tensor, list[Patch]]:
    """Of the first image the rows `[n, 6]` of the best class of each place, on the CPU, and their masks, maybe none."""
    best = best_class(detections.rows[0])
    masks = [] if detections.masks is None else list(patches(detections.masks, 0, best, letterbox))
    return detections.rows[0][best].cpu(), masks


def show(
    artist: Artist, sources: Sequence[str], folder: Path, *, texts: bool = False, scores: bool = False,
    progress: bool = True,
) -> list[Path]:  # fmt: skip
    """Draw detections on files and streams; Ctrl-C ends it, and what is written until then is whole.

    Args:
        texts, scores: write `labels/`, too, as upstream's detect.py does; see `coco.TextWriter`.

    Raises:
        InputError: what is read would be written over.
        DataError: no source can be decoded.
    """
    targets = [folder / name for name in target_names(sources)]
    refuse_overwrite(targets, sources, "choose another --name or --project")
    writer = TextWriter(folder / "labels", scores, sources) if texts else None
    unread, counts, drawings = list[str](), Counter[str](), list[Path]()

    def draw(image: np.ndarray, frame: int = 0) -> np.ndarray:
        drawn, rows = artist.draw(image)
        counts.update(name_of(row[5], artist.names) for row in rows)
        if writer:
            writer.add(path, rows, image.shape[:2], frame)
        return drawn

    try:
        for path, target in zip(sources, targets, strict=True):
            counts.clear()
            text, stopped = "", None
            try:
                if is_video(path):
                    text, stopped = draw_video(draw, path, target, progress)
                elif (image := decode(path)) is not None:
                    write_bytes(target, cv2.imencode(target.suffix, draw(image))[1].tobytes())
                else:
                    raise DataError(f"{shown(path)} cannot be {'opened as an image' if '://' in path else 'decoded'}")
            except DataError as error:
                unread.append(str(error))
                continue
            drawings.append(target)
            source = "" if target.stem == Path(path).stem else f" ({shown(path)})"
            classes = ", ".join(f"{name}: {number}" for name, number in counts.most_common())
            objects = f"{plural(counts.total(), 'object')}{f' ({classes})' if classes else ''}"
            logger.info("%s%s: %s%s", target, source, objects, text)
            if stopped:
                raise stopped
    finally:
        if drawings:
            speeds = ", ".join(f"{value:.1f} ms {part}" for part, value in artist.detector.milliseconds().items())
            logger.info("%d of %d files drawn; %s per image", len(drawings), len(sources), speeds)
            if unread:
                logger.warning("not read: %d; first: %s", len(unread), unread[0])
    if not drawings:
        several = f"none of {len(sources)} files can be read; the first: " if len(sources) > 1 else ""
        raise DataError(f"{several}{unread[0]}")
    return drawings


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


def draw_video(
    draw: Callable[[np.ndarray, int], np.ndarray], source: str, target: Path, progress: bool
) -> tuple[str, KeyboardInterrupt | None]:
    """`draw` each frame of a video or stream, numbered from 1, into an MPEG-4 at `target`, which is whole in the end.

    Returns how many frames, and why they ended, in words; and the Ctrl-C that ended them, or None.
    """
    count, ended, stopped = 0, "", None
    if is_stream(source):
        logger.info("opening %s; Ctrl-C ends it", shown(source))
    with open_video(source) as video, atomic_path(target) as temporary:
        size = int(video.get(cv2.CAP_PROP_FRAME_WIDTH)), int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
        rate, total = video.get(cv2.CAP_PROP_FPS), max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        rate = round(rate, 2) if 0.01 < rate < 655 else 25.0  # MPEG-4 holds a ratio of numbers up to 65,535
        writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
        if not writer.isOpened():
            raise DataError(f"{target}: this OpenCV cannot write MP4 videos")
        bar = tqdm(frames(video), total=total or None, desc=target.name, unit="frame", disable=not progress)
        try:
            for frame in bar:
                writer.write(draw(frame, count + 1))
                count += 1
        except KeyboardInterrupt as error:
            ended, stopped = ", interrupted", error
        bar.close()
        writer.release()
        if not count:
            raise stopped or DataError(f"{shown(source)} cannot be decoded")
        whole = 0
        with contextlib.suppress(DataError), open_video(str(temporary)) as video:
            whole = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        if whole < count:  # OpenCV says nothing when it cannot write
            raise QatError(f"{target} could not be written whole; is there space left on the disk?")
    if is_stream(source) and not ended and count != total:
        ended = ", the stream ended or its connection was lost"
    return f" in {count}{f' of {total}' if count < total else ''} frames{ended}", stopped


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
