"""The forms in which a detector leaves: what stands behind its raw predictions in the file.

    plain        output0 [B, 4 + classes, anchors], as upstream's export.py
    end-to-end   num_dets [B, 1], det_boxes [B, K, 4], det_scores [B, K], det_classes [B, K]: NMS inside
    deepstream   output [B, anchors, 6]: x1, y1, x2, y2, score, class, as DeepStream-Yolo's parser reads it

A form is a pure pass over the graph of the plain form, so that all of them share one trace, one quantization and one
typing. Boxes are corners in pixels of the input, FP32; scores FP32; num_dets and det_classes INT32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from utils.core.errors import InputError
from utils.core.tasks import DETECT, SEGMENT, Layout
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU
from utils.onnx_graph.editing import Tail, pure

PLUGIN, PLUGIN_DOMAIN = "EfficientNMS_TRT", "TRT"
MOST_DETECTIONS = 3840  # of TensorRT's TopK
Nms = Literal["efficient", "onnx", "none"]


@dataclass(frozen=True)
class NmsSettings:
    """NMS in the file.

    Attributes:
        kind: `efficient`: TensorRT's plugin; `onnx`: the standard operator; `none`: no suppression, for networks that
            give one box an object.
        topk: detections an image, at most; the outputs always have so many rows, zeros behind the last one.
        iou_thres: of two boxes of a class that overlap by more, the one with the lower score goes.
        conf_thres: a score must be above it.
        agnostic: boxes suppress each other across classes, and count for their best class only.
    """

    kind: Nms = "efficient"
    topk: int = 100
    iou_thres: float = EVERYDAY_NMS_IOU
    conf_thres: float = EVERYDAY_CONFIDENCE
    agnostic: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= MOST_DETECTIONS:
            raise InputError(f"--topk-all is {self.topk}; expected 1 to {MOST_DETECTIONS}")
        for name in ("iou_thres", "conf_thres"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected 0 to 1")


@dataclass(frozen=True)
class Form:
    """A form of output and the pass that attaches it.

    Attributes:
        name: in the file's metadata and in the summary.
        suffix: of the file's name, before `.onnx`.
        attach: the pass that adds the form to a plain graph.
        nms: settings of the end-to-end form, None for the others.
    """

    name: str
    suffix: str
    attach: Callable[[ModelProto], ModelProto]
    nms: NmsSettings | None = None

    def metadata(self) -> dict[str, str]:
        """Properties for the file."""
        entries = {"form": self.name}
        return entries | {"nms": json.dumps(asdict(self.nms))} if self.nms else entries


def plain() -> Form:
    """Raw predictions."""
    return Form("plain", "", lambda model: model)


def end2end(settings: NmsSettings) -> Form:
    """Detections, after NMS in the file."""
    return Form("end-to-end", "-end2end", partial(attach_nms, settings=settings), settings)


def deepstream() -> Form:
    """A row for each anchor, for DeepStream's own NMS."""
    return Form("deepstream", "-deepstream", attach_deepstream)


@pure
def attach_nms(model: ModelProto, settings: NmsSettings) -> None:
    """Turn raw predictions into detections."""
    tail = Tail(model, "end2end")
    batch, layout, anchors = _dimensions(model)
    boxes, scores = _boxes_and_scores(tail, layout)
    if settings.kind == "efficient":
        _plugin(model, tail, boxes, scores, settings)
    else:
        _standard(tail, boxes, scores, layout.nc, anchors, settings)
    floats, integers, k = TensorProto.FLOAT, TensorProto.INT32, settings.topk
    types_and_shapes = ((integers, 1), (floats, k, 4), (floats, k), (integers, k))
    tail.outputs([_output(n, t, batch, *s) for n, (t, *s) in zip(DETECT.detections, types_and_shapes, strict=True)])


@pure
def attach_deepstream(model: ModelProto) -> None:
    """Turn raw predictions into rows of x1, y1, x2, y2, best score, its class."""
    tail = Tail(model, "deepstream")
    batch, layout, anchors = _dimensions(model)
    boxes, scores = _boxes_and_scores(tail, layout)
    best, label = _best_class(tail, scores)
    (label,) = tail.add("Cast", label, to=TensorProto.FLOAT)
    columns = [tail.add("Transpose", name, perm=[0, 2, 1])[0] for name in (best, label)]
    tail.add("Concat", boxes, *columns, outputs=["output"], axis=2)
    tail.outputs([_output("output", TensorProto.FLOAT, batch, anchors, 6)])


def _dimensions(model: ModelProto) -> tuple[int | str, Layout, int | str]:
    """Batch, layout of the rows, anchors; a dynamic one is its name."""
    outputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.output}
    batch, rows, anchors = outputs[DETECT.prediction]
    nm = outputs[SEGMENT.prototypes][1].dim_value if SEGMENT.prototypes in outputs else 0
    layout = Layout.of_rows(rows.dim_value, nm)
    return batch.dim_param or batch.dim_value, layout, anchors.dim_param or anchors.dim_value


