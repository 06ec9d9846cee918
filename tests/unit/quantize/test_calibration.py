"""Calibration against brute force on the raw values; statistics do not depend on how data is cut into batches."""

import numpy as np
import pytest
import torch
from small_networks import Conv, Network, chain
from torch import nn

from models.quantize import calibration, placement
from models.quantize.calibration import Histogram, Statistics
from models.quantize.fake_quantize import representable
from models.quantize.recipe import Calibration, Recipe
from utils.core.errors import QatError

GENERATOR = torch.Generator().manual_seed(3)
NORMAL = torch.randn(200_000, generator=GENERATOR)
LONG_TAIL = NORMAL * torch.rand(200_000, generator=GENERATOR).pow(-0.4)
SAMPLES = {"normal": NORMAL, "long tail": LONG_TAIL, "uniform": torch.rand(200_000, generator=GENERATOR) * 3}


def placed() -> Network:
    network = chain()
    placement.apply(network, placement.plan(network, Recipe()))
    return network


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
    network = placed()
    found = calibration.collect(network, [torch.rand(2, 3, 32, 32)] * 3)
    plan = network.quantization_plan
    for name, tensors in plan.scales.items():
        counted = [tensor for tensor in plan.tensors if tensor.name in tensors and not tensor.redundant]
        assert len(found.histograms[placement.scale_key(name)].counts) == len(counted)
    assert max(len(one.counts) for one in found.histograms.values()) > 1


def test_statistics_are_of_the_float_network_and_each_scale_sees_all_its_tensors():
    network, original, seen = placed(), chain(), []
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
    network, amax = placed(), {}
    found = calibration.calibrate(network, [usual, usual, usual, unusual], Calibration(median_limit=0))
    for limit in (0.0, 4.0):
        calibration.apply_calibration(network, found, Calibration(median_limit=limit))
        amax[limit] = {name: float(one.amax) for name, one in network.activation_quantizers.items()}
    assert amax[4.0]["images"] == float(representable(4 * usual.max()))
    assert all(amax[4.0][name] < amax[0.0][name] for name in amax[0.0])


def test_no_images_and_values_that_are_not_finite_are_refused():
    network = placed()
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
    network, seen = placed(), []
    network.model[0].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    calibration.collect(network, [torch.rand(1, 3, 32, 32)])
    assert (seen, torch.backends.cudnn.allow_tf32) == ([False], True)


def test_the_range_of_zeros_is_zero():
    zeros = statistics(torch.zeros(100))
    assert [float(zeros.amax(method)["t"]) for method in ("max", "percentile", "mse")] == [0, 0, 0]
