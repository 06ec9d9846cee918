"""The verifier: a good graph passes, and a graph broken for one property fails that property and no other."""

import json
from collections.abc import Callable, Iterable

import numpy as np
import onnx
import pytest
from qdq_graph import Editor, good_graph

from utils.onnx_graph.passes.for_openvino import (
    TARGET_KEY,
    drop_repeated_quantizers,
    offset_activations,
    seven_bit_weights,
)
from utils.onnx_graph.passes.quantizers import store_int8_weights
from utils.onnx_graph.passes.to_half import to_half
from utils.onnx_graph.verify import PROPERTIES, table, verify
from utils.onnx_graph.view import set_metadata

GOOD = good_graph()
STRONG = set_metadata(to_half(GOOD), {"typing": "strong"})


def _set_scale(pair: str, value: float) -> Callable[[Editor], None]:
    return lambda edit: edit.set_tensor(f"{pair}/scale", np.array(value, np.float32))


def _weight_scale(value: float) -> Callable[[Editor], None]:
    return lambda edit: edit.set_tensor("model.0.conv.weight/scale", np.full(8, value, np.float32))


def _one_weight_scale(edit: Editor) -> None:
    for node in ("QuantizeLinear", "DequantizeLinear"):
        del edit.find(f"model.0.conv.weight/{node}").attribute[:]
    edit.set_tensor("model.0.conv.weight/scale", np.array(0.01, np.float32))
    edit.set_tensor("model.0.conv.weight/zero_point", np.array(0, np.int8))


def _other_weight_axis(edit: Editor) -> None:
    for node in ("QuantizeLinear", "DequantizeLinear"):
        edit.find(f"model.3.m.cv1.conv.weight/{node}").attribute[0].i = 1


def _several_activation_scales(edit: Editor) -> None:
    edit.set_tensor("/model.5/cv2.0/cv2.0.0/act/Mul/scale", np.full(8, 0.05, np.float32))
    edit.set_tensor("/model.5/cv2.0/cv2.0.0/act/Mul/zero_point", np.zeros(8, np.int8))


def _partner_with_another_scale(edit: Editor) -> None:
    other = edit.model.graph.initializer.add()
    other.CopyFrom(onnx.numpy_helper.from_array(np.array(0.06, np.float32), "other"))
    edit.rewire("/model.5/cv2.0/cv2.0.0/act/Mul/DequantizeLinear", 1, "other")


def _integers_through_another_node(edit: Editor) -> None:
    edit.model.graph.node.append(
        onnx.helper.make_node("Identity", [f"{MAXIMUM}/QuantizeLinear_output_0"], ["same"], "same")
    )
    edit.rewire(f"{MAXIMUM}/DequantizeLinear", 0, "same")


def _integers_from_outside(edit: Editor) -> None:
    edit.model.graph.input.append(onnx.helper.make_tensor_value_info("integers", onnx.TensorProto.INT8, None))
    edit.rewire(f"{MAXIMUM}/DequantizeLinear", 0, "integers")


def _scale_from_outside(edit: Editor) -> None:
    graph, name = edit.model.graph, "model.0.conv.weight/scale"
    graph.initializer.remove(next(one for one in graph.initializer if one.name == name))
    graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8]))


def _second_quantizer(edit: Editor) -> None:
    tensor = "/model.0/act/Mul_output_0"
    edit.insert_pair(tensor, 0.06, "second")
    edit.rewire("/model.0/act/Mul/QuantizeLinear", 0, tensor)
    edit.rewire("/model.1/AveragePool", 0, "second/DequantizeLinear_output_0")


def _quantized_twice(edit: Editor) -> None:
    edit.insert_pair("/model.0/act/Mul/DequantizeLinear_output_0", 0.06, "second")


def _branch_read_twice(edit: Editor) -> None:
    """The second input of the Add is a convolution's result, but another node needs it too."""
    extra = onnx.helper.make_tensor_value_info("extra", onnx.TensorProto.FLOAT, None)
    edit.model.graph.output.append(extra)
    branch = "/model.3/m/cv2/act/Mul_output_0"
    edit.model.graph.node.append(onnx.helper.make_node("Neg", [branch], ["extra"], name="reader"))


