"""Passes on the decoding behind the last convolutions: boxes from distributions (DFL), in fewer and smaller steps.

Upstream's head transposes the distributions `[B, 4 * bins, anchors]`, and computes the softmax and mean of each: the
distance to a side of the box, in cells. From the distances it computes corners, from the corners middle and size, and
then pixels. All steps after the softmax are linear. So here one convolution computes middle and size from the four
distributions; then come the anchor's point and the stride. Nothing is transposed, and no shape is computed. Another
pass joins boxes and scores separately.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, helper

from utils.onnx_graph.view import GraphAppender, GraphView, attribute, drop_unused, pure, set_nodes, store

# cx, cy, w, h from the distances to left, top, right and bottom; cx and cy from the anchor's point
BOX_OF_SIDES = np.array([[-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5], [1, 0, 1, 0], [0, 1, 0, 1]], np.float32)
SIDES_INWARD = [0, 2, 1, 3]  # upstream's transposition: bins in front of sides


@pure
def decode_boxes(model: ModelProto) -> None:
    """Compute boxes by one softmax and one convolution; a graph that decodes otherwise than upstream's stays."""
    view = GraphView(model)
    decoding = None
    for softmax in view.of_type("Softmax"):
        decoding = decoding or _decoding(softmax, view)
    if decoding is None:
        return
    position = view.nodes.index(decoding.boxes)
    before = len(view.nodes)
    tail = GraphAppender(model, decoding.scope)
    bins = len(decoding.values)
    weight = np.kron(BOX_OF_SIDES, decoding.values).reshape(4, 4 * bins, 1, 1)
    # in a shape 0 copies the size of the input, and -1 is the rest, so batch and anchors may be dynamic
    x = tail.add("Reshape", decoding.distributions, [-1, bins, 0, 1])
    x = tail.add("Softmax", x, axis=1)
    x = tail.add("Reshape", x, [-1, 4 * bins, 0, 1])
    x = tail.add("Conv", x, weight, kernel_shape=[1, 1])
    x = tail.add("Reshape", x, [0, 4, -1])
    anchors = view.array(decoding.anchors)
    if anchors is not None:  # the anchors' points, and zeros for width and height: [1, 4, anchors]
        points: object = np.concatenate([anchors, np.zeros_like(anchors)], -2)
    else:
        zeros = tail.add("Mul", decoding.anchors, 0.0)
        points = tail.add("Concat", decoding.anchors, zeros, axis=-2)
    x = tail.add("Add", x, points)
    tail.add("Mul", x, decoding.strides, output=decoding.boxes.output[0])
    nodes = list(model.graph.node)
    set_nodes(model, [*nodes[:position], *nodes[before:], *nodes[position + 1 : before]])
    drop_unused(model)


class _Decoding(NamedTuple):
    """Upstream's decoding of boxes; tensors are names."""

    distributions: str  # [B, 4 * bins, anchors]
    scope: str  # of DFL's convolution
    values: np.ndarray  # distance that each bin stands for, float32 [bins]
    anchors: str  # their points in cells, [1, 2, anchors]
    strides: str  # pixels of a cell, [1, anchors]
    boxes: NodeProto  # its result is cx, cy, w, h in pixels


def _decoding(softmax: NodeProto, view: GraphView) -> _Decoding | None:
    """The decoding around a softmax; None if it is not upstream's."""
    transpose = _producer(view, softmax.input[0], "Transpose")
    if transpose is None or attribute(transpose, "perm") != SIDES_INWARD or attribute(softmax, "axis") != 1:
        return None
    reshape = _producer(view, transpose.input[0], "Reshape")
    mean = _follower(view, softmax.output[0], "Conv")
    if reshape is None or mean is None or len(mean.input) > 2:
        return None
    bins = view.array(mean.input[1])
    flat = _follower(view, mean.output[0], "Reshape")
    if bins is None or bins.shape != (1, bins.size, 1, 1) or flat is None:
        return None
    split = _follower(view, flat.output[0], "Split")
    if split is None or attribute(split, "axis") != 1 or len(split.input) < 2:
        return None
    sizes = view.array(split.input[1])
    if sizes is None or sizes.tolist() != [2, 2]:
        return None
    near, far = split.output
    steps = _steps_to_boxes(view, near, far)
    if steps is None:
        return None
    anchors, strides, boxes = steps
    scope = mean.name.rpartition("/")[0].strip("/")
    return _Decoding(reshape.input[0], scope, bins.ravel(), anchors, strides, boxes)


