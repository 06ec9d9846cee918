"""Look-ups in a graph: what inference finds without the weights is what it finds with them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from utils.onnx_graph.view import channel_counts, with_shapes


@pytest.fixture
def model() -> ModelProto:
    """A convolution, and a Reshape whose target is computed from the convolution's shape."""
    nodes = [
        helper.make_node("Conv", ["images", "weight"], ["maps"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["maps", "bias"], ["shifted"]),
        helper.make_node("Shape", ["shifted"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["shifted", "target"], ["rows"]),
        helper.make_node("Relu", ["rows"], ["output"]),
    ]
    constants = {
        "weight": np.ones((24, 16, 3, 3), np.float32),
        "bias": np.ones((1, 24, 1, 1), np.float32),
        "first": np.array([0]),
        "rest": np.array([24, -1]),
    }
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [2, 16, 8, 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def types(graph: GraphProto) -> dict[str, str]:
    return {value.name: str(value.type) for value in [*graph.value_info, *graph.output]}


def test_shapes_are_found_without_the_weights(model):
    before = model.SerializeToString()
    found = with_shapes(model, data_prop=True)
    expected = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    assert types(found) == types(expected)
    assert "dim_value: 64" in types(found)["rows"]  # from the values of the small constants
    assert [tensor.name for tensor in found.initializer] == ["bias", "first", "rest"]
    assert {value.name for value in found.input} == {"images"}
    assert model.SerializeToString() == before


def test_channels_by_name(model):
    assert channel_counts(model) == {"images": 16, "maps": 24, "shifted": 24}
