"""Networks with unusual layers: exported files have all properties, and compute what the torch networks compute."""

from pathlib import Path

import onnx
import pytest
import torch
from exported_files import SIDE, assert_close, export_onnx, predict, program, random_images, run
from random_networks import TINY, random_network, save_float, save_quantized

from models.quantize import checkpoint
from models.quantize.flow import export_mode
from models.quantize.recipe import Recipe
from utils.jobs.compare_tensors import STEPS, compare_tensors
from utils.jobs.open import Network, load_network
from utils.onnx_graph.export import ExportConfig
from utils.onnx_graph.verify import verify

CPU = torch.device("cpu")


def quantized(folder: Path, recipe: Recipe | None = None, **changes: object) -> Network:
    """The tiny network with changes to its description, placed and calibrated."""
    floating = save_float(folder / "float.pt", random_network({**TINY, **changes}))
    return load_network(save_quantized(folder / "int8.pt", floating, recipe), CPU)


# upstream's `activation` → what there is of it in a file at most opsets: below 20 torch writes GELU in pieces, at 13
# Hardswish too, and Mish always
ACTIVATIONS = {"ReLU()": "Relu", "Mish()": "Softplus", "GELU()": "Erf", "Hardswish()": "HardSwish"}


@pytest.mark.parametrize(
    ("activation", "options"),
    [("ReLU()", {"typing": "strong"}), ("Mish()", {"typing": "weak"}), ("Mish()", {"typing": "strong"}),
     ("GELU()", {"typing": "strong"}), ("Hardswish()", {"typing": "weak"}),
     ("Hardswish()", {"typing": "weak", "opset": 13})],
)  # fmt: skip
def test_a_network_with_another_activation(activation, options, tmp_path):
    """Placed, calibrated, exported, verified, and run beside PyTorch, as with SiLU."""
    network = quantized(tmp_path, activation=f"nn.{activation}")
    config = ExportConfig((SIDE, SIDE), 2, **options)
    result = export_onnx(network.model, config, tmp_path / "network.onnx", network.metadata())
    assert result.report.ok, result.report.findings
    model = onnx.load(result.path)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Sigmoid") == 1
    assert any(traced.layout for traced in result.quantizers.values()), "no tensor has whole blocks of channels"
    pieces = activation == "Hardswish()" and "opset" in options
    assert kinds.count("HardSigmoid" if pieces else ACTIVATIONS[activation]) >= 35
    assert compare_tensors(network.model, model, random_images(), result.quantizers)[STEPS] <= 1
    pixels, score = (0.25, 1e-3) if options["typing"] == "weak" else (0.5, 2e-3)
    assert_close(run(result.path, random_images()), predict(network, random_images()), pixels, score)


@pytest.mark.parametrize(("strides", "channels"), [((8, 16), 3), ((8, 16, 32), 1), ((4, 8, 16, 32, 64), 3)])
def test_other_levels_and_one_channel(strides, channels, tmp_path, capsys):
    """Of coarse levels without a head the layers are still there, and nothing reads them; checked beside PyTorch."""
    levels = [{4: 1, 8: 3, 16: 4, 32: 6, 64: 7}[stride] for stride in strides]
    layers = [*TINY["head"][:2], [-1, 1, "ADown", [16]], [levels, 1, "DDetect", ["nc"]]]
    floating = save_float(tmp_path / "levels.pt", random_network({**TINY, "head": layers, "ch": channels}))
    weights = save_quantized(tmp_path / "int8.pt", floating, imgsz=128)
    plan = checkpoint.load_quantized(weights).model.quantization_plan
    unread = [path for path, reason in plan.float_convolutions.items() if reason == "nothing leads from it to the head"]
    assert {path[:7] for path in unread} == {f"model.{layer}" for layer in range(levels[-1] + 1, 8)}
    for file, typing in ((weights, "weak"), (weights, "strong"), (floating, "weak")):
        words = ("--weights", file, "--output", tmp_path / "a.onnx", "--imgsz", 128, "--typing", typing)
        code, out, err = program(capsys, *words, "--device", "cpu")
        assert (code, err, out[-1]) == (0, [], "matches PyTorch (rounding only)")
        shape = onnx.load(tmp_path / "a.onnx").graph.input[0].type.tensor_type.shape.dim
        assert [size.dim_value for size in shape] == [1, channels, 128, 128]


