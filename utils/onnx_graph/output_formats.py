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
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, TensorProto, helper

from utils.core.errors import InputError
from utils.core.output_form import DEEPSTREAM, END_TO_END, NMS_KEY, PLAIN
from utils.core.tasks import BOX, DETECT, DISPLAY_CONF, DISPLAY_IOU, SEGMENT
from utils.onnx_graph.view import GraphAppender, metadata_of, pure

PLUGIN, PLUGIN_DOMAIN = "EfficientNMS_TRT", "TRT"
Nms = Literal["efficient", "onnx", "none"]
SCALE = 0.25  # cells of the prototypes' grid in a pixel of the input: of upstream's heads, and of yolov9-qat's pooler
RESOLUTION = 160  # rows and columns of a mask in its box's frame, unless something else is asked for


@dataclass(frozen=True)
class NmsSettings:
    """NMS in the file.

    Its kinds are `efficient`, TensorRT's plugin, `onnx`, the standard operator, and `none`, no suppression, for
    networks that give one box an object.
    """

    kind: Nms = "efficient"
    topk: int = 100  # detections an image, at most; the outputs have so many rows, zeros behind the last one
    iou_thres: float = DISPLAY_IOU  # of two boxes of a class that overlap by more, the one with the lower score goes
    conf_thres: float = DISPLAY_CONF  # a score must be above it
    agnostic: bool = False  # boxes suppress each other across classes, and count for their best class only


@dataclass(frozen=True)
class Kept:
    """Names of what NMS in the file keeps."""

    boxes: str  # corners in pixels of the input, float32 [B, K, 4]; zero behind the last detection
    anchor: str  # which of the network's boxes each is, int64 [B, K, 1]
    valid: str  # which rows hold a detection, bool [B, K]


@dataclass(frozen=True)
class OutputFormat:
    """A form of output and the pass that attaches it."""

    name: str  # in the file's metadata and in the summary
    suffix: str  # of the file's name, before `.onnx`
    attach: Callable[[ModelProto], ModelProto]  # adds the form to a plain graph, and to its metadata how to read it


def plain() -> OutputFormat:
    """Raw predictions."""
    return OutputFormat(PLAIN, "", lambda model: model)


def end2end(settings: NmsSettings, mask_resolution: int = RESOLUTION) -> OutputFormat:
    """Detections, after NMS in the file; `mask_resolution` is that of a segmentation network, 0 for the grid."""
    attach = partial(attach_nms, settings=settings, mask_resolution=mask_resolution)
    return OutputFormat(END_TO_END, "-end2end", attach)


def deepstream(settings: NmsSettings | None = None) -> OutputFormat:
    """A detector's rows for each anchor, for DeepStream's own NMS; detections with masks, after NMS in the file."""
    attach = partial(attach_deepstream, settings=settings or NmsSettings())
    return OutputFormat(DEEPSTREAM, "-deepstream", attach)


@pure
def attach_nms(model: ModelProto, settings: NmsSettings, mask_resolution: int = RESOLUTION) -> None:
    """Turn raw predictions into detections, with masks where there are prototypes."""
    tail, raw = GraphAppender(model, "end2end"), _Raw.of(model)
    kept, sums = _suppress(model, tail, raw, settings)
    floats, integers, k, side = TensorProto.FLOAT, TensorProto.INT32, settings.topk, mask_resolution
    number, boxes, scores, labels = DETECT.detections
    kinds: dict[str, tuple[int, list[int | str]]] = {
        number: (integers, [1]), boxes: (floats, [k, 4]), scores: (floats, [k]), labels: (integers, [k]),
    }  # fmt: skip
    if kept is not None:
        masks = framed(tail, sums, raw, kept, k, side, side) if side else cropped(tail, sums, raw, kept)
        tail.add("Identity", masks, output=SEGMENT.masks)
        kinds[SEGMENT.masks] = (floats, [k, side * side] if side else [k, *raw.grid])
        model.metadata_props.add(key="mask_resolution", value=str(side))
    tail.outputs({name: (kind, [raw.batch, *shape]) for name, (kind, shape) in kinds.items()})


