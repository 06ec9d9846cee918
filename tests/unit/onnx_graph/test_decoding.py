"""Decoding in few steps, against upstream's formula in NumPy, and against the graph that it replaces."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from decoding_graph import ANCHORS, BATCH, BINS, POINTS, head_graph, images
from onnx import ModelProto, TensorProto, helper
from qdq_graph import Editor, results

from utils.onnx_graph.passes.decode_boxes import decode_boxes
from utils.onnx_graph.passes.to_half import to_half


def run(model: ModelProto, batch: int = BATCH) -> np.ndarray:
    return results(model, images=images(batch))["output0"]


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
def test_boxes_are_the_same_in_fewer_steps(batch, computed):
    model = head_graph(batch, computed)
    result = decode_boxes(model)
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
    assert decode_boxes(result) == result


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
def test_a_graph_that_decodes_otherwise_stays(name):
    editor = Editor(head_graph())
    assert decode_boxes(editor.model) != editor.model
    OTHERS[name](editor)
    assert decode_boxes(editor.model) == editor.model


def test_distances_are_fp16_and_pixels_fp32_in_a_strongly_typed_file():
    model = decode_boxes(head_graph())
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
