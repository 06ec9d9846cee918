"""The output formats of a file: the operators behind the raw predictions.

    plain        output0 [B, 4 + classes, anchors], as upstream's export.py
    end-to-end   num_dets [B, 1], det_boxes [B, K, 4], det_scores [B, K], det_classes [B, K]: NMS inside
    deepstream   output [B, anchors, 6]: x1, y1, x2, y2, score, class, as DeepStream-Yolo's parser reads it

and for a segmentation network:

    plain        output0 has mask coefficients too, and output1 [B, nm, H / 4, W / 4] the prototypes
    end-to-end   det_masks [B, K, R * R] too, in the boxes' frames, or [B, K, H / 4, W / 4]
    deepstream   output [B, K, 6 + H / 4 * W / 4]: after NMS, with masks in the boxes' frames, as DeepStream-Yolo-Seg's
                 parser reads it

A form is a pure pass over the graph of the plain form, so that all of them share one trace, one quantization and one
typing. Boxes are corners in pixels of the input, FP32; scores FP32; num_dets and det_classes INT32.

A mask is a sum of prototypes: in its box's frame, or on the prototypes' grid, cropped to the box. In the frame, each
value is ROIAlign's with one sample a bin: the mean of the four nearest cells, weighted by distance. That is linear, so
two matrix products with these weights, one for rows and one for columns, compute all values from the sums. TensorRT's
own ROIAlign is a plugin, and would pool each prototype for each box, which takes 30 times the memory.
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

PLUGIN = "EfficientNMS_TRT"
PLUGIN_DOMAIN = "TRT"
Nms = Literal["efficient", "onnx", "none"]
SCALE = 0.25  # cells of the prototypes' grid in a pixel of the input, in upstream's heads and yolov9-qat's pooler
RESOLUTION = 160  # rows and columns of a mask in its box's frame, by default


@dataclass(frozen=True)
class NmsSettings:
    """NMS in the file.

    Its kinds are `efficient`, TensorRT's plugin, `onnx`, the standard operator, and `none`, no suppression, for
    networks that give one box for each object.
    """

    kind: Nms = "efficient"
    topk: int = 100  # detections an image, at most; the outputs have so many rows, zeros behind the last one
    iou_thres: float = DISPLAY_IOU  # if boxes of a class overlap by more, the one with the lower score is dropped
    conf_thres: float = DISPLAY_CONF  # a score must be above it
    agnostic: bool = False  # boxes suppress each other across classes, and count for their best class only


@dataclass(frozen=True)
class Detections:
    """Names of the tensors that describe the detections which NMS in the file keeps."""

    boxes: str  # corners in pixels of the input, float32 [B, K, 4]; zero behind the last detection
    anchor: str  # the number of the anchor of each, int64 [B, K, 1]
    valid: str  # True for rows that hold a detection, bool [B, K]


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
    tail = GraphAppender(model, "end2end")
    raw = _Raw.of(model)
    detections, sums = _suppress(model, tail, raw, settings)
    number, boxes, scores, labels = DETECT.detections
    topk = settings.topk
    outputs: dict[str, tuple[int, list[int | str]]] = {}
    outputs[number] = (TensorProto.INT32, [raw.batch, 1])
    outputs[boxes] = (TensorProto.FLOAT, [raw.batch, topk, 4])
    outputs[scores] = (TensorProto.FLOAT, [raw.batch, topk])
    outputs[labels] = (TensorProto.INT32, [raw.batch, topk])
    if detections is not None:
        shape: list[int | str]
        if mask_resolution:
            masks = framed(tail, sums, raw, detections, topk, mask_resolution, mask_resolution)
            shape = [raw.batch, topk, mask_resolution * mask_resolution]
        else:
            masks = cropped(tail, sums, raw, detections)
            shape = [raw.batch, topk, *raw.grid]
        tail.add("Identity", masks, output=SEGMENT.masks)
        outputs[SEGMENT.masks] = (TensorProto.FLOAT, shape)
        model.metadata_props.add(key="mask_resolution", value=str(mask_resolution))
    tail.outputs(outputs)


@pure
def attach_deepstream(model: ModelProto, settings: NmsSettings) -> None:
    """Turn raw predictions into rows of x1, y1, x2, y2, score, class; with masks after NMS with these settings."""
    tail = GraphAppender(model, "deepstream")
    raw = _Raw.of(model)
    if raw.nm:
        shape = _deepstream_masks(model, tail, raw, settings)
    else:
        shape = _deepstream_rows(tail, raw)
    tail.outputs({"output": (TensorProto.FLOAT, [raw.batch, *shape])})


def _deepstream_rows(tail: GraphAppender, raw: _Raw) -> list[int | str]:
    """Attach the rows of a detector; returns the shape of `output` without the batch."""
    boxes, scores, _ = _parts(tail, raw)
    best, label = tail.several("TopK", scores, [1], outputs=2, axis=1)  # [B, 1, anchors]
    label = tail.add("Cast", label, to=TensorProto.FLOAT)
    columns = [tail.add("Transpose", name, perm=[0, 2, 1]) for name in (best, label)]
    tail.add("Concat", boxes, *columns, output="output", axis=2)
    return [raw.anchors, 6]


def _deepstream_masks(model: ModelProto, tail: GraphAppender, raw: _Raw, settings: NmsSettings) -> list[int | str]:
    """Attach NMS and rows with masks; returns the shape of `output` without the batch."""
    height, width = raw.grid
    if not isinstance(height, int) or not isinstance(width, int):
        raise InputError("DeepStream needs masks of a fixed size, but height and width of this file are dynamic")
    detections, sums = _suppress(model, tail, raw, settings)
    assert detections is not None, "there are masks"
    masks = framed(tail, sums, raw, detections, settings.topk, height, width)
    _, boxes, scores, labels = DETECT.detections
    labels = tail.add("Cast", labels, to=TensorProto.FLOAT)
    columns = [tail.add("Unsqueeze", name, [2]) for name in (scores, labels)]
    tail.add("Concat", boxes, *columns, masks, output="output", axis=2)
    return [settings.topk, 6 + height * width]


def _suppress(
    model: ModelProto, tail: GraphAppender, raw: _Raw, settings: NmsSettings
) -> tuple[Detections | None, str]:
    """Attach NMS, whose results have the names of `DETECT.detections`.

    Returns:
        Where there are prototypes, the detections, and the name of the sums of prototypes, before the sigmoid,
        `[B, K, h, w]`.
    """
    boxes, scores, coefficients = _parts(tail, raw)
    model.metadata_props.add(key=NMS_KEY, value=json.dumps(asdict(settings)))
    if settings.kind == "efficient":
        _plugin(model, tail, boxes, scores, settings)
    else:
        detections = _standard(tail, boxes, scores, raw, settings)
    if not coefficients:
        return None, ""
    if settings.kind == "efficient":
        detections = _search_anchors(tail, boxes, settings.topk)
    by_anchor = tail.add("Transpose", coefficients, perm=[0, 2, 1])
    chosen = tail.add("GatherND", by_anchor, detections.anchor, batch_dims=1)
    pixels = tail.add("Reshape", SEGMENT.prototypes, [0, 0, -1])
    product = tail.add("MatMul", chosen, pixels)
    shape: object = [0, settings.topk, *raw.grid]
    if any(isinstance(side, str) for side in raw.grid):
        grid = tail.add("Slice", tail.add("Shape", SEGMENT.prototypes), [2], [4])
        shape = tail.add("Concat", [0, settings.topk], grid, axis=0)
    return detections, tail.add("Reshape", product, shape)


def _search_anchors(tail: GraphAppender, boxes: str, topk: int) -> Detections:
    """Search the anchors of the boxes that TensorRT's plugin returns, since it does not return their numbers.

    It may round the boxes, so the nearest one by the sum of differences is taken: it is the same, or nearly so.

    Args:
        boxes: those of all anchors, `[B, anchors, 4]`.
    """
    number, kept_boxes, *_ = DETECT.detections
    valid = tail.add("Less", np.arange(topk, dtype=np.int32), number)
    rows = tail.add("Unsqueeze", kept_boxes, [2])
    columns = tail.add("Unsqueeze", boxes, [1])
    differences = tail.add("Abs", tail.add("Sub", rows, columns))
    distance = tail.add("ReduceSum", differences, [3], keepdims=0)
    _, nearest = tail.several("TopK", distance, [1], outputs=2, axis=2, largest=0)
    return Detections(kept_boxes, nearest, valid)


@dataclass(frozen=True)
class _Raw:
    """Sizes of the outputs of a plain graph; a dynamic size is its name."""

    batch: int | str
    nc: int  # classes
    nm: int  # mask coefficients, 0 for a detector
    anchors: int | str
    grid: tuple[int | str, int | str] = (0, 0)  # height and width of the prototypes, if there are any

    @classmethod
    def of(cls, model: ModelProto) -> _Raw:
        """Read the sizes of a plain graph."""
        shapes: dict[str, list[int | str]] = {}
        for value in model.graph.output:
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = [dim.dim_param or dim.dim_value for dim in dims]
        batch, rows, anchors = shapes[DETECT.prediction]
        if SEGMENT.prototypes not in shapes:
            return cls(batch, int(rows) - BOX, 0, anchors)
        _, nm, height, width = shapes[SEGMENT.prototypes]
        return cls(batch, int(rows) - BOX - int(nm), int(nm), anchors, (height, width))


def _parts(tail: GraphAppender, plain: _Raw) -> tuple[str, str, str]:
    """Corners `[B, anchors, 4]`, scores `[B, classes, anchors]`, coefficients `[B, nm, anchors]`; '' for none."""
    sizes = [BOX, plain.nc]
    if plain.nm:
        sizes.append(plain.nm)
    raw, scores, *masks = tail.several("Split", DETECT.prediction, sizes, outputs=len(sizes), axis=1)
    coefficients = masks[0] if masks else ""
    middle, size = tail.several("Split", raw, [2, 2], outputs=2, axis=1)
    half = tail.add("Mul", size, 0.5)
    low = tail.add("Sub", middle, half)
    high = tail.add("Add", middle, half)
    corners = tail.add("Concat", low, high, axis=1)
    return tail.add("Transpose", corners, perm=[0, 2, 1]), scores, coefficients


def _plugin(model: ModelProto, tail: GraphAppender, boxes: str, scores: str, settings: NmsSettings) -> None:
    """Attach TensorRT's EfficientNMS (https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin)."""
    attributes = {
        "domain": PLUGIN_DOMAIN,
        "plugin_version": "1",
        "background_class": -1,
        "score_activation": 0,
        "box_coding": 0,
        "class_agnostic": int(settings.agnostic),
        "max_output_boxes": settings.topk,
        "iou_threshold": settings.iou_thres,
        "score_threshold": settings.conf_thres,
    }
    scores = tail.add("Transpose", scores, perm=[0, 2, 1])
    tail.several(PLUGIN, boxes, scores, outputs=DETECT.detections, **attributes)
    model.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))