@pure
def attach_deepstream(model: ModelProto, settings: NmsSettings) -> None:
    """Turn raw predictions into rows of x1, y1, x2, y2, score, class; with masks after NMS with these settings."""
    tail, raw = GraphAppender(model, "deepstream"), _Raw.of(model)
    if raw.nm:
        height, width = raw.grid
        if not isinstance(height, int) or not isinstance(width, int):
            raise InputError("DeepStream's masks have a fixed size, and height and width are dynamic here")
        kept, sums = _suppress(model, tail, raw, settings)
        assert kept is not None, "there are masks"
        masks = framed(tail, sums, raw, kept, settings.topk, height, width)
        _, boxes, scores, labels = DETECT.detections
        labels = tail.add("Cast", labels, to=TensorProto.FLOAT)
        columns = [tail.add("Unsqueeze", name, [2]) for name in (scores, labels)]
        tail.add("Concat", boxes, *columns, masks, output="output", axis=2)
        shape: list[int | str] = [settings.topk, 6 + height * width]
    else:
        boxes, scores, _ = _parts(tail, raw)
        best, label = tail.several("TopK", scores, [1], outputs=2, axis=1)  # [B, 1, anchors]
        label = tail.add("Cast", label, to=TensorProto.FLOAT)
        columns = [tail.add("Transpose", name, perm=[0, 2, 1]) for name in (best, label)]
        tail.add("Concat", boxes, *columns, output="output", axis=2)
        shape = [raw.anchors, 6]
    tail.outputs({"output": (TensorProto.FLOAT, [raw.batch, *shape])})


def _suppress(
    model: ModelProto, tail: GraphAppender, raw: _Raw, settings: NmsSettings
) -> tuple[Kept | None, str]:  # fmt: skip
    """Attach NMS, whose results have the names of `DETECT.detections`.

    Returns:
        Where there are prototypes, what it keeps, and the name of the sums of prototypes, before the sigmoid,
        `[B, K, h, w]`.
    """
    boxes, scores, coefficients = _parts(tail, raw)
    model.metadata_props.add(key=NMS_KEY, value=json.dumps(asdict(settings)))
    if settings.kind != "efficient":
        kept = _standard(tail, boxes, scores, raw, settings)
    else:
        _plugin(model, tail, boxes, scores, settings)
        if coefficients:  # the plugin does not say which boxes it keeps, so they are looked for
            number, found, *_ = DETECT.detections
            valid = tail.add("Less", np.arange(settings.topk, dtype=np.int32), number)
            # it may round what it returns, too: the nearest box by the sum of differences is it, or nearly the same
            apart = tail.add("Sub", tail.add("Unsqueeze", found, [2]), tail.add("Unsqueeze", boxes, [1]))
            apart = tail.add("ReduceSum", tail.add("Abs", apart), [3], keepdims=0)
            kept = Kept(found, tail.several("TopK", apart, [1], outputs=2, axis=2, largest=0)[1], valid)
    if not coefficients:
        return None, ""
    chosen = tail.add("GatherND", tail.add("Transpose", coefficients, perm=[0, 2, 1]), kept.anchor, batch_dims=1)
    product = tail.add("MatMul", chosen, tail.add("Reshape", SEGMENT.prototypes, [0, 0, -1]))
    shape: object = [0, settings.topk, *raw.grid]
    if any(isinstance(side, str) for side in raw.grid):
        grid = tail.add("Slice", tail.add("Shape", SEGMENT.prototypes), [2], [4])
        shape = tail.add("Concat", [0, settings.topk], grid, axis=0)
    return kept, tail.add("Reshape", product, shape)


@dataclass(frozen=True)
class _Raw:
    """What a plain graph gives; a dynamic size is its name. `grid` is that of the prototypes, (0, 0) without them."""

    batch: int | str
    nc: int
    nm: int
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
            return cls(batch, int(rows) - BOX, 0, anchors)
        _, nm, height, width = shapes[SEGMENT.prototypes]
        return cls(batch, int(rows) - BOX - int(nm), int(nm), anchors, (height, width))


