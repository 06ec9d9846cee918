"""QAT on small networks, without upstream: what trains, at which rates, that it learns, what it tells on the way."""

import copy
import math

import numpy as np
import pytest
import torch
from small_finetuners import CPU, constant, held_out, images, make, moved, parts, task_loss
from small_networks import Network, detector, segmenter, segmenter_with_own_input

from models.quantize import finetune
from models.quantize.distillation import raw_head
from models.quantize.fake_quantize import INT8, quantizers, representable
from models.quantize.finetune import DivergedError, HeldOutLoss, highest_rate, learning_rate
from models.quantize.modules import QuantConv2d


@pytest.fixture
def teacher() -> Network:
    return detector()


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, (True, True, True)), ({"train": "ranges"}, (False, True, False))]
)
def test_what_trains_moves_and_nothing_else(teacher, settings, expected):
    before = copy.deepcopy(teacher.state_dict())
    tuner = make(teacher, **settings)
    old = parts(tuner)
    tuner.run_epoch(images(3), constant(1e-3))
    new = parts(tuner)
    found = [moved(one, other) for one, other in zip(old, new, strict=True)]
    for names, moves, one in zip(found, expected, old, strict=True):
        assert (len(names) > 0.9 * len(one) - 2) if moves else not names
    assert "model.6.dfl.conv.weight" not in found[0]
    assert not moved(before, teacher.state_dict())
    assert all(p.grad is None for p in (*tuner.student.parameters(), *tuner.ranges.parameters()))
    assert not any(module.training for m in (teacher, tuner.student) for module in m.modules())


def test_no_weight_is_clipped_after_an_epoch_and_the_next_one_rounds_with_those_ranges(teacher):
    tuner = make(teacher)
    tuner.run_epoch(images(3), constant(1e-2))
    convolutions = [one for one in tuner.student.modules() if isinstance(one, QuantConv2d)]
    for one in convolutions:
        largest = one.weight.detach().abs().amax((1, 2, 3), keepdim=True)
        assert torch.equal(one.weight_quantizer.amax, representable(largest))
    with tuner.ranges.in_use():
        for one in convolutions:
            assert torch.equal(one.weight_quantizer.trained_scale * INT8.max, one.weight_quantizer.amax)


def test_weights_biases_and_ranges_have_rates_of_their_own(teacher):
    """Adam's first step is the rate itself, in the direction of the gradient's sign."""
    tuner = make(teacher, bias_rate=7.0, range_rate=300.0, grad_clip=1e6)
    weights = {name: value.detach().clone() for name, value in tuner.student.named_parameters()}
    ranges = tuner.ranges.log_amax.detach().clone()
    tuner.run_epoch(images(1), constant(1e-5))
    steps = {"weight": 0.0, "bias": 0.0}
    for name, value in tuner.student.named_parameters():
        kind = name.rpartition(".")[2]
        steps[kind] = max(steps[kind], float((value.detach() - weights[name]).abs().max()))
    assert steps == pytest.approx({"weight": 1e-5, "bias": 7e-5}, rel=0.02)
    assert float((tuner.ranges.log_amax.detach() - ranges).abs().max()) == pytest.approx(3e-3, rel=0.02)


@pytest.mark.parametrize("settings", [{}, {"train": "ranges"}])
def test_state_continues_exactly(teacher, settings):
    whole = make(teacher, **settings)
    whole.run_epoch(images(4, seed=1), constant(1e-5))
    state, student = copy.deepcopy(whole.state_dict()), copy.deepcopy(whole.student.state_dict())
    whole.run_epoch(images(4, seed=2), constant(1e-5))

    resumed = make(teacher, factor=2.0, **settings)
    resumed.student.load_state_dict(student)
    resumed.load_state_dict(state)
    resumed.run_epoch(images(4, seed=2), constant(1e-5))
    assert not any(moved(one, other) for one, other in zip(parts(whole), parts(resumed), strict=True))
    assert torch.equal(whole.ranges.log_amax, resumed.ranges.log_amax), "what lies between float16 scales"


@pytest.mark.parametrize("make_network", [segmenter, segmenter_with_own_input])
def test_a_segmentation_network_trains_its_masks_too(make_network):
    teacher = make_network()
    tuner = make(teacher, factor=3.0)
    old, ranges, _ = parts(tuner)
    losses = [tuner.run_epoch(images(8), constant(3e-4)).loss for _ in range(5)]
    assert losses[-1] < 0.7 * losses[0]
    new, new_ranges, _ = parts(tuner)
    head = f"model.{len(teacher.model) - 1}"
    branch = {name for name in old if name.startswith((f"{head}.cv4", f"{head}.proto"))}
    assert len(branch) >= 10
    assert branch <= moved(old, new)
    assert f"activation_quantizers.{head.replace('.', '/')}/cv4/0/0._amax" in moved(ranges, new_ranges)


