"""Boxes and scores are joined apart: upstream's head joins all and splits them again, which copies everything twice."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.onnx_graph.view import GraphView, attribute, drop_unused, pure, set_nodes


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
                shape = np.array([0, sizes[part], -1], np.int64)  # 0: the batch as it is
                model.graph.initializer.append(numpy_helper.from_array(shape, f"{name}/shape"))
                nodes.append(
                    helper.make_node("Reshape", [pair.input[part], f"{name}/shape"], [f"{name}/result"], name=name)
                )
                parts.append(f"{name}/result")
            nodes.append(helper.make_node("Concat", parts, [output], name=f"{split.name}/{part}", axis=2))
        position = list(model.graph.node).index(split)
        set_nodes(model, [*model.graph.node[:position], *nodes, *model.graph.node[position + 1 :]])
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
        reshape = view.producer(name)
        pair = view.producer(reshape.input[0]) if reshape is not None and reshape.op_type == "Reshape" else None
        if reshape is None or pair is None or pair.op_type != "Concat" or len(pair.input) != 2:
            return []
        levels.append((reshape, pair))
    return levels
