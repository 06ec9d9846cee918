"""Layers of boxes are found in a graph, and built in FP32 where TensorRT would choose."""

import numpy as np
import onnx
import pytest
from decoding_graph import head_graph
from onnx import TensorProto, helper, numpy_helper
from tensorrt_stand_in import stand_in

from utils.onnx_graph.passes.decode_boxes import decode_boxes
from utils.trt.build import build, fp32_box_layers
from utils.trt.preflight import BuildConfig

HEAD = "/model.5/"
TRACED = {
    HEAD + name
    for name in ("dfl/Softmax", "dfl/conv/Conv", "dfl/Reshape_1", "Split_1", "Sub", "Add", "Add_1", "Div", "Sub_1",
                 "Concat", "Mul", "Concat_1")
}  # fmt: skip


def followed_by(graph, *nodes, tensors=()):
    """The graph with more nodes behind its `output0`."""
    graph.graph.node.extend(nodes)
    graph.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in tensors)
    return graph


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, name=kind, **attributes)


def test_from_the_softmax_to_the_output():
    assert fp32_box_layers(head_graph()) == TRACED
    graph = decode_boxes(head_graph())
    found = fp32_box_layers(graph)
    names = [one.name for one in graph.graph.node]
    first = next(index for index, one in enumerate(graph.graph.node) if one.op_type == "Softmax")
    assert found == set(names[first:]) - {f"{HEAD}Sigmoid"}
    assert {one.op_type for one in graph.graph.node if one.name in found} >= {"Softmax", "Conv", "Add", "Mul"}


def test_what_is_computed_from_integers_does_not_count():
    nodes = [node("ArgMax", ["output0"], ["which"]), node("Cast", ["which"], ["number"], to=TensorProto.FLOAT),
             node("TopK", ["output0", "k"], ["most", "place"]), node("Gather", ["output0", "place"], ["gathered"]),
             node("Sqrt", ["place"], ["root"]), node("Neg", ["most"], ["negative"])]  # fmt: skip
    found = fp32_box_layers(followed_by(head_graph(), *nodes, tensors=[("k", np.array([3]))]))
    assert found - TRACED == {"ArgMax", "TopK", "Gather", "Neg"}


@pytest.mark.parametrize("kind", ["Conv", "QuantizeLinear"])
def test_a_softmax_of_features_does_not_count(kind):
    tensors = [("features", np.ones((8, 7, 1), np.float32)), ("scale", np.float32(1))]
    inputs = {"Conv": ["output0", "features"], "QuantizeLinear": ["output0", "scale"]}[kind]
    assert fp32_box_layers(followed_by(head_graph(), node(kind, inputs, ["more"]), tensors=tensors)) == frozenset()


def four_axes():
    """The graph behind a reshape, since builds want images of four axes."""
    graph = followed_by(head_graph(), tensors=[("three", np.array([0, 0, -1]))])
    size = graph.graph.input[0].type.tensor_type.shape.dim
    rows, anchors = size[1].dim_value, size[2].dim_value
    for one in graph.graph.node:
        one.input[:] = ["flat" if name == "images" else name for name in one.input]
    graph.graph.node.insert(0, node("Reshape", ["images", "three"], ["flat"]))
    del graph.graph.input[:]
    graph.graph.input.append(helper.make_tensor_value_info("images", TensorProto.FLOAT, [2, rows, anchors, 1]))
    graph.graph.node.append(node("ArgMax", ["output0"], ["which"], axis=1))
    return graph


@pytest.mark.parametrize(("version", "precision"), [("8.6.0", "best"), ("10.3.0", "best"), ("8.6.0", "fp32")])
def test_they_are_built_in_float32_and_integers_stay(tmp_path, monkeypatch, version, precision):
    api = stand_in(monkeypatch, version)
    onnx.save(four_axes(), tmp_path / "head.onnx")
    build(tmp_path / "head.onnx", tmp_path / "head.engine", BuildConfig(progress=False, precision=precision))
    calls = dict(api.module.calls)
    kind, layers = api.module.DataType.FLOAT, calls["layers"]
    if precision == "fp32":  # needs no constraint
        assert calls["build"] == []
        assert not any(one.told for one in layers)
        return
    assert calls["build"] == ["FP16", "PREFER_PRECISION_CONSTRAINTS"]
    assert {one.name for one in layers if one.precision is kind} == TRACED
    assert all(one.told == dict.fromkeys(range(one.num_outputs), kind) for one in layers if one.name in TRACED)
    (index,) = [one for one in layers if one.name == "ArgMax"]
    assert (index.precision, index.told) == (None, {})
