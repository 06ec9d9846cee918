"""Exported files compute what the torch networks compute, also those with unusual layers, and export_qat.py says what
it did or why it cannot."""

import json
import shlex
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from exported_files import SIDE, assert_close, export_onnx, predict, program, random_images, run
from onnx import ModelProto
from random_networks import TINY, convolutions_in, narrow, random_network, save_float, save_quantized

from models.quantize import checkpoint, placement
from models.quantize.flow import export_mode
from models.quantize.modules import limit_weights_to_7_bits, quantized_weights
from models.quantize.recipe import Recipe
from utils.core.errors import QatError
from utils.jobs.compare_tensors import LIMITS, RANGES, STEPS, compare_tensors
from utils.jobs.open import load_network, open_runner
from utils.onnx_graph import export
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.qdq_view import QdqGraph
from utils.onnx_graph.verify import verify
from utils.onnx_graph.view import metadata_of, overwrite

CPU = torch.device("cpu")
OPENVINO = "openvino-avx2"
TARGETS = ("openvino", OPENVINO)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small network with random weights: a float checkpoint and a quantized one made from it."""
    folder = tmp_path_factory.mktemp("weights")
    floating = save_float(folder / "tiny.pt", random_network(TINY))
    return {"float": floating, "quantized": save_quantized(folder / "tiny-int8.pt", floating)}


@pytest.fixture(scope="module")
def networks(weights):
    return {kind: load_network(path, CPU) for kind, path in weights.items()}


@pytest.fixture(scope="module")
def exported(networks, tmp_path_factory):
    """Files for two images, float or quantized, with other options: each is exported once. Tests only read them."""
    folder, found = tmp_path_factory.mktemp("exported"), {}

    def export(kind, **options):
        config = ExportConfig(**{"imgsz": (SIDE, SIDE), "batch_size": 2, **options})
        if (kind, config) not in found:
            path = folder / f"{kind}-{len(found)}.onnx"
            found[kind, config] = export_onnx(networks[kind].model, config, path, networks[kind].metadata())
        return found[kind, config]

    return export


CONFIGS = {
    "static": {},
    "opset 13": {"opset": 13},
    "strong": {"typing": "strong"},
    "strong, dynamic": {"typing": "strong", "dynamic": "all", "simplify": True},
    "simplified": {"simplify": True},
    "in place": {"inplace": True},
    "dynamic batch": {"dynamic": "batch"},
    "dynamic, simplified": {"dynamic": "all", "simplify": True},
    "one image, dynamic": {"dynamic": "all", "batch_size": 1},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_files_compute_what_torch_computes(kind, options, networks, exported):
    network, result = networks[kind], exported(kind, **options)
    onnx.checker.check_model(str(result.path), full_check=True)
    assert (result.report is None) == (kind == "float")
    assert result.report is None or result.report.ok, result.report.findings
    if kind == "float" and options.get("typing") == "strong":
        assert result.size_bytes < 0.65 * exported("float").size_bytes  # FP16
    # float: the same arithmetic in another order; quantized: single values move by a step, see the tests below
    pixels, score = (1e-3, 1e-5) if kind == "float" else (0.25, 1e-3)
    if options.get("typing") == "strong":
        pixels, score = (0.25, 1e-3) if kind == "float" else (0.5, 2e-3)  # cells of 32 pixels, in steps of 1/128
    shapes = {"none": [(2, SIDE, SIDE)], "batch": [(2, SIDE, SIDE), (1, SIDE, SIDE), (3, SIDE, SIDE)]}
    for shape in shapes.get(options.get("dynamic", "none"), [(2, SIDE, SIDE), (1, 96, 128), (3, 32, 64)]):
        images = random_images(*shape)
        expected = predict(network, images)
        assert_close(run(result.path, images), expected, pixels, score)
        with open_runner(result.path) as runner:  # optimised
            assert_close(runner.infer({"images": images})["output0"].numpy(), expected, pixels, score)


def without_zero_blocks(weight: np.ndarray, module: torch.nn.Conv2d) -> np.ndarray:
    """`[C_out, C_in, h, w]` → `[C_out, C_in / groups, h, w]` of a convolution in groups that was written as dense."""
    if weight.shape[1] == module.weight.shape[1]:
        return weight
    blocks = weight.reshape(module.groups, module.out_channels // module.groups, module.groups, -1, *weight.shape[2:])
    assert np.count_nonzero(weight) == sum(np.count_nonzero(blocks[i, :, i]) for i in range(module.groups))
    return np.concatenate([blocks[i, :, i] for i in range(module.groups)])


@pytest.mark.parametrize("options", [{}, {"int8_weights": True}, {"int8_weights": True, "typing": "strong"}])
def test_weights_are_the_integers_of_the_torch_network(options, networks, exported):
    """Also where a weight lies between two levels, as half of the largest one does.

    Scales are float16 numbers, so that FP16 keeps them, and weights stay whole multiples of theirs.
    """
    network = networks["quantized"]
    context = QdqGraph(onnx.load(exported("quantized", for_int8_kernels=False, **options).path))
    modules = dict(network.model.named_modules())
    assert context.convolutions
    for conv in context.convolutions:
        module = modules[context.path(conv)]
        scale = module.weight_quantizer.amax.flatten().numpy() / 127
        found = context.array(context.dequantizer(conv.input[1]).input[1])
        assert found.dtype == (np.float16 if "typing" in options else np.float32)
        np.testing.assert_array_equal(found.astype(np.float32), scale)
        with torch.no_grad():
            expected = module.weight_quantizer(module.weight).numpy()
        if options:
            expected = np.rint(expected / scale[:, None, None, None])
        stored = context.array(context.weight_name(conv))
        np.testing.assert_array_equal(without_zero_blocks(stored, module), expected)


@pytest.mark.parametrize("options", [{"simplify": True}, {"opset": 13}, {"int8_weights": True}, {"dynamic": "all"}])
def test_quantized_tensors_agree_within_one_step(options, networks, exported):
    network, plain, other = networks["quantized"], exported("quantized"), exported("quantized", **options)
    assert any(traced.layout for traced in plain.quantizers.values())  # some tensors are wider there
    for result in (plain, other):
        graph = onnx.load(result.path)
        assert len(result.quantizers) == len(QdqGraph(graph).activations)
        steps, share, apart, moved = compare_tensors(network.model, graph, random_images(), result.quantizers).values()
        assert (steps <= 1, share < 1e-4, apart < 1e-3, moved) == (True, True, True, 0)


@pytest.mark.parametrize(("name", "side"), [("demo", 160), ("gelan-c, narrow", 160), ("gelan-e, narrow", 160)])
def test_networks(name, side, checkout, upstream_yaml, tmp_path):
    """Every convolution is quantized, every property holds, and tensors are one step apart at most."""
    network, _, is_narrow = name.partition(", ")
    config = checkout / "data/demo/gelan-digits.yaml" if name == "demo" else upstream_yaml(network)
    config = narrow(config) if is_narrow else config
    floating = save_float(tmp_path / "network.pt", random_network(config, nc=3))
    quantized = load_network(save_quantized(tmp_path / "network-int8.pt", floating), CPU)
    size = ExportConfig((side, side), 1)
    result = export_onnx(quantized.model, size, tmp_path / "network.onnx", quantized.metadata())
    assert result.report is not None
    assert result.report.ok, result.report.findings
    assert result.report.counts["float_convolutions"] == 0
    assert convolutions_in(result.path) == set(quantized.model.quantization_plan.convolutions)
    assert result.report.checked["concat"] > 0
    assert result.outputs == {"output0": (1, 7, 21 * side**2 // 1024)}
    found = compare_tensors(quantized.model, onnx.load(result.path), random_images(1, side, side), result.quantizers)
    steps, share, apart, _ = found.values()
    assert (steps <= 1, share < 1e-4, apart < 1e-3) == (True, True, True)


@pytest.mark.parametrize(
    ("recipe", "floats"),
    [(Recipe(head="last-conv-float"), 6), (Recipe(head="float"), 18), (Recipe(float=("model.0", "model.3.cv2.*")), 7),
     (Recipe(add="residual"), 0)],
)  # fmt: skip
def test_recipe_travels_with_the_file(recipe, floats, weights, tmp_path):
    network = load_network(save_quantized(tmp_path / "some.pt", weights["float"], recipe), CPU)
    assert len(network.model.quantization_plan.float_convolutions) == floats
    for typing in ("strong", "weak"):
        config = ExportConfig((SIDE, SIDE), 1, typing=typing)
        result = export_onnx(network.model, config, tmp_path / "some.onnx", network.metadata())
        report = verify(onnx.load(result.path))
        assert report.ok, report.findings
        assert report.counts["float_convolutions"] == floats
    graph = onnx.load(result.path)
    named = json.loads(metadata_of(graph)["float_modules"])
    assert named == list(network.model.quantization_plan.float_convolutions)
    onnx.helper.set_model_props(graph, {})
    assert floats == 0 or {f.rule for f in verify(graph).findings} >= {"convolutions"}


def state_of(model: torch.nn.Module) -> list[object]:
    """Everything that an export could leave behind, but values."""
    attributes = [(key, id(value)) for key, value in vars(model.model[-1]).items() if not key.startswith("_")]
    named = [(name, id(one)) for name, one in (*model.named_modules(), *model.named_parameters())]
    modules = [(one.training, len(one._forward_hooks) + len(one._forward_pre_hooks)) for one in model.modules()]
    return [attributes, named, modules, [one.requires_grad for one in model.parameters()]]


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("fails", [False, True])
def test_network_is_left_as_it_was(kind, fails, weights, tmp_path, monkeypatch):
    model = load_network(weights[kind], CPU).model
    model.model[2].train()
    state, values = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    config = ExportConfig((96, 96), 1, dynamic="all", inplace=True)
    if fails:
        monkeypatch.setattr(torch.onnx, "export", lambda *_args, **_options: (_ for _ in ()).throw(RuntimeError("no")))
        with pytest.raises(QatError, match="cannot export this model: no"):
            export_onnx(model, config, tmp_path / "network.onnx", {})
    else:
        export_onnx(model, config, tmp_path / "network.onnx", {})
    assert state_of(model) == state
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_invalid_graph_is_not_written(networks, tmp_path, monkeypatch):
    def damage(graph: ModelProto) -> ModelProto:
        graph.graph.node[0].op_type = "Unheard"
        return graph

    monkeypatch.setattr(export, "without_provenance", damage)
    with pytest.raises(QatError, match="not valid ONNX"):
        export_onnx(networks["float"].model, ExportConfig((SIDE, SIDE)), tmp_path / "network.onnx", {})
    assert not list(tmp_path.iterdir())


def test_no_warnings_that_users_cannot_act_on(networks, tmp_path, recwarn, capfd):
    for network in networks.values():
        export_onnx(network.model, ExportConfig((SIDE, SIDE), dynamic="all"), tmp_path / "network.onnx", {})
    assert [str(item.message) for item in recwarn] == []
    assert capfd.readouterr() == ("", "")


# the program


@pytest.mark.parametrize("kind", ["float", "quantized"])
def test_program_exports(kind, weights, tmp_path, capsys):
    path = tmp_path / "file.onnx"
    code, out, err = program(
        capsys, "--weights", weights[kind], "--output", path, "--imgsz", 64, 96, "--batch-size", 2, "--device", "cpu"
    )
    assert (code, err) == (0, [])
    name = {"float": "not quantized, DDetect, FP32", "quantized": "QAT, DDetect, INT8 and FP16 (strongly typed)"}[kind]
    opset, typing = {"float": ("17", "weak"), "quantized": ("19", "strong")}[kind]
    size = path.stat().st_size / 1e6
    if kind == "quantized":
        assert out.pop(0) == f"warning: --imgsz 64x96 was given, and {weights[kind]} is for 96"
    assert out[0] == f"{path}: {name}, opset {opset}, images [2, 3, 64, 96] -> output0 [2, 14, 126], {size:.1f} MB"
    assert onnx.load(path).ir_version == {"17": 8, "19": 9}[opset]  # so ONNX Runtime 1.16 reads them
    assert out[-1] == "matches PyTorch (rounding only)"
    assert out[-3:-1] == [f"next: python val_trt.py {path} --data DATA.yaml",
                          f"then, on the machine with the GPU: scripts/generate_trt_engine.sh {path}"]  # fmt: skip
    assert [line.endswith("all 15 properties hold") for line in out[1:-3]] == ([True] if kind == "quantized" else [])
    entries = metadata_of(onnx.load(path))
    expected = {"stride": "32", "task": "detect", "batch": "2", "opset": opset, "typing": typing, "dynamic": "none"}
    assert expected.items() <= entries.items()
    assert json.loads(entries["imgsz"]) == [64, 96]
    assert json.loads(entries["names"]) == {str(index): f"class {index}" for index in range(10)}
    assert entries["kind"] == ("float" if kind == "float" else "qat")
    assert entries["version"]
    if kind == "quantized":
        assert Recipe.from_dict(json.loads(entries["recipe"])) == checkpoint.load_quantized(weights[kind]).recipe
    else:
        assert "recipe" not in entries


def test_a_quantized_network_has_the_size_of_its_calibration_and_sizes_are_rounded_up(weights, tmp_path, capsys):
    assert load_network(weights["quantized"], CPU).source.imgsz == open_runner(weights["quantized"]).imgsz[0] == 96
    words = ("--output", tmp_path / "a.onnx", "--device", "cpu", "--check", 0)
    assert "images [1, 3, 96, 96]" in program(capsys, "--weights", weights["quantized"], *words)[1][0]
    code, out, err = program(capsys, "--weights", weights["float"], *words, "--img-size", 50, "--half", "--simplify")
    assert (code, err) == (0, [])
    assert out[0] == "warning: image size 50 is not a multiple of the stride 32; using 64"
    assert "not quantized, DDetect, FP16, opset 17, images [1, 3, 64, 64]" in out[2]


def test_names_say_what_is_in_a_file_and_what_is_replaced_is_said(weights, tmp_path, capsys):
    quick, folder = ("--imgsz", SIDE, "--check", 0, "--device", "cpu"), tmp_path / "a folder's"
    folder.mkdir()
    for kind in weights:
        (folder / f"{kind}.pt").write_bytes(weights[kind].read_bytes())
    (folder / "quantized-int8.onnx").write_bytes(b"somebody's")
    cases = [  # the words, the file, and whether it replaces one
        ("float", (), "float.onnx", False),
        ("float", ("--half",), "float-fp16.onnx", False),
        ("quantized", ("--typing", "weak"), "quantized-int8.onnx", True),
        ("quantized", ("--typing", "strong"), "quantized-int8-strong.onnx", False),
        ("quantized", ("--typing", "strong", "--dynamic", "batch"), "quantized-int8-strong.onnx", True),
        ("float", ("--include", "onnx_end2end", "--half"), "float-fp16-end2end.onnx", False),
    ]
    cases += [("quantized", ("--target", target), f"quantized-int8-{target}.onnx", False) for target in TARGETS]
    for kind, words, name, replaced in cases:
        code, out, err = program(capsys, "--weights", folder / f"{kind}.pt", *quick, *words)
        assert (code, err) == (0, [])
        assert any(line.startswith(f"{folder / name}: ") for line in out)
        assert [line for line in out if line.startswith("replaces")] == [f"replaces {folder / name}"] * replaced
        assert str(folder / name) in shlex.split(out[-2])
    shutil.copy(weights["quantized"], folder / "some-int8.pt")
    assert program(capsys, "--weights", folder / "some-int8.pt", *quick, "--typing", "weak")[0] == 0
    assert {path.name for path in folder.glob("*.onnx")} == {name for *_, name, _ in cases} | {"some-int8.onnx"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("more", [(), ("--int8-weights",), ("--input", "uint8")], ids=str)
def test_a_file_for_openvino(more, target, weights, tmp_path, capsys):
    """It is compared with PyTorch, whose ranges are the file's, and whose weights are rounded to 7 bits for AVX2."""
    path = tmp_path / "file.onnx"
    words = ("--weights", weights["quantized"], "--output", path, "--imgsz", SIDE, "--batch-size", 2, "--device", "cpu")
    code, out, err = program(capsys, *words, "--target", target, *more)
    assert (code, err) == (0, [])
    assert out[-1].startswith("matches PyTorch")
    assert ("7 bits" in out[-1]) is (target == OPENVINO)
    assert "--runtime openvino" in out[-2]
    assert not any("generate_trt_engine" in line for line in out)
    entries = metadata_of(onnx.load(path))
    assert (entries["target"], entries["typing"]) == (target, "weak")
    assert program(capsys, "--verify", path)[0] == 0