def _output(name: str, kind: int, *shape: int | str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _boxes_and_scores(tail: Tail, layout: Layout) -> tuple[str, str]:
    """Corners `[B, anchors, 4]` and scores `[B, classes, anchors]`."""
    sizes = layout.sizes
    raw, scores, *_ = tail.add("Split", DETECT.prediction, tail.value(sizes), outputs=("",) * len(sizes), axis=1)
    middle, size = tail.add("Split", raw, tail.value([2, 2]), outputs=("", ""), axis=1)
    (half,) = tail.add("Mul", size, tail.value(0.5, np.float32))
    corners = [tail.add(kind, middle, half)[0] for kind in ("Sub", "Add")]
    (joined,) = tail.add("Concat", *corners, axis=1)
    return tail.add("Transpose", joined, perm=[0, 2, 1])[0], scores


def _best_class(tail: Tail, scores: str) -> tuple[str, str]:
    """Highest score of each anchor and its class, `[B, 1, anchors]`."""
    best, label = tail.add("TopK", scores, tail.value([1]), outputs=("", ""), axis=1)
    return best, label


def _plugin(model: ModelProto, tail: Tail, boxes: str, scores: str, settings: NmsSettings) -> None:
    """Attach TensorRT's EfficientNMS (https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin)."""
    (scores,) = tail.add("Transpose", scores, perm=[0, 2, 1])
    tail.add(
        PLUGIN, boxes, scores, outputs=DETECT.detections, domain=PLUGIN_DOMAIN,
        plugin_version="1", background_class=-1, score_activation=0, box_coding=0,
        class_agnostic=int(settings.agnostic), max_output_boxes=settings.topk,
        iou_threshold=settings.iou_thres, score_threshold=settings.conf_thres,
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))


def _standard(tail: Tail, boxes: str, scores: str, classes: int, anchors: int | str, settings: NmsSettings) -> None:
    """NMS with ONNX's own operators: scores that are not kept become zero, then the best are taken.

    The shape of every result but NonMaxSuppression's own is known when an engine is built.
    """
    label = ""
    if settings.agnostic:
        (scores, label), classes = _best_class(tail, scores), 1
    zero = tail.value(0.0, np.float32)
    if settings.kind == "none":
        threshold = tail.value(settings.conf_thres, np.float32)
        (above,) = tail.add("Greater", scores, threshold)
        (kept,) = tail.add("Where", above, scores, zero)
    else:
        thresholds = [tail.value([value], np.float32) for value in (settings.iou_thres, settings.conf_thres)]
        (chosen,) = tail.add("NonMaxSuppression", boxes, scores, tail.value([settings.topk]), *thresholds)
        (values,) = tail.add("GatherND", scores, chosen)
        (shape,) = tail.add("Shape", scores)
        (empty,) = tail.add("Expand", zero, shape)
        (kept,) = tail.add("ScatterND", empty, chosen, values)
    (kept,) = tail.add("Transpose", kept, perm=[0, 2, 1])  # equal scores in the order of anchors, as the loop has them
    (kept,) = tail.add("Reshape", kept, tail.value([0, -1]))
    if isinstance(anchors, str) or anchors * classes < settings.topk:  # TopK wants that many
        (kept,) = tail.add("Pad", kept, tail.value([0, 0, 0, settings.topk]), zero)
    number, boxes_out, scores_out, classes_out = DETECT.detections
    _, index = tail.add("TopK", kept, tail.value([settings.topk]), outputs=(scores_out, ""), axis=1)
    (valid,) = tail.add("Greater", scores_out, zero)
    (counted,) = tail.add("Cast", valid, to=TensorProto.INT64)
    (total,) = tail.add("ReduceSum", counted, tail.value([1]), keepdims=1)
    tail.add("Cast", total, outputs=[number], to=TensorProto.INT32)
    (index,) = tail.add("Mul", index, counted)  # rows behind the last detection may point into the padding
    (anchor,) = tail.add("Div", index, tail.value(classes))
    (first,) = tail.add("Mul", anchor, tail.value(classes))
    (kind,) = tail.add("Sub", index, first)
    if label:
        (row,) = tail.add("Squeeze", label, tail.value([1]))
        (kind,) = tail.add("GatherElements", row, anchor, axis=1)
        (kind,) = tail.add("Mul", kind, counted)
    tail.add("Cast", kind, outputs=[classes_out], to=TensorProto.INT32)
    (column,) = tail.add("Unsqueeze", anchor, tail.value([2]))
    (found,) = tail.add("GatherND", boxes, column, batch_dims=1)
    (shown,) = tail.add("Unsqueeze", valid, tail.value([2]))
    tail.add("Where", shown, found, zero, outputs=[boxes_out])
