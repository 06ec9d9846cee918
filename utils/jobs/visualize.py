"""What networks detect, to look at: drawn on images and videos (`val_trt.py --source`), or for report pages."""

from __future__ import annotations

import colorsys
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from tqdm import tqdm

from utils.core.device import select_device
from utils.core.errors import DataError, QatError
from utils.core.files import atomic_path
from utils.core.run_folder import new_run
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.detector import BatchDetections, Detector
from utils.evaluation.gt_masks import filled
from utils.evaluation.images import check_source, decode, frames, is_video, open_video, target_names
from utils.evaluation.input_plan import InputPlan, gives_masks, has_nms, nms_thresholds, nms_words
from utils.evaluation.letterbox import letterbox_on, letterboxed_planes
from utils.evaluation.loop import labels_in_images
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


def run(options: ValOptions, files: Sequence[Path]) -> list[Path]:
    """Draw detections on `files` into a run folder; class names are the network's, or else the dataset's.

    Raises:
        InputError: or one of its kinds: the network cannot be used, or a single file cannot be decoded.
    """
    with open_runner(options.engine_file, select_device(options.device)) as runner:
        names = runner.names or (load_data(options.data).names if Path(options.data).is_file() else None)
        artist = Artist(
            runner, names, imgsz=options.imgsz[0] if options.imgsz else None, max_det=options.max_det,
            conf_thres=DISPLAY_CONF if options.conf_thres is None else options.conf_thres,
            iou_thres=DISPLAY_IOU if options.iou_thres is None else options.iou_thres,
        )  # fmt: skip
        with new_run(options.project, options.name, options.exist_ok) as folder:
            written = show(artist, files, folder)
    logger.info("results: %s", folder)
    return written


class Artist:
    """Runs a network on images and draws its detections."""

    def __init__(
        self, runner: Runner, names: Mapping[int, str] | None = None, *, imgsz: int | None = None,
        conf_thres: float = DISPLAY_CONF, iou_thres: float = DISPLAY_IOU, max_det: int = 300,
    ) -> None:  # fmt: skip
        """See `detector.Detector` for the thresholds.

        Args:
            names: of the classes, the network's own if None.
            imgsz: longer side of the input in pixels, for networks of dynamic size.

        Raises:
            InputError: the network is no detector, or does not take that size.
        """
        if has_nms(runner):
            inside = nms_thresholds(runner)
            lowest, overlap = inside.get("conf_thres"), inside.get("iou_thres")
            if runner.task.masks and not gives_masks(runner):
                logger.warning("NMS is inside the network: the boxes are drawn, and it gives no masks")
            if lowest is None:
                logger.warning(
                    "NMS is inside the network, which does not say its thresholds: --conf-thres %g finds no more than "
                    "those let through", conf_thres,
                )  # fmt: skip
            elif conf_thres < lowest:
                logger.warning(
                    "%s is inside the network, and leaves out what scores less than %g: --conf-thres %g finds no "
                    "more than that; export with a lower --conf-thres for more", nms_words(runner), lowest, conf_thres,
                )  # fmt: skip
            if overlap not in (None, iou_thres):
                logger.warning(
                    "NMS is inside the network, with its own --iou-thres %g instead of %g", overlap, iou_thres
                )
        self._plan = InputPlan.of(runner, imgsz, 1)
        self.detector = Detector(runner, None, conf_thres=conf_thres, iou_thres=iou_thres, max_det=max_det)
        self._names = names or runner.names or {}

    def draw(self, image: np.ndarray) -> tuple[np.ndarray, int]:
        """Uint8 BGR `[H, W, 3]` → the same with boxes, and with masks where the network has them; and how many."""
        detections, best, shapes = self._detect(image)
        rows = detections.rows[0][best].tolist()
        if detections.masks is not None:
            image = draw_masks(image, patches(detections.masks, 0, best, shapes), [int(row[5]) for row in rows])
        return draw_boxes(image, rows, self._names), len(rows)

    def find(self, image: np.ndarray) -> Tensor:
        """Uint8 BGR `[H, W, 3]` → `[n, 6]` xyxy in its pixels, score, class; the best class of each place."""
        detections, best, _ = self._detect(image)
        return detections.rows[0][best].cpu()

    def _detect(self, image: np.ndarray) -> tuple[BatchDetections, Tensor, Any]:
        """Detections in an image, the numbers of those that are drawn, and where the image lies in the input."""
        device = self.detector.device
        if device.type == "cuda":
            images, box = letterbox_on(image, self._plan.imgsz, device)
        else:
            planes, box = letterboxed_planes(image, self._plan.imgsz, self._plan.imgsz)
            images = torch.from_numpy(planes)[None]
        with torch.inference_mode():
            detections = self.detector(images, [box.shapes])
            return detections, best_class(detections.rows[0]), box.shapes