@pytest.mark.parametrize("recipe", [Recipe(add="residual"), Recipe(float=("model.2",))], ids=["residual", "float"])
def test_a_network_with_an_input_of_a_sum_or_a_block_in_float(recipe, tmp_path):
    network = quantized(tmp_path, recipe)
    config = ExportConfig((SIDE, SIDE), 1, typing="weak")
    report = export_onnx(network.model, config, tmp_path / "some.onnx", network.metadata()).report
    assert report.ok, report.findings
    assert report.counts["float_convolutions"] == 2 * len(recipe.float)


WIDE = "64 channels"
FIRST = {  # layers that read the image and pool, enlarge or read it twice → the stride of the convolution behind them
    "max pool": ([-1, 1, "nn.MaxPool2d", [2, 2]], 1),
    "AConv": ([-1, 1, "AConv", [8]], 1),
    "upsample": ([-1, 1, "nn.Upsample", [None, 2, "nearest"]], 4),
    "SPPCSPC": ([-1, 1, "SPPCSPC", [16]], 2),
    WIDE: ([-1, 1, "Conv", [64, 3, 1]], 2),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_network_that_does_not_begin_with_one_narrow_convolution(name, tmp_path, capsys):
    """The image is quantized in front of it, and the check finds nothing; a convolution of 64 channels becomes two."""
    first, stride = FIRST[name]
    backbone = [first, [-1, 1, "Conv", [8, 3, stride]], *TINY["backbone"][1:]]
    head = [[one_later(sources), *row] for sources, *row in TINY["head"]]
    floating = save_float(tmp_path / "first.pt", random_network({**TINY, "backbone": backbone, "head": head}))
    weights = save_quantized(tmp_path / "int8.pt", floating)
    arguments = ("--weights", weights, "--imgsz", SIDE, SIDE, "--typing", "weak", "--device", "cpu")
    path = tmp_path / "a.onnx"
    code, out, err = program(capsys, *arguments, "--output", path)
    assert (code, err, out[-1]) == (0, [], "matches PyTorch (rounding only)")
    assert verify(onnx.load(path)).ok
    in_parts = "/model.0/conv/Conv.1" in {node.name for node in onnx.load(path).graph.node}
    assert in_parts == (name == WIDE)


def one_later(source: int | list[int]) -> int | list[int]:
    """Where a layer reads, when another layer is put in front of all."""
    return [one_later(one) for one in source] if isinstance(source, list) else source + (source >= 0)


LEVELS = TINY["head"][:2]  # up to layer 6
TWINS = {  # layers from 7 on → kinds of nodes that compute the same twice, and how many are left
    "two upsamples": ([*[[6, 1, "nn.Upsample", [None, 2, "nearest"]]] * 2, [[7, 8, 4], 1, "Concat", [1]]], "Resize", 1),
    "two ADowns": (
        [*[[4, 1, "ADown", [16]]] * 2, [[7, 8], 1, "Concat", [1]], TINY["head"][2], [[10, 4], 1, "Concat", [1]]],
        "AveragePool",
        4,  # layer 5, an AConv, has the same, too
    ),
}


@pytest.mark.parametrize(("name", "simplify"), [*((name, False) for name in TWINS), ("two ADowns", True)])
def test_layers_that_compute_the_same(name, simplify, tmp_path):
    """In the file there is one of them, and its quantizer is still compared with the right one in PyTorch."""
    layers, kind, left = TWINS[name]
    head = [*LEVELS, *layers, [[3, 6 + len(layers), 6], 1, "DDetect", ["nc"]]]
    network = quantized(tmp_path, head=head)
    config = ExportConfig((SIDE, SIDE), 2, simplify=simplify, for_int8_kernels=False)
    result = export_onnx(network.model, config, tmp_path / "network.onnx", network.metadata())
    assert result.report.ok, result.report.findings
    model = onnx.load(result.path)
    assert [node.op_type for node in model.graph.node].count(kind) == left
    steps, share, _ = compare_tensors(network.model, model, random_images(), result.quantizers).values()
    calls: list[int] = []
    for quantizer in network.model.activation_quantizers.values():
        quantizer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad(), export_mode():
        network.model(random_images())
    assert len(result.quantizers) < len(calls)
    assert (steps <= 1, share < 1e-3) == (True, True)