@pure
def replace_plugin(model: ModelProto, classes: int) -> None:
    """Put ONNX's own operators in the place of TensorRT's plugin, so that ONNX Runtime runs the file."""
    for plugin in [node for node in model.graph.node if node.op_type == PLUGIN]:
        model.graph.node.remove(plugin)
        tail = GraphAppender(model, "no_plugin")
        boxes, scores = plugin.input
        settings = NmsSettings(**json.loads(metadata_of(model)[NMS_KEY]))
        scores = tail.add("Transpose", scores, perm=[0, 2, 1])
        _standard(tail, boxes, scores, _Raw("batch", classes, 0, "anchors"), settings)


def _standard(tail: GraphAppender, boxes: str, scores: str, raw: _Raw, settings: NmsSettings) -> Detections:
    """NMS with ONNX's own operators: suppressed scores become zero, then the best scores are taken.

    The shape of every result but NonMaxSuppression's own is known when an engine is built.
    """
    label = ""
    classes = raw.nc
    topk = settings.topk
    if settings.agnostic:
        scores, label = tail.several("TopK", scores, [1], outputs=2, axis=1)
        classes = 1
    if settings.kind == "none":
        is_high = tail.add("Greater", scores, settings.conf_thres)
        best = tail.add("Where", is_high, scores, 0.0)
    else:
        chosen = tail.add("NonMaxSuppression", boxes, scores, [topk], [settings.iou_thres], [settings.conf_thres])
        values = tail.add("GatherND", scores, chosen)
        empty = tail.add("Expand", 0.0, tail.add("Shape", scores))
        best = tail.add("ScatterND", empty, chosen, values)
    best = tail.add("Transpose", best, perm=[0, 2, 1])  # so that equal scores stay in the order of anchors
    best = tail.add("Reshape", best, [0, -1])
    if isinstance(raw.anchors, str) or raw.anchors * classes < topk:  # TopK wants that many
        best = tail.add("Pad", best, [0, 0, 0, topk], 0.0)
    number, boxes_out, scores_out, classes_out = DETECT.detections
    _, index = tail.several("TopK", best, [topk], outputs=(scores_out, ""), axis=1)
    valid = tail.add("Greater", scores_out, 0.0)
    is_detection = tail.add("Cast", valid, to=TensorProto.INT64)
    count = tail.add("ReduceSum", is_detection, [1], keepdims=1)
    tail.add("Cast", count, output=number, to=TensorProto.INT32)
    index = tail.add("Mul", index, is_detection)  # rows behind the last detection may point into the padding
    anchor = tail.add("Div", index, classes)
    if label:
        class_of_anchor = tail.add("Squeeze", label, [1])
        class_id = tail.add("GatherElements", class_of_anchor, anchor, axis=1)
        class_id = tail.add("Mul", class_id, is_detection)
    else:
        class_id = tail.add("Sub", index, tail.add("Mul", anchor, classes))
    tail.add("Cast", class_id, output=classes_out, to=TensorProto.INT32)
    column = tail.add("Unsqueeze", anchor, [2])
    best_boxes = tail.add("GatherND", boxes, column, batch_dims=1)
    tail.add("Where", tail.add("Unsqueeze", valid, [2]), best_boxes, 0.0, output=boxes_out)
    return Detections(boxes_out, column, valid)


