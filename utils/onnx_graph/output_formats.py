"""The forms in which a network leaves: what stands behind its raw predictions in the file.

    plain        output0 [B, 4 + classes, anchors], as upstream's export.py
    end-to-end   num_dets [B, 1], det_boxes [B, K, 4], det_scores [B, K], det_classes [B, K]: NMS inside
    deepstream   output [B, anchors, 6]: x1, y1, x2, y2, score, class, as DeepStream-Yolo's parser reads it

and of a segmentation network, whose masks `py` makes:

    plain        output0 has mask coefficients too, and output1 [B, nm, H / 4, W / 4] the prototypes
    end-to-end   det_masks [B, K, R * R] too, in the boxes' frames, or [B, K, H / 4, W / 4]
    deepstream   output [B, K, 6 + H / 4 * W / 4]: after NMS, with masks in the boxes' frames, as DeepStream-Yolo-Seg's
                 parser reads it

A form is a pure pass over the graph of the plain form, so that all of them share one trace, one quantization and one
typing. Boxes are corners in pixels of the input, FP32; scores FP32; num_dets and det_classes INT32.

A mask is a sum of prototypes, in its box's frame, or on the prototypes' grid and cropped there. The first is what
ROIAlign of the sums gives with one sample a bin, and ROIAlign of the prototypes, since both are linear: each value is a
mean of four neighbours by distance, so that two products with matrices of hat functions, one for rows and one for
columns, compute all of them. TensorRT's own ROIAlign is a plugin, and would pool each prototype for each box, which
takes 30 times the memory.
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
from utils.core.tasks import DETECT, DISPLAY_CONF, DISPLAY_IOU, SEGMENT, Layout
from utils.onnx_graph.view import GraphAppender, pure

PLUGIN, PLUGIN_DOMAIN = "EfficientNMS_TRT", "TRT"
Nms = Literal["efficient", "onnx", "none"]
SCALE = 0.25  # cells of the prototypes' grid in a pixel of the input: of upstream's heads, and of yolov9-qat's pooler
RESOLUTION = 160  # rows and columns of a mask in its box's frame, unless something else is asked for


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
    iou_thres: float = DISPLAY_IOU
    conf_thres: float = DISPLAY_CONF
    agnostic: bool = False


@dataclass(frozen=True)
class Kept:
    """Names of what NMS in the file keeps.

    Attributes:
        boxes: corners in pixels of the input, float32 `[B, K, 4]`; zero behind the last detection.
        anchor: which of the network's boxes each is, int64 `[B, K, 1]`.
        valid: which rows hold a detection, bool `[B, K]`.
        topk: K.
    """

    boxes: str
    anchor: str
    valid: str
    topk: int


@dataclass(frozen=True)
class Sums:
    """Sums of prototypes, before the sigmoid: their name, `[B, K, h, w]`, and h and w, 0 where they are dynamic."""

    name: str
    height: int
    width: int


@dataclass(frozen=True)
class OutputFormat:
    """A form of output and the pass that attaches it.

    Attributes:
        name: in the file's metadata and in the summary.
        suffix: of the file's name, before `.onnx`.
        attach: the pass that adds the form to a plain graph, and to its metadata what is needed to read it.
    """

    name: str
    suffix: str
    attach: Callable[[ModelProto], ModelProto]


def plain() -> OutputFormat:
    """Raw predictions."""
    return OutputFormat("plain", "", lambda model: model)


def end2end(settings: NmsSettings, mask_resolution: int = RESOLUTION) -> OutputFormat:
    """Detections, after NMS in the file; `mask_resolution` is that of a segmentation network, 0 for the grid."""
    attach = partial(attach_nms, settings=settings, mask_resolution=mask_resolution)
    return OutputFormat("end-to-end", "-end2end", attach)


def deepstream(settings: NmsSettings | None = None) -> OutputFormat:
    """A detector's rows for each anchor, for DeepStream's own NMS; detections with masks, after NMS in the file."""
    attach = partial(attach_deepstream, settings=settings or NmsSettings())
    return OutputFormat("deepstream", "-deepstream", attach)


@pure
def attach_nms(model: ModelProto, settings: NmsSettings, mask_resolution: int = RESOLUTION) -> None:
    """Turn raw predictions into detections, with masks where there are prototypes."""
    tail, raw = GraphAppender(model, "end2end"), _Raw.of(model)
    masked = _attach(model, tail, raw, settings)
    floats, integers, k = TensorProto.FLOAT, TensorProto.INT32, settings.topk
    types_and_shapes = ((integers, 1), (floats, k, 4), (floats, k), (integers, k))
    outputs = [_output(n, t, raw.batch, *s) for n, (t, *s) in zip(DETECT.detections, types_and_shapes, strict=True)]
    if masked is not None:
        (kept, sums), side = masked, mask_resolution
        masks = framed(tail, sums, kept, side, side) if side else cropped(tail, sums, kept)
        tail.add("Identity", masks, outputs=[SEGMENT.masks])
        outputs.append(_output(SEGMENT.masks, floats, raw.batch, k, *((side * side,) if side else raw.grid)))
        model.metadata_props.add(key="mask_resolution", value=str(side))
    tail.outputs(outputs)


@pure
def attach_deepstream(model: ModelProto, settings: NmsSettings | None = None) -> None:
    """Turn raw predictions into rows of x1, y1, x2, y2, score, class; with masks after NMS with these settings."""
    settings = settings or NmsSettings()
    masked = SEGMENT.prototypes in (value.name for value in model.graph.output)
    tail, raw = GraphAppender(model, "deepstream"), _Raw.of(model)
    if masked:
        height, width = raw.grid
        attached = _attach(model, tail, raw, settings)
        if attached is None or not isinstance(height, int) or not isinstance(width, int):
            raise InputError("DeepStream's masks have a fixed size, and height and width are dynamic here")
        kept, sums = attached
        masks = framed(tail, sums, kept, height, width)
        _, boxes, scores, labels = DETECT.detections
        (labels,) = tail.add("Cast", labels, to=TensorProto.FLOAT)
        columns = [tail.add("Unsqueeze", name, tail.value([2]))[0] for name in (scores, labels)]
        tail.add("Concat", boxes, *columns, masks, outputs=["output"], axis=2)
        tail.outputs([_output("output", TensorProto.FLOAT, raw.batch, settings.topk, 6 + height * width)])
        return
    boxes, scores, _ = _parts(tail, raw.layout)
    best, label = tail.add("TopK", scores, tail.value([1]), outputs=("", ""), axis=1)  # [B, 1, anchors]
    (label,) = tail.add("Cast", label, to=TensorProto.FLOAT)
    columns = [tail.add("Transpose", name, perm=[0, 2, 1])[0] for name in (best, label)]
    tail.add("Concat", boxes, *columns, outputs=["output"], axis=2)
    tail.outputs([_output("output", TensorProto.FLOAT, raw.batch, raw.anchors, 6)])


def _attach(model: ModelProto, tail: GraphAppender, raw: _Raw, settings: NmsSettings) -> tuple[Kept, Sums] | None:
    """Attach NMS, whose results have the names of `DETECT.detections`, and sums of prototypes where there are any."""
    boxes, scores, coefficients = _parts(tail, raw.layout)
    model.metadata_props.add(key="nms", value=json.dumps(asdict(settings)))
    if settings.kind == "efficient":
        _plugin(model, tail, boxes, scores, settings)
        kept = None
        if coefficients:  # the plugin does not say which boxes it keeps, so they are looked for
            number, found, *_ = DETECT.detections
            (valid,) = tail.add("Less", tail.value(np.arange(settings.topk), np.int32), number)
            # it may round what it returns, too: the nearest box by the sum of differences is it, or nearly the same
            (each,) = tail.add("Unsqueeze", found, tail.value([2]))
            (every,) = tail.add("Unsqueeze", boxes, tail.value([1]))
            (apart,) = tail.add("Sub", each, every)
            (apart,) = tail.add("Abs", apart)
            (apart,) = tail.add("ReduceSum", apart, tail.value([3]), keepdims=0)
            _, anchor = tail.add("TopK", apart, tail.value([1]), outputs=("", ""), axis=2, largest=0)
            kept = Kept(found, anchor, valid, settings.topk)
    else:
        kept = _standard(tail, boxes, scores, raw.layout.nc, raw.anchors, settings)
    if kept is None or not coefficients:
        return None
    (rows,) = tail.add("Transpose", coefficients, perm=[0, 2, 1])
    (chosen,) = tail.add("GatherND", rows, kept.anchor, batch_dims=1)
    (flat,) = tail.add("Reshape", SEGMENT.prototypes, tail.value([0, 0, -1]))
    (product,) = tail.add("MatMul", chosen, flat)
    height, width = (side if isinstance(side, int) else 0 for side in raw.grid)
    if height and width:
        shape = tail.value([0, kept.topk, height, width])
    else:
        (whole,) = tail.add("Shape", SEGMENT.prototypes)
        (last,) = tail.add("Slice", whole, tail.value([2]), tail.value([4]))
        (shape,) = tail.add("Concat", tail.value([0, kept.topk]), last, axis=0)
    (sums,) = tail.add("Reshape", product, shape)
    return kept, Sums(sums, height, width)


@dataclass(frozen=True)
class _Raw:
    """What a plain graph gives; a dynamic size is its name. `grid` is that of the prototypes, (0, 0) without them."""

    batch: int | str
    layout: Layout
    anchors: int | str
    grid: tuple[int | str, int | str] = (0, 0)

    @classmethod
    def of(cls, model: ModelProto) -> _Raw:
        """Of a plain graph."""
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in model.graph.output
        }
        batch, rows, anchors = shapes[DETECT.prediction]
        if SEGMENT.prototypes not in shapes:
            return cls(batch, Layout.of_rows(int(rows)), anchors)
        _, nm, height, width = shapes[SEGMENT.prototypes]
        return cls(batch, Layout.of_rows(int(rows), int(nm)), anchors, (height, width))


def _output(name: str, kind: int, *shape: int | str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _parts(tail: GraphAppender, layout: Layout) -> tuple[str, str, str]:
    """Corners `[B, anchors, 4]`, scores `[B, classes, anchors]`, coefficients `[B, nm, anchors]`; '' for none."""
    sizes = layout.sizes
    raw, scores, *more = tail.add("Split", DETECT.prediction, tail.value(sizes), outputs=("",) * len(sizes), axis=1)
    middle, size = tail.add("Split", raw, tail.value([2, 2]), outputs=("", ""), axis=1)
    (half,) = tail.add("Mul", size, tail.value(0.5, np.float32))
    corners = [tail.add(kind, middle, half)[0] for kind in ("Sub", "Add")]
    (joined,) = tail.add("Concat", *corners, axis=1)
    return tail.add("Transpose", joined, perm=[0, 2, 1])[0], scores, more[0] if more else ""


def _plugin(model: ModelProto, tail: GraphAppender, boxes: str, scores: str, settings: NmsSettings) -> None:
    """Attach TensorRT's EfficientNMS (https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin)."""
    (scores,) = tail.add("Transpose", scores, perm=[0, 2, 1])
    tail.add(
        PLUGIN, boxes, scores, outputs=DETECT.detections, domain=PLUGIN_DOMAIN,
        plugin_version="1", background_class=-1, score_activation=0, box_coding=0,
        class_agnostic=int(settings.agnostic), max_output_boxes=settings.topk,
        iou_threshold=settings.iou_thres, score_threshold=settings.conf_thres,
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))


