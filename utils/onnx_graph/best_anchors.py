"""A pass that lets a graph decode only those anchors whose scores can be among the best.

Of the K best pairs of an anchor and a class none has to be sought outside of the K anchors with the highest scores of
any class: each of these has a pair that is as good. They stay in their order, so that equal scores do too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from utils.core.tasks import DETECT
from utils.onnx_graph.editing import Tail, drop_unused, rename_inputs, set_nodes
from utils.onnx_graph.view import GraphView, opset_of

ANCHORS = "best_anchors"  # name of their numbers, int64 `[B, K]`
BEHIND_SOFTMAX = ("Cast", "Reshape", "Conv")


@dataclass(frozen=True)
class _Head:
    """The nodes that read something of every anchor.

    Attributes:
        sides: reads the distributions, `[B, rows, anchors]`.
        own: what reads numbers of the anchors' own, and these: points `[4, anchors]` and strides `[1, anchors]`.
        scores: the Sigmoid.
        predictions: the Concat of boxes, scores and what else there is.
    """

    sides: NodeProto
    own: tuple[tuple[NodeProto, str, np.ndarray], ...]
    scores: NodeProto
    predictions: NodeProto


def keep_best_anchors(model: ModelProto, count: int) -> None:
    """Let the predictions be those of the `count` best anchors, in place.

    A graph of dynamic size, or that decodes otherwise than `decoding.py` writes it, keeps all.
    """
    view = GraphView(model)
    head = _head(view)
    if head is None or head.own[0][2].shape[1] <= count:
        return
    readers = [(node, node.input[0]) for node in (head.sides, head.scores)]
    readers += [(head.predictions, name) for name in head.predictions.input[2:]]
    rows = _rows(model)
    if not all(rows.get(name) for _, name in readers):
        return
    tail = Tail(model, "best")
    index = _best(tail, head.scores.input[0], count, opset_of(model))
    (places,) = tail.add("Unsqueeze", index, tail.value([1]))
    for node, name in readers:
        (wide,) = tail.add("Expand", places, tail.value([1, rows[name], 1]))
        rename_inputs(node, {name: tail.add("GatherElements", name, wide, axis=2)[0]})
    for node, name, values in head.own:
        (chosen,) = tail.add("Gather", tail.value(np.ascontiguousarray(values.T), np.float32), index, axis=0)
        rename_inputs(node, {name: tail.add("Transpose", chosen, perm=[0, 2, 1])[0]})
    set_nodes(model, _in_order(list(model.graph.node)))
    next(iter(model.graph.output)).type.tensor_type.shape.dim[2].dim_value = count
    del model.graph.value_info[:]  # the shapes in it are those from before
    drop_unused(model)


def _best(tail: Tail, logits: str, count: int, opset: int) -> str:
    """The numbers of the best anchors, ascending, int64 `[B, count]`; `logits` are `[B, classes, anchors]`."""
    if opset < 18:
        (best,) = tail.add("ReduceMax", logits, axes=[1], keepdims=0)
    else:
        (best,) = tail.add("ReduceMax", logits, tail.value([1]), keepdims=0)
    _, index = tail.add("TopK", best, tail.value([count]), outputs=("", ""), axis=1)
    (numbers,) = tail.add("Cast", index, to=TensorProto.FLOAT)  # TensorRT 8 sorts no integers
    ascending, _ = tail.add("TopK", numbers, tail.value([count]), outputs=("", ""), axis=1, largest=0)
    return tail.add("Cast", ascending, outputs=[ANCHORS], to=TensorProto.INT64)[0]


def _head(view: GraphView) -> _Head | None:
    """What decodes; None if it is not what `decoding.py` writes, or the anchors are computed."""
    predictions = view.producer(DETECT.prediction)
    if predictions is None or predictions.op_type != "Concat" or len(predictions.input) < 2:
        return None
    strides, scores = (view.producer(name) for name in predictions.input[:2])
    points = view.producer(strides.input[0]) if strides is not None and strides.op_type == "Mul" else None
    if points is None or points.op_type != "Add" or scores is None or scores.op_type != "Sigmoid" or strides is None:
        return None
    node = view.producer(points.input[0])
    while node is not None and node.op_type in BEHIND_SOFTMAX:
        node = view.producer(node.input[0])
    sides = view.producer(node.input[0]) if node is not None and node.op_type == "Softmax" else None
    values = [view.array(one.input[1]) for one in (points, strides)]
    if sides is None or sides.op_type != "Reshape" or any(value is None for value in values):
        return None
    known = [value.reshape(-1, value.shape[-1]) for value in values if value is not None]
    own = tuple((one, one.input[1], value) for one, value in zip((points, strides), known, strict=True))
    return _Head(sides, own, scores, predictions)


def _rows(model: ModelProto) -> dict[str, int]:
    """Rows of the tensors `[B, rows, anchors]`, 0 where they are not known."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    shapes = {value.name: value.type.tensor_type.shape.dim for value in inferred}
    return {name: shape[1].dim_value for name, shape in shapes.items() if len(shape) == 3}


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