def framed(
    tail: GraphAppender, sums: str, raw: _Raw, detections: Detections, topk: int, rows: int, columns: int
) -> str:
    """Masks in their boxes' frames, in 0..1: `[B, K, rows * columns]`; zero behind the last detection."""
    x1, y1, x2, y2 = tail.several("Split", detections.boxes, [1] * 4, outputs=4, axis=2)
    vertical = _hats(tail, raw, 2, _bins(tail, y1, y2, rows), cells_axis=3)
    horizontal = _hats(tail, raw, 3, _bins(tail, x1, x2, columns), cells_axis=2)
    pooled = tail.add("MatMul", tail.add("MatMul", vertical, sums), horizontal)
    logits = tail.add("Reshape", pooled, [0, topk, rows * columns])
    probabilities = tail.add("Sigmoid", logits)
    is_valid = tail.add("Unsqueeze", detections.valid, [2])
    return tail.add("Where", is_valid, probabilities, 0.0)


def cropped(tail: GraphAppender, sums: str, raw: _Raw, detections: Detections) -> str:
    """Masks on the prototypes' grid, in 0..1: `[B, K, h, w]`; zero outside their boxes, as evaluation crops them."""
    boxes = tail.add("Mul", detections.boxes, SCALE)
    x1, y1, x2, y2 = tail.several("Split", boxes, [1] * 4, outputs=4, axis=2)
    inside = []
    for low, high, axis, other in ((y1, y2, 2, 3), (x1, x2, 3, 2)):
        places, _ = _cells(tail, raw, axis)
        is_after = tail.add("GreaterOrEqual", places, low)
        is_before = tail.add("Less", places, high)
        is_inside = tail.add("And", is_after, is_before)
        inside.append(tail.add("Unsqueeze", is_inside, [other]))
    is_in_box = tail.add("And", *inside)
    probabilities = tail.add("Sigmoid", sums)
    masks = tail.add("Where", is_in_box, probabilities, 0.0)
    is_valid = tail.add("Unsqueeze", detections.valid, [2, 3])
    return tail.add("Where", is_valid, masks, 0.0)


