"""Predictions of the best anchors only: with NMS inside, the boxes of all others are not computed.

    keep_best_anchors(model, 1000)

Their numbers are sorted as FP32, since TensorRT sorts no INT64: whole numbers are exact in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from utils.core.tasks import DETECT
from utils.onnx_graph.view import (
    GraphAppender,
    GraphView,
    drop_unused,
    metadata_of,
    opset_of,
    rename_inputs,
    set_nodes,
    with_shapes,
)

ANCHORS = "topk_anchors"  # name of their numbers, int64 `[B, K]`
BEHIND_SOFTMAX = ("Cast", "Reshape", "Conv")
WHOLE_IN_HALF = 2048  # FP16 has every whole number up to it


@dataclass(frozen=True)
class _Own:
    """A node that reads numbers of the anchors' own.

    Attributes:
        name: of these numbers.
        other: what it reads besides.
        values: the numbers, `[rows, anchors]`.
    """

    node: NodeProto
    name: str
    other: str
    values: np.ndarray


@dataclass(frozen=True)
class _Head:
    """The nodes that read something of every anchor.

    Attributes:
        sides: reads the distributions, `[B, rows, anchors]`.
        own: what reads points `[4, anchors]` and strides `[1, anchors]`.
        scores: the Sigmoid.
        predictions: the Concat of boxes, scores and what else there is.
    """

    sides: NodeProto
    own: tuple[_Own, ...]
    scores: NodeProto
    predictions: NodeProto


def keep_best_anchors(model: ModelProto, count: int) -> None:
    """Let the predictions be those of the `count` best anchors, in place.

    A graph of dynamic size, or that decodes otherwise than `decode_boxes.py` writes it, keeps all; so does one whose
    metadata do not say that it is strongly typed, if it has more anchors than FP16 can number.
    """
    head = _head(GraphView(model))
    anchors = 0 if head is None else head.own[0].values.shape[1]
    if head is None or anchors <= count or (anchors > WHOLE_IN_HALF and metadata_of(model).get("typing") != "strong"):
        return
    readers = [(node, node.input[0]) for node in (head.sides, head.scores)]
    readers += [(head.predictions, name) for name in head.predictions.input[2:]]
    shapes = {v.name: v.type.tensor_type.shape.dim for v in with_shapes(model, data_prop=True).value_info}
    rows = {name: shape[1].dim_value for name, shape in shapes.items() if len(shape) == 3}  # 0 where not known
    if not all(rows.get(name) for _, name in readers):
        return
    tail = GraphAppender(model, "best")
    index = _best(tail, head.scores.input[0], count, opset_of(model))
    (places,) = tail.add("Unsqueeze", index, tail.value([1]))
    for node, name in readers:
        (wide,) = tail.add("Expand", places, tail.value([1, rows[name], 1]))
        rename_inputs(node, {name: tail.add("GatherElements", name, wide, axis=2)[0]})
    for own in head.own:
        (chosen,) = tail.add("Gather", tail.value(np.ascontiguousarray(own.values.T), np.float32), index, axis=0)
        rename_inputs(own.node, {own.name: tail.add("Transpose", chosen, perm=[0, 2, 1])[0]})
    set_nodes(model, _in_order(list(model.graph.node)))
    next(iter(model.graph.output)).type.tensor_type.shape.dim[2].dim_value = count
    del model.graph.value_info[:]  # the shapes in it are those from before
    drop_unused(model)


def _best(tail: GraphAppender, logits: str, count: int, opset: int) -> str:
    """The numbers of the best anchors, ascending, int64 `[B, count]`; `logits` are `[B, classes, anchors]`."""
    if opset < 18:
        (best,) = tail.add("ReduceMax", logits, axes=[1], keepdims=0)
    else:
        (best,) = tail.add("ReduceMax", logits, tail.value([1]), keepdims=0)
    _, index = tail.add("TopK", best, tail.value([count]), outputs=("", ""), axis=1)
    (numbers,) = tail.add("Cast", index, to=TensorProto.FLOAT)  # exact
    ascending, _ = tail.add("TopK", numbers, tail.value([count]), outputs=("", ""), axis=1, largest=0)
    return tail.add("Cast", ascending, outputs=[ANCHORS], to=TensorProto.INT64)[0]


def _head(view: GraphView) -> _Head | None:
    """What decodes; None if it is not what `passes/decode_boxes.py` writes, or the anchors are computed."""
    predictions = view.producer(DETECT.prediction)
    if predictions is None or predictions.op_type != "Concat" or len(predictions.input) < 2:
        return None
    boxes, scores = predictions.input[:2]
    strides = _own(view, boxes, "Mul")
    points = _own(view, strides.other, "Add") if strides is not None else None
    sigmoid = view.producer(scores)
    if strides is None or points is None or sigmoid is None or sigmoid.op_type != "Sigmoid":
        return None
    node = view.producer(points.other)
    while node is not None and node.op_type in BEHIND_SOFTMAX:
        node = view.producer(node.input[0])
    sides = view.producer(node.input[0]) if node is not None and node.op_type == "Softmax" else None
    if sides is None or sides.op_type != "Reshape" or points.values.shape[1] != strides.values.shape[1]:
        return None
    return _Head(sides, (points, strides), sigmoid, predictions)


def _own(view: GraphView, result: str, kind: str) -> _Own | None:
    """The node of a kind that makes `result` of a tensor and a constant, in either order; None if it is another."""
    node = view.producer(result)
    if node is None or node.op_type != kind:
        return None
    for name, other in (node.input, reversed(node.input)):
        values = view.array(name)
        if values is not None and values.ndim:
            return _Own(node, name, other, values.reshape(-1, values.shape[-1]))
    return None


def _in_order(nodes: list[NodeProto]) -> list[NodeProto]:
    """The nodes so that each comes behind what it reads, otherwise as they are."""
    makers: Mapping[str, int] = {name: number for number, node in enumerate(nodes) for name in node.output}
    placed: dict[int, NodeProto] = {}

    def place(number: int) -> None:
        for name in nodes[number].input:
            if name in makers and makers[name] not in placed:
                place(makers[name])
        placed[number] = nodes[number]

    for number in range(len(nodes)):
        if number not in placed:
            place(number)
    return list(placed.values())
