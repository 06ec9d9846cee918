"""Channels in blocks of 32: the same results bit for bit, nothing cuts through a block any more, the rest stays."""

from functools import partial

import numpy as np
import onnx
import pytest
from int8_network import Network, assert_same, block, nodes, one_scale_for_all_weights
from onnx import ModelProto, helper
from qdq_graph import SIZE

from utils.onnx_graph.passes.align_channels import align_channels
from utils.onnx_graph.qdq_view import number_quantizers, provenance_of, without_provenance
from utils.onnx_graph.view import GraphView, attribute, drop_unused, rename_inputs, store, with_shapes


def with_layouts(model):
    """The graph with whole blocks; and the layouts of tensors that became wider, by their quantizers."""
    result = align_channels(number_quantizers(model))
    layouts = {name: one.layout for name, one in provenance_of(result).items() if one.layout is not None}
    return without_provenance(result), layouts


def aligned(model: ModelProto) -> ModelProto:
    result = without_provenance(align_channels(model))
    return onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True, data_prop=True)


def widths(model: ModelProto) -> dict[str, int]:
    """Tensor → channels."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in with_shapes(model)}
    return {name: shape[1].dim_value for name, shape in shapes.items() if len(shape) == 4}


def cut_blocks(model: ModelProto) -> list[str]:
    """Concats and Splits of which a part begins inside a block."""
    found, width = [], widths(model)
    for node in model.graph.node:
        if node.op_type in ("Concat", "Split") and attribute(node, "axis") == 1:
            parts = node.input if node.op_type == "Concat" else node.output
            if any(width[name] % 32 for name in parts[:-1]):
                found.append(node.name)
    return found


@pytest.mark.parametrize("opset", [17, 19])
@pytest.mark.parametrize(("parts", "width"), [(120, 128), (60, 64), (48, 64), (24, 32), (16, 32)])
def test_parts_get_whole_blocks(parts, width, opset):
    model = block(parts)
    model.opset_import[0].version = opset
    if opset > 17:  # a Split of equal parts may say how many they are, and not how large
        nodes(model, "Split")[0].attribute.append(helper.make_attribute("num_outputs", 2))
    result = aligned(model)
    assert cut_blocks(model) == ["/Split", "/Concat"]
    assert cut_blocks(result) == []
    found = widths(result)
    assert found["/Concat_output_0"] == 3 * width + parts  # nothing follows the last part
    assert found["/Split_output_1"] == found["/Add_output_0"] == width
    assert_same(result, model)


@pytest.mark.parametrize("parts", [32, 64, 12, 8])
def test_whole_blocks_and_narrow_parts_stay(parts):
    model = block(parts)
    assert with_layouts(model) == (model, {})


def in_float(model: ModelProto, of_weights: bool) -> None:
    """All that reads a weight, or an activation, reads it in front of its quantizer."""
    view, around = GraphView(model), {}
    for node in nodes(model, "DequantizeLinear"):
        source = view.producer(node.input[0]).input[0]
        if view.is_constant(source) == of_weights:
            around[node.output[0]] = source
    for node in model.graph.node:
        rename_inputs(node, around)
    drop_unused(model)


def behind(model: ModelProto, kind: str, other: str) -> None:
    """One more operator behind the Concat, the first convolution and the last half; {} is the number of channels."""
    for tensor, count in {"/Concat_output_0": 96, "/Add_output_0": 24, "/cv1/act/Mul_output_0": 48}.items():
        index = next(i for i, node in enumerate(model.graph.node) if tensor in node.output)
        for node in model.graph.node:
            node.input[:] = [f"{tensor}.behind" if name == tensor else name for name in node.input]
        second = other.format(count) or tensor
        model.graph.node.insert(index + 1, helper.make_node(kind, [tensor, second], [f"{tensor}.behind"]))


def channels_scaled_one_by_one(model: ModelProto) -> None:
    """A Mul with a number for each channel."""
    for count in (96, 24, 48):
        store(model, f"factors{count}", np.ones((1, count, 1, 1), np.float32))
    behind(model, "Mul", "factors{}")


def divided_by_itself(model: ModelProto) -> None:
    """Where it is zero that is no number, which a weight of zero does not take away."""
    behind(model, "Div", "")


@pytest.mark.parametrize(
    "change", [partial(in_float, of_weights=True), partial(in_float, of_weights=False), one_scale_for_all_weights,
               channels_scaled_one_by_one, divided_by_itself],
)  # fmt: skip
def test_what_cannot_be_widened_stays(change):
    model = block(24)
    change(model)
    onnx.checker.check_model(model, full_check=True)
    assert with_layouts(model) == (model, {})


def test_slices_and_resizes_follow():
    b = Network()
    y = b.convolve(b.pair("images", 1 / 127, "images"), "cv1", (3, 48))
    values = {name: b.tensor(name, np.array([value])) for name, value in (("from", 24), ("to", 1 << 40), ("axis", 1))}
    half = b.quantized("Slice", "/Slice", y, *values.values())
    half = b.quantized("AveragePool", "/Pool", half, kernel_shape=[2, 2], strides=[2, 2])
    sizes = b.tensor("sizes", np.array([2, 24, SIZE, SIZE]))
    up = b.quantized("Resize", "/Resize", half, "", "", sizes, mode="nearest", nearest_mode="floor",
                     coordinate_transformation_mode="asymmetric")  # fmt: skip
    model = b.finish(b.quantized("Concat", "/Concat", y, up, y, axis=1), 120, batch=2)
    result = aligned(model)
    assert cut_blocks(result) == []
    assert widths(result)["/Slice_output_0"] == widths(result)["/Resize_output_0"] == 32
    assert widths(result)["/Concat_output_0"] == 2 * (32 + 32) + 32
    assert_same(result, model)


@pytest.mark.parametrize("seed", range(25))
def test_random_networks(seed):
    """Whatever is made of these layers gives the same, and there is nothing left to do a second time."""
    random = np.random.default_rng(seed)
    b = Network(seed)
    pool = [(b.convolve(b.pair("images", 1 / 127, "images"), "stem", (3, 48)), 48)]
    for step in range(12):
        x, count = pool[random.integers(len(pool))]
        kind = random.choice(["conv", "concat", "split", "add", "max", "average"])
        if kind == "conv":
            wanted = int(random.choice([16, 20, 24, 32, 40, 60, 90]))
            pool.append((b.convolve(x, f"conv{step}", (count, wanted), kernel=3), wanted))
        elif kind == "concat":
            chosen = [pool[i] for i in random.integers(len(pool), size=random.integers(2, 5))]
            joined = b.quantized("Concat", f"/concat{step}", *(name for name, _ in chosen), axis=1)
            pool.append((joined, sum(number for _, number in chosen)))
        elif kind == "split" and count >= 32:
            first = int(random.integers(16, count - 15))
            sizes = b.tensor(f"sizes{step}", np.array([first, count - first]))
            parts = b.node("Split", f"/split{step}", x, sizes, outputs=2, axis=1)
            pairs = [b.pair(part, 0.05, f"/split{step}.{i}") for i, part in enumerate(parts)]
            pool += zip(pairs, (first, count - first), strict=True)
        elif kind == "add":
            same = [name for name, number in pool if number == count]
            other = same[random.integers(len(same))]
            pool.append((b.quantized("Add", f"/add{step}", x, other), count))
        elif kind in ("max", "average"):
            name = {"max": "MaxPool", "average": "AveragePool"}[kind]
            pool.append((b.quantized(name, f"/pool{step}", x, kernel_shape=[3, 3], pads=[1] * 4), count))
    joined = b.quantized("Concat", "/end", *(name for name, _ in pool), axis=1)
    model = b.finish(joined, sum(number for _, number in pool))
    result = aligned(model)
    assert_same(result, model, 1)
    assert with_layouts(result) == (result, {})
