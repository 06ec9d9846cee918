"""Decoding in few steps, against upstream's formula in NumPy, and against the graph that it replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

from utils.onnx_graph.decoding import decode_in_few_steps
from utils.onnx_graph.fp16 import to_half

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))
from qdq_graph import Builder, Editor

BINS, CLASSES, BATCH = 6, 3, 2
GRID = [(x + 0.5, y + 0.5, stride) for stride, side in ((8, 4), (16, 2)) for y in range(side) for x in range(side)]
POINTS = np.array(GRID, np.float32).T  # x, y in cells, and pixels of a cell
ANCHORS = POINTS.shape[1]
ROWS = 4 * BINS + CLASSES


def head_graph(batch: int | str = BATCH, computed: bool = False) -> ModelProto:
    """Upstream's decoding as the exporter traces it, behind convolutions, for static sizes or with computed anchors."""
    b = Builder()
    weight = b.random.normal(0, 1, (ROWS, ROWS, 1)).astype(np.float32) / 3
    x = b.node("Conv", "/model.5/Conv", "images", b.tensor("weight", weight), kernel_shape=[1])
    sides, scores = b.node(
        "Split", "/model.5/Split", x, b.tensor("sizes", np.array([4 * BINS, CLASSES])), outputs=2, axis=1
    )
    points, strides = b.tensor("points", POINTS[None, :2]), b.tensor("strides", POINTS[2:])
    if computed:  # depends on an input, as with dynamic sizes
        one = b.node("Exp", "/one", b.node("Sub", "/zero", "images", "images"))
        one = b.node("ReduceMax", "/max", one, axes=[0, 1], keepdims=1)
        points = b.node("Mul", "/points", points, one)
    shape = b.tensor("bins", np.array([0, 4, BINS, -1]))
    box = b.node("Reshape", "/model.5/dfl/Reshape", sides, shape)
    box = b.node("Transpose", "/model.5/dfl/Transpose", box, perm=[0, 2, 1, 3])
    box = b.node("Softmax", "/model.5/dfl/Softmax", box, axis=1)
    levels = b.tensor("model.5.dfl.conv.weight", np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1))
    box = b.node("Conv", "/model.5/dfl/conv/Conv", box, levels, kernel_shape=[1, 1])
    box = b.node("Reshape", "/model.5/dfl/Reshape_1", box, b.tensor("sides", np.array([0, 4, -1])))
    near, far = b.node("Split", "/model.5/Split_1", box, b.tensor("halves", np.array([2, 2])), outputs=2, axis=1)
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
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def images(batch: int = BATCH) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 3, (batch, ROWS, ANCHORS)).astype(np.float32)


def run(model: ModelProto, batch: int = BATCH) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"images": images(batch)})[0]


def reference(model: ModelProto) -> np.ndarray:
    """Upstream's formula: mean distances to the sides, from the anchors' points."""
    weight = onnx.numpy_helper.to_array(next(one for one in model.graph.initializer if one.name == "weight"))
    raw = np.einsum("oi,bia->boa", weight[..., 0].astype(float), images())
    power = np.exp(raw[:, : 4 * BINS].reshape(BATCH, 4, BINS, ANCHORS))
    left, top, right, bottom = np.einsum("bska,k->sba", power / power.sum(2, keepdims=True), np.arange(BINS))
    x, y, stride = POINTS
    corners = np.stack([x - left, y - top, x + right, y + bottom], 1) * stride
    box = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
    return np.concatenate([box, 1 / (1 + np.exp(-raw[:, 4 * BINS :]))], 1)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("batch", [BATCH, "batch"])
def test_boxes_are_the_same_in_fewer_steps(batch: int | str, computed: bool):
    model = head_graph(batch, computed)
    text = model.SerializeToString()
    result = decode_in_few_steps(model)
    assert model.SerializeToString() == text
    assert result.graph.output == model.graph.output
    np.testing.assert_allclose(run(model), reference(model), atol=2e-4)
    np.testing.assert_allclose(run(result), reference(model), atol=2e-4)
    np.testing.assert_array_equal(run(result)[:, 4:], run(model)[:, 4:])  # scores are left alone
    if batch == "batch":
        np.testing.assert_allclose(run(result, 5), run(model, 5), atol=2e-4)
    kinds = [node.op_type for node in result.graph.node]
    assert not {"Transpose", "Div"} & set(kinds)
    assert [kinds.count(kind) for kind in ("Softmax", "Conv", "Split", "Concat", "Sub")] == [
        1, 2, 1, 1 + computed, int(computed),
    ]  # fmt: skip
    assert decode_in_few_steps(result) == result


OTHERS: dict[str, Callable[[Editor], None]] = {
    "a mean with a bias": lambda edit: edit.find("/model.5/dfl/conv/Conv").input.append("strides"),
    "sides in another order": lambda edit: (
        edit.find("/model.5/dfl/Transpose").attribute[0].ints.__setitem__(slice(None), [0, 2, 3, 1])
    ),
    "corners of other points": lambda edit: edit.rewire("/model.5/Sub", 0, "images"),
    "sides the other way round": lambda edit: edit.find("/model.5/Sub").input.reverse(),
    "a third of both corners": lambda edit: edit.set_tensor("two", np.array(3, np.float32)),
    "size before the middle": lambda edit: edit.find("/model.5/Concat").input.reverse(),
    "size from low to high": lambda edit: edit.find("/model.5/Sub_1").input.reverse(),
    "another consumer of the mean": lambda edit: edit.model.graph.node.append(
        helper.make_node("Neg", ["/model.5/dfl/Reshape_1_output_0"], ["more"], name="/more")
    ),
    "one part and three": lambda edit: edit.set_tensor("halves", np.array([1, 3])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_graph_that_decodes_otherwise_stays(name: str):
    editor = Editor(head_graph())
    assert decode_in_few_steps(editor.model) != editor.model
    OTHERS[name](editor)
    assert decode_in_few_steps(editor.model) == editor.model


def test_distances_are_fp16_and_pixels_fp32_in_a_strongly_typed_file():
    model = decode_in_few_steps(head_graph())
    result = to_half(model)
    kinds = {
        node.op_type: value.type.tensor_type.elem_type
        for value in onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True).graph.value_info
        for node in result.graph.node
        if value.name in node.output
    }
    assert kinds["Softmax"] == kinds["Conv"] == TensorProto.FLOAT16
    assert kinds["Add"] == kinds["Mul"] == kinds["Sigmoid"] == TensorProto.FLOAT
    assert 0 < np.abs(run(result) - run(model)).max() < 0.5  # pixels, of cells of 16
