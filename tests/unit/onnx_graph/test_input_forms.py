"""Forms of input: graphs that take bytes compute in ONNX Runtime what the float graph computes."""

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from qdq_graph import SIZE, Editor, good_graph, results

from models.quantize.fake_quantize import float16_scale
from utils.core.input_spec import InputSpec
from utils.onnx_graph.passes.take_bytes import take_bytes
from utils.onnx_graph.passes.to_half import to_half
from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import input_spec, set_metadata

GOOD = good_graph()


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


def run(model: ModelProto, images: np.ndarray, output: str = "output0") -> np.ndarray:
    return results(model, images=images)[output]


def fed(form: InputSpec) -> np.ndarray:
    """What the form takes for PIXELS, by its definition."""
    return PIXELS.transpose(0, 2, 3, 1) if form.layout == "nhwc" else PIXELS


@pytest.mark.parametrize("form", [BYTES, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("model", [GOOD, HALF], ids=["weak", "strong"])
def test_same_results(model, form):
    graph = formed(model, form)
    expected = run(model, PIXELS.astype(np.float32) / 255)
    np.testing.assert_array_equal(run(graph, fed(form)), expected)
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


@pytest.mark.parametrize("scale", [1 / 127, 254 / 255 / 127, 0.00787, 0.0041])
def test_bytes_give_the_integers_of_floats(scale):
    """All 256 of them, for scales as the quantizers have them."""
    step = float16_scale(torch.tensor(scale)).item()
    values = np.arange(256, dtype=np.float32)
    divided, at_once = np.rint(values / np.float32(255) / np.float32(step)), np.rint(values / np.float32(step * 255))
    np.testing.assert_array_equal(divided, at_once)


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
    np.testing.assert_allclose(run(graph, fed(form), "negative"), PIXELS / -255, rtol=1e-6)
    np.testing.assert_array_equal(run(graph, fed(form)), run(GOOD, PIXELS.astype(np.float32) / 255))
