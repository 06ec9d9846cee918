"""Masks behind detections, in standard operators: a sum of prototypes for each detection, cut out by its box.

A mask is in its box's frame, or on the prototypes' grid and cropped there. The first is what ROIAlign of the sums gives
with one sample a bin, and ROIAlign of the prototypes, since both are linear: each value is a mean of four neighbours
by distance, so that two products with matrices of hat functions, one for rows and one for columns, compute all of them.
TensorRT's own ROIAlign is a plugin, and would pool each prototype for each box, which takes 30 times the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from utils.onnx_graph.view import GraphAppender

SCALE = 0.25  # cells of the prototypes' grid in a pixel of the input: of upstream's heads, and of yolov9-qat's pooler
RESOLUTION = 160  # rows and columns of a mask in its box's frame, unless something else is asked for


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
    prototypes: str
    height: int
    width: int


def nearest_box(tail: GraphAppender, boxes: str, found: str) -> str:
    """Which of `boxes`, `[B, anchors, 4]`, each of `found`, `[B, K, 4]`, is: int64 `[B, K, 1]`.

    TensorRT's plugin does not say it, and may round what it returns; the nearest by the sum of differences is it, or
    has nearly the same box.
    """
    (each,) = tail.add("Unsqueeze", found, tail.value([2]))
    (every,) = tail.add("Unsqueeze", boxes, tail.value([1]))
    (apart,) = tail.add("Sub", each, every)
    (apart,) = tail.add("Abs", apart)
    (apart,) = tail.add("ReduceSum", apart, tail.value([3]), keepdims=0)
    _, index = tail.add("TopK", apart, tail.value([1]), outputs=("", ""), axis=2, largest=0)
    return index


def sums_of(
    tail: GraphAppender, kept: Kept, coefficients: str, prototypes: str, size: tuple[int | str, int | str]
) -> Sums:
    """For each detection its sum of prototypes.

    Args:
        coefficients: name of `[B, nm, anchors]`.
        prototypes: name of `[B, nm, h, w]`.
        size: h and w; a dynamic one is a name.
    """
    (rows,) = tail.add("Transpose", coefficients, perm=[0, 2, 1])
    (chosen,) = tail.add("GatherND", rows, kept.anchor, batch_dims=1)
    (flat,) = tail.add("Reshape", prototypes, tail.value([0, 0, -1]))
    (product,) = tail.add("MatMul", chosen, flat)
    height, width = (side if isinstance(side, int) else 0 for side in size)
    if height and width:
        shape = tail.value([0, kept.topk, height, width])
    else:
        (whole,) = tail.add("Shape", prototypes)
        (last,) = tail.add("Slice", whole, tail.value([2]), tail.value([4]))
        (shape,) = tail.add("Concat", tail.value([0, kept.topk]), last, axis=0)
    (sums,) = tail.add("Reshape", product, shape)
    return Sums(sums, prototypes, height, width)


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
    (shape,) = tail.add("Shape", sums.prototypes)
    (count,) = tail.add("Gather", shape, tail.value(axis), axis=0)
    (numbers,) = tail.add("Range", tail.value(0), count, tail.value(1))
    (last,) = tail.add("Sub", count, tail.value(1))
    (cells,) = tail.add("Cast", numbers, to=TensorProto.FLOAT)
    return cells, tail.add("Cast", last, to=TensorProto.FLOAT)[0]
