"""Placement on small networks: what asks for INT8, what shares a scale, what stays in float, and why."""

import ast
import copy
import logging
import re

import numpy as np
import pytest
import torch
from small_networks import (
    AConv,
    Concat,
    Conv,
    Network,
    RepNBottleneck,
    Unknown,
    chain,
    detector,
    segmenter,
    segmenter_with_own_input,
)
from torch import nn

from models.quantize import calibration, modules, placement, rules
from models.quantize.calibration import Histogram, Statistics
from models.quantize.fake_quantize import TensorQuantizer, quantizers, representable
from models.quantize.flow import export_mode
from models.quantize.recipe import Calibration, Recipe
from utils.core.errors import QatError, RecipeError

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def placed(network: Network, **recipe) -> tuple[Network, placement.Plan]:
    plan = placement.plan(network, Recipe(**recipe))
    placement.apply(network, plan)
    return network, plan


def with_ranges(network: Network) -> Network:
    """With ranges that all differ: with equal ones any sharing would pass."""
    for number, quantizer in enumerate(quantizers(network).values()):
        quantizer.set_amax(torch.full_like(quantizer.amax, 0.3 + 0.07 * number))
    return network


def test_every_convolution_reads_a_quantized_tensor_and_weight():
    network, plan = placed(chain())
    assert set(plan.convolutions.values()) == {"int8"}
    seen = {}
    for name, module in network.named_modules():
        if isinstance(module, modules.QuantConv2d):
            module.register_forward_pre_hook(lambda _m, args, name=name: seen.update({name: args[0]}))
    for quantizer in quantizers(network).values():
        quantizer.set_amax(torch.full_like(quantizer.amax, 127 / 256))
    with torch.no_grad():
        network(X)
    assert set(seen) == set(plan.convolutions)
    for name, value in seen.items():
        if name not in plan.image_consumers:  # those quantize the image themselves
            values = value * 256
            assert torch.allclose(values, values.round(), atol=1e-4), f"{name} reads what is not on the INT8 grid"
            assert values.abs().max() <= 128.0001
    assert set(modules.quantized_weights(network)) == set(plan.convolutions)


def test_with_quantizers_off_outputs_are_the_float_networks_bit_for_bit():
    original = chain()
    for module in original.modules():
        if isinstance(module, Conv):  # as upstream's fuse() leaves it: a bound method that would win over ours
            module.forward = lambda x, module=module: module.act(module.conv(x))
    network, plan = placed(copy.deepcopy(original))
    new = set(network.state_dict()) - set(original.state_dict())
    assert set(original.state_dict()) < set(network.state_dict())
    assert all("quantizer" in name for name in new)
    with torch.no_grad(), placement.quantizers_off(network):
        assert torch.equal(network(X), original(X))
    with torch.no_grad():
        eager = with_ranges(network)(X)
        assert not torch.equal(eager, original(X))
        with export_mode():  # which rounds again what is redundant
            assert torch.equal(eager, network(X))
    assert any(item.redundant for item in plan.tensors)


def test_weights_that_are_rounded_once_change_no_result_and_come_back():
    network = with_ranges(placed(chain())[0])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        expected = network(X)
        with modules.rounded_weights(network):
            assert torch.equal(network(X), expected)
            assert not torch.equal(network.state_dict()["model.0.conv.weight"], before["model.0.conv.weight"])
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())


def test_float_pattern_frees_tensors_that_nobody_else_reads():
    names = {item.name for item in placement.plan(chain(), Recipe(add="residual")).tensors}
    assert "model.2.cv2" not in names  # the branch from the convolution
    assert {"model.1.out", "model.2.out"} <= names
    _, plan = placed(chain(), float=("model.5",))
    assert plan.float_convolutions == {"model.5.conv": "the recipe's float pattern model.5"}
    names = {item.name for item in plan.tensors}
    assert not {"model.4.out", "model.3"} & names  # the Concat is read by nothing in INT8
    assert {"model.0", "model.5"} <= names  # ADown still reads the one, the last convolution the other