def show(artist: Artist, source: str | Path | Sequence[Path], folder: Path, *, progress: bool = True) -> list[Path]:
    """Draw detections on an image, on all images and videos of a folder, or on a video; or on these files.

    Returns:
        The files that were written, in `folder`, named as their sources (see `images.target_names`).

    Raises:
        InputError: there is nothing at `source`, or it is neither image nor video.
        DataError: a file cannot be decoded, and it is the only one.
    """
    files = check_source(source) if isinstance(source, (str, Path)) else list(source)
    names = target_names(files)
    for file, name in zip(files, names, strict=True):
        if Path(name).stem != file.stem:
            logger.info("%s is drawn as %s: another file has that name", file, name)
    written = []
    for file, name in zip(files, names, strict=True):
        try:
            target = folder / name
            if is_video(file):
                count = draw_video(artist, file, target, progress)
                logger.info("%s: %d frames", target, count)
            else:
                image = decode(str(file))
                if image is None:
                    raise DataError(f"{file} cannot be decoded")
                drawn, count = artist.draw(image)
                _, data = cv2.imencode(target.suffix, drawn)
                with atomic_path(target) as temporary:
                    temporary.write_bytes(data.tobytes())
                logger.info("%s: %d objects", target, count)
            written.append(target)
        except DataError as error:
            if len(files) == 1:
                raise
            logger.warning("left out: %s", error)
    speeds = ", ".join(f"{value:.1f} ms {part}" for part, value in artist.detector.milliseconds().items())
    logger.info("%d of %d files drawn; %s per image", len(written), len(files), speeds)
    return written


def draw_masks(image: np.ndarray, patches: Iterable[Patch], labels: Sequence[int]) -> np.ndarray:
    """A copy of uint8 BGR `[H, W, 3]` with masks in the colours of their classes: a tint, and one pixel of outline."""
    image = image.copy()
    for patch, label in zip(patches, labels, strict=True):
        height, width = patch.inside.shape
        under = image[patch.top : patch.top + height, patch.left : patch.left + width]
        tinted = (1 - TINT) * under[patch.inside] + TINT * np.array(_colour(label))
        under[patch.inside] = tinted.round().astype(np.uint8)
        wide = np.pad(patch.inside, 1)
        surrounded = wide[:-2, 1:-1] & wide[2:, 1:-1] & wide[1:-1, :-2] & wide[1:-1, 2:]
        under[patch.inside & ~surrounded] = _colour(label)
    return image


