"""Ranges of activations in files for OpenVINO: they begin where values begin, hold zero, and end where they did."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_graph import SIZE, Editor, good_graph, results

from utils.core.input_spec import InputSpec
from utils.onnx_graph.passes.for_openvino import (
    LEAST_SILU,
    drop_repeated_quantizers,
    lower_bounds,
    offset_activations,
    seven_bit_weights,
)
from utils.onnx_graph.passes.quantizers import store_int8_weights
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.qdq_view import QdqGraph

GOOD = good_graph()


def ranges(model):
    """Name of each activation's QuantizeLinear → scale, zero point, least and largest value."""
    graph = QdqGraph(model)
    found = {}
    for node in graph.activations:
        scale, zero_point = float(graph.constant(node.input[1])), graph.constant(node.input[2])
        limits = np.iinfo(zero_point.dtype)
        ends = [(limit - int(zero_point)) * scale for limit in (limits.min, limits.max)]
        found[node.name] = (scale, int(zero_point), *ends)
    return found


def test_silu_is_the_minimum_of_its_curve():
    x = np.linspace(-5, 5, 1_000_001)
    np.testing.assert_allclose(LEAST_SILU, (x / (1 + np.exp(-x))).min(), atol=1e-8)


def test_a_range_ends_where_it_did_and_begins_at_the_least_value():
    before, after = ranges(GOOD), ranges(offset_activations(GOOD))
    bounds = lower_bounds(QdqGraph(GOOD))
    assert before.keys() == after.keys()
    begins = []
    for node in QdqGraph(GOOD).activations:
        old, new = before[node.name], after[node.name]
        half_a_step = new[0] / 2 * 1.0001
        assert abs(new[3] - old[3]) <= half_a_step
        assert 0 <= new[1] <= 128
        assert new[2] <= min(0.0, bounds.get(node.input[0], old[2])) + half_a_step  # nothing more is clipped
        begins.append(new[2] / old[2])
    assert min(begins) < 0.5  # some ranges are shorter


def test_a_range_without_a_known_beginning_has_the_values_that_it_had():
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Mul", ["x", "three"], ["y"]),
                helper.make_node("QuantizeLinear", ["y", "s", "z"], ["q"], name="quantize"),
                helper.make_node("DequantizeLinear", ["q", "s", "z"], ["out"]),
            ],
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1000])],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1000])],
            [
                numpy_helper.from_array(np.float32(3), "three"),
                numpy_helper.from_array(np.float32(0.02), "s"),
                numpy_helper.from_array(np.int8(0), "z"),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    x = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    before, after = (results(graph, x=x)["out"] for graph in (model, offset_activations(model)))
    np.testing.assert_allclose(after, before, rtol=1e-6)
    assert ranges(offset_activations(model))["quantize"][1] == 128


def test_no_tensor_is_below_its_bound():
    """All tensors of the graph, computed on random images, against what the operators tell."""
    model = offset_activations(GOOD)
    bounds = lower_bounds(QdqGraph(model))
    largest_step = max(scale for scale, *_ in ranges(model).values())
    known = [name for name in bounds if any(name in node.output for node in model.graph.node)]
    known = [name for name in known if "QuantizeLinear" not in name or "Dequantize" in name]
    assert len(known) > 20
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in known)
    for images in np.random.default_rng(1).random((4, 1, 3, 16, 16), np.float32):
        for name, values in results(model, check=False, images=images).items():
            assert values.min() >= bounds[name] - largest_step, name


def test_rounding_errors_get_smaller():
    """Of each tensor behind SiLU alone: the mean error of its rounding, on random values of its range."""
    before, after = ranges(GOOD), ranges(offset_activations(GOOD))
    random = np.random.default_rng(2)
    for name, (scale, _, _, largest) in before.items():
        if "act/Mul" not in name:
            continue
        new_scale, zero_point = after[name][:2]
        values = random.uniform(LEAST_SILU, largest, 10_000)
        old = np.clip(np.rint(values / scale), -128, 127) * scale
        new = (np.clip(np.rint(values / new_scale) + zero_point, 0, 255) - zero_point) * new_scale
        ratio = np.abs(new - values).mean() / np.abs(old - values).mean()
        assert ratio == pytest.approx(new_scale / scale, rel=0.05)
        assert ratio < 1