def test_prototypes_are_enlarged_with_one_scale():
    plan = placement.plan(segmenter(), Recipe())
    assert plan.scales["model.6.proto.cv1"] == ("model.6.proto.cv1", "model.6.proto.upsample")
    plan = placement.plan(segmenter_with_own_input(), Recipe())
    assert plan.scales["model.5"] == ("model.5", "model.6")


FIRST = {  # a layer that reads the image, which is no convolution → tensors that share the image's scale
    "max pool": (nn.MaxPool2d(2), ("images", "model.0")),
    "upsample": (nn.Upsample(None, 2, "nearest"), ("images", "model.0")),
    "average pool": (AConv(3, 3), ("images",)),
    "shortcut": (RepNBottleneck(3), ("images",)),
    "in a row": (nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(2)), ("images", "model.0.0", "model.0.1")),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_image_is_quantized_for_whatever_reads_it(name):
    torch.manual_seed(0)
    first, shared = FIRST[name]
    original = Network([(-1, copy.deepcopy(first)), (-1, Conv(3, 4)), (-1, nn.Conv2d(4, 4, 1))]).eval()
    network, plan = placed(copy.deepcopy(original))
    assert plan.tensors[0].name == "images"
    assert plan.scales["images"] == shared
    assert [item.redundant for item in plan.tensors if item.name in shared] == [False] + [True] * (len(shared) - 1)
    with torch.no_grad(), placement.quantizers_off(network):
        assert torch.equal(network(X), original(X))
    with_ranges(network)
    image = network.activation_quantizers["images"]
    with torch.no_grad():
        expected = network(X)
        assert torch.equal(expected, network(image(X)))
        with export_mode():
            assert torch.equal(network(X), expected)
        for path in plan.image_consumers:
            network.get_submodule(path).input_point = None
        assert torch.equal(network(image(X)), expected), "all that read the image read the same"
        assert not torch.equal(network(X), expected)


def test_module_without_a_row_falls_back_to_its_convolutions_with_a_warning(caplog):
    network = Network(
        [(-1, Conv(3, 4)), (-1, Unknown(4)), (-1, Conv(4, 4)), ([-1, 1], Concat()), (-1, nn.Conv2d(8, 2, 1))]
    )
    original = copy.deepcopy(network)
    with caplog.at_level(logging.WARNING):
        network, plan = placed(network)
    assert "model.1 is a Unknown" in caplog.text
    assert plan.unknown == {"model.1": "Unknown"}
    assert plan.fallback == ("model.1.inner", "model.2.conv")  # this reads a result which nobody quantizes
    assert set(placement.points(network)) >= {"model.1.inner.input", "model.2.conv.input"}
    with torch.no_grad(), placement.quantizers_off(network):
        assert torch.equal(network(X), original(X))


def test_layers_that_nothing_reads_stay_in_float():
    """A head that was cut down to one level: the layers in front of the other one are left out by the exporter."""
    network = detector()
    network.model[-1].f = [2, 2]
    plan = placement.plan(network, Recipe())
    network.model[0].bn = nn.BatchNorm2d(8)
    with pytest.raises(QatError, match="fuse"):
        placement.plan(network, Recipe())
    assert plan.float_convolutions == {"model.5.conv": "nothing leads from it to the head"}
    assert not [tensor.name for tensor in plan.tensors if tensor.name.startswith(("model.3", "model.4", "model.5"))]


def test_head_options_keep_the_last_layer_or_its_plain_convolutions_in_float():
    for option in ("float", "last-conv-float"):  # the last layer of this one is a plain convolution
        _, plan = placed(chain(), head=option)
        assert plan.float_convolutions == {"model.6": f"the recipe's head: {option}"}
    assert placed(chain(), head="int8")[1].float_convolutions == {}
    network = Network([(-1, Conv(3, 4)), (-1, nn.Sequential(Conv(4, 4), nn.Conv2d(4, 4, 1)))])
    assert set(placed(copy.deepcopy(network), head="float")[1].float_convolutions) == {"model.1.0.conv", "model.1.1"}
    assert set(placed(copy.deepcopy(network), head="last-conv-float")[1].float_convolutions) == {"model.1.1"}


