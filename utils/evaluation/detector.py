"""A runner with preprocessing and NMS: images in, boxes in the images' own pixels out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from utils.evaluation.stage_clock import StageClock
from utils.runners.base import as_feed

if TYPE_CHECKING:
    from utils.evaluation.data_yaml import DataConfig
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchDetections:
    """Detections in a batch: for each image float32 `[n, 6]`, xyxy in its pixels, score, class, best first.

    `masks` belong to them; None for detection.
    """

    rows: RaggedBatch
    masks: Masks | None = None


def output_names(runner: Runner) -> dict[str, str]:
    """The task's names of the outputs → the runner's: the same, or else the first of as many dimensions.

    `InputError` if a network for segmentation has no prototypes.
    """
    task = runner.task
    names: dict[str, str] = {}
    for name, dimensions in zip(task.outputs, (3, 4), strict=False):
        fitting = [spec.name for spec in runner.outputs if len(spec.shape) == dimensions]
        if name in fitting:
            names[name] = name
        elif fitting:
            names[name] = fitting[0]
        elif name == task.prototypes:
            outputs = ", ".join(map(str, runner.outputs))
            expected = f"{name} [batch, masks, height, width]"
            raise InputError(f"a segmentation model gives {expected}, too; this one gives {outputs}")
        else:
            names[name] = runner.outputs[0].name
    return names


class Detector:
    """Calls the runner on batches, in the runner's own batch size, and keeps the times."""

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

        `InputError` if the network and the dataset have different numbers of classes, or the network gives no
        detections.
        """
        form = runner.form
        if form.name == DEEPSTREAM:
            raise InputError("the model's output has DeepStream's form; give a file of export_qat.py's")
        self.device = runner.device
        self._runner = runner
        self._input = image_input(runner)
        self._batch = batch_range(runner)
        self._nms_inside = form.name == END_TO_END
        self._masks = form.task.masks if self._nms_inside and form.masks else ""
        self._outputs = {} if self._nms_inside else output_names(runner)
        self._conf_thres = conf_thres
        self._iou_thres = iou_thres
        self._max_det = max_det
        self._single_cls = single_cls
        self._nc = None if single_cls or data is None else data.nc
        self._clock = StageClock(runner.device)
        self._counts: list[int] = []
        self._bad = torch.zeros((), dtype=torch.int64, device=runner.device)
        if data is None:
            return
        if form.has_nms:
            self._warn_of_own_nms(form)
        if not single_cls and runner.names:
            check_classes(runner.names, data, "the model")

    def __call__(self, batch: Batch) -> BatchDetections:
        """Detect in the images; the next call may overwrite prototypes.

        Results are on the runner's device, but the boxes of a single image may stay on the CPU, see `nms`.
        """
        raw = self.raw(batch.images)
        size = (batch.images.shape[2], batch.images.shape[3])
        rows, masks = self._selected(raw, size) if self._nms_inside else self._suppressed(raw, size)
        boxes = boxes_to_image(rows.flat[:, :4], rows.owners(), batch.letterboxes)
        scores = rows.flat[:, 4:5]
        classes = rows.flat[:, 5:6]
        if self._single_cls:
            classes = torch.zeros_like(classes)
        detections = RaggedBatch(torch.cat([boxes, scores, classes], 1), rows.counts)
        if masks:  # masks are compared and drawn on the device, together with their boxes
            detections = detections.to(self.device)
        self._clock.stop("nms")
        return BatchDetections(detections, masks)

    def _suppressed(self, raw: Mapping[str, Tensor], size: tuple[int, int]) -> tuple[RaggedBatch, Masks | None]:
        """Detections in pixels of the input of `size`, and their masks, after NMS of ours."""
        prediction = Prediction.of(raw, self._runner.task)
        rows = non_max_suppression(
            prediction,
            self._conf_thres,
            self._iou_thres,
            max_det=self._max_det,
            agnostic=self._single_cls,
        )
        masks = Masks.of(prediction, rows.to(self.device), size) if prediction.nm else None
        return rows, masks

    def _selected(self, raw: Mapping[str, Tensor], size: tuple[int, int]) -> tuple[RaggedBatch, Masks | None]:
        """Detections in pixels of the input of `size`, and their masks, of a network with NMS inside."""
        numbers, rows = self._best(raw[""])
        if not self._masks:
            return rows, None
        boxes = [image_rows[:, :4] for image_rows in rows]
        return rows, Masks.from_model(raw[self._masks], numbers, boxes, size)

    def _warn_of_own_nms(self, form: OutputForm) -> None:
        """Warn of NMS inside the network, with its settings and those of the loop, and of masks that are missing."""
        settings = ", ".join(f"{name} {value:g}" for name, value in form.thresholds.items())
        logger.warning(
            "%s is inside the model (%s); the loop has conf_thres %g, iou_thres %g, at most %d. With others AP "
            "does not compare with that of other files",
            form.nms_name,
            settings or "unknown thresholds",
            self._conf_thres,
            self._iou_thres,
            self._max_det,
        )
        if form.task.masks and not form.masks:
            logger.warning("the model gives no %s: its boxes are evaluated", form.task.masks)

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs for uint8 `[B, 3, H, W]` RGB by the task's names, on the runner's device, without NMS of ours.

        A network with NMS inside gives its table of detections, under the name '', and its masks.
        """
        self._counts.append(len(images))
        self._clock.start()
        inputs = as_feed(images.to(self.device, non_blocking=True), self._runner.input_spec, self._input.dtype)
        self._clock.stop("preprocess")
        outputs = self._infer(inputs)
        self._clock.stop("inference")
        return outputs

    def warm_up(self, batch: Batch) -> None:
        """Detect in one image of the first batch: libraries load and compile at their first call."""
        if self._counts:
            return
        self(Batch(batch.images[:1], batch.paths[:1], batch.letterboxes[:1]))
        self._counts.clear()
        self._clock.clear()
        self._bad.zero_()

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds per image, for each stage, without the first call, which warms up, if there are more."""
        skip = 1 if len(self._counts) > 1 else 0
        images = max(sum(self._counts[skip:]), 1)
        return {stage: 1000 * sum(seconds[skip:]) / images for stage, seconds in self._clock.seconds().items()}

    @property
    def not_finite(self) -> int:
        """Number of images for which the network gave NaN or infinity."""
        return int(self._bad)

    def _infer(self, images: Tensor) -> dict[str, Tensor]:
        """Run in batches that the network takes: the last is filled up if it must be, and the filling is dropped."""
        _, max_batch = self._batch
        parts = images.split(max_batch or len(images))
        if len(parts) == 1:
            outputs = self._infer_part(images)
        else:
            outputs = self._joined(parts, len(images))
        # a sum is finite only if every summand is; counted where the tensor is, so that nothing waits for it
        sums = [tensor.flatten(1).sum(1, dtype=torch.float32) for tensor in outputs.values()]
        self._bad += (~torch.stack(sums).isfinite().all(0)).sum()
        return outputs

    def _joined(self, parts: Sequence[Tensor], images: int) -> dict[str, Tensor]:
        """Run on several parts of a batch; the outputs of all its images."""
        outputs: dict[str, Tensor] = {}
        first = 0
        for part in parts:
            last = first + len(part)
            for name, tensor in self._infer_part(part).items():
                if name not in outputs:
                    outputs[name] = tensor.new_empty((images, *tensor.shape[1:]))
                outputs[name][first:last] = tensor  # a copy: the next call may overwrite the tensor
            first = last
        return outputs

    def _infer_part(self, images: Tensor) -> dict[str, Tensor]:
        """Run once, on images that the network takes at a time, or fewer; the outputs of these images."""
        min_batch, _ = self._batch
        missing = min_batch - len(images)
        filled = images
        if missing > 0:
            filled = torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
        raw = self._runner.infer({self._input.name: filled})
        outputs = self._packed(raw) if self._nms_inside else self._named(raw)
        return {name: tensor[: len(images)] for name, tensor in outputs.items()}

    def _packed(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The table of detections of a network with NMS inside, under the name '', and its masks."""
        outputs = {"": packed_detections(raw)}
        if self._masks:
            outputs[self._masks] = raw[self._masks]
        return outputs

    def _best(self, table: Tensor) -> tuple[RaggedBatch, RaggedBatch]:
        """Filter detections `[B, K, 6]` by confidence and `max_det`, best first: their indices `[n]`, rows `[n, 6]`."""
        order = table[..., 4].argsort(dim=1, descending=True, stable=True)
        table = table.gather(1, order[..., None].expand_as(table))
        passes = table[..., 4] > self._conf_thres
        passes &= passes.cumsum(1) <= self._max_det
        counts = passes.sum(1).tolist()
        return RaggedBatch(order[passes], counts), RaggedBatch(table[passes], counts)

    def _named(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The runner's outputs by the task's names; `InputError` if their shapes do not fit the task or the dataset."""
        task = self._runner.task
        outputs = {name: raw[own_name] for name, own_name in self._outputs.items()}
        prediction = outputs[task.prediction]
        nm = outputs[task.prototypes].shape[1] if task.prototypes else 0
        rows = prediction.shape[1] if prediction.ndim == 3 else 0
        fewest_rows = BOX + (self._nc or 1) + nm
        fits_classes = rows == fewest_rows if self._nc else rows >= fewest_rows
        has_one_batch_size = len({len(tensor) for tensor in outputs.values()}) == 1
        if fits_classes and has_one_batch_size:
            return outputs
        shapes = ", ".join(f"{self._outputs[name]} {list(tensor.shape)}" for name, tensor in outputs.items())
        masks = f" + {nm} for masks" if nm else ""
        raise InputError(
            f"the model gives {shapes}; expected for each image [4 + {self._nc or 'classes'}{masks}, anchors]"
        )
