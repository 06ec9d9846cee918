"""Passes on what stands behind the last convolutions: boxes from distributions (DFL), in fewer and smaller steps.

Upstream's head transposes the distributions `[B, 4 * bins, anchors]`, takes their softmax and its mean, which is a
distance to each side of a box in cells, and makes corners of these, then middle and size, then pixels. All behind the
softmax is linear: one convolution computes middle and size from all four distributions at once, and an anchor's own
point and stride follow. Nothing is transposed, and no shape is computed. Boxes and scores are joined apart.
"""

from __future__ import annotations

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
    found = next((one for node in view.nodes if node.op_type == "Softmax" and (one := _decoding(node, view))), None)
    if found is None:
        return
    source, scope, values, anchors, strides, boxes = found
    position, before = view.nodes.index(boxes), len(view.nodes)
    tail, bins = GraphAppender(model, scope), len(values)
    weight = np.kron(BOX_OF_SIDES, values).reshape(4, 4 * bins, 1, 1)
    # in a shape 0 is the size that was there, and -1 what is left: nothing has to be known of batch and anchors
    x = tail.add("Softmax", tail.add("Reshape", source, [-1, bins, 0, 1]), axis=1)
    x = tail.add("Conv", tail.add("Reshape", x, [-1, 4 * bins, 0, 1]), weight, kernel_shape=[1, 1])
    x = tail.add("Reshape", x, [0, 4, -1])
    known = view.array(anchors)
    if known is not None:  # the anchors' points, and zeros for width and height: [1, 4, anchors]
        points: object = np.concatenate([known, np.zeros_like(known)], -2)
    else:
        points = tail.add("Concat", anchors, tail.add("Mul", anchors, 0.0), axis=-2)
    tail.add("Mul", tail.add("Add", x, points), strides, output=boxes.output[0])
    nodes = list(model.graph.node)
    set_nodes(model, [*nodes[:position], *nodes[before:], *nodes[position + 1 : before]])
    drop_unused(model)


def _decoding(softmax: NodeProto, view: GraphView) -> tuple[str, str, np.ndarray, str, str, NodeProto] | None:
    """What a softmax decodes; None if it is not upstream's.

    Returns:
        Name of the distributions `[B, 4 * bins, anchors]`; scope of DFL's convolution; values whose mean a distance is,
        float32 `[bins]`; names of the anchors' points in cells `[1, 2, anchors]` and of the pixels of a cell
        `[1, anchors]`; the node that gives cx, cy, w, h in pixels.
    """
    transpose = view.producer(softmax.input[0])
    if transpose is None or not _is(transpose, "Transpose", perm=SIDES_INWARD) or not _is(softmax, "Softmax", axis=1):
        return None
    reshape, mean = view.producer(transpose.input[0]), _follower(view, softmax.output[0], "Conv")
    if reshape is None or reshape.op_type != "Reshape" or mean is None or len(mean.input) > 2:
        return None
    bins = view.array(mean.input[1])
    flat = _follower(view, mean.output[0], "Reshape")
    split = _follower(view, flat.output[0], "Split") if flat is not None else None
    if bins is None or bins.shape != (1, bins.size, 1, 1) or split is None or not _is(split, "Split", axis=1):
        return None
    sizes = view.array(split.input[1]) if len(split.input) > 1 else None
    ends = _ends(view, *split.output) if sizes is not None and sizes.tolist() == [2, 2] else None
    scope = mean.name.rpartition("/")[0].strip("/")
    return None if ends is None else (reshape.input[0], scope, bins.ravel(), *ends)


def _ends(view: GraphView, near: str, far: str) -> tuple[str, str, NodeProto] | None:
    """Anchors' points, strides and the node that gives boxes, for the distances to the near and to the far sides."""
    low, high = _follower(view, near, "Sub"), _follower(view, far, "Add")
    if low is None or high is None or low.input[1] != near:
        return None
    anchors = _other(high, far)
    if view.comparable(low.input[0]) != view.comparable(anchors):
        return None
    corners = {low.output[0], high.output[0]}
    both = [node for node in view.consumers(low.output[0]) if set(node.input) == corners]
    total = next((node for node in both if node.op_type == "Add"), None)
    size = next((node for node in both if node.op_type == "Sub" and node.input[0] == high.output[0]), None)
    middle = _follower(view, total.output[0], "Div") if total is not None else None
    divisor = view.array(middle.input[1]) if middle is not None else None
    if size is None or middle is None or divisor is None or divisor.size != 1 or divisor.item() != 2:
        return None
    joined = _follower(view, middle.output[0], "Concat")
    if joined is None or list(joined.input) != [middle.output[0], size.output[0]] or attribute(joined, "axis") != 1:
        return None
    boxes = _follower(view, joined.output[0], "Mul")
    return None if boxes is None else (anchors, _other(boxes, joined.output[0]), boxes)


def _is(node: NodeProto, kind: str, **attributes: object) -> bool:
    """Whether a node is of this kind and has these attributes."""
    return node.op_type == kind and all(attribute(node, name) == value for name, value in attributes.items())


def _follower(view: GraphView, tensor: str, kind: str) -> NodeProto | None:
    """The only consumer of a tensor, if it is of this kind."""
    consumers = view.consumers(tensor)
    return consumers[0] if len(consumers) == 1 and consumers[0].op_type == kind else None


def _other(node: NodeProto, name: str) -> str:
    """The input of a node with two that is not `name`."""
    return str(node.input[1] if node.input[0] == name else node.input[0])


@pure
def separate_predictions(model: ModelProto) -> None:
    """Join the levels' boxes and scores apart, instead of joining all first and splitting them again.

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
        for part, output in enumerate(split.output):
            parts = []
            for reshape, pair in levels:
                name = f"{reshape.name}/{('boxes', 'scores')[part]}"
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
    for reshape in map(view.producer, joined.input):
        pair = view.producer(reshape.input[0]) if reshape is not None and reshape.op_type == "Reshape" else None
        if reshape is None or pair is None or pair.op_type != "Concat" or len(pair.input) != 2:
            return []
        levels.append((reshape, pair))
    return levels
