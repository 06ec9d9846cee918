"""Blocks of channels: parts that are cut out, and whole blocks of 32; the same results bit for bit, the rest stays."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import pytest
from int8_network import Network, assert_same, block, nodes, one_scale_for_all_weights, run
from onnx import ModelProto, helper
from onnx.numpy_helper import from_array
from qdq_graph import SIZE

from utils.onnx_graph.passes.align_channels import align_channels
from utils.onnx_graph.passes.int8_kernels import separate_first
from utils.onnx_graph.passes.separate_parts import separate_parts
from utils.onnx_graph.qdq_view import number_quantizers, provenance_of, without_provenance
from utils.onnx_graph.view import GraphView, attribute, drop_unused, overwrite, rename_inputs, store, with_shapes

# a convolution for each part of a result that is cut

WHOLE = "/cv1/act/Mul_output_0"  # before its quantizer
Y = "/cv1/act/Mul/DequantizeLinear_output_0"


def separated(cut, model):
    """The graph after a pass; and the quantizers of parts by name: the one that each is a part of, and the channels."""
    numbered = number_quantizers(model)
    result, wholes = cut(numbered), list(provenance_of(numbered))
    parts = {name: (wholes[one.call], one.channels) for name, one in provenance_of(result).items() if one.channels}
    return without_provenance(result), parts


def elan(sizes: tuple[int, ...] = (24, 24), used: int = 1, *, slices: bool = False, silu: bool = True) -> ModelProto:
    """`concat(y, c)`, where y is a convolution's result and c is computed from one part of it."""
    b = Network()
    x = b.pair("images", 1 / 127, "images")
    y = b.pair(b.conv(x, "cv1", (3, sum(sizes)), kernel=3, silu=silu), 0.05, "/cv1/act/Mul")
    starts = np.cumsum([0, *sizes])
    if slices:
        ends = [*starts[1:-1], 1 << 40]  # torch writes the last one so
        bounds = {"from": starts[used], "to": ends[used], "axis": 1, "step": 1}
        part = b.node("Slice", "/Slice", y, *(b.tensor(name, np.array([value])) for name, value in bounds.items()))
    else:
        part = b.node("Split", "/Split", y, b.tensor("sizes", np.array(sizes)), outputs=len(sizes), axis=1)[used]
    c = b.convolve(b.pair(part, 0.05, "/part"), "cv2", (sizes[used], 16), kernel=3)
    return b.finish(b.quantized("Concat", "/Concat", y, c, axis=1), sum(sizes) + 16)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("slices", [True, False])
@pytest.mark.parametrize("used", [0, 1])
def test_each_half_gets_a_convolution(used, slices, silu):
    model = onnx.shape_inference.infer_shapes(elan((24, 40), used, slices=slices, silu=silu))
    result, parts = separated(separate_parts, model)
    assert_same(result, model)
    assert [conv.name for conv in nodes(result, "Conv")] == [
        "/cv1/conv/Conv.0", "/cv1/conv/Conv.1", "/cv2/conv/Conv", "/last/conv/Conv"
    ]  # fmt: skip
    assert not nodes(result, "Split") + nodes(result, "Slice")
    assert parts == {
        "/cv1/act/Mul.0/QuantizeLinear": ("/cv1/act/Mul/QuantizeLinear", slice(0, 24)),
        "/cv1/act/Mul.1/QuantizeLinear": ("/cv1/act/Mul/QuantizeLinear", slice(24, 64)),
    }
    names = {node.name for node in nodes(result, "QuantizeLinear")}
    assert set(parts) <= names
    assert "/part/QuantizeLinear" not in names  # the part has that scale already
    assert "cv1.conv.1.weight/QuantizeLinear" in names
    assert not {"/part/scale", "/part/zero_point"} & {tensor.name for tensor in result.graph.initializer}


@pytest.mark.parametrize(("start", "end", "axis", "step", "bounds"),
                         [(2, 5, 1, 1, (2, 5)), (2, 5, 1, 2, None), (5, 2, 1, -1, None), (2, 5, 1, -1, None),
                          (2, 5, 2, 1, None), (5, 5, 1, 1, None), (-3, 5, 1, 1, None)])  # fmt: skip
def test_the_channels_of_a_slice_are_known_where_they_are_neighbours(start, end, axis, step, bounds):
    numbers = zip(("start", "end", "axis", "step"), (start, end, axis, step), strict=True)
    made = [helper.make_node("Constant", [], [name], value=from_array(np.array([value]))) for name, value in numbers]
    node = helper.make_node("Slice", ["images", "start", "end", "axis", "step"], ["part"])
    graph = helper.make_graph([*made, node], "slice", [], [])
    assert GraphView(helper.make_model(graph)).channel_bounds(node) == bounds


def first(channels: int) -> ModelProto:
    b = Network()
    x = b.convolve(b.pair("images", 1 / 127, "images"), "a", (3, channels), kernel=3)
    return b.finish(b.convolve(x, "b", (channels, 64), kernel=3), 64)


