"""A runner with what stands before and after it: images in, boxes in the images' own pixels out."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from utils.core.errors import InputError
from utils.core.tasks import DISPLAY_CONF, DISPLAY_IOU, Layout, Prediction
from utils.core.text import plural
from utils.evaluation.batch import Batch, RaggedBatch
from utils.evaluation.input_plan import (
    batch_range,
    gives_masks,
    has_nms,
    image_input,
    nms_thresholds,
    nms_words,
    output_names,
)
from utils.evaluation.letterbox import boxes_to_image
from utils.evaluation.masks import AnyMasks, Masks, MasksFromModel
from utils.evaluation.nms import non_max_suppression, packed_detections
from utils.runners.base import as_feed

if TYPE_CHECKING:
    from utils.evaluation.data_yaml import DataConfig
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)  # of what each evaluation of a run would say again


@dataclass(frozen=True)
class BatchDetections:
    """What a network detects in a batch.

    Attributes:
        rows: of each image float32 `[n, 6]`: xyxy in the original's pixels, score, class; best first.
        masks: of these; None for detection.
    """

    rows: RaggedBatch
    masks: AnyMasks | None = None


@dataclass(frozen=True)
class Started:
    """What a network computes for a batch, on a GPU perhaps still.

    Attributes:
        raw: its outputs, as `Detector` names them.
        shape: of the images, `[B, 3, H, W]`.
        marks: events on the GPU: before it, when images are ready, after it.
    """

    raw: dict[str, Tensor]
    shape: Sequence[int]
    marks: Sequence[Any] = ()


class Detector:
    """Calls the runner on batches, in the runner's own batch size, and keeps the times.

    `detect` goes through the batches of a loader; a call, or `start` and `finish`, takes one batch. With `overlap` the
    network is started on each batch before NMS of the one before it, on a GPU on a stream beside torch's current one.
    """

    def __init__(
        self,
        runner: Runner,
        data: DataConfig | None,
        *,
        conf_thres: float = DISPLAY_CONF,
        iou_thres: float = DISPLAY_IOU,
        max_det: int = 300,
        single_cls: bool = False,
        upsample_masks: bool = False,
        overlap: bool = False,
    ) -> None:
        """See `nms.non_max_suppression` for the thresholds; without `data` the network's classes are not checked.

        Raises:
            InputError: the network and the dataset have different numbers of classes, or the network is no detector.
        """
        if runner.metadata.get("form") == "deepstream":
            raise InputError("the network's output has DeepStream's form; give a file of export_qat.py's")
        self.device = runner.device
        self._runner = runner
        self._input, self._form = image_input(runner), runner.input_spec
        self._batch = batch_range(runner)
        self._task = runner.task
        self._suppressed = has_nms(runner)
        self._masks = self._task.masks if self._suppressed and gives_masks(runner) else ""
        self._outputs = {} if self._suppressed else output_names(runner)
        if self._suppressed and data is not None:
            settings = ", ".join(f"{name} {value:g}" for name, value in nms_thresholds(runner).items())
            logger.warning(
                "%s is inside the network (%s); the loop has conf_thres %g, iou_thres %g, at most %d. With others "
                "AP does not compare with that of other files: it can even be higher, since the curve is cut off",
                nms_words(runner), settings or "unknown thresholds", conf_thres, iou_thres, max_det,
            )  # fmt: skip
            if self._task.masks and not gives_masks(runner):
                logger.warning("this network with NMS inside gives no masks (%s); its boxes are evaluated",
                               self._task.masks)  # fmt: skip
        self._nc = None if single_cls or data is None else data.nc
        self._data = data
        self._thresholds = conf_thres, iou_thres
        self._max_det = max_det
        self._single_cls = single_cls
        self._upsample_masks = upsample_masks
        self._overlap = overlap
        self._beside = torch.cuda.Stream(self.device) if overlap and self.device.type == "cuda" else None
        self._times: dict[str, list[float]] = defaultdict(list)
        self._waited = 0.0  # seconds, for the loader
        self._counts: list[int] = []
        self._bad = torch.zeros((), dtype=torch.int64, device=runner.device)
        self._check_classes()

    def detect(self, loader: Any) -> Iterator[tuple[Batch, BatchDetections | None]]:
        """Batches in their order with what is detected in them; None in one without images."""

        def batches_started() -> Iterator[tuple[Batch, Started | None]]:
            clock = time.perf_counter()
            for batch in on_device(loader, self.device):
                self._waited += time.perf_counter() - clock
                if len(loader) == 1 and len(batch):  # whose times are all that there is
                    self.warm_up(batch.images, batch.shapes)
                yield batch, self.start(batch.images) if len(batch) else None
                clock = time.perf_counter()

        for batch, started in prefetch(batches_started()) if self._overlap else batches_started():
            yield batch, None if started is None else self.finish(started, batch.shapes)

    def __call__(self, images: Tensor, shapes: Sequence[Any]) -> BatchDetections:
        """Detect.

        Args:
            images: uint8 `[B, 3, H, W]` RGB, letterboxed.
            shapes: where the originals lie in them, from the loader.

        Returns:
            What is in them, on the runner's device. Prototypes may be overwritten by the next call.
        """
        return self.finish(self.start(images), shapes)

    def warm_up(self, images: Tensor, shapes: Sequence[Any]) -> None:
        """Before the first batch, detect in one of its images: libraries load and compile at their first call."""
        if not self._counts:
            self.finish(self.start(images[:1]), shapes[:1])
            self._counts, self._times = [], defaultdict(list)
            self._bad.zero_()

    def start(self, images: Tensor) -> Started:
        """Let the network compute a batch; with `overlap` this waits for no GPU, and can be called again at once.

        Args:
            images: as those of a call.
        """
        self._counts.append(len(images))
        if self._beside is None:
            clock = self._now()
            inputs = self._prepare(images)
            clock = self._lap("preprocess", clock)
            raw = self._infer(inputs)
            self._lap("inference", clock)
            return Started(raw, images.shape)
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        if images.is_cuda:
            images.record_stream(self._beside)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        with torch.cuda.stream(self._beside):
            marks[0].record()
            inputs = self._prepare(images)
            marks[1].record()
            raw = self._infer(inputs)
            marks[2].record()
        return Started(raw, images.shape, marks)

    def finish(self, started: Started, shapes: Sequence[Any]) -> BatchDetections:
        """What is detected in a batch that was started; see a call."""
        if started.marks:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(started.marks[-1])
            for tensor in started.raw.values():
                tensor.record_stream(current)
        clock = self._now()
        for part, (before, after) in zip(("preprocess", "inference"), pairwise(started.marks), strict=False):
            self._times[part].append(before.elapsed_time(after) / 1000)
        raw, size = started.raw, (started.shape[2], started.shape[3])
        masks: AnyMasks | None
        if self._suppressed:
            numbers, rows = self._best(raw[""])
            boxes = [one[:, :4] for one in rows]
            masks = MasksFromModel.of(
                raw[self._masks], numbers, boxes, size, upsampled=self._upsample_masks
            ) if self._masks else None  # fmt: skip
        else:
            prediction = Prediction.of(raw, self._task)
            rows = non_max_suppression(prediction, *self._thresholds, max_det=self._max_det, agnostic=self._single_cls)
            masks = Masks.of(prediction, rows, size, upsampled=self._upsample_masks)
        detections = BatchDetections(in_images(rows, shapes, single_cls=self._single_cls), masks)
        self._lap("nms", clock)
        return detections

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds per image, for each part.

        The first call, which warms up a batch size, counts only if it is the only one.
        """
        skip = 1 if len(self._counts) > 1 else 0
        images = max(sum(self._counts[skip:]), 1)
        return {part: 1000 * sum(times[skip:]) / images for part, times in self._times.items()}

    @property
    def not_finite(self) -> int:
        """How many images had NaN or infinity in what the network gave for them."""
        return int(self._bad)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, over all batches; `images` is what `detect` has waited for the loader."""
        return {"images": self._waited, **{part: sum(times) for part, times in self._times.items()}}

    def _prepare(self, images: Tensor) -> Tensor:
        return as_feed(images.to(self.device, non_blocking=True), self._form, self._input.dtype)

    def _infer(self, images: Tensor) -> dict[str, Tensor]:
        """Run in batches that the network takes: the last is filled up if it must be, and the filling is dropped.

        With `overlap` results are copied, since the next run would overwrite them before they are used.

        Returns:
            The outputs by the task's names; of a network with NMS inside, its table of detections by no name, and its
            masks.
        """
        min_batch, max_batch = self._batch
        found: dict[str, Tensor] = {}
        parts = images.split(max_batch or len(images))
        first = 0
        for part in parts:
            missing = min_batch - len(part)
            filled = part if missing <= 0 else torch.cat([part, part[-1:].expand(missing, -1, -1, -1)])
            raw = self._runner.infer({self._input.name: filled})
            if self._suppressed:
                result = {"": packed_detections(raw)} | ({self._masks: raw[self._masks]} if self._masks else {})
            else:
                result = self._named(raw)
            result = {name: tensor[: len(part)] for name, tensor in result.items()}
            if len(part) == len(images) and not self._overlap:
                found = result
                break
            if not first:
                found = {name: one.new_empty((len(images), *one.shape[1:])) for name, one in result.items()}
            for name, tensor in result.items():
                found[name][first : first + len(part)] = tensor  # a copy: the next call may overwrite it
            first += len(part)
        # a sum is finite only if all that it is of is; counted where the tensor is, so that nothing waits for it
        sums = [tensor.flatten(1).sum(1, dtype=torch.float32) for tensor in found.values()]
        self._bad += (~torch.stack(sums).isfinite().all(0)).sum()
        return found

    def _best(self, raw: Tensor) -> tuple[RaggedBatch, RaggedBatch]:
        """Those of a table of detections `[B, K, 6]` that the thresholds let through, best first.

        Returns:
            Of each image the numbers of its rows, `[n]`, and these rows, `[n, 6]`.
        """
        order = raw[..., 4].argsort(dim=1, descending=True, stable=True)
        raw = raw.gather(1, order[..., None].expand_as(raw))
        valid = raw[..., 4] > self._thresholds[0]
        valid &= valid.cumsum(1) <= self._max_det
        counts = valid.sum(1).tolist()
        return RaggedBatch(order[valid], counts), RaggedBatch(raw[valid], counts)

    def _check_classes(self) -> None:
        """Compare the network's classes with the dataset's, as far as the file says them before it has run."""
        names, data = self._runner.names, self._data
        if data is None or self._nc is None:
            return
        specs = [next(spec for spec in self._runner.outputs if spec.name == own) for own in self._outputs.values()]
        counts = [spec.shape[1] if len(spec.shape) > 2 else None for spec in specs]  # of rows, and of prototypes
        nc = len(names) if names else None
        if counts and None not in counts:
            nc = max(Layout.of_rows(*(count or 0 for count in counts)).nc, 0)
        if nc is not None and nc != self._nc:
            raise InputError(
                f"the network has {plural(nc, 'class')}{_few(names)}, and {data.file} has "
                f"{self._nc}{_few(data.names)}; give "
                "the dataset that it was trained on"
            )
        if names and list(names.values()) != list(data.names.values()):
            warn_once(f"the network's class names{_few(names)} differ from those of {data.file}{_few(data.names)}: "
                       "classes are matched by number")  # fmt: skip

    def _named(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The runner's outputs by the task's names, if they can be what the task and the dataset want.

        Raises:
            InputError: their shapes are others.
        """
        found = {name: raw[own] for name, own in self._outputs.items()}
        prediction = found[self._task.prediction]
        nm = found[self._task.prototypes].shape[1] if self._task.prototypes else 0
        rows = prediction.shape[1] if prediction.ndim == 3 else 0
        least = Layout(self._nc or 1, nm).rows
        if rows < least or (self._nc and rows != least) or len(set(map(len, found.values()))) != 1:
            shapes = ", ".join(f"{self._outputs[name]} {list(one.shape)}" for name, one in found.items())
            masks = f" + {nm} for masks" if nm else ""
            raise InputError(
                f"the network gives {shapes}; expected of each image [4 + {self._nc or 'classes'}{masks}, anchors]"
                f"{f' for {self._data.file}' if self._data else ''}"
            )
        return found

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def _lap(self, part: str, since: float) -> float:
        now = self._now()
        self._times[part].append(now - since)
        return now