def _standard(
    tail: GraphAppender, boxes: str, scores: str, classes: int, anchors: int | str, settings: NmsSettings
) -> Kept:
    """NMS with ONNX's own operators: scores that are not kept become zero, then the best are taken.

    The shape of every result but NonMaxSuppression's own is known when an engine is built.
    """
    label = ""
    if settings.agnostic:
        scores, label = tail.add("TopK", scores, tail.value([1]), outputs=("", ""), axis=1)
        classes = 1
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
    return Kept(boxes_out, column, valid, settings.topk)


def framed(tail: GraphAppender, sums: Sums, kept: Kept, rows: int, columns: int) -> str:
    """Masks in their boxes' frames, in 0..1: `[B, K, rows * columns]`; zero behind the last detection."""
    x1, y1, x2, y2 = tail.add("Split", kept.boxes, tail.value([1, 1, 1, 1]), outputs=("",) * 4, axis=2)
    vertical = _hats(tail, sums, 2, _bins(tail, y1, y2, rows), cells_axis=3)
    horizontal = _hats(tail, sums, 3, _bins(tail, x1, x2, columns), cells_axis=2)
    (pooled,) = tail.add("MatMul", vertical, sums.name)
    (pooled,) = tail.add("MatMul", pooled, horizontal)
    (flat,) = tail.add("Reshape", pooled, tail.value([0, kept.topk, rows * columns]))
    (share,) = tail.add("Sigmoid", flat)
    return _where(tail, kept.valid, [2], share)


