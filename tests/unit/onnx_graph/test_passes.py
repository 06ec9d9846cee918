"""Graph passes: each leaves its input alone, and ONNX Runtime computes the same before and after."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from decoding_graph import ANCHORS, BATCH, BINS, POINTS, head_graph
from decoding_graph import images as head_images
from onnx import ModelProto, TensorProto, helper, numpy_helper
from qdq_graph import SIZE, Builder, Editor, good_graph, results

from utils.core.input_spec import InputSpec
from utils.onnx_graph import export_config, passes
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.passes.decode_boxes import decode_boxes
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.passes.to_half import to_half
from utils.onnx_graph.qdq_view import without_provenance
from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import DEQUANTIZE, QUANTIZE, input_spec, set_metadata

GOOD = good_graph()


def clean_up(model: ModelProto) -> ModelProto:
    """The passes that every export runs."""
    return without_provenance(passes.run_passes(model, ExportConfig(for_int8_kernels=False)))


def run(model: ModelProto, batch: int = 1, output: str = "output0", images: np.ndarray | None = None) -> np.ndarray:
    """An output, for random images if there are no others."""
    random = np.random.default_rng(0).random((batch, 3, SIZE, SIZE), np.float32)
    return results(model, images=random if images is None else images)[output]


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def chunk_graph(batch: int | str) -> ModelProto:
    """`x.chunk(2, 1)` and `x.view(b, -1)` as torch's exporter writes them, with an Identity and an unused constant."""
    b = Builder()
    constants = {"one": [1], "zero": [0], "index": 1, "two": 2, "first": 0, "rest": [-1], "lost": 5.0}
    for name, value in constants.items():
        b.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value))))
    x = b.conv("images", "model.0", (3, 8))
    shape = b.node("Shape", "/Shape", x)
    channels = b.node("Gather", "/Gather", shape, "index", axis=0)
    half = b.node("Unsqueeze", "/Unsqueeze", b.node("Div", "/Div", channels, "two"), "zero")
    full = b.node("Mul", "/Mul", half, b.node("Unsqueeze", "/Unsqueeze_2", "two", "zero"))
    left = b.node("Slice", "/Slice", x, "zero", half, "one")
    right = b.node("Slice", "/Slice_1", x, half, full, "one")
    summed = b.node("Identity", "/Identity", b.node("Add", "/Add", left, right))
    images = b.node("Unsqueeze", "/Unsqueeze_1", b.node("Gather", "/Gather_1", shape, "first", axis=0), "zero")
    b.node("Reshape", "/Reshape", summed, b.node("Concat", "/Concat", images, "rest", axis=0))
    b.nodes.append(helper.make_node("Identity", ["/Reshape_output_0"], ["output0"], name="/Identity_1"))
    return b.model("output0", [4 * SIZE * SIZE], batch)


def double_graph() -> ModelProto:
    """A tensor with two equal pairs, one behind, then another scale, of one element as torch's; and two equal pools."""
    b = Builder()
    x = b.pair("images", np.array([1 / 127]), "images")
    x = b.conv(x, "model.0", (3, 8))
    one, two = b.pair(x, np.array([0.05]), "one"), b.pair(x, np.array([0.05]), "two")
    three = b.pair(b.pair(two, 0.05, "again"), 0.07, "other")
    total = b.node("Add", "/Add", b.node("Add", "/Add_1", one, two), three)
    for pool in ("/pool", "/pool_1"):
        same = b.pair(b.node("MaxPool", pool, one, kernel_shape=[1, 1]), 0.05, pool)
        total = b.node("Add", f"{pool}/Add", total, same)
    b.nodes.append(helper.make_node("Relu", [total], ["output0"], name="/Relu"))
    return b.model("output0", [8, SIZE, SIZE])


PASSES: dict[str, Callable[[ModelProto], ModelProto]] = {
    step.__name__: step
    for step in passes.wanted_passes(ExportConfig(int8_weights=True))
    if step is not passes.convolve_pools  # of what others make
} | {"all": clean_up, "simplify": lambda model: passes.simplify(clean_up(model))}
GRAPHS = {"good": GOOD, "chunk": chunk_graph(1), "dynamic chunk": chunk_graph("batch"), "double": double_graph()}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", PASSES)
def test_pass_is_pure_and_keeps_the_numbers(name, graph):
    model = GRAPHS[graph]
    before = model.SerializeToString(deterministic=True)
    result = PASSES[name](model)
    assert model.SerializeToString(deterministic=True) == before, "the input was changed"
    assert result.graph.output == model.graph.output
    for batch in (1, 3) if graph == "dynamic chunk" else (1,):
        np.testing.assert_array_equal(run(result, batch), run(model, batch))