@pytest.mark.parametrize(("part", "factor"), [("scale", 1.5), ("scale", 0.7), ("zero_point", 0.5)])
def test_a_wrong_range_for_openvino_is_found(part, factor, exported, networks):
    """The torch network computes with the file's ranges, which are compared with its own."""
    result = exported("quantized", target="openvino")
    images = random_images(2)
    good = onnx.load(result.path)
    assert compare_tensors(networks["quantized"].model, good, images, result.quantizers)[RANGES] <= 1
    graph = QdqGraph(good)
    products = {name for node in graph.of_type("Mul") for name in node.output}
    behind_silu = [node for node in graph.activations if node.input[0] in products]
    name = behind_silu[1].input[1 if part == "scale" else 2]
    value = graph.constant(name)
    assert value > 0
    overwrite(good, {name: (value * factor).astype(value.dtype)})
    assert compare_tensors(networks["quantized"].model, good, images, result.quantizers)[RANGES] > LIMITS[RANGES][1]


def test_weights_of_7_bits_are_rounded_from_the_float_ones(networks, weights):
    network = load_network(weights["quantized"], CPU)
    limit_weights_to_7_bits(network.model)
    before = quantized_weights(networks["quantized"].model)
    for path, (module, quantizer) in quantized_weights(network.model).items():
        original, own = before[path]
        step = own.amax / 127 * 2
        expected = (original.weight.clamp(-own.amax, own.amax) / step).detach().numpy()
        found = (quantizer(module.weight) / step).detach().numpy()
        assert np.abs(found).max() <= 64
        assert np.abs(found - np.rint(found)).max() < 1e-4
        assert np.abs(found - expected).max() < 0.5001


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [("float", (), "--target"), ("quantized", ("--typing", "strong"), "--typing strong"),
     ("quantized", ("--half",), "--half"), ("quantized", ("--opset", 19), "--opset"),
     ("quantized", ("--include", "onnx_end2end"), "--nms"), ("quantized", ("--no-int8-rewrites",), "--no-int8")],
)  # fmt: skip
def test_what_does_not_fit_openvino_is_refused(kind, words, named, weights, tmp_path, capsys):
    words = ("--weights", weights[kind], "--output", tmp_path / "a.onnx", "--target", OPENVINO, *words)
    code, _, err = program(capsys, *words, "--device", "cpu")
    assert (code, len(err), [*tmp_path.iterdir()]) == (2, 1, [])
    assert named in err[0]