def cropped(tail: GraphAppender, sums: Sums, kept: Kept) -> str:
    """Masks on the prototypes' grid, in 0..1: `[B, K, h, w]`; zero outside their boxes, as evaluation crops them."""
    (boxes,) = tail.add("Mul", kept.boxes, tail.value(SCALE, np.float32))
    x1, y1, x2, y2 = tail.add("Split", boxes, tail.value([1, 1, 1, 1]), outputs=("",) * 4, axis=2)
    inside = []
    for low, high, axis, other in ((y1, y2, 2, 3), (x1, x2, 3, 2)):
        places, _ = _cells(tail, sums, axis)
        (behind,) = tail.add("GreaterOrEqual", places, low)
        (before,) = tail.add("Less", places, high)
        (both,) = tail.add("And", behind, before)
        inside += tail.add("Unsqueeze", both, tail.value([other]))
    (box,) = tail.add("And", *inside)
    (share,) = tail.add("Sigmoid", sums.name)
    (share,) = tail.add("Where", box, share, tail.value(0.0, np.float32))
    return _where(tail, kept.valid, [2, 3], share)


def _where(tail: GraphAppender, valid: str, axes: list[int], values: str) -> str:
    (shown,) = tail.add("Unsqueeze", valid, tail.value(axes))
    return tail.add("Where", shown, values, tail.value(0.0, np.float32))[0]