def test_images_as_bytes_are_taken_exactly():
    """The range of images becomes 0 to its end, and bytes give what the same images as floats give."""
    bytes_of = InputSpec("uint8")
    model = offset_activations(take_bytes(GOOD, bytes_of))
    images = np.random.default_rng(3).integers(0, 256, (1, 3, 16, 16), np.uint8)
    expected = results(offset_activations(GOOD), images=images.astype(np.float32) / 255)
    for name, values in results(model, images=images).items():
        np.testing.assert_allclose(values, expected[name], atol=1e-4, rtol=1e-4)
    graph = QdqGraph(model)
    first = next(node for node in graph.activations if graph.is_of_bytes(node.input[0]))
    assert int(graph.constant(first.input[2])) == 0


def test_equal_scales_stay_equal_also_where_each_pair_has_its_own():
    editor = Editor(GOOD)
    graph = QdqGraph(editor.model)
    concat = graph.of_type("Concat")[0]
    scales = {graph.dequantizer(name).input[1] for name in concat.input}
    after = QdqGraph(offset_activations(editor.model))
    concat = next(node for node in after.nodes if node.name == concat.name)
    stored = [after.dequantizer(name).input for name in concat.input]
    assert len(scales) >= 1
    assert len({float(after.constant(scale)) for _, scale, _ in stored}) == 1
    assert len({int(after.constant(zero)) for *_, zero in stored}) == 1


def test_it_changes_nothing_twice():
    once = offset_activations(GOOD)
    assert ranges(offset_activations(once)) == ranges(once)


@pytest.mark.parametrize("model", [GOOD, offset_activations(GOOD)])
def test_a_quantizer_behind_operators_that_move_values_is_dropped(model):
    fewer = drop_repeated_quantizers(model)
    names = {node.name for node in QdqGraph(fewer).activations}
    dropped = {node.name for node in QdqGraph(model).activations} - names
    moved = ("/model.1/MaxPool", "/model.2/Resize", "/model.3/Split", "/model.3/Split.1", "/model.3/Concat")
    assert dropped == {f"{name}/QuantizeLinear" for name in (*moved, "/model.4/Concat")}
    images = np.random.default_rng(3).random((1, 3, SIZE, SIZE), dtype=np.float32)
    np.testing.assert_array_equal(results(fewer, images=images)["output0"], results(model, images=images)["output0"])


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ("/model.3/Concat", {"/model.3/Concat", "/model.4/Concat"}),  # another scale behind it, and before the next
        ("/model.3/cv1/act/Mul", {"/model.3/Split", "/model.3/Split.1"}),
    ],
)
def test_a_quantizer_of_another_scale_stays(changed, stays):
    editor = Editor(GOOD)
    parameters = editor.find(f"{changed}/QuantizeLinear").input
    editor.set_tensor(parameters[1], np.float32(0.07))
    before = {node.name for node in QdqGraph(drop_repeated_quantizers(GOOD)).activations}
    after = {node.name for node in QdqGraph(drop_repeated_quantizers(editor.model)).activations}
    assert {name.removesuffix("/QuantizeLinear") for name in after - before} == stays


def test_weights_of_7_bits_that_a_file_holds_as_integers_are_those_that_it_had_in_larger_steps():
    before, after = store_int8_weights(GOOD), seven_bit_weights(store_int8_weights(GOOD))
    weights = [QdqGraph(model) for model in (before, after)]
    compared = 0
    for conv in weights[0].of_type("Conv"):
        pair = [graph.dequantizer(conv.input[1]) for graph in weights]
        if None in pair:
            continue
        values = []
        for graph, node in zip(weights, pair, strict=True):
            integers, scale = graph.constant(node.input[0]), graph.constant(node.input[1])
            assert np.abs(integers.astype(np.int16)).max() <= (64 if graph is weights[1] else 127)
            values.append(integers * scale.reshape(-1, 1, 1, 1))
        assert np.abs(values[1] - values[0]).max() <= weights[0].constant(pair[0].input[1]).max() * 1.0001
        compared += 1
    assert compared > 3


def test_integers_of_a_bias_are_not_those_of_a_weight():
    bias = np.array([100_000, -70_000], np.int32)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("DequantizeLinear", ["bias", "s"], ["out"])],
            "graph",
            [],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [2])],
            [numpy_helper.from_array(bias, "bias"), numpy_helper.from_array(np.float32(0.01), "s")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    np.testing.assert_array_equal(results(seven_bit_weights(model))["out"], results(model)["out"])
