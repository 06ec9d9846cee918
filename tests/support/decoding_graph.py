"""Upstream's decoding as the exporter traces it, behind convolutions of random weights."""

import numpy as np
from onnx import ModelProto, TensorProto, helper
from qdq_graph import Builder

BINS, CLASSES, BATCH = 6, 3, 2
GRID = [(x + 0.5, y + 0.5, stride) for stride, side in ((8, 4), (16, 2)) for y in range(side) for x in range(side)]
POINTS = np.array(GRID, np.float32).T  # x, y in cells, and pixels of a cell
ANCHORS = POINTS.shape[1]
ROWS = 4 * BINS + CLASSES


def head_graph(batch: int | str = BATCH, computed: bool = False, opset: int = 17) -> ModelProto:
    """Predictions `[B, 4 + CLASSES, ANCHORS]`, for a static size or with computed anchors."""
    b = Builder()
    weight = b.random.normal(0, 1, (ROWS, ROWS, 1)).astype(np.float32) / 3
    x = b.node("Conv", "/model.5/Conv", "images", b.tensor("weight", weight), kernel_shape=[1])
    sizes = b.tensor("sizes", np.array([4 * BINS, CLASSES]))
    sides, scores = b.node("Split", "/model.5/Split", x, sizes, outputs=2, axis=1)
    points, strides = b.tensor("points", POINTS[None, :2]), b.tensor("strides", POINTS[2:])
    if computed:  # depends on an input, as with dynamic sizes
        one = b.node("Exp", "/one", b.node("Sub", "/zero", "images", "images"))
        one = b.node("MaxPool", "/max", one, kernel_shape=[1])
        one = b.node("Gather", "/one_of_all", one, b.tensor("first", np.array([0])), axis=1)
        points = b.node("Mul", "/points", points, one)
    halves = b.tensor("halves", np.array([2, 2]))
    near, far = b.node("Split", "/model.5/Split_1", b.dfl(sides, BINS), halves, outputs=2, axis=1)
    low, high = b.node("Sub", "/model.5/Sub", points, near), b.node("Add", "/model.5/Add", points, far)
    middle = b.node("Add", "/model.5/Add_1", low, high)
    middle = b.node("Div", "/model.5/Div", middle, b.tensor("two", np.array(2, np.float32)))
    size = b.node("Sub", "/model.5/Sub_1", high, low)
    box = b.node("Concat", "/model.5/Concat", middle, size, axis=1)
    box = b.node("Mul", "/model.5/Mul", box, strides)
    score = b.node("Sigmoid", "/model.5/Sigmoid", scores)
    b.nodes.append(helper.make_node("Concat", [box, score], ["output0"], name="/model.5/Concat_1", axis=1))
    values = [("images", ROWS), ("output0", 4 + CLASSES)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, rows, ANCHORS]) for name, rows in values]
    graph = helper.make_graph(b.nodes, "head", ends[:1], ends[1:], b.tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def images(batch: int = BATCH) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 3, (batch, ROWS, ANCHORS)).astype(np.float32)