def _bins(tail: GraphAppender, low: str, high: str, count: int) -> str:
    """Middles of `count` equal bins between two sides of each box, in cells; the middle of the first cell is 0.

    Args:
        low, high: the sides, `[B, K, 1]`, in pixels of the input.

    Returns:
        `[B, K, count]`.
    """
    shares = ((np.arange(count) + 0.5) / count).astype(np.float32)
    length = tail.add("Sub", high, low)
    place = tail.add("Mul", length, shares)
    place = tail.add("Mul", tail.add("Add", place, low), SCALE)
    return tail.add("Sub", place, 0.5)


def _hats(tail: GraphAppender, raw: _Raw, axis: int, places: str, cells_axis: int) -> str:
    """Weights by which each place between cells reads the cells along an axis of the prototypes.

    A weight falls from 1 at a cell's middle to 0 at its neighbour's, as a hat does. A place up to one cell outside of
    the grid reads the border, one further outside reads zero, as in ROIAlign.

    Args:
        places: `[B, K, places]`.
        cells_axis: of the result, which is `[B, K, places, cells]` for 3 and `[B, K, cells, places]` for 2.
    """
    cells, last = _cells(tail, raw, axis)
    within = tail.add("Min", tail.add("Max", places, 0.0), last)
    outside = tail.add("Abs", tail.add("Sub", places, within))  # cells from the grid's border
    near = tail.add("LessOrEqual", outside, 1.0)
    if cells_axis == 2:
        cells = tail.add("Unsqueeze", cells, [1])
    within = tail.add("Unsqueeze", within, [cells_axis])
    near = tail.add("Unsqueeze", near, [cells_axis])
    distance = tail.add("Abs", tail.add("Sub", within, cells))
    hat = tail.add("Relu", tail.add("Sub", 1.0, distance))
    return tail.add("Where", near, hat, 0.0)


def _cells(tail: GraphAppender, raw: _Raw, axis: int) -> tuple[Any, Any]:
    """The numbers of the cells along axis 2 or 3 of the prototypes, `[cells]`, and the last of them; float32."""
    size = raw.grid[axis - 2]
    if isinstance(size, int):
        return np.arange(size, dtype=np.float32), float(size - 1)
    count = tail.add("Gather", tail.add("Shape", SEGMENT.prototypes), axis, axis=0)
    cells = tail.add("Range", 0, count, 1)
    last = tail.add("Sub", count, 1)
    return tail.add("Cast", cells, to=TensorProto.FLOAT), tail.add("Cast", last, to=TensorProto.FLOAT)