def grouped_graph(groups: int, channels: int = 32) -> ModelProto:
    """A quantized convolution in groups, its weight with a scale an output channel."""
    b = Builder()
    x = b.pair(b.conv(b.pair("images", 1 / 127, "images"), "model.0", (3, channels)), 0.05, "x")
    weight = b.random.normal(0, 0.3, (channels, channels // groups, 3, 3)).astype(np.float32)
    scale = np.abs(weight).max((1, 2, 3)) / 127
    quantized = b.pair(b.tensor("weight", weight), scale, "weight", axis=0)
    x = b.node("Conv", "/Conv", x, quantized, kernel_shape=[3, 3], pads=[1] * 4, group=groups)
    b.nodes.append(helper.make_node("Relu", [x], ["output0"], name="/Relu"))
    return b.model("output0", [channels, SIZE, SIZE])


@pytest.mark.parametrize(("groups", "dense"), [(1, True), (4, True), (8, True), (16, False), (32, False)])
def test_few_narrow_groups_become_dense_with_the_same_results(groups, dense):
    model = grouped_graph(groups)
    result = passes.dense_groups(model)
    (conv,) = [node for node in result.graph.node if node.name == "/Conv"]
    assert (onnx.helper.get_node_attr_value(conv, "group") == 1) is dense
    np.testing.assert_allclose(run(result), run(model), atol=1e-5)
    assert verify(result).ok == verify(model).ok is True


def pool_graph(batch: int | str = 1, quantized: bool = True, then: str = "conv", **changed: object) -> ModelProto:
    """An average pool of 2x2 and what reads it: a convolution, SiLU, itself as a second reader, the graph's output."""
    b = Builder()
    x = b.pair(b.conv(b.pair("images", 1 / 128, "images"), "model.0", (3, 8)), 1 / 32, "x")
    attributes = {"kernel_shape": [2, 2], "strides": [1, 1]} | changed
    pooled = b.node("AveragePool", "/model.1/AveragePool", x, **attributes)
    x = b.pair(pooled, 0.0213, "/model.1/AveragePool") if quantized else pooled
    if then == "silu":
        x = b.node("Mul", "/model.1/Mul", x, b.node("Sigmoid", "/model.1/Sigmoid", x))
    elif then == "two":
        x = b.node("Add", "/Add", x, b.pair(pooled, 0.0317, "/second"))
    elif then == "float":
        x = b.node("Add", "/Add", x, pooled)
    x = b.conv(x, "model.2", (8, 8), silu=False) if then != "silu" else x
    b.nodes.append(helper.make_node("Relu", [x], ["output0"], name="/Relu"))
    model = b.model("output0", [8, SIZE, SIZE], batch)
    if then == "output":
        model.graph.output.append(helper.make_tensor_value_info(pooled, TensorProto.FLOAT, None))
    for dim in model.graph.output[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "side"
    return model


@pytest.mark.parametrize("then", ["conv", "two"])
@pytest.mark.parametrize("batch", [1, "batch"])
def test_an_int8_average_pool_becomes_a_depthwise_convolution(batch, then):
    model = pool_graph(batch, then=then)
    result = passes.convolve_pools(model)
    (conv,) = [node for node in result.graph.node if node.name == "/model.1/AveragePool"]
    assert (conv.op_type, onnx.helper.get_node_attr_value(conv, "group")) == ("Conv", 8)
    assert "AveragePool" not in ops(result)
    assert verify(result).ok == verify(model).ok
    for count in (1, 3) if batch == "batch" else (1,):
        np.testing.assert_array_equal(run(result, count), run(model, count))
    stored = passes.store_int8_weights(result).graph.initializer
    (levels,) = [numpy_helper.to_array(tensor) for tensor in stored if tensor.name.endswith("/weight_quantized")]
    np.testing.assert_array_equal(levels[:, 0], np.broadcast_to([[64, 64, 0], [64, 64, 0], [0, 0, 0]], (8, 3, 3)))


@pytest.mark.parametrize(
    "changed",
    [
        {"quantized": False}, {"then": "silu"}, {"then": "float"}, {"then": "output"}, {"strides": [2, 2]},
        {"kernel_shape": [3, 3]}, {"pads": [0, 0, 1, 1]}, {"auto_pad": "SAME_UPPER"},
    ],
)  # fmt: skip
def test_other_average_pools_stay(changed):
    model = pool_graph(**changed)
    assert passes.convolve_pools(model) == model


@pytest.mark.parametrize("batch", [1, 3])
def test_boxes_and_scores_are_joined_apart_with_the_same_results(batch):
    model = two_levels()
    result = passes.separate_predictions(model)
    assert "Split" not in ops(result)
    assert ops(result).count("Concat") == 2 + 1  # boxes, scores, and the network's result
    np.testing.assert_array_equal(run(result, batch), run(model, batch))


OTHER_PARTS: dict[str, Callable[[onnx.NodeProto], object]] = {
    "a sum": lambda level: setattr(level, "op_type", "Add"),
    "one": lambda level: level.input.pop(),
    "three": lambda level: level.input.append("images"),
}


@pytest.mark.parametrize("parts", OTHER_PARTS)
def test_levels_of_other_parts_stay(parts):
    model = two_levels()
    OTHER_PARTS[parts](next(node for node in model.graph.node if node.name == "/Concat0"))
    assert passes.separate_predictions(model) == model


def two_levels() -> ModelProto:
    """The end of upstream's head: two levels of boxes and scores, joined, then split."""
    b = Builder()
    levels = []
    for level, stride in enumerate((1, 2)):
        x = b.node("MaxPool", f"/pool{level}", "images", kernel_shape=[stride] * 2, strides=[stride] * 2)
        both = [b.conv(x, f"model.{level}.{part}", (3, count), silu=False) for part, count in enumerate((4, 2))]
        joined = b.node("Concat", f"/Concat{level}", *both, axis=1)
        shape = b.tensor(f"shape{level}", np.array([0, 6, -1]))
        levels.append(b.node("Reshape", f"/Reshape{level}", joined, shape))
    everything = b.node("Concat", "/Concat", *levels, axis=2)
    boxes, scores = b.node("Split", "/Split", everything, b.tensor("sizes", np.array([4, 2])), outputs=2, axis=1)
    end = [boxes, b.node("Sigmoid", "/Sigmoid", scores)]
    b.nodes.append(helper.make_node("Concat", end, ["output0"], name="/End", axis=1))
    return b.model("output0", [6, SIZE * SIZE + SIZE * SIZE // 4], batch="batch")


def test_merging_leaves_one_quantizer_a_tensor():
    result = clean_up(double_graph())
    # image, weight, tensor, pool, and the one of another scale behind the tensor, which is not for a pass to decide
    assert ops(result).count(QUANTIZE) == ops(result).count(DEQUANTIZE) == 5
    assert ops(result).count("MaxPool") == 1


def test_quantizers_and_scales_are_named_after_what_they_round():
    b = Builder()
    x = b.conv("images", "model.0", (3, 8))
    halves = b.node("Split", "/Split", x, b.tensor("sizes", np.array([4, 4])), outputs=2, axis=1)
    b.node("Add", "/Add", *(b.pair(half, 0.05, f"q{index}") for index, half in enumerate(halves)))
    result = passes.name_quantizers(b.model("/Add_output_0", [4, SIZE, SIZE]))
    rounded = ["model.0.conv.weight", "/Split", "/Split.1"]
    assert [node.name for node in result.graph.node if node.op_type == QUANTIZE] == [
        f"{one}/{QUANTIZE}" for one in rounded
    ]
    names = {tensor.name for tensor in result.graph.initializer}
    assert names - {"sizes", "model.0.conv.weight", "model.0.conv.bias"} == {
        *(f"{one}/scale" for one in rounded), "zero_point", "zero_point_1", "zero_point_2"
    }  # fmt: skip


def test_equal_scales_are_one_initializer():
    result = passes.share_scales(GOOD)
    scales = {node.input[1] for node in result.graph.node if node.op_type == QUANTIZE}
    assert len(scales) == 9 + 5, "9 weights, and 1/127, 0.02, 0.03, 0.04, 0.05 for activations"
    assert verify(result).ok


def test_weights_are_rounded_as_torch_rounds_them():
    """Also between two levels, where dividing by the scale and multiplying by its inverse part."""
    shape = (40, 3, 3, 3)
    scale = np.random.default_rng(3).uniform(0.001, 0.1, shape[0]).astype(np.float32)
    factor = scale.reshape(-1, 1, 1, 1)
    weight = (np.random.default_rng(4).integers(-300, 300, shape) / np.float32(2) * factor).astype(np.float32)
    b = Builder()
    quantized = b.pair(b.tensor("w", weight), scale, "w", axis=0)
    b.nodes.append(helper.make_node("Conv", ["images", quantized], ["output0"], name="/Conv", pads=[1] * 4))
    result = clean_up(b.model("output0", [shape[0], SIZE, SIZE]))
    stored = numpy_helper.to_array(next(tensor for tensor in result.graph.initializer if tensor.name == "w"))
    zeros = torch.zeros(shape[0], dtype=torch.int32)
    in_torch = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(weight), torch.from_numpy(scale), zeros, 0, -128, 127
    )
    np.testing.assert_array_equal(stored, in_torch.numpy())
    by_division = np.clip(np.rint(weight / factor), -128, 127) * factor
    assert (by_division != stored).any(), "no weight of this test lies where the two part"
    np.testing.assert_array_equal(run(passes.store_int8_weights(result)), run(result))


def test_int8_weights_shrink_the_file_and_round_like_quantizelinear():
    result = passes.store_int8_weights(GOOD)
    kinds = {tensor.name: tensor.data_type for tensor in result.graph.initializer if len(tensor.dims) == 4}
    assert list(kinds.values()).count(TensorProto.INT8) == 9
    assert {name for name in kinds if name.endswith("conv.weight")} == {"model.5.dfl.conv.weight"}
    np.testing.assert_array_equal(run(result), run(GOOD))


def float_graph() -> ModelProto:
    editor = Editor(GOOD)
    for name in [node.name for node in GOOD.graph.node if node.op_type == QUANTIZE]:
        editor.bypass(name.removesuffix(f"/{QUANTIZE}"))
    del editor.model.graph.value_info[:]
    return passes.remove_unused(editor.model)


def test_half_turns_the_body_and_dfl_to_fp16_and_leaves_scores_and_ends():
    model = float_graph()
    result = to_half(model)
    difference = np.abs(run(result) - run(model))
    assert 0 < difference.max() < 0.01
    kinds = {tensor.name: tensor.data_type for tensor in result.graph.initializer}
    assert kinds["model.0.conv.weight/half"] == TensorProto.FLOAT16
    assert kinds["model.5.dfl.conv.weight/half"] == TensorProto.FLOAT16
    found = onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in found}
    assert types["/model.5/dfl/Softmax_output_0"] == types["/model.5/Split_output_1"] == TensorProto.FLOAT16
    assert types["/model.5/Sigmoid_output_0"] == TensorProto.FLOAT, "scores close to 1 would be equal"
    assert kinds["/model.2/scales"] == TensorProto.FLOAT, "factors of a Resize are always FP32"
    assert "model.0.conv.weight" not in kinds
    assert ops(result).count("Cast") == 3, "the image, distances and scores"
    assert (result.graph.input, result.graph.output) == (model.graph.input, model.graph.output)
    editor = Editor(model)
    editor.set_tensor("model.0.conv.bias", np.full(8, 1e6, np.float32))
    stored = next(t for t in to_half(editor.model).graph.initializer if t.name == "model.0.conv.bias/half")
    assert np.isfinite(numpy_helper.to_array(stored)).all(), "it saturates"


BEHIND_PROTOTYPES = {  # what reads the result of their last convolution → the tensors of it that are FP16
    "SiLU": ([("Sigmoid", ["raw"], "gate"), ("Mul", ["raw", "gate"], "output1")], {"gate", "output1/half"}),
    "Mish": (
        [("Softplus", ["raw"], "gate"), ("Tanh", ["gate"], "product"), ("Mul", ["raw", "product"], "output1")],
        {"gate", "product", "output1/half"},
    ),
    "scores": ([("Sigmoid", ["raw"], "output1")], set()),
    "another reader": (
        [("Sigmoid", ["raw"], "gate"), ("Mul", ["raw", "gate"], "product"), ("Add", ["product", "gate"], "output1")],
        set(),
    ),
    "no activation": ([("Exp", ["raw"], "output1")], set()),
}


def with_prototypes(kind: str, read_again: bool) -> ModelProto:
    """The float graph with one more last convolution, and a second output behind it."""
    model = float_graph()
    score = next(node for node in model.graph.node if node.name == "/model.5/cv3.0/cv3.0.1/conv/Conv")
    nodes = [("Conv", [score.input[0], "model.5.proto.conv.weight"], "raw"), *BEHIND_PROTOTYPES[kind][0]]
    outputs = ["output1", "output2"] if read_again else ["output1"]
    nodes += [("Neg", ["output1"], "output2")] if read_again else []
    weight = np.random.default_rng(0).normal(0, 0.3, (4, 8, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "model.5.proto.conv.weight"))
    model.graph.node.extend(helper.make_node(op, inputs, [name], f"/model.5/{name}") for op, inputs, name in nodes)
    shape = [1, 4, SIZE, SIZE]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in outputs)
    return model


@pytest.mark.parametrize("kind", BEHIND_PROTOTYPES)
@pytest.mark.parametrize("read_again", [False, True])
def test_half_takes_the_activation_of_prototypes_along(kind, read_again):
    model = with_prototypes(kind, read_again)
    result = to_half(model)
    found = onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True).graph.value_info
    half = {value.name for value in found if value.type.tensor_type.elem_type == TensorProto.FLOAT16}
    assert half & {"gate", "product", "output1", "output1/half"} == BEHIND_PROTOTYPES[kind][1]
    assert result.graph.output == model.graph.output
    assert ops(result).count("Cast") == 4, "the image and three ends"
    for output in result.graph.output:
        one, other = (run(graph, output=output.name) for graph in (result, model))
        assert one.dtype == np.float32
        assert 0 < np.abs(one - other).max() < 0.02


# graphs that take bytes compute what the float graph computes


def strong() -> ModelProto:
    """The graph in FP16, at the first opset with FP16 scales, where a Split says how many results it has."""
    model = set_metadata(to_half(GOOD), {"typing": "strong"})
    model.opset_import[0].version, model.ir_version = 19, 9
    split = next(node for node in model.graph.node if node.op_type == "Split" and len(node.input) == 1)
    split.attribute.append(helper.make_attribute("num_outputs", 2))
    return model


HALF = strong()
BYTES, LAST = InputSpec("uint8"), InputSpec("uint8", "nhwc")
PIXELS = np.random.default_rng(0).integers(0, 256, (1, 3, SIZE, SIZE), np.uint8)


def formed(model: ModelProto, form: InputSpec) -> ModelProto:
    graph = take_bytes(model, form)
    onnx.checker.check_model(graph, full_check=True)
    kept = {entry.key: entry.value for entry in graph.metadata_props}
    return set_metadata(graph, {**kept, **form.metadata()})


def fed(form: InputSpec) -> np.ndarray:
    """What the form takes for PIXELS, by its definition."""
    return PIXELS.transpose(0, 2, 3, 1) if form.layout == "nhwc" else PIXELS


@pytest.mark.parametrize("form", [BYTES, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("model", [GOOD, HALF], ids=["weak", "strong"])
def test_same_results(model, form):
    graph = formed(model, form)
    expected = run(model, images=PIXELS.astype(np.float32) / 255)
    np.testing.assert_array_equal(run(graph, images=fed(form)), expected)
    assert np.ptp(expected) > 1
    assert input_spec(graph) == form
    readers = [node for node in graph.graph.node if "images" in node.input]  # TensorRT takes no other layer there
    assert [(node.op_type, node.attribute[0].i) for node in readers] == [("Cast", TensorProto.FLOAT)]
    kind = graph.graph.input[0].type.tensor_type
    assert kind.elem_type == TensorProto.UINT8
    shape = [1, SIZE, SIZE, 3] if form is LAST else [1, 3, SIZE, SIZE]
    assert [dim.dim_value for dim in kind.shape.dim] == shape


@pytest.mark.parametrize("form", [BYTES, LAST])
def test_the_first_quantizer_divides_bytes(form):
    """TensorRT 8.6.0 leaves out the factor of a Mul in front of a QuantizeLinear; FP16 scales would be rounded."""
    for model, products in ((GOOD, 0), (HALF, 1)):
        graph = formed(model, form)
        before, after = ([node for node in one.graph.node if node.op_type == "Mul"] for one in (model, graph))
        assert len(after) - len(before) == products
        assert verify(graph).ok
    graph = Editor(formed(set_metadata(GOOD, {"typing": "weak"}), form))
    first = next(node for node in graph.model.graph.node if node.op_type == "QuantizeLinear")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.model.graph.initializer}
    own = next(node for node in graph.model.graph.node if first.output[0] in node.input)
    assert stored[first.input[1]] == stored[own.input[1]] * np.float32(255)
    first.input[1] = own.input[1]  # as if they had been divided
    found = {(one.rule, one.node, one.message) for one in verify(graph.model).findings}
    assert found == {("pairs", first.name, "its DequantizeLinear has another scale")}


@pytest.mark.parametrize("form", [BYTES, LAST])
def test_what_reads_an_image_in_float_gets_a_product(form):
    """As where a recipe leaves one of two convolutions in float that read it."""
    edit = Editor(GOOD)
    edit.model.graph.node.append(helper.make_node("Neg", ["images"], ["negative"], name="stranger"))
    edit.model.graph.output.append(helper.make_tensor_value_info("negative", TensorProto.FLOAT, [1, 3, SIZE, SIZE]))
    graph = formed(edit.model, form)
    assert verify(graph).ok
    pixels, products = {"images"}, set()
    for node in graph.graph.node:
        if pixels & {*node.input} and node.op_type in ("Cast", "Transpose", "Mul"):
            (products if node.op_type == "Mul" else pixels).add(node.output[0])
    assert products
    assert not any(node.input[0] in products for node in graph.graph.node if node.op_type == "QuantizeLinear")  # 8.6.0
    np.testing.assert_allclose(run(graph, output="negative", images=fed(form)), PIXELS / -255, rtol=1e-6)
    np.testing.assert_array_equal(run(graph, images=fed(form)), run(GOOD, images=PIXELS.astype(np.float32) / 255))


# decoding in few steps, against upstream's formula in NumPy, and against the graph that it replaces


def decoded(model: ModelProto, batch: int = BATCH) -> np.ndarray:
    return run(model, images=head_images(batch))


def reference(model: ModelProto) -> np.ndarray:
    """Upstream's formula: mean distances to the sides, from the anchors' points."""
    weight = onnx.numpy_helper.to_array(next(one for one in model.graph.initializer if one.name == "weight"))
    raw = np.einsum("oi,bia->boa", weight[..., 0].astype(float), head_images())
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
    np.testing.assert_allclose(decoded(model), reference(model), atol=2e-4)
    np.testing.assert_allclose(decoded(result), reference(model), atol=2e-4)
    np.testing.assert_array_equal(decoded(result)[:, 4:], decoded(model)[:, 4:])  # scores are left alone
    if batch == "batch":
        np.testing.assert_allclose(decoded(result, 5), decoded(model, 5), atol=2e-4)
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
    assert 0 < np.abs(decoded(result) - decoded(model)).max() < 0.5  # pixels, of cells of 16


# how an exported file is typed: by the network, the operator set that was asked for, and the installed TensorRT


@pytest.mark.parametrize(
    ("quantized", "asked", "typing", "opset"),
    [
        (True, {}, "strong", 19), (False, {}, "weak", 17), (True, {"opset": 17}, "weak", 17),
        (True, {"opset": 20}, "strong", 20), (False, {"opset": 20}, "weak", 20),
        (True, {"typing": "weak"}, "weak", 17), (False, {"typing": "strong"}, "strong", 17),
    ],
)  # fmt: skip
def test_typing_follows_from_network_and_opset(quantized, asked, typing, opset):
    config = ExportConfig(**{"typing": "auto", **asked}).resolved(quantized)
    assert (config.typing, config.opset) == (typing, opset)


@pytest.mark.parametrize(
    ("installed", "typing"),
    [({}, "strong"), ({"tensorrt": "8.6.1"}, "weak"), ({"tensorrt-cu12": "10.11.0.33"}, "weak"),
     ({"tensorrt": "10.12.0"}, "strong"), ({"tensorrt": "11.4.0.12"}, "strong"), ({"tensorrt": "unknown"}, "strong")],
)  # fmt: skip
def test_an_installed_tensorrt_decides(installed, typing, monkeypatch):
    def version(name: str) -> str:
        if name not in installed:
            raise export_config.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(export_config.metadata, "version", version)
    assert ExportConfig(typing="auto").resolved(quantized=True).typing == typing