def test_program_verifies(weights, tmp_path, capsys):
    path = tmp_path / "file.onnx"
    assert program(capsys, "--weights", weights["quantized"], "--output", path, "--imgsz", SIDE)[0] == 0
    code, out, err = program(capsys, "--verify", path)
    assert (code, err) == (0, [])
    assert out[-1].endswith("all 15 properties hold")
    graph = onnx.load(path)
    node = next(node for node in graph.graph.node if node.op_type == "Concat")
    dequantizer = next(other for other in graph.graph.node if node.input[0] in other.output)
    node.input[0] = next(o for o in graph.graph.node if dequantizer.input[0] in o.output).input[0]
    onnx.save(graph, path)
    code, out, err = program(capsys, "--verify", path)
    assert (code, err) == (1, [])
    assert any(line.startswith(f"concat: {node.name}: its input") for line in out)
    assert out[-1].endswith("1 breach")


def test_export_with_breaches_shows_the_table(weights, tmp_path, capsys, monkeypatch):
    """A convolution that placing forgets, though the recipe leaves it in INT8, is seen."""
    original = placement.apply

    def forgetful(model, plan, *others):
        original(model, replace(plan, convolutions={**plan.convolutions, "model.0.conv": "forgotten"}), *others)
        model.quantization_plan = plan

    monkeypatch.setattr(placement, "apply", forgetful)
    path = save_quantized(tmp_path / "forgetful.pt", weights["float"])
    code, out, err = program(capsys, "--weights", path, "--imgsz", SIDE)
    assert (code, len(err)) == (1, 1)
    assert any(line.startswith("convolutions: /model.0/conv/Conv: ") for line in out)
    assert "breaches" in err[0]
    assert not any(line.startswith("next") for line in out)


# networks with unusual layers


def quantized(folder, **changes):
    """The tiny network with changes to its description, placed and calibrated."""
    floating = save_float(folder / "float.pt", random_network({**TINY, **changes}))
    return load_network(save_quantized(folder / "int8.pt", floating), CPU)


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
    steps, share, *_ = compare_tensors(network.model, model, random_images(), result.quantizers).values()
    calls: list[int] = []
    for quantizer in network.model.activation_quantizers.values():
        quantizer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad(), export_mode():
        network.model(random_images())
    assert len(result.quantizers) < len(calls)
    assert (steps <= 1, share < 1e-3) == (True, True)
