"""What scripts/compare_placement.py exports: three files that differ in nothing but the placement of quantizers."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from random_networks import TINY, convolutions_in, tiny_with

from models.quantize import placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.jobs.compare_placement import variants
from utils.onnx_graph.qdq_view import Context
from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import attribute, metadata_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import yaml

    folder = tmp_path_factory.mktemp("placement")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return folder


@pytest.fixture(scope="module")
def run(start):
    """The program on `tiny.yaml` of a folder."""

    def call(folder, *words):
        fixed = ["--imgsz", 64, "--batch-size", 2, "--device", "cpu", "--onnx-only", "--typing", "weak"]
        program = "scripts/compare_placement.py"
        return start(program, folder / "tiny.yaml", *fixed, "--output", folder / "out", *words)

    return call


def test_three_placements_and_nothing_twice(folder, run):
    result = run(folder)
    assert result.returncode == 0, result.stderr
    graphs = {v: Context(onnx.load(folder / f"out/tiny-64-b2-{v}.onnx")) for v in variants.VARIANTS}
    weights = {v: _weights(graph.model) for v, graph in graphs.items()}
    modules = {variant: convolutions_in(folder / f"out/tiny-64-b2-{variant}.onnx") for variant in variants.VARIANTS}
    assert modules["fp16"] == modules["int8-convs"] == modules["int8"]
    assert graphs["fp16"].nodes("QuantizeLinear") == []
    for variant in ("int8-convs", "int8"):  # the same network: weights differ by their rounding only
        for name, value in joined(weights[variant]).items():
            expected = ungrouped(weights["fp16"][name], value.shape[1])
            assert np.abs(value - expected).max() <= np.abs(value).max() / 127
    separate, shared = graphs["int8-convs"], graphs["int8"]
    for node in separate.nodes("Concat", "MaxPool", "AveragePool", "Resize"):
        if not set(node.output) & separate.decoding:
            assert all(separate.dequantizer(name) is None for name in node.input)
    for node in shared.nodes("Concat", "MaxPool", "Resize"):
        if not set(node.output) & shared.decoding:
            assert all(shared.dequantizer(name) for name in shared.inputs(node))
    pools = separate.nodes("AveragePool")  # convolutions in ours
    assert pools
    assert shared.nodes("AveragePool") == []
    depthwise = [node.name for node in shared.nodes("Conv") if attribute(node, "group", 1) > 4]
    assert depthwise == [node.name for node in pools]
    scales = [node.input[1] for node in separate.activations]
    assert len(scales) > len({node.input[1] for node in shared.activations})
    before = {path: path.stat().st_mtime_ns for path in folder.glob("out/*.onnx")}
    again = run(folder)
    assert again.stdout.count("is there already") == 3
    assert {path: path.stat().st_mtime_ns for path in folder.glob("out/*.onnx")} == before


def test_a_segmentation_description_keeps_its_prototypes(run, tmp_path):
    """As upstream's models/segment/*.yaml; what --from-onnx and the engine tools read."""
    import yaml

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_with("DSegment")))
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    for variant in variants.VARIANTS:
        graph = onnx.load(tmp_path / f"out/tiny-64-b2-{variant}.onnx")
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.graph.output}
        assert shapes == {"output0": [2, 4 + 10 + 8, 84], "output1": [2, 8, 16, 16]}
        assert metadata_of(graph)["task"] == "segment"
    modules = {variant: convolutions_in(tmp_path / f"out/tiny-64-b2-{variant}.onnx") for variant in variants.VARIANTS}
    assert modules["fp16"] == modules["int8-convs"] == modules["int8"]
    assert {"model.11.proto.conv", "model.11.cv4.0.2"} <= modules["int8"]
    context = Context(onnx.load(tmp_path / "out/tiny-64-b2-int8.onnx"))
    of_masks = [
        node for node in context.convolutions if context.path(node).startswith(("model.11.proto", "model.11.cv4"))
    ]
    assert len(of_masks) == 1 + 3 * 3
    assert all(context.dequantizer(node.input[0]) for node in of_masks)


def test_a_yaml_with_another_activation(run, tmp_path):
    """With ReLU as `activation` each convolution is fused with a Relu, and quantized as with SiLU."""
    import yaml

    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "activation": "nn.ReLU()"}))
    result = run(tmp_path, "--variants", "fp16", "int8")
    assert result.returncode == 0, result.stderr
    floating, quantized = (Context(onnx.load(tmp_path / f"out/tiny-64-b2-{name}.onnx")) for name in ("fp16", "int8"))
    assert verify(quantized.model).ok
    for graph in (floating, quantized):
        assert len(graph.nodes("Sigmoid")) == 1  # of the scores
        relus = graph.nodes("Relu")
        assert {graph.view.producer(node.input[0]).op_type for node in relus} == {"Conv"}
        assert len(relus) > 10
    readers = [quantized.view.consumers(node.output[0]) for node in quantized.nodes("Relu")]
    assert {node.op_type for nodes in readers for node in nodes} == {"QuantizeLinear"}


def joined(weights):
    """Without channels that fill blocks, and with the parts of a convolution that became several in one."""
    found = {}
    for name, value in weights.items():
        value = value if "dfl" in name else without_fillings(value)
        whole = re.sub(r"\.conv\.\d+\.weight$", ".conv.weight", name)
        found[whole] = np.concatenate([found[whole], value]) if whole in found else value
    return found


def without_fillings(weight):
    """Without the channels of zeros that were added to fill blocks."""
    rows, columns = weight.any((1, 2, 3)), weight.any((0, 2, 3))
    return weight[rows][:, columns]


def ungrouped(weight, inputs):
    """A grouped convolution's weights as those of one that reads all channels, zero where it did not."""
    each = weight.shape[1]
    groups = inputs // each
    full = np.zeros((len(weight), inputs, *weight.shape[2:]), weight.dtype)
    for group in range(groups):
        rows = slice(group * len(weight) // groups, (group + 1) * len(weight) // groups)
        full[rows, group * each : (group + 1) * each] = weight[rows]
    return full


def _weights(model):
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("conv.weight")}


def test_convolutions_only_keeps_float_what_the_recipe_keeps():
    model = upstream.fuse(upstream.build_model(TINY))
    ours = placement.plan(model, Recipe(head="float"))
    theirs = variants.convolutions_only(ours)
    assert theirs.tensors == ()
    assert set(theirs.fallback) == {path for path, state in ours.convolutions.items() if state == "int8"}
    assert theirs.convolutions == ours.convolutions


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("aux.yaml", {"head": [*TINY["head"][:-1], [[3, 8, 6], 1, "DualDDetect", ["nc"]]]}, "reparameterization.py"),
        ("a.txt", {}, "is neither a model's YAML nor float weights"),
    ],
)
def test_models_that_cannot_be_compared(tmp_path, name, content, message):
    import yaml

    from utils.core.errors import InputError

    path = tmp_path / name
    path.write_text(yaml.safe_dump({**TINY, **content}))
    with pytest.raises(InputError, match=message):
        variants.load(path)