def _gated(edit: Editor) -> None:
    """A convolution's own result is quantized, and read by a product that is no activation."""
    edit.rewire("/model.1/cv1/act/Mul/QuantizeLinear", 0, "/model.1/cv1/conv/Conv_output_0")
    edit.rewire("/model.1/cv1/act/Sigmoid", 0, "images")
    factors = [f"/model.1/{one}/DequantizeLinear_output_0" for one in ("cv1/act/Mul", "MaxPool")]
    edit.find("/model.1/cv1/act/Mul").input[:] = factors


def _dfl(edit: Editor, kind: type) -> None:
    edit.set_tensor("model.5.dfl.conv.weight/half", np.ones((1, 4, 1, 1), kind))


HEAD, MAXIMUM = "/model.5/cv2.0/cv2.0.0", "/model.1/MaxPool"
Edit = Callable[[Editor], None]

# what is done to the good graph → the properties that break, and the nodes that are named
MUTATIONS: dict[str, tuple[Edit, set[tuple[str, str]]]] = {
    **{f"scale {value}": (_weight_scale(value), {("scales", "model.0.conv.weight/QuantizeLinear")})
       for value in (0.0, np.inf, np.nan, -0.1)},
    "zero point": (lambda edit: edit.set_tensor("/model.0/act/Mul/zero_point", np.array(3, np.int8)),
     {("symmetric", "/model.0/act/Mul/QuantizeLinear")}),
    "unsigned": (lambda edit: edit.set_tensor("/model.0/act/Mul/zero_point", np.array(0, np.uint8)),
     {("symmetric", "/model.0/act/Mul/QuantizeLinear")}),
    "weight per tensor": (_one_weight_scale, {("granularity", "model.0.conv.weight/DequantizeLinear")}),
    "weight per input channel": (_other_weight_axis, {("granularity", "model.3.m.cv1.conv.weight/DequantizeLinear")}),
    "activation per channel": (_several_activation_scales, {("granularity", f"{HEAD}/act/Mul/QuantizeLinear")}),
    "pair of two scales": (_partner_with_another_scale, {("pairs", f"{HEAD}/act/Mul/QuantizeLinear")}),
    "integers by another node": (_integers_through_another_node,
     {("pairs", f"{MAXIMUM}/QuantizeLinear"), ("pairs", f"{MAXIMUM}/DequantizeLinear"), ("float island", "same")}),
    "integers from outside": (_integers_from_outside, {("pairs", f"{MAXIMUM}/DequantizeLinear")}),
    "scale from outside": (_scale_from_outside, {("scales", "model.0.conv.weight/QuantizeLinear")}),
    "two quantizers": (_second_quantizer, {("one quantizer", "second/QuantizeLinear")}),
    "quantized twice": (_quantized_twice, {("one quantizer", "second/QuantizeLinear")}),
    "float input": (lambda edit: edit.rewire("/model.1/cv1/conv/Conv", 0, "/model.1/MaxPool_output_0"),
     {("convolutions", "/model.1/cv1/conv/Conv")}),
    "float weight": (lambda edit: edit.bypass("model.0.conv.weight"), {("convolutions", "/model.0/conv/Conv")}),
    "pair before activation": (lambda edit: edit.insert_pair("/model.0/conv/Conv_output_0", 0.05, "inserted"),
     {("activation", "/model.0/conv/Conv")}),
    "pair inside SiLU": (lambda edit: edit.insert_pair("/model.0/act/Sigmoid_output_0", 0.01, "inserted"),
     {("activation", "/model.0/act/Sigmoid"), ("float island", "/model.0/act/Mul")}),
    "concat: one input": (_set_scale("/model.3/m/Add", 0.031), {("concat", "/model.3/Concat")}),
    "concat: result": (_set_scale("/model.4/Concat", 0.031), {("concat", "/model.4/Concat")}),
    "concat: float input": (lambda edit: edit.bypass("/model.3/m/Add"), {("concat", "/model.3/Concat")}),
    "concat: float result": (
        lambda edit: edit.bypass("/model.4/Concat"),
        {
            ("concat", "/model.4/Concat"),
            ("convolutions", f"{HEAD}/conv/Conv"),
            ("convolutions", "/model.5/cv3.0/cv3.0.0/conv/Conv"),
        },
    ),
    "max pool": (_set_scale("/model.1/MaxPool", 0.041), {("moving", "/model.1/MaxPool")}),
    "max pool: float input": (lambda edit: edit.rewire("/model.1/MaxPool", 0, "/model.1/AveragePool_output_0"),
     {("moving", "/model.1/MaxPool")}),
    "max pool: float result": (lambda edit: edit.bypass("/model.1/MaxPool"),
     {("moving", "/model.1/MaxPool"), ("convolutions", "/model.1/cv1/conv/Conv")}),
    "split": (_set_scale("/model.3/cv1/act/Mul", 0.031), {("moving", "/model.3/Split")}),
    "resize": (_set_scale("/model.1/cv1/act/Mul", 0.031), {("moving", "/model.2/Resize")}),
    "average pool: float input": (lambda edit: edit.rewire("/model.1/AveragePool", 0, "/model.0/act/Mul_output_0"),
     {("average pool", "/model.1/AveragePool")}),
    "average pool: float result": (lambda edit: edit.bypass("/model.1/AveragePool"),
     {("average pool", "/model.1/AveragePool"), ("moving", "/model.1/MaxPool")}),
    "float residual": (lambda edit: edit.rewire("/model.3/m/Add", 0, "/model.3/Split_output_1"),
     {("residual", "/model.3/m/Add")}),
    "branch read twice": (_branch_read_twice, {("residual", "/model.3/m/Add")}),
    "chain of sums": (
        lambda edit: edit.insert_node("Add", "/model.3/m/Add_output_0", edit.find("/model.3/m/Add").input[0]), set()
    ),
    "float sum": (lambda edit: edit.insert_node("Neg", "/model.3/m/cv2/act/Mul_output_0"),
     {("residual", "/model.3/m/Add"), ("float island", "/inserted/Neg")}),
    "quantized scores": (lambda edit: edit.insert_pair("/model.5/Sigmoid_output_0", 1 / 127, "inserted"),
     {("decoding", "inserted/QuantizeLinear")}),
    "quantized boxes": (lambda edit: edit.insert_pair("/model.5/cv2.0/cv2.0.1/conv/Conv_output_0", 0.1, "inserted"),
     {("decoding", "inserted/QuantizeLinear")}),
    "quantized DFL": (lambda edit: edit.insert_pair("model.5.dfl.conv.weight", 0.1, "dfl"),
     {("decoding", "/model.5/dfl/conv/Conv")}),
    "float operator": (lambda edit: edit.insert_node("Exp", "/model.0/act/Mul_output_0"),
     {("float island", "/inserted/Exp")}),
    "activation of its own": (lambda edit: edit.insert_node("Relu", "/model.1/AveragePool_output_0"),
     {("float island", "/inserted/Relu"), ("average pool", "/model.1/AveragePool")}),
    "gate": (_gated, set()),
    "strong: FP32": (lambda edit: edit.set_tensor("model.0.conv.weight/scale/half", np.full(8, 0.01, np.float32)),
     {("types", "/model.0/conv/Conv")}),
    "strong: FP64 decodes": (lambda edit: _dfl(edit, np.float64), {("types", "/model.5/dfl/conv/Conv")}),
    "strong: FP32 decodes, as in older files": (lambda edit: _dfl(edit, np.float32), set()),
}  # fmt: skip


