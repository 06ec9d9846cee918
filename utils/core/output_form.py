"""The form of a network's outputs, read from a file's metadata and outputs.

    plain        raw predictions, without NMS: `output0`, and the prototypes `output1` of a segmentation network
    end-to-end   detections, with NMS inside: `num_dets`, `det_boxes`, `det_scores`, `det_classes`, maybe `det_masks`
    deepstream   `output`, for DeepStream's parsers: a detector gives all boxes, a segmentation network gives
                 detections with masks, with NMS inside

`utils/onnx_graph/output_formats.py` writes these forms, and describes their shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from utils.core.tasks import DETECT, DETECTIONS, SEGMENT, Task, task_of_outputs

PLAIN, END_TO_END, DEEPSTREAM = "plain", "end-to-end", "deepstream"
FORM_KEY, NMS_KEY = "form", "nms"  # of a file's metadata
MaskKind = Literal["", "prototypes", "grid", "frames"]
Shapes = Mapping[str, Sequence[int | None]]  # of outputs by name; None for a dynamic size


class KnownForm(NamedTuple):
    """One form.

    Attributes:
        name: as in a file's metadata.
        outputs: a file with outputs of these names has this form; without names here, its metadata name the form.
        with_nms: tasks whose files of this form have NMS inside.
        masks: the kind of a segmentation network's masks, see `OutputForm`; None: as in the shape of `det_masks`.
    """

    name: str
    outputs: tuple[str, ...]
    with_nms: tuple[Task, ...]
    masks: MaskKind | None


# A file has the first form that fits, or else the last one.
FORMS = (
    KnownForm(END_TO_END, outputs=DETECTIONS, with_nms=(DETECT, SEGMENT), masks=None),
    KnownForm(DEEPSTREAM, outputs=(), with_nms=(SEGMENT,), masks="frames"),
    KnownForm(PLAIN, outputs=(), with_nms=(), masks="prototypes"),
)


@dataclass(frozen=True)
class OutputForm:
    """Outputs of a network.

    Attributes:
        name: PLAIN, END_TO_END or DEEPSTREAM.
        task: of the network.
        has_nms: the network gives detections after NMS, or after top-k alone, and not raw predictions.
        nms_kind: `efficient`, `onnx` or `none` (top-k alone); empty where the metadata do not name it.
        thresholds: `conf_thres` and `iou_thres` of NMS inside, where the metadata name them and they are used.
        masks: `prototypes`, whose sums are masks; or masks on the prototypes' `grid` or in the boxes' `frames`;
            empty for no masks.
        mask_side: rows and columns of masks in square frames; None for others.
    """

    name: str
    task: Task
    has_nms: bool = False
    nms_kind: str = ""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    masks: MaskKind = ""
    mask_side: int | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, str], outputs: Shapes) -> OutputForm:
        """Read the form of a file from its metadata and the shapes of its outputs."""
        task = task_of_outputs(metadata, {name: len(shape) for name, shape in outputs.items()})
        form = known_form(metadata, outputs)
        form_of_file = cls(form.name, task, masks=_mask_kind(form, task, outputs))
        if task not in form.with_nms:
            return form_of_file
        settings = _nms_settings(metadata)
        kind = str(settings.get("kind", ""))
        return replace(
            form_of_file,
            has_nms=True,
            nms_kind=kind,
            thresholds=_thresholds(settings, kind),
            mask_side=_square_side(outputs.get(task.masks, ())),
        )

    @property
    def nms_name(self) -> str:
        """The operation inside the network that selects detections, in words."""
        return "top-k without NMS" if self.nms_kind == "none" else "NMS"


def known_form(metadata: Mapping[str, str], outputs: Shapes) -> KnownForm:
    """The row of FORMS that a file has."""
    for form in FORMS:
        if form.outputs and set(form.outputs) <= set(outputs):
            return form
        if not form.outputs and form.name == metadata.get(FORM_KEY):
            return form
    return FORMS[-1]


def _mask_kind(form: KnownForm, task: Task, outputs: Shapes) -> MaskKind:
    """Kind of the masks that a file of this form gives."""
    if not task.masks:
        return ""
    if form.masks is not None:
        return form.masks
    if task.masks not in outputs:
        return ""
    return "frames" if len(outputs[task.masks]) == 3 else "grid"


def _nms_settings(metadata: Mapping[str, str]) -> dict[str, object]:
    """The settings of NMS in a file; empty where its metadata have none, or something else under this key."""
    try:
        settings = json.loads(metadata.get(NMS_KEY, ""))
    except (ValueError, RecursionError):  # the latter: deeply nested
        return {}
    return settings if isinstance(settings, dict) else {}


def _thresholds(settings: Mapping[str, object], kind: str) -> dict[str, float]:
    """The thresholds that NMS of this kind uses."""
    names = ("conf_thres",) if kind == "none" else ("conf_thres", "iou_thres")
    values = {name: settings.get(name) for name in names}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def _square_side(shape: Sequence[int | None]) -> int | None:
    """Rows of masks `[B, K, R * R]`; None for other masks, or a dynamic size."""
    size = shape[2] if len(shape) == 3 else None
    return math.isqrt(size) if size else None