def _parts(tail: GraphAppender, plain: _Raw) -> tuple[str, str, str]:
    """Corners `[B, anchors, 4]`, scores `[B, classes, anchors]`, coefficients `[B, nm, anchors]`; '' for none."""
    sizes = [BOX, plain.nc, plain.nm] if plain.nm else [BOX, plain.nc]
    raw, scores, *more = tail.several("Split", DETECT.prediction, sizes, outputs=len(sizes), axis=1)
    middle, size = tail.several("Split", raw, [2, 2], outputs=2, axis=1)
    half = tail.add("Mul", size, 0.5)
    corners = tail.add("Concat", tail.add("Sub", middle, half), tail.add("Add", middle, half), axis=1)
    return tail.add("Transpose", corners, perm=[0, 2, 1]), scores, more[0] if more else ""


def _plugin(model: ModelProto, tail: GraphAppender, boxes: str, scores: str, settings: NmsSettings) -> None:
    """Attach TensorRT's EfficientNMS (https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin)."""
    tail.several(
        PLUGIN, boxes, tail.add("Transpose", scores, perm=[0, 2, 1]), outputs=DETECT.detections, domain=PLUGIN_DOMAIN,
        plugin_version="1", background_class=-1, score_activation=0, box_coding=0,
        class_agnostic=int(settings.agnostic), max_output_boxes=settings.topk,
        iou_threshold=settings.iou_thres, score_threshold=settings.conf_thres,
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))


@pure
def replace_plugin(model: ModelProto, classes: int) -> None:
    """Put ONNX's own operators in the place of TensorRT's plugin, so that ONNX Runtime runs the file."""
    for plugin in [node for node in model.graph.node if node.op_type == PLUGIN]:
        model.graph.node.remove(plugin)
        tail, (boxes, scores) = GraphAppender(model, "no_plugin"), plugin.input
        settings = NmsSettings(**json.loads(metadata_of(model)[NMS_KEY]))
        scores = tail.add("Transpose", scores, perm=[0, 2, 1])
        _standard(tail, boxes, scores, _Raw("batch", classes, 0, "anchors"), settings)


def _standard(tail: GraphAppender, boxes: str, scores: str, raw: _Raw, settings: NmsSettings) -> Kept:
    """NMS with ONNX's own operators: scores that are not kept become zero, then the best are taken.

    The shape of every result but NonMaxSuppression's own is known when an engine is built.
    """
    label, classes, topk = "", raw.nc, settings.topk
    if settings.agnostic:
        scores, label = tail.several("TopK", scores, [1], outputs=2, axis=1)
        classes = 1
    if settings.kind == "none":
        kept = tail.add("Where", tail.add("Greater", scores, settings.conf_thres), scores, 0.0)
    else:
        thresholds = [settings.iou_thres], [settings.conf_thres]
        chosen = tail.add("NonMaxSuppression", boxes, scores, [topk], *thresholds)
        values = tail.add("GatherND", scores, chosen)
        empty = tail.add("Expand", 0.0, tail.add("Shape", scores))
        kept = tail.add("ScatterND", empty, chosen, values)
    kept = tail.add("Transpose", kept, perm=[0, 2, 1])  # equal scores in the order of anchors, as the loop has them
    kept = tail.add("Reshape", kept, [0, -1])
    if isinstance(raw.anchors, str) or raw.anchors * classes < topk:  # TopK wants that many
        kept = tail.add("Pad", kept, [0, 0, 0, topk], 0.0)
    number, boxes_out, scores_out, classes_out = DETECT.detections
    _, index = tail.several("TopK", kept, [topk], outputs=(scores_out, ""), axis=1)
    valid = tail.add("Greater", scores_out, 0.0)
    counted = tail.add("Cast", valid, to=TensorProto.INT64)
    tail.add("Cast", tail.add("ReduceSum", counted, [1], keepdims=1), output=number, to=TensorProto.INT32)
    index = tail.add("Mul", index, counted)  # rows behind the last detection may point into the padding
    anchor = tail.add("Div", index, classes)
    if label:
        kind = tail.add("GatherElements", tail.add("Squeeze", label, [1]), anchor, axis=1)
        kind = tail.add("Mul", kind, counted)
    else:
        kind = tail.add("Sub", index, tail.add("Mul", anchor, classes))
    tail.add("Cast", kind, output=classes_out, to=TensorProto.INT32)
    column = tail.add("Unsqueeze", anchor, [2])
    found = tail.add("GatherND", boxes, column, batch_dims=1)
    tail.add("Where", tail.add("Unsqueeze", valid, [2]), found, 0.0, output=boxes_out)
    return Kept(boxes_out, column, valid)