def test_ranges_alone_mend_wrong_ranges(teacher):
    tuner = make(teacher, factor=8.0, train="ranges")
    weights, old, _ = parts(tuner)
    start = held_out(tuner, images(2, seed=9)).value
    for seed in range(5):
        tuner.run_epoch(images(8, seed), constant(1e-4))
    assert held_out(tuner, images(2, seed=9)).value < 0.3 * start
    again, new, _ = parts(tuner)
    assert not moved(weights, again)
    assert np.median([float(new[name] / old[name]) for name in old]) < 0.5


def test_a_loss_that_is_not_finite_is_named(teacher):
    tuner = make(teacher)
    tuner.student.model[2].cv1.conv.bias.data[0] = float("nan")
    with pytest.raises(DivergedError, match="nan"):
        tuner.run_epoch(images(1), constant(1e-3))
    with pytest.raises(DivergedError, match="the loss on held-out images is nan"):
        held_out(tuner, images(1))
    assert not any(m.training for m in tuner.student.modules())
    assert not any(one.trained_scale is not None for one in quantizers(tuner.student).values())


def test_ranges_that_are_not_finite_are_not_put_in(teacher):
    """The caller restores the best state."""
    tuner = make(teacher)
    before = {name: one.amax.clone() for name, one in quantizers(tuner.student).items()}
    tuner.ranges.log_amax.data.fill_(float("nan"))
    with pytest.raises(DivergedError):
        tuner.run_epoch(images(1), constant(1e-3))
    assert all(torch.equal(one.amax, before[name]) for name, one in quantizers(tuner.student).items())


@pytest.mark.parametrize("make_network", [detector, segmenter])
def test_the_held_out_loss_is_the_task_loss_of_the_student_as_it_is_saved(make_network):
    teacher = make_network()
    tuner = make(teacher, factor=4.0)
    tuner.run_epoch(images(2), constant(1e-5))
    torch.manual_seed(1)
    with torch.no_grad():  # so that the loss is large beside float32's rounding
        for parameter in tuner.student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batches = images(3, seed=5)
    with raw_head(tuner.student), raw_head(teacher), torch.no_grad():
        x = torch.cat([finetune.as_input(one, CPU) for one in batches])
        wanted = float(task_loss(tuner.student(x), teacher(x), 3))
    before = parts(tuner)
    assert held_out(tuner, batches).value == pytest.approx(wanted, rel=1e-3), "batches are taken together"
    assert not any(moved(one, other) for one, other in zip(before, parts(tuner), strict=True))
    assert not any(m.training for m in tuner.student.modules())


def test_images_become_fractions():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert finetune.as_input(images, CPU).flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])
    floats = torch.rand(1, 3, 2, 2)
    assert finetune.as_input(floats, CPU) is floats


def test_five_percent_of_the_steps_rise_in_a_line_and_the_rest_fall_as_half_a_cosine():
    found = [learning_rate(step, 200, 2.0) for step in range(200)]
    assert found[:10] == pytest.approx([2 * (i + 1) / 10 for i in range(10)])
    # 191 intervals from the highest rate to zero, which would be that of the step behind the last
    assert found[10:] == pytest.approx([1 + math.cos(math.pi * i / 191) for i in range(1, 191)])
    assert max(found) == found[9] == 2.0
    assert 0 < found[-1] < 1e-3
    assert [learning_rate(0, steps, 1.0) for steps in (1, 2, 3)] == [1.0] * 3
    assert 0 < learning_rate(2, 3, 1.0) < learning_rate(1, 3, 1.0) < 1


def test_runs_of_a_hundred_steps_want_twice_the_rate_of_short_and_of_long_ones():
    found = [highest_rate("auto", steps) for steps in (1, 30, 60, 100, 200, 450, 100_000)]
    assert found == pytest.approx([3e-5, 3e-5, 6e-5, 6.36e-5, 4.5e-5, 3e-5, 3e-5], rel=1e-3)
    assert highest_rate(2e-4, 100) == 2e-4


def test_the_error_of_a_difference_of_losses_is_that_of_paired_images():
    """Against the delta method for a ratio of sums, image by image."""
    generator = np.random.default_rng(3)
    weights = generator.uniform(1, 9, 300)
    common = weights * generator.gamma(2, 0.02, 300)
    change = weights * generator.normal(-0.004, 0.01, 300)
    ptq, qat = (HeldOutLoss(torch.tensor(np.stack((one, weights), 1))) for one in (common, common + change))
    value, error = qat.difference(ptq)
    assert value == pytest.approx(change.sum() / weights.sum())
    assert error == pytest.approx(np.sqrt(((change - value * weights) ** 2).sum()) / weights.sum(), rel=0.1)
    assert ptq.difference(ptq) == (0.0, 0.0)
    assert error < 0.5 * HeldOutLoss(ptq.terms).difference(HeldOutLoss(ptq.terms.flip(0)))[1], "paired, and not apart"