def in_images(found: Sequence[Tensor], shapes: Sequence[Any], *, single_cls: bool = False) -> RaggedBatch:
    """Detections of NMS, in the input's pixels for each image, as `[n, 6]` in the pixels of the originals."""
    found = RaggedBatch.of(found)
    boxes = boxes_to_image(found.flat[:, :4], found.owners(), shapes)
    rows = torch.cat([boxes, found.flat[:, 4:6]], 1)
    if single_cls:
        rows[:, 5] = 0
    return RaggedBatch(rows, found.counts)


def _few(names: Any) -> str:
    """The first class names, for messages."""
    if not names:
        return ""
    first = [str(name) for name in list(names.values())[:3]]
    return f" ({', '.join(first)}{', ...' if len(names) > 3 else ''})"


T = TypeVar("T")


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """The same items, each given once the next one has been made, so that what it starts goes on meanwhile."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def on_device(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The loader's batches, on a GPU with the images of the next one being copied there while this one is used."""
    if device.type != "cuda":
        yield from loader
        return
    stream = torch.cuda.Stream(device)

    def copied(batch: Batch) -> tuple[Batch, Any]:
        with torch.cuda.stream(stream):
            return replace(batch, images=batch.images.to(device, non_blocking=True)), stream.record_event()

    for batch, event in prefetch(map(copied, loader)):
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        batch.images.record_stream(current)  # its memory is kept until that stream has used it
        yield batch