def _bins(tail: GraphAppender, low: str, high: str, count: int) -> str:
    """Middles of `count` bins between two sides of each box, in cells of the grid, from the first cell's middle on.

    `[B, K, count]`; the sides are `[B, K, 1]` in pixels of the input.
    """
    (length,) = tail.add("Sub", high, low)
    (place,) = tail.add("Mul", length, tail.value((np.arange(count) + 0.5) / count, np.float32))
    (place,) = tail.add("Add", place, low)
    (place,) = tail.add("Mul", place, tail.value(SCALE, np.float32))
    return tail.add("Sub", place, tail.value(0.5, np.float32))[0]


def _hats(tail: GraphAppender, sums: Sums, axis: int, places: str, cells_axis: int) -> str:
    """How much each cell along an axis of the sums counts at each place.

    A place outside of the grid has the value of the border, and zero from one cell on, as ROIAlign has it.

    Args:
        places: `[B, K, places]`.
        cells_axis: of the result, which is `[B, K, places, cells]` for 3 and `[B, K, cells, places]` for 2.
    """
    cells, last = _cells(tail, sums, axis)
    one, zero = tail.value(1.0, np.float32), tail.value(0.0, np.float32)
    (within,) = tail.add("Max", places, zero)
    (within,) = tail.add("Min", within, last)
    (beyond,) = tail.add("Sub", places, within)
    (beyond,) = tail.add("Abs", beyond)
    (near,) = tail.add("LessOrEqual", beyond, one)
    if cells_axis == 2:
        (cells,) = tail.add("Unsqueeze", cells, tail.value([1]))
    (within,) = tail.add("Unsqueeze", within, tail.value([cells_axis]))
    (near,) = tail.add("Unsqueeze", near, tail.value([cells_axis]))
    (apart,) = tail.add("Sub", within, cells)
    (apart,) = tail.add("Abs", apart)
    (hat,) = tail.add("Sub", one, apart)
    (hat,) = tail.add("Relu", hat)
    return tail.add("Where", near, hat, zero)[0]


def _cells(tail: GraphAppender, sums: Sums, axis: int) -> tuple[str, str]:
    """The numbers of the cells along axis 2 or 3 of the prototypes, `[cells]`, and the last of them; float32."""
    known = {2: sums.height, 3: sums.width}[axis]
    if known:
        return tail.value(np.arange(known), np.float32), tail.value(known - 1, np.float32)
    (shape,) = tail.add("Shape", SEGMENT.prototypes)
    (count,) = tail.add("Gather", shape, tail.value(axis), axis=0)
    (numbers,) = tail.add("Range", tail.value(0), count, tail.value(1))
    (last,) = tail.add("Sub", count, tail.value(1))
    (cells,) = tail.add("Cast", numbers, to=TensorProto.FLOAT)
    return cells, tail.add("Cast", last, to=TensorProto.FLOAT)[0]