def framed(tail: GraphAppender, sums: str, raw: _Raw, kept: Kept, topk: int, rows: int, columns: int) -> str:
    """Masks in their boxes' frames, in 0..1: `[B, K, rows * columns]`; zero behind the last detection."""
    x1, y1, x2, y2 = tail.several("Split", kept.boxes, [1] * 4, outputs=4, axis=2)
    vertical = _hats(tail, raw, 2, _bins(tail, y1, y2, rows), cells_axis=3)
    horizontal = _hats(tail, raw, 3, _bins(tail, x1, x2, columns), cells_axis=2)
    pooled = tail.add("MatMul", tail.add("MatMul", vertical, sums), horizontal)
    share = tail.add("Sigmoid", tail.add("Reshape", pooled, [0, topk, rows * columns]))
    return tail.add("Where", tail.add("Unsqueeze", kept.valid, [2]), share, 0.0)


def cropped(tail: GraphAppender, sums: str, raw: _Raw, kept: Kept) -> str:
    """Masks on the prototypes' grid, in 0..1: `[B, K, h, w]`; zero outside their boxes, as evaluation crops them."""
    x1, y1, x2, y2 = tail.several("Split", tail.add("Mul", kept.boxes, SCALE), [1] * 4, outputs=4, axis=2)
    inside = []
    for low, high, axis, other in ((y1, y2, 2, 3), (x1, x2, 3, 2)):
        places, _ = _cells(tail, raw, axis)
        both = tail.add("And", tail.add("GreaterOrEqual", places, low), tail.add("Less", places, high))
        inside.append(tail.add("Unsqueeze", both, [other]))
    share = tail.add("Where", tail.add("And", *inside), tail.add("Sigmoid", sums), 0.0)
    return tail.add("Where", tail.add("Unsqueeze", kept.valid, [2, 3]), share, 0.0)


def _bins(tail: GraphAppender, low: str, high: str, count: int) -> str:
    """Middles of `count` bins between two sides of each box, in cells of the grid, from the first cell's middle on.

    `[B, K, count]`; the sides are `[B, K, 1]` in pixels of the input.
    """
    place = tail.add("Mul", tail.add("Sub", high, low), ((np.arange(count) + 0.5) / count).astype(np.float32))
    place = tail.add("Mul", tail.add("Add", place, low), SCALE)
    return tail.add("Sub", place, 0.5)


def _hats(tail: GraphAppender, raw: _Raw, axis: int, places: str, cells_axis: int) -> str:
    """How much each cell along an axis of the prototypes counts at each place.

    A place outside of the grid has the value of the border, and zero from one cell on, as ROIAlign has it.

    Args:
        places: `[B, K, places]`.
        cells_axis: of the result, which is `[B, K, places, cells]` for 3 and `[B, K, cells, places]` for 2.
    """
    cells, last = _cells(tail, raw, axis)
    within = tail.add("Min", tail.add("Max", places, 0.0), last)
    near = tail.add("LessOrEqual", tail.add("Abs", tail.add("Sub", places, within)), 1.0)
    if cells_axis == 2:
        cells = tail.add("Unsqueeze", cells, [1])
    within, near = (tail.add("Unsqueeze", name, [cells_axis]) for name in (within, near))
    hat = tail.add("Relu", tail.add("Sub", 1.0, tail.add("Abs", tail.add("Sub", within, cells))))
    return tail.add("Where", near, hat, 0.0)


def _cells(tail: GraphAppender, raw: _Raw, axis: int) -> tuple[Any, Any]:
    """The numbers of the cells along axis 2 or 3 of the prototypes, `[cells]`, and the last of them; float32."""
    known = raw.grid[axis - 2]
    if isinstance(known, int):
        return np.arange(known, dtype=np.float32), float(known - 1)
    count = tail.add("Gather", tail.add("Shape", SEGMENT.prototypes), axis, axis=0)
    cells, last = tail.add("Range", 0, count, 1), tail.add("Sub", count, 1)
    return tail.add("Cast", cells, to=TensorProto.FLOAT), tail.add("Cast", last, to=TensorProto.FLOAT)