def test_good_graph_passes():
    onnx.checker.check_model(GOOD, full_check=True)
    report = verify(GOOD)
    assert report.findings == ()
    assert report.ok
    assert {name for name in PROPERTIES if not report.checked[name]} == {"types", "seven bits"}, "what looks at nothing"
    strong = verify(STRONG)
    assert strong.ok
    assert strong.checked == report.checked | {"types": 10}  # every convolution, DFL's too
    assert report.counts == {"quantizers": 24, "convolutions": 9, "float_convolutions": 0}
    assert "all 15 properties hold" in table(report)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_breaks_exactly_its_property(name):
    edit, expected = MUTATIONS[name]
    editor = Editor(STRONG if name.startswith("strong") else GOOD)
    edit(editor)
    report = verify(editor.model)
    assert sorted((finding.rule, finding.node) for finding in report.findings) == sorted(expected)
    assert report.ok is not bool(expected)


def test_every_property_has_a_mutation():
    mutated = {rule for _, expected in MUTATIONS.values() for rule, _ in expected}
    assert set(PROPERTIES) == mutated | {"seven bits"}  # test_a_file_for_openvino


def test_int8_weights_are_verified_too():
    stored = store_int8_weights(GOOD)
    assert verify(stored).ok
    editor = Editor(stored)
    editor.set_tensor("model.0.conv.weight/scale", np.zeros(8, np.float32))
    assert [finding.rule for finding in verify(editor.model).findings] == ["scales"]