def _steps_to_boxes(view: GraphView, near: str, far: str) -> tuple[str, str, NodeProto] | None:
    """Follow the distances to the near sides (left, top) and the far sides (right, bottom) to the node of the boxes.

    Returns:
        Names of the anchors' points and strides, and that node; None if the nodes between are not upstream's.
    """
    low = _follower(view, near, "Sub")
    high = _follower(view, far, "Add")
    if low is None or high is None or low.input[1] != near:
        return None
    anchors = _other(high, far)
    if view.comparable(low.input[0]) != view.comparable(anchors):
        return None
    middle = _middle(view, low.output[0], high.output[0])
    size = _size(view, low.output[0], high.output[0])
    if middle is None or size is None:
        return None
    joined = _follower(view, middle, "Concat")
    if joined is None or list(joined.input) != [middle, size] or attribute(joined, "axis") != 1:
        return None
    boxes = _follower(view, joined.output[0], "Mul")
    if boxes is None:
        return None
    return (anchors, _other(boxes, joined.output[0]), boxes)


def _middle(view: GraphView, low: str, high: str) -> str | None:
    """Name of (low + high) / 2, None if nothing computes it."""
    for total in view.consumers(low):
        if total.op_type == "Add" and set(total.input) == {low, high}:
            middle = _follower(view, total.output[0], "Div")
            divisor = None if middle is None else view.array(middle.input[1])
            if middle is None or divisor is None or divisor.size != 1 or divisor.item() != 2:
                return None
            return str(middle.output[0])
    return None


def _size(view: GraphView, low: str, high: str) -> str | None:
    """Name of high - low, None if nothing computes it."""
    for node in view.consumers(low):
        if node.op_type == "Sub" and list(node.input) == [high, low]:
            return str(node.output[0])
    return None


def _producer(view: GraphView, tensor: str, kind: str) -> NodeProto | None:
    """The node that writes a tensor, if it is of this kind."""
    node = view.producer(tensor)
    if node is not None and node.op_type == kind:
        return node
    return None


def _follower(view: GraphView, tensor: str, kind: str) -> NodeProto | None:
    """The only consumer of a tensor, if it is of this kind."""
    consumers = view.consumers(tensor)
    if len(consumers) == 1 and consumers[0].op_type == kind:
        return consumers[0]
    return None


def _other(node: NodeProto, name: str) -> str:
    """The input beside `name` of a node with two inputs."""
    return str(node.input[1] if node.input[0] == name else node.input[0])


@pure
def separate_predictions(model: ModelProto) -> None:
    """Join the levels' boxes, and their scores, instead of joining all first and splitting them again.

    Upstream's head computes Concat(boxes, scores) a level → Reshape → Concat of levels → Split. On a GPU each of these
    is a copy of everything; taken apart, boxes and scores are copied once.
    """
    view = GraphView(model)
    for split in [node for node in model.graph.node if node.op_type == "Split" and len(node.output) == 2]:
        levels = _levels(split, view)
        sizes = view.array(split.input[1]) if levels else None
        if sizes is None:
            continue
        nodes: list[NodeProto] = []
        kinds = ("boxes", "scores")
        for part, output in enumerate(split.output):
            parts = []
            for reshape, pair in levels:
                name = f"{reshape.name}/{kinds[part]}"
                shape = store(model, f"{name}/shape", np.array([0, sizes[part], -1]))  # 0: the batch as it is
                parts.append(f"{name}/result")
                nodes.append(helper.make_node("Reshape", [pair.input[part], shape], parts[-1:], name=name))
            nodes.append(helper.make_node("Concat", parts, [output], name=f"{split.name}/{part}", axis=2))
        position = view.nodes.index(split)
        set_nodes(model, [*view.nodes[:position], *nodes, *view.nodes[position + 1 :]])
        drop_unused(model)
        return


def _levels(split: NodeProto, view: GraphView) -> list[tuple[NodeProto, NodeProto]]:
    """Each level's Reshape and the Concat of boxes and scores before it; empty if the Split reads something else."""
    joined = view.producer(split.input[0])
    if joined is None or joined.op_type != "Concat" or len(view.consumers(joined.output[0])) > 1:
        return []
    if len(split.input) < 2 or view.array(split.input[1]) is None or attribute(split, "axis", 0) != 1:
        return []
    levels = []
    for name in joined.input:
        reshape = _producer(view, name, "Reshape")
        if reshape is None:
            return []
        pair = _producer(view, reshape.input[0], "Concat")
        if pair is None or len(pair.input) != 2:
            return []
        levels.append((reshape, pair))
    return levels
