"""A runner with what stands before and after it: images in, boxes in the images' own pixels out."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from utils.core.errors import InputError
from utils.core.tasks import BOX, DISPLAY_CONF, DISPLAY_IOU, Prediction
from utils.core.text import plural, short_repr
from utils.evaluation.batch import RaggedBatch
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
from utils.evaluation.masks import Masks
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
    masks: Masks | None = None


class Detector:
    """Calls the runner on batches, in the runner's own batch size, and keeps the times.

    Attributes:
        device: the runner's.
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
    ) -> None:
        """See `nms.non_max_suppression` for the thresholds; without `data` the network's classes are not checked.

        Raises:
            InputError: the network and the dataset have different numbers of classes, or the network is no detector.
        """
        if runner.metadata.get("form") == "deepstream":
            raise InputError("the network's output has DeepStream's form; give a file of export_qat.py's")
        self.device = runner.device
        self._runner, self._task, self._data = runner, runner.task, data
        self._input, self._form, self._batch = image_input(runner), runner.input_spec, batch_range(runner)
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
            if self._task.masks and not self._masks:
                logger.warning("this network with NMS inside gives no masks (%s); its boxes are evaluated",
                               self._task.masks)  # fmt: skip
        self._nc = None if single_cls or data is None else data.nc
        self._conf_thres, self._iou_thres, self._max_det, self._single_cls = conf_thres, iou_thres, max_det, single_cls
        self._times: dict[str, list[float]] = defaultdict(list)
        self._counts: list[int] = []
        self._bad = torch.zeros((), dtype=torch.int64, device=runner.device)
        if self._nc is not None and data is not None and (names := runner.names):
            self._check_names(names, data)

    def __call__(self, images: Tensor, shapes: Sequence[Any]) -> BatchDetections:
        """Detect.

        Args:
            images: uint8 `[B, 3, H, W]` RGB, letterboxed.
            shapes: where the originals lie in them, from the loader.

        Returns:
            What is in them, on the runner's device. Prototypes may be overwritten by the next call.
        """
        raw = self.raw(images)
        clock = self._now()
        size, masks = (images.shape[2], images.shape[3]), None
        if self._suppressed:
            numbers, rows = self._best(raw[""])
            if self._masks:
                masks = Masks.from_model(raw[self._masks], numbers, [one[:, :4] for one in rows], size)
        else:
            prediction = Prediction.of(raw, self._task)
            rows = non_max_suppression(
                prediction, self._conf_thres, self._iou_thres, max_det=self._max_det, agnostic=self._single_cls
            )
            masks = Masks.of(prediction, rows, size)
        detections = BatchDetections(in_images(rows, shapes, single_cls=self._single_cls), masks)
        self._lap("nms", clock)
        return detections

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The network's outputs by the task's names, on the runner's device, without NMS of ours; see a call."""
        self._counts.append(len(images))
        clock = self._now()
        inputs = as_feed(images.to(self.device, non_blocking=True), self._form, self._input.dtype)
        clock = self._lap("preprocess", clock)
        outputs = self._infer(inputs)
        self._lap("inference", clock)
        return outputs

    def warm_up(self, images: Tensor, shapes: Sequence[Any]) -> None:
        """Before the first batch, detect in one of its images: libraries load and compile at their first call."""
        if not self._counts:
            self(images[:1], shapes[:1])
            self._counts, self._times = [], defaultdict(list)
            self._bad.zero_()

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

    def _infer(self, images: Tensor) -> dict[str, Tensor]:
        """Run in batches that the network takes: the last is filled up if it must be, and the filling is dropped.

        Returns:
            The outputs by the task's names; of a network with NMS inside, its table of detections by no name, and its
            masks.
        """
        min_batch, max_batch = self._batch
        outputs: dict[str, Tensor] = {}
        first = 0
        for part in images.split(max_batch or len(images)):
            missing = min_batch - len(part)
            filled = part if missing <= 0 else torch.cat([part, part[-1:].expand(missing, -1, -1, -1)])
            raw = self._runner.infer({self._input.name: filled})
            if self._suppressed:
                result = {"": packed_detections(raw)} | ({self._masks: raw[self._masks]} if self._masks else {})
            else:
                result = self._named(raw)
            result = {name: tensor[: len(part)] for name, tensor in result.items()}
            if len(part) == len(images):
                outputs = result
                break
            outputs = outputs or {name: one.new_empty((len(images), *one.shape[1:])) for name, one in result.items()}
            for name, tensor in result.items():
                outputs[name][first : first + len(part)] = tensor  # a copy: the next call may overwrite it
            first += len(part)
        # a sum is finite only if all that it is of is; counted where the tensor is, so that nothing waits for it
        sums = [tensor.flatten(1).sum(1, dtype=torch.float32) for tensor in outputs.values()]
        self._bad += (~torch.stack(sums).isfinite().all(0)).sum()
        return outputs

    def _best(self, raw: Tensor) -> tuple[RaggedBatch, RaggedBatch]:
        """Those of a table of detections `[B, K, 6]` that the thresholds let through, best first.

        Returns:
            Of each image the numbers of its rows, `[n]`, and these rows, `[n, 6]`.
        """
        order = raw[..., 4].argsort(dim=1, descending=True, stable=True)
        raw = raw.gather(1, order[..., None].expand_as(raw))
        valid = raw[..., 4] > self._conf_thres
        valid &= valid.cumsum(1) <= self._max_det
        counts = valid.sum(1).tolist()
        return RaggedBatch(order[valid], counts), RaggedBatch(raw[valid], counts)

    def _check_names(self, names: Mapping[int, str], data: DataConfig) -> None:
        """Raise `InputError` if the network has another number of classes than the dataset; warn of other names."""
        first, second = (short_repr([*one.values()]) for one in (names, data.names))
        if len(names) != data.nc:
            raise InputError(
                f"the network has {plural(len(names), 'class')} {first}, and {data.file} has {data.nc} {second}; "
                "give the dataset that it was trained on"
            )
        if list(names.values()) != list(data.names.values()):
            warn_once(f"the network's class names {first} differ from those of {data.file} {second}: "
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
        least = BOX + (self._nc or 1) + nm
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
