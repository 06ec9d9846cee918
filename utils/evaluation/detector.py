"""A runner with what stands before and after it: images in, boxes in the images' own pixels out."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.core.errors import InputError
from utils.core.output_form import DEEPSTREAM, END_TO_END, OutputForm
from utils.core.tasks import BOX, DISPLAY_CONF, DISPLAY_IOU, Prediction
from utils.evaluation.batch import Batch, RaggedBatch
from utils.evaluation.data_yaml import check_classes
from utils.evaluation.input_plan import batch_range, image_input
from utils.evaluation.letterbox import boxes_to_image
from utils.evaluation.masks import Masks
from utils.evaluation.nms import non_max_suppression, packed_detections
from utils.runners.base import as_feed

if TYPE_CHECKING:
    from utils.evaluation.data_yaml import DataConfig
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchDetections:
    """What a network detects in a batch: of each image float32 `[n, 6]`, xyxy in its pixels, score, class, best first.

    `masks` are of these; None for detection.
    """

    rows: RaggedBatch
    masks: Masks | None = None


def output_names(runner: Runner) -> dict[str, str]:
    """The task's names of the outputs → the runner's: the same, or else the first of as many dimensions.

    `InputError` if a network for segmentation has no prototypes.
    """
    task, names = runner.task, {}
    for name, dimensions in zip(task.outputs, (3, 4), strict=False):
        fitting = [spec.name for spec in runner.outputs if len(spec.shape) == dimensions]
        if not fitting and name == task.prototypes:
            outputs = ", ".join(map(str, runner.outputs))
            expected = f"{name} [batch, masks, height, width]"
            raise InputError(f"a network for segmentation gives {expected}, too; this one gives {outputs}")
        names[name] = name if name in fitting else [*fitting, runner.outputs[0].name][0]
    return names


class Detector:
    """Calls the runner on batches, in the runner's own batch size, and keeps the times."""

    def __init__(
        self, runner: Runner, data: DataConfig | None, *, conf_thres: float = DISPLAY_CONF,
        iou_thres: float = DISPLAY_IOU, max_det: int = 300, single_cls: bool = False,
    ) -> None:  # fmt: skip
        """See `nms.non_max_suppression` for the thresholds; without `data` the network's classes are not checked.

        `InputError` if the network and the dataset have different numbers of classes, or the network is no detector.
        """
        form = runner.form
        if form.name == DEEPSTREAM:
            raise InputError("the network's output has DeepStream's form; give a file of export_qat.py's")
        self.device, self._runner = runner.device, runner
        self._input, self._batch = image_input(runner), batch_range(runner)
        self._nms_inside = form.name == END_TO_END
        self._masks = form.task.masks if self._nms_inside and form.masks else ""
        self._outputs = {} if self._nms_inside else output_names(runner)
        self._conf_thres, self._iou_thres, self._max_det, self._single_cls = conf_thres, iou_thres, max_det, single_cls
        self._nc = None if single_cls or data is None else data.nc
        self._times: dict[str, list[float]] = defaultdict(list)
        self._counts: list[int] = []
        self._bad = torch.zeros((), dtype=torch.int64, device=runner.device)
        if data is None:
            return
        if form.has_nms:
            self._warn_of_own_nms(form)
        if not single_cls and runner.names:
            check_classes(runner.names, data, "the network")

    def __call__(self, batch: Batch) -> BatchDetections:
        """What is in the images, on the runner's device. Prototypes may be overwritten by the next call."""
        raw = self.raw(batch.images)
        clock = self._now()
        size, masks = (batch.images.shape[2], batch.images.shape[3]), None
        if not self._nms_inside:
            prediction = Prediction.of(raw, self._runner.task)
            rows = non_max_suppression(
                prediction, self._conf_thres, self._iou_thres, max_det=self._max_det, agnostic=self._single_cls
            )
            if prediction.nm:
                masks = Masks.of(prediction, rows.to(self.device), size)
        else:
            numbers, rows = self._best(raw[""])
            if self._masks:
                masks = Masks.from_model(raw[self._masks], numbers, [one[:, :4] for one in rows], size)
        boxes = boxes_to_image(rows.flat[:, :4], rows.owners(), batch.letterboxes)
        classes = rows.flat[:, 5:6] * (not self._single_cls)
        detections = RaggedBatch(torch.cat([boxes, rows.flat[:, 4:5], classes], 1), rows.counts).to(self.device)
        self._lap("nms", clock)
        return BatchDetections(detections, masks)

    def _warn_of_own_nms(self, form: OutputForm) -> None:
        """Log the settings of NMS inside the network beside those of the loop, and masks that it does not give."""
        settings = ", ".join(f"{name} {value:g}" for name, value in form.thresholds.items())
        logger.warning(
            "%s is inside the network (%s); the loop has conf_thres %g, iou_thres %g, at most %d. With others AP "
            "does not compare with that of other files",
            form.nms_name,
            settings or "unknown thresholds",
            self._conf_thres,
            self._iou_thres,
            self._max_det,
        )
        if form.task.masks and not form.masks:
            logger.warning("the network gives no %s: its boxes are evaluated", form.task.masks)

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs for uint8 `[B, 3, H, W]` RGB by the task's names, on the runner's device, without NMS of ours.

        Of a network with NMS inside its table of detections, by no name, and its masks.
        """
        self._counts.append(len(images))
        clock = self._now()
        inputs = as_feed(images.to(self.device, non_blocking=True), self._runner.input_spec, self._input.dtype)
        clock = self._lap("preprocess", clock)
        outputs = self._infer(inputs)
        self._lap("inference", clock)
        return outputs

    def warm_up(self, batch: Batch) -> None:
        """Before the first batch, detect in one of its images: libraries load and compile at their first call."""
        if not self._counts:
            self(Batch(batch.images[:1], batch.paths[:1], batch.letterboxes[:1]))
            self._counts, self._times = [], defaultdict(list)
            self._bad.zero_()

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds per image, for each part, without the first call, which warms up, if there are more."""
        skip = 1 if len(self._counts) > 1 else 0
        images = max(sum(self._counts[skip:]), 1)
        return {part: 1000 * sum(times[skip:]) / images for part, times in self._times.items()}

    @property
    def not_finite(self) -> int:
        """How many images had NaN or infinity in what the network gave for them."""
        return int(self._bad)

    def _infer(self, images: Tensor) -> dict[str, Tensor]:
        """Run in batches that the network takes: the last is filled up if it must be, and the filling is dropped."""
        min_batch, max_batch = self._batch
        outputs: dict[str, Tensor] = {}
        first = 0
        for part in images.split(max_batch or len(images)):
            missing = min_batch - len(part)
            filled = part if missing <= 0 else torch.cat([part, part[-1:].expand(missing, -1, -1, -1)])
            raw = self._runner.infer({self._input.name: filled})
            if self._nms_inside:
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

    def _best(self, table: Tensor) -> tuple[RaggedBatch, RaggedBatch]:
        """Of a table `[B, K, 6]` what the thresholds let through, best first: numbers of rows `[n]`, rows `[n, 6]`."""
        order = table[..., 4].argsort(dim=1, descending=True, stable=True)
        table = table.gather(1, order[..., None].expand_as(table))
        valid = table[..., 4] > self._conf_thres
        valid &= valid.cumsum(1) <= self._max_det
        counts = valid.sum(1).tolist()
        return RaggedBatch(order[valid], counts), RaggedBatch(table[valid], counts)

    def _named(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The runner's outputs by the task's names; `InputError` if their shapes do not fit the task or the dataset."""
        task, outputs = self._runner.task, {name: raw[own] for name, own in self._outputs.items()}
        prediction = outputs[task.prediction]
        nm = outputs[task.prototypes].shape[1] if task.prototypes else 0
        rows = prediction.shape[1] if prediction.ndim == 3 else 0
        least = BOX + (self._nc or 1) + nm
        if rows < least or (self._nc and rows != least) or len(set(map(len, outputs.values()))) != 1:
            shapes = ", ".join(f"{self._outputs[name]} {list(tensor.shape)}" for name, tensor in outputs.items())
            masks = f" + {nm} for masks" if nm else ""
            raise InputError(
                f"the network gives {shapes}; expected of each image [4 + {self._nc or 'classes'}{masks}, anchors]"
            )
        return outputs

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()

    def _lap(self, part: str, since: float) -> float:
        now = self._now()
        self._times[part].append(now - since)
        return now