@pytest.mark.parametrize(("make", "index", "prototypes"), [
    (detector, 6, set()), (segmenter, 6, {"proto.cv3.conv"}), (segmenter_with_own_input, 8, {"proto.conv"}),
])  # fmt: skip
def test_the_last_convolutions_of_a_head_are_those_of_maps_coefficients_and_prototypes(make, index, prototypes):
    branches = ("cv2", "cv3", "cv4") if prototypes else ("cv2", "cv3")
    ends = {f"{branch}.{level}.1" for branch in branches for level in range(2)} | prototypes
    plan = placement.plan(make(), Recipe(head="last-conv-float"))
    assert set(plan.float_convolutions) == {f"model.{index}.{end}" for end in ends}
    plan = placement.plan(make(), Recipe())
    assert plan.float_convolutions == {}
    results = {f"model.{index}.{end.removesuffix('.conv')}" for end in ends}
    assert not results & {tensor.name for tensor in plan.tensors}, "what they compute is not rounded"


@pytest.mark.parametrize(("patterns", "head"), [(("*",), "int8"), (("model.[0-5]*",), "float")])
def test_a_recipe_that_leaves_nothing_in_int8_is_refused(patterns, head):
    recipe = Recipe(float=patterns, head=head)
    with pytest.raises(RecipeError, match=f"head: {head}.*all 7 convolutions"):
        placement.check(placement.plan(chain(), recipe), recipe)
    placement.check(placement.plan(chain(), Recipe(float=("model.[0-5]*",))), Recipe())


# patterns of a recipe's `float`

# pattern → the convolutions of `chain` that it names, found by reading the network
CHAIN = {
    "*cv2": "1.cv2.conv 2.cv2.conv", "model.?": "0.conv 5.conv 6", "model.1.cv?": "1.cv1.conv 1.cv2.conv",
    "model.2": "2.cv1.conv 2.cv2.conv", "model.2.*": "2.cv1.conv 2.cv2.conv", "model.2.cv1": "2.cv1.conv",
    "model.2.cv1.conv": "2.cv1.conv", "model.*.cv1.conv": "1.cv1.conv 2.cv1.conv", "model.[0-4]": "0.conv",
    "model.[!0]": "5.conv 6", "model.5.co?v": "5.conv", "model.6": "6",
    "*.conv": "0.conv 1.cv1.conv 1.cv2.conv 2.cv1.conv 2.cv2.conv 5.conv",
    "model": "0.conv 1.cv1.conv 1.cv2.conv 2.cv1.conv 2.cv2.conv 5.conv 6",
}  # fmt: skip
NOTHING = ["cv1", "MODEL.0", "model.1.cv", "model.77", "model.2.add", "model.2.cv1.conv.weight", "model.0.", " model.0",
           "model.?.?", "?", "model.[", ".conv"]  # fmt: skip


@pytest.mark.parametrize("pattern", CHAIN)
def test_what_is_placed_in_float(pattern):
    plan = placement.plan(chain(), Recipe(float=(pattern,)))
    expected = {f"model.{path}" for path in CHAIN[pattern].split()}
    assert (
        set(plan.float_convolutions)
        == {path for path in plan.convolutions if placement.matches(pattern, path)}
        == expected
    )


def test_a_pattern_that_names_nothing_is_refused():
    for pattern in NOTHING:
        with pytest.raises(RecipeError, match=rf"{re.escape(repr(pattern))} .*model\.0"):
            placement.plan(chain(), Recipe(float=("model.0", pattern)))


# the statements of rules.py


