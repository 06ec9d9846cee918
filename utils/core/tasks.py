"""The tasks of a network, detection with and without masks, and their outputs.

A `Task` names the outputs of a network, and a `Prediction` holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

IMAGES = "images"  # name of the network's input, `[B, 3, H, W]`
BOX = 4  # rows of a box: cx, cy, w, h
# AP wants every detection; these are the defaults of upstream's val.py
AP_CONFIDENCE, AP_NMS_IOU = 0.001, 0.7
# the defaults of upstream's detection program, and of networks with NMS in the file
DISPLAY_CONF, DISPLAY_IOU = 0.25, 0.45
MASK_AP_NMS_IOU = 0.6  # that of upstream's val.py for segmentation


@dataclass(frozen=True)
class Task:
    """One task, such as detection: the names of its outputs, and its settings of NMS and pycocotools.

    Attributes:
        name: as in an ONNX file's metadata.
        nms_iou: default IoU of NMS: upstream's for AP.
        iou_type: the name of the shapes that pycocotools compares.
        prototypes: the output that masks are sums of, `[B, nm, h, w]`; empty where there are no masks.
        masks: the output with masks of a file with NMS inside; empty where there are none.
        prediction: the output with boxes, class scores and coefficients of masks, `[B, 4 + nc + nm, anchors]`.
        detections: outputs of a file with NMS inside: their number, `[B, 1]`; corners in pixels of the input,
            `[B, K, 4]`; scores and classes, `[B, K]`.
    """

    name: str
    nms_iou: float
    iou_type: str
    prototypes: str = ""
    masks: str = ""
    prediction: str = "output0"
    detections: tuple[str, ...] = ("num_dets", "det_boxes", "det_scores", "det_classes")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs of a network without NMS."""
        return (self.prediction, self.prototypes) if self.prototypes else (self.prediction,)


DETECT = Task("detect", AP_NMS_IOU, "bbox")
SEGMENT = Task("segment", MASK_AP_NMS_IOU, "segm", prototypes="output1", masks="det_masks")
DETECTIONS = DETECT.detections


def task_of_head(head: Any) -> Task:
    """The task of a network that ends in `head`: one with masks has a number of coefficients, `nm`."""
    return SEGMENT if getattr(head, "nm", 0) else DETECT


def task_of_outputs(metadata: Mapping[str, str], outputs: Mapping[str, int]) -> Task:
    """The task of a file, by its metadata, or else by its outputs (name → number of dimensions).

    Two of three and of four dimensions are a prediction and prototypes, in any order; `det_masks` are masks.
    """
    for task in (DETECT, SEGMENT):
        if metadata.get("task") == task.name:
            return task
    has_masks = SEGMENT.masks in outputs or sorted(outputs.values()) == [3, 4]
    return SEGMENT if has_masks else DETECT


@dataclass(frozen=True)
class Prediction:
    """Predictions of a network for a batch, before NMS; for upstream's, `Prediction(*predicted(network(images)))`.

    Attributes:
        raw: `[B, 4 + nc + nm, anchors]`: cx, cy, w, h in pixels, class scores in 0..1, mask coefficients.
        prototypes: `[B, nm, h, w]`; None without masks.
    """

    raw: Tensor
    prototypes: Tensor | None = None

    @classmethod
    def of(cls, outputs: Mapping[str, Tensor], task: Task) -> Prediction:
        """Take the outputs of a network by the task's names; `InputError` for another number of dimensions."""
        for name, axes in zip(task.outputs, ("rows, anchors", "coefficients, height, width"), strict=False):
            if outputs[name].ndim != 2 + axes.count(","):
                raise InputError(f"the model's output {name} is {list(outputs[name].shape)}; expected [batch, {axes}]")
        return cls(*(outputs[name] for name in task.outputs))

    @property
    def nm(self) -> int:
        """Number of mask coefficients and prototypes."""
        return 0 if self.prototypes is None else self.prototypes.shape[1]

    @property
    def nc(self) -> int:
        """Number of classes."""
        rows: int = self.raw.shape[1]
        return rows - BOX - self.nm

    @property
    def task(self) -> Task:
        """The task that the prediction belongs to."""
        return DETECT if self.prototypes is None else SEGMENT

    @property
    def boxes(self) -> Tensor:
        """cx, cy, w, h in pixels, `[B, 4, anchors]`."""
        return self.raw[:, :BOX]

    @property
    def scores(self) -> Tensor:
        """In 0..1, `[B, nc, anchors]`."""
        return self.raw[:, BOX : BOX + self.nc]

    @property
    def coefficients(self) -> Tensor:
        """Coefficients of the prototypes, `[B, nm, anchors]`."""
        return self.raw[:, BOX + self.nc :]


def predicted(result: Any) -> tuple[Tensor, ...]:
    """The predictions of a network of upstream's in evaluation mode, and the prototypes of a segmentation network.

    A detector returns `(predictions, maps)`, and a segmentation network `(predictions, (maps, coefficients,
    prototypes))`; with `export` set, these return `predictions` and `(predictions, prototypes)`. In a list of
    predictions, as with an auxiliary branch, the first is taken.
    """
    if not isinstance(result, (tuple, list)):
        return (result,)
    first, *rest = result
    while isinstance(first, (tuple, list)):
        first = first[0]
    second = rest[0] if rest else None
    if isinstance(second, tuple):
        return first, second[2]
    return (first,) if second is None or isinstance(second, list) else (first, second)


def trained(result: Any) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
    """Results of the head while training: for each level the raw map `[B, 4 * bins + classes, H, W]`, and masks' parts.

    These are the coefficients `[B, nm, anchors]` and the prototypes `[B, nm, h, w]`; a detector has none.
    """
    if isinstance(result, tuple) and not hasattr(result[0], "shape"):
        maps, *masks = result
        return maps, tuple(masks)
    return result, ()