# patterns of a recipe's `float`

# the convolutions of the good graph
CONVOLUTIONS = [
    "model.0.conv", "model.1.cv1.conv", "model.3.cv1.conv", "model.3.m.cv1.conv", "model.3.m.cv2.conv",
    "model.5.cv2.0.0.conv", "model.5.cv2.0.1.conv", "model.5.cv3.0.0.conv", "model.5.cv3.0.1.conv",
]  # fmt: skip


def named(modules: Iterable[str]) -> onnx.ModelProto:
    """The good graph as an exporter writes it that names the modules."""
    return set_metadata(GOOD, {"float_modules": json.dumps(list(modules))})


@pytest.mark.parametrize("path", CONVOLUTIONS)
def test_a_file_that_names_modules_is_judged_by_them_and_not_by_its_patterns(path):
    for modules, ok in ([path], True), ([], False), ([other for other in CONVOLUTIONS if other != path], False):
        editor = Editor(named(modules))
        editor.bypass(f"{path}.weight")
        report = verify(editor.model)
        assert report.ok is ok
        assert [finding.rule for finding in report.findings] == ([] if ok else ["convolutions"])
        assert report.counts["float_convolutions"] == len(modules)


def test_a_sum_of_float_convolutions_that_is_read_as_int8_has_quantized_inputs():
    editor = Editor(named(["model.3.m.cv1.conv", "model.3.m.cv2.conv"]))
    assert verify(editor.model).ok
    editor.rewire("/model.3/m/Add", 0, "/model.3/Split_output_1")
    assert [finding.rule for finding in verify(editor.model).findings] == ["residual"]


def test_an_operator_is_in_float_with_the_convolutions_around_it():
    for path, breaches in (("model.0.conv", set()), ("model.3.cv1.conv", {"convolutions", "float island"})):
        editor = Editor(named([path]))
        editor.bypass("model.0.conv.weight")
        editor.insert_node("Exp", "/model.0/act/Mul_output_0")
        editor.find("/inserted/Exp").name = "/model.0/Exp"
        assert {finding.rule for finding in verify(editor.model).findings} == breaches


REPEATED = offset_activations(GOOD)
OFFSET = drop_repeated_quantizers(REPEATED)
SEVEN_BITS = seven_bit_weights(OFFSET)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("model", "target", "broken"),
    [
        (SEVEN_BITS, "openvino-avx2", set()),
        (OFFSET, "openvino-avx2", {"seven bits"}),
        (OFFSET, "openvino", set()),
        (REPEATED, "openvino", {"one quantizer"}),
        (GOOD, "openvino", {"symmetric", "one quantizer"}),
        (REPEATED, "", {"symmetric"}),  # TensorRT's file
        (OFFSET, "", {"symmetric", "convolutions", "moving", "residual"}),
        (GOOD, "openvino-avx2", {"symmetric", "one quantizer", "seven bits"}),
    ],
)
def test_a_file_for_openvino(model, target, broken, stored):
    model = store_int8_weights(model) if stored else model
    report = verify(set_metadata(model, {TARGET_KEY: target} if target else {}))
    assert {finding.rule for finding in report.findings} == broken


def test_only_activations_are_unsigned_for_openvino():
    edit = Editor(set_metadata(SEVEN_BITS, {TARGET_KEY: "openvino-avx2"}))
    edit.set_tensor("model.0.conv.weight/zero_point", np.full(8, 128, np.uint8))
    assert {finding.rule for finding in verify(edit.model).findings} == {"symmetric"}


@pytest.mark.parametrize(("zero_point", "broken"), [(20, set()), (129, {"symmetric"})])
def test_zero_points_for_openvino(zero_point, broken):
    """They are those of a range that holds 0, and equal where values only move."""
    edit = Editor(set_metadata(OFFSET, {TARGET_KEY: "openvino"}))
    quantizer = edit.find("/model.1/cv1/act/Mul/QuantizeLinear")  # a Resize reads its pair, and a Concat that
    edit.set_tensor(quantizer.input[2], np.uint8(zero_point))
    broken = {"concat", "convolutions", *broken}  # which the convolution behind the Concat has no single grid for
    assert {finding.rule for finding in verify(edit.model).findings} == broken