@pytest.mark.parametrize(
    "rule", [rule for rule in rules.RULES if isinstance(rule.flow, str) and rule.flow], ids=lambda r: r.name
)
def test_statements_parse_and_use_only_what_was_computed_before(rule):
    known = {"x", "self"}
    for step in modules.parse(rule.flow):
        if not step.is_operation:
            known.add(step.call.split(".")[0])
        used = {node.id for argument in step.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
        assert used <= known
        known.update(step.targets)
    assert "out" in known


@pytest.mark.parametrize("text", ["cv1(x)", "y = x", "y = 3"])
def test_other_statements_are_refused(text):
    with pytest.raises(SyntaxError, match="name = call"):
        modules.parse(text)


def test_a_flow_computes_what_its_statements_say():
    original = nn.Module()
    original.cv1, original.sizes, original.d = nn.Conv2d(4, 4, 1), (1, 3), 1
    flow = modules.FlowModule.from_float(
        original, "y = cv1(x); a, b = split(y, self.sizes); z = concat(b, a, dim=self.d); out = add(z, x)"
    )
    x = torch.rand(2, 4, 5, 5)
    y = original.cv1(x)
    assert torch.equal(flow(x), torch.cat((y[:, 1:], y[:, :1]), 1) + x)


def test_resize_takes_only_the_size_of_its_second_argument():
    small, large = torch.rand(1, 2, 4, 4), torch.rand(1, 7, 8, 8)
    out = modules.OPERATIONS["resize_like"](small, large)
    assert torch.equal(out, small.repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_subclasses_and_foreign_classes_of_the_same_name_have_no_row():
    class Conv2d(nn.Conv2d):
        """A user's own."""

    assert rules.find(Conv2d(1, 1, 1)) is None
    assert rules.find(nn.Conv2d(1, 1, 1)).kind == "conv"


# calibration against brute force on the raw values; statistics do not depend on how data is cut into batches

GENERATOR = torch.Generator().manual_seed(3)
NORMAL = torch.randn(200_000, generator=GENERATOR)
LONG_TAIL = NORMAL * torch.rand(200_000, generator=GENERATOR).pow(-0.4)
SAMPLES = {"normal": NORMAL, "long tail": LONG_TAIL, "uniform": torch.rand(200_000, generator=GENERATOR) * 3}


def statistics(values: torch.Tensor, pieces: int = 1) -> Statistics:
    parts = [part.abs() for part in values.chunk(pieces)]
    result = Histogram.empty(float(parts[0].max()), values.device)
    for part in parts:
        result.add(part)
    return Statistics({"t": result})


def of_tensors(*tensors: torch.Tensor) -> Statistics:
    one = Histogram.empty(1.0, NORMAL.device)
    for number, values in enumerate(tensors):
        one.add(values.abs(), tensor=number)
    return Statistics({"t": one})


def squared_error(values: np.ndarray, amax: float) -> float:
    scale = amax / 127
    return float(np.mean((np.clip(np.round(values / scale), -128, 127) * scale - values) ** 2))


def test_weights_of_7_bits_keep_the_clipping_of_8_and_double_the_scale():
    network, _ = placed(chain())
    found = modules.quantized_weights(network)
    assert len(found) > 1
    amax = {path: quantizer.amax.clone() / 2 for path, (_, quantizer) in found.items()}
    for path, (_, quantizer) in found.items():
        quantizer.set_amax(amax[path])  # so that the largest weights are clipped
    modules.limit_weights_to_7_bits(network)
    for path, (convolution, quantizer) in found.items():
        assert torch.equal(quantizer.amax, 2 * amax[path])
        assert (convolution.weight.abs() <= amax[path]).all()


@pytest.mark.parametrize(("method", "clipped"), [("percentile", 1), ("max", 0)])
def test_ranges_that_the_median_image_limits_are_counted(caplog, method, clipped):
    """Of two tensors one has an image with activations a thousand times as large as those of the others."""
    caplog.set_level(logging.INFO)
    network = nn.Module()
    network.activation_quantizers = {name: TensorQuantizer() for name in ("usual", "outlier")}
    histograms = {}
    for name, factor in (("usual", 1), ("outlier", 1000)):
        images = torch.stack([NORMAL[:900], NORMAL[900:1800], factor * NORMAL[1800:2700]])
        histograms[name] = Histogram.empty(1.0, NORMAL.device)
        histograms[name].add(images.abs())
        histograms[name].add_images(images.abs().amax(1).tolist())
    found = Statistics(histograms)
    calibration.apply_calibration(network, found, Calibration(method=method))
    said = [line for line in caplog.messages if "ranges are clipped" in line]
    assert [line.split()[1:4] for line in said] == [["1", "of", "2"]] * clipped


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
def test_percentile_is_numpys_to_a_bin(name, percentile):
    found = statistics(SAMPLES[name], 5)
    expected = np.percentile(SAMPLES[name].abs().numpy(), percentile)
    bin_width = found.histograms["t"].top / calibration.BINS
    assert abs(float(found.amax("percentile", percentile)["t"]) - expected) <= 2 * bin_width


@pytest.mark.parametrize("name", SAMPLES)
def test_mse_finds_what_brute_force_on_the_values_finds(name):
    values = SAMPLES[name]
    found = float(statistics(values, 3).amax("mse")["t"])
    raw = values.numpy().astype(np.float64)
    best = min(squared_error(raw, amax) for amax in np.linspace(0.02, 1, 150) * float(values.abs().max()))
    assert squared_error(raw, found) <= best * 1.03


def test_batches_and_a_growing_range_give_the_same_statistics():
    ordered = LONG_TAIL.abs().sort().values  # each piece brings larger values: the range doubles several times
    cut, whole = statistics(ordered, 20), statistics(ordered)
    assert cut.histograms["t"].counts.sum() == whole.histograms["t"].counts.sum() == len(ordered)
    assert float(cut.amax("max")["t"]) == float(LONG_TAIL.abs().max())
    for method in ("percentile", "mse"):
        assert float(cut.amax(method)["t"]) == pytest.approx(float(whole.amax(method)["t"]), rel=0.02)


def test_a_small_tensor_is_not_clipped_more_often_than_a_large_one_that_shares_its_scale():
    small, large = NORMAL[:5000] * 4, NORMAL
    found = of_tensors(large, small)
    alone = [float(statistics(values).amax("percentile", 99.0)["t"]) for values in (small, large)]
    shared = float(found.amax("percentile", 99.0)["t"])
    assert shared == pytest.approx(max(alone), rel=0.01)
    assert float((small.abs() > shared).float().mean()) <= 0.0101
    pooled = statistics(torch.cat([large, small]))  # what counting both together gives
    assert float((small.abs() > pooled.amax("percentile", 99.0)["t"]).float().mean()) > 0.2
    repeated = of_tensors(large, small.repeat(40))  # the same shape in a tensor forty times as large
    assert float(found.amax("mse")["t"]) == pytest.approx(float(repeated.amax("mse")["t"]), rel=1e-6)


def test_a_bin_counts_beyond_float32s_whole_numbers():
    one = Histogram.empty(1.0, torch.device("cpu"))
    number = calibration.EXACT + 4096
    one.add(torch.full((1,), 0.5).expand(number), largest=0.5)
    assert float(one.counts.sum()) == number


def test_tensors_of_a_scale_are_told_apart_in_every_batch():
    network, _ = placed(chain())
    found = calibration.collect(network, [torch.rand(2, 3, 32, 32)] * 3)
    plan = network.quantization_plan
    for name, tensors in plan.scales.items():
        counted = [tensor for tensor in plan.tensors if tensor.name in tensors and not tensor.redundant]
        assert len(found.histograms[placement.scale_key(name)].counts) == len(counted)
    assert max(len(one.counts) for one in found.histograms.values()) > 1


def test_statistics_are_of_the_float_network_and_each_scale_sees_all_its_tensors():
    network, original, seen = placed(chain())[0], chain(), []
    batches = [torch.rand(2, 3, 32, 32, generator=GENERATOR) for _ in range(2)]
    calibration.calibrate(network, batches, Calibration(method="max"))
    for layer in (0, 2):
        original.model[layer].register_forward_hook(lambda _m, _i, out: seen.append(out.abs().max()))
    with torch.no_grad():
        for images in batches:
            original(images)
    assert network.activation_quantizers["model/0"].amax == representable(max(seen))


def of_images(*maxima: float) -> Statistics:
    """A scale of one tensor whose images have these largest magnitudes, and normal values otherwise."""
    images = [NORMAL[:20_000] / NORMAL[:20_000].abs().max() * largest for largest in maxima]
    result = statistics(torch.cat(images))
    result.histograms["t"].add_images(list(maxima))
    return result


@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_a_few_unusual_images_do_not_decide_a_range(method):
    usual, spoilt = of_images(*[1.0] * 20), of_images(*[1.0] * 18, 100.0, 300.0)
    assert float(spoilt.amax(method)["t"]) > 8
    assert float(spoilt.amax(method, median_limit=4)["t"]) == 4
    assert float(usual.amax(method, median_limit=4)["t"]) == float(usual.amax(method)["t"]) <= 1


def test_max_has_no_limit_and_neither_has_a_scale_that_is_zero_for_most_images():
    assert float(of_images(1.0, 1.0, 100.0).amax("max", median_limit=4)["t"]) == 100
    zero = of_images(1e-30, 1e-30, 100.0)
    zero.histograms["t"].of_images = [0.0, 0.0, 100.0]
    assert float(zero.amax("percentile", median_limit=4)["t"]) == float(zero.amax("percentile")["t"]) > 4


def test_a_scale_looks_at_the_largest_of_its_tensors_in_each_image():
    one = Histogram.empty(1.0, torch.device("cpu"))
    for forward in ([[1.0, 5.0], [2.0, 3.0]], [[4.0], [0.0]], [[], []]):  # the last: a part of a batch without images
        for tensor, largest in enumerate(forward):
            one.add_images(largest, tensor)
    assert one.of_images == [2.0, 5.0, 4.0]
    assert (one.limit(2), one.limit(0)) == (8, float("inf"))


def test_the_limit_is_the_recipes():
    usual, unusual = torch.rand(1, 3, 32, 32, generator=GENERATOR), torch.rand(1, 3, 32, 32, generator=GENERATOR) * 50
    network, amax = placed(chain())[0], {}
    found = calibration.calibrate(network, [usual] * 3 + [unusual], Calibration(percentile=99.999, median_limit=0))
    for limit in (0.0, 4.0):
        calibration.apply_calibration(network, found, Calibration(percentile=99.999, median_limit=limit))
        amax[limit] = {name: float(one.amax) for name, one in network.activation_quantizers.items()}
    assert amax[4.0]["images"] == float(representable(4 * usual.max()))
    assert all(amax[4.0][name] < amax[0.0][name] for name in amax[0.0])


def test_no_images_and_values_that_are_not_finite_are_refused():
    network, _ = placed(chain())
    with pytest.raises(QatError, match="no images"):
        calibration.collect(network, [])
    network.model[0].conv.bias.data[0] = float("inf")
    with pytest.raises(QatError, match=r"infinity at model\.0"):
        calibration.collect(network, [torch.rand(1, 3, 32, 32)])
    broken = Network([(-1, Conv(3, 4)), (-1, nn.Conv2d(4, 4, 1))]).eval()
    broken.model[0].conv.weight.data[0] = float("nan")
    plan = placement.plan(broken, Recipe())
    with pytest.raises(ValueError, match="NaN"):
        placement.apply(broken, plan)


def test_statistics_are_gathered_in_full_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    network, seen = placed(chain())[0], []
    network.model[0].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    calibration.collect(network, [torch.rand(1, 3, 32, 32)])
    assert (seen, torch.backends.cudnn.allow_tf32) == ([False], True)


def test_the_range_of_zeros_is_zero():
    zeros = statistics(torch.zeros(100))
    assert [float(zeros.amax(method)["t"]) for method in ("max", "percentile", "mse")] == [0, 0, 0]