def test_the_first_convolution_is_cut_into_32_channels_that_are_copied():
    model = first(96)
    result, parts = separated(separate_first, model)
    assert_same(result, model)
    first_ones = [f"/a/conv/Conv.{part}{copy}" for copy in ("", ".copy") for part in range(3)]
    assert [conv.name for conv in nodes(result, "Conv")] == [*first_ones, "/b/conv/Conv", "/last/conv/Conv"]
    assert parts == {
        name: ("/a/act/Mul/QuantizeLinear", slice(32 * part, 32 * part + 32))
        for part in range(3)
        for name in (f"/a/act/Mul.{part}/QuantizeLinear", f"/a/conv/Conv.{part}.copy/QuantizeLinear")
    }
    (concat,), view = nodes(result, "Concat"), GraphView(result)
    assert view.consumers(concat.output[0])[0].name == "/a/act/Mul/QuantizeLinear"  # Q/DQ on both sides
    for name in concat.input:  # TensorRT 8.6.0 writes a wrong place where the convolution itself stands there
        assert view.producer(view.producer(view.producer(name).input[0]).input[0]).name.endswith(".copy")


@pytest.mark.parametrize("channels", [16, 32, 80])
def test_a_first_convolution_that_stays(channels):
    model = first(channels)
    assert separated(separate_first, model) == (model, {})


def add(model: ModelProto, kind: str, *inputs: str, outputs: int = 1, **attributes: int) -> None:
    """Another reader, at the end, whose results are the graph's."""
    names = [f"other{index}" for index in range(outputs)]
    model.graph.node.append(helper.make_node(kind, inputs, names, **attributes))
    for name in names:
        output(model, name)


def output(model: ModelProto, name: str) -> None:
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))


def not_joined(model: ModelProto) -> None:
    (concat,), (split,) = nodes(model, "Concat"), nodes(model, "Split")
    concat.input[:] = [*split.output, concat.input[1]]


def in_groups(model: ModelProto) -> None:
    nodes(model, "Conv")[0].attribute.append(helper.make_attribute("group", 3))
    weight = GraphView(model).constant("cv1.conv.weight")
    overwrite(model, {"cv1.conv.weight": weight[:, :1]})


def slopes_by_channel(model: ModelProto) -> None:
    slope = store(model, "slope", np.full((48, 1, 1), 0.25, np.float32))
    gate, activation = nodes(model, "Sigmoid")[0], nodes(model, "Mul")[0]
    activation.CopyFrom(helper.make_node("PRelu", [gate.input[0], slope], [WHOLE]))
    model.graph.node.remove(gate)


def overlapping(model: ModelProto) -> None:
    bounds = [store(model, name, np.array([value])) for name, value in (("s", 8), ("e", 40), ("a", 1))]
    add(model, "Slice", Y, *bounds)


LEFT_ALONE: dict[str, Callable[[ModelProto], None]] = {
    "something else reads it": lambda model: add(model, "Add", Y, Y),
    "cut along the height": lambda model: add(model, "Split", Y, axis=2, outputs=2),
    "read before its activation": lambda model: add(model, "Relu", "/cv1/conv/Conv_output_0"),
    "a part is an output": lambda model: output(model, nodes(model, "Split")[0].output[1]),
    "only what is not quantized is cut": lambda model: nodes(model, "Split")[0].input.__setitem__(0, WHOLE),
    "only the parts are joined": not_joined, "parts overlap": overlapping, "groups": in_groups,
    "one scale for all weights": one_scale_for_all_weights, "slopes by channel": slopes_by_channel,
}  # fmt: skip


@pytest.mark.parametrize("change", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_left_alone(change):
    model = elan()
    change(model)
    assert len(run(model, 1)) == 1  # it is a network still
    assert separated(separate_parts, model) == (model, {})


@pytest.mark.parametrize("seed", range(25))
def test_blocks_behind_each_other(seed):
    """The same results, also with whole blocks of channels afterwards; a second time finds nothing."""
    random = np.random.default_rng(seed)
    b = Network(seed)
    x, channels, expected = b.pair("images", 1 / 127, "images"), 3, 0
    for step in range(3):
        sizes = random.choice([8, 16, 24, 32, 40], random.integers(2, 4))
        y = b.convolve(x, f"cv{step}", (channels, int(sizes.sum())), kernel=3)
        parts = b.node("Split", f"/split{step}", y, b.tensor(f"sizes{step}", sizes), outputs=len(sizes), axis=1)
        joined = [y]
        for index in random.choice(len(sizes), random.integers(1, len(sizes) + 1), replace=False):
            half = b.pair(parts[index], float(random.choice([0.05, 0.1])), f"/split{step}.{index}")
            joined.append(b.convolve(half, f"cv{step}.{index}", (int(sizes[index]), 16), kernel=3))
        random.shuffle(joined)
        x = b.quantized("Concat", f"/concat{step}", *joined, axis=1)
        channels, expected = int(sizes.sum()) + 16 * (len(joined) - 1), expected + len(sizes)
    model = b.finish(x, channels)
    result, parts = separated(separate_parts, model)
    assert len(parts) == expected
    assert_same(result, model, 1)
    assert_same(align_channels(result), model, 1)
    assert separated(separate_parts, result)[1] == {}


# whole blocks of channels


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