def draw_boxes(image: np.ndarray, rows: Iterable[list[float]], names: Mapping[int, str]) -> np.ndarray:
    """A copy of uint8 BGR `[H, W, 3]` with boxes `(x1, y1, x2, y2, score, class)` and their names."""
    image = np.ascontiguousarray(image).copy()
    width = max(round(sum(image.shape[:2]) / 700), 1)
    for x1, y1, x2, y2, score, label in rows:
        colour = _colour(int(label))
        corner = (round(x1), round(y1))
        cv2.rectangle(image, corner, (round(x2), round(y2)), colour, width, cv2.LINE_AA)
        text = f"{names.get(int(label), f'class {int(label)}')} {score:.2f}"
        size, below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, width / 3 + 0.15, max(width - 1, 1))
        top = corner[1] - size[1] - below if corner[1] > size[1] + below else corner[1]
        cv2.rectangle(image, (corner[0], top), (corner[0] + size[0], top + size[1] + below), colour, -1)
        cv2.putText(image, text, (corner[0], top + size[1] + below // 2), cv2.FONT_HERSHEY_SIMPLEX, width / 3 + 0.15,
                    (255, 255, 255), max(width - 1, 1), cv2.LINE_AA)  # fmt: skip
    return image


def _colour(label: int) -> tuple[int, int, int]:
    """A dark colour for each class, far from those of its neighbours."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.85, 0.75)
    return round(blue * 255), round(green * 255), round(red * 255)


def writable_rate(rate: float) -> float:
    """Frames a second as MPEG-4 can hold them, a ratio of numbers up to 65,535; 25 where the video says nothing.

    OpenCV makes a decimal fraction of the rate, so that those of slow motion, such as 237.333, need fewer digits.
    """
    if not 0.01 < rate < 65_535:
        return 25.0
    return round(rate, 3 if rate < 65 else 2 if rate < 655 else 0)


def draw_video(artist: Artist, file: Path, target: Path, progress: bool) -> int:
    """Draw detections on every frame of a video, written as MPEG-4 to `target`; return the number of frames."""
    with open_video(file) as video:
        size = int(video.get(cv2.CAP_PROP_FRAME_WIDTH)), int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
        rate, total = writable_rate(video.get(cv2.CAP_PROP_FPS)), int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        with atomic_path(target) as temporary:
            writer = cv2.VideoWriter(str(temporary), cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
            if not writer.isOpened():
                raise DataError(f"{target}: this OpenCV cannot write MP4 videos")
            bar = tqdm(frames(video), total=total or None, desc=file.name, unit="frame", disable=not progress)
            count = 0
            for frame in bar:
                writer.write(artist.draw(frame)[0])
                count += 1
            writer.release()
            if not count:
                raise DataError(f"{file} cannot be decoded")
            whole = 0
            with contextlib.suppress(DataError), open_video(temporary) as video:
                whole = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
            if whole < count:  # OpenCV says nothing when it cannot write
                raise QatError(f"{target} could not be written whole; is there space left on the disk?")
    return count


# --- for report pages ------------------------------------------------------------------------------------------------


def collect_samples(
    runners: Mapping[str, Runner], data: DataConfig, *, imgsz: int, count: int = 4,
    confidence: float = DISPLAY_CONF, split: str = "val",
) -> list[Sample]:  # fmt: skip
    """Detections of several networks on the same `count` images, for drawing them side by side.

    The images are evenly spread over a split, so that nobody chose them.

    Args:
        runners: by the name that the column gets; the first two are compared with each other.
        imgsz: pixels; images are letterboxed to a square of it.
        confidence: detections below it are not shown.

    Raises:
        DataError: the split has no readable image, or boxes as labels where a network has masks.
        InputError: a network does not take the images, or its classes are not the dataset's.
    """
    with_masks = any(runner.task.masks and (gives_masks(runner) or not has_nms(runner)) for runner in runners.values())
    loader = make_loader(
        data, split, imgsz=imgsz, batch_size=1, workers=0, limit=count, mask_stride=1 if with_masks else None
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
            predictions = {}
            for name, detector in detectors.items():
                detections = detector(batch.images, batch.shapes)
                best = best_class(detections.rows[0])
                shapes = batch.shapes[0]
                masks = () if detections.masks is None else patches(detections.masks, 0, best, shapes)
                outlines = [outline_of(mask.inside, mask.left, mask.top) for mask in masks]
                predictions[name] = report_boxes(detections.rows[0][best], data.names, outlines)
            file = files[batch.paths[0]]
            polygons = (filled(points * np.float32(file.size), file.size[::-1]) for points in file.polygons)
            truth = report_boxes(labels[:, [1, 2, 3, 4, 0]], data.names, list(map(outline_of, polygons)))
            samples.append(Sample(image=batch.paths[0], predictions=predictions, truth=truth, confidence=confidence))
    return samples


def report_boxes(rows: Tensor, names: Mapping[int, str], outlines: Sequence[tuple[str, ...]]) -> list[Box]:
    """Rows of xyxy in pixels of the image, a score if there is one, and the class; with outlines, if there are any."""
    return [
        Box(xyxy=(x0, y0, x1, y1), name=names[int(label)], score=score[0] if score else None, outline=outline)
        for (x0, y0, x1, y1, *score, label), outline in zip(rows.tolist(), outlines or [()] * len(rows), strict=True)
    ]
