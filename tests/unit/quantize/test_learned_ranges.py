"""Ranges as parameters: where they begin, what a forward rounds with, and what is left behind."""

import pytest
import torch
from small_networks import Network, detector
from torch import Tensor, nn

from models.quantize import calibration, placement
from models.quantize.fake_quantize import INT8, SMALLEST_AMAX, TensorQuantizer, quantizers, representable
from models.quantize.finetune import LearnedRanges
from models.quantize.recipe import Calibration, Recipe

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def network() -> Network:
    found = detector()
    placement.apply(found, placement.plan(found, Recipe()))
    calibration.calibrate(found, [X], Calibration(method="max"))
    return found


def ranges(network: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.amax.clone() for name, quantizer in quantizers(network).items()}


def is_activation(amax: Tensor) -> bool:
    return amax.dim() == 0


def forward(network: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The network's maps, and what each quantizer made of its last tensor."""
    seen: dict[str, Tensor] = {}
    handles = [
        quantizer.register_forward_hook(lambda _m, _i, result, name=name: seen.update({name: result.detach().clone()}))
        for name, quantizer in quantizers(network).items()
    ]
    maps = network(X)[1]
    for handle in handles:
        handle.remove()
    return maps, seen


def test_at_the_start_nothing_moves(network):
    before, (_, values) = ranges(network), forward(network)
    learned = LearnedRanges(network)
    assert [one.numel() for one in learned.parameters()] == [sum(map(is_activation, before.values()))]
    for _ in range(3):
        with learned.in_use():
            learned.put_in()
            _, during = forward(network)
    after = ranges(network)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(during[name], one) for name, one in values.items())


def test_every_float16_scale_comes_back_from_its_logarithm():
    scales = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    amax = scales * INT8.max
    amax = amax[amax >= SMALLEST_AMAX]
    came_back = LearnedRanges._amax(amax.log())
    assert torch.equal(representable(came_back), amax)


def test_what_is_settled_rounds_to_the_same_values_as_training_bit_for_bit(network):
    before = ranges(network)
    learned = LearnedRanges(network)
    with torch.no_grad():  # what training could have done: each range by another factor
        learned.log_amax += 0.3 * torch.randn(learned.log_amax.shape, generator=torch.Generator().manual_seed(2))
    with learned.in_use():
        learned.put_in()
        maps, during = forward(network)
        scales = {name: quantizer.trained_scale for name, quantizer in quantizers(network).items()}
        sum((one**2).sum() for one in maps).backward()
    assert float((learned.log_amax.grad != 0).float().mean()) > 0.95
    assert all(torch.equal(scale, scale.half().float()) for scale in scales.values())
    assert not any(quantizer.trained_scale is not None for quantizer in quantizers(network).values())
    after = ranges(network)
    for name, amax in before.items():
        assert torch.equal(after[name], amax) != is_activation(amax), name
    with torch.no_grad():
        settled, values = forward(network)
    assert all(torch.equal(during[name], one) for name, one in values.items())
    assert all(torch.equal(one, other) for one, other in zip(maps, settled, strict=True))


def test_a_ranges_gradient_is_that_of_its_logarithm():
    """Clipped values alone: their gradient is that of amax times the logarithm's own derivative."""
    quantizer = TensorQuantizer()
    quantizer.set_amax(torch.tensor(127.0))
    network = nn.Sequential(quantizer)
    learned = LearnedRanges(network)
    x = torch.tensor([1000.0, 2000.0, 5000.0])
    with learned.in_use():
        learned.put_in()
        network(x).sum().backward()
    assert float(learned.log_amax.grad) == pytest.approx(3 * 127.0, rel=1e-4)


def test_a_range_does_not_fall_below_the_smallest(network):
    learned = LearnedRanges(network)
    with torch.no_grad():
        learned.log_amax.fill_(-1000.0)
    learned.settle()
    for amax in filter(is_activation, ranges(network).values()):
        assert SMALLEST_AMAX <= float(amax) < 1.1 * SMALLEST_AMAX
