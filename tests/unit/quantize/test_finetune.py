"""QAT on small networks, without upstream: what trains, at which rates, that it learns, what it tells on the way."""

import copy
import math

import numpy as np
import pytest
import shared_work
import torch
from small_finetuners import CPU, constant, held_out, images, make, moved, parts, quantized, task_loss
from small_networks import Network, detector, segmenter, segmenter_with_own_input
from together import together
from torch import Tensor, nn

from models.quantize.distillation import mask_distance, raw_head, task_terms
from models.quantize.fake_quantize import INT8, SMALLEST_AMAX, TensorQuantizer, quantizers, representable
from models.quantize.finetune import DivergedError, HeldOutLoss, LearnedRanges, as_input, learning_rate
from models.quantize.modules import QuantConv2d
from models.quantize.recipe import Finetune
from utils.core.score import Difference


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


def test_the_loss_of_an_epoch_is_the_mean_of_its_steps(teacher):
    batches = images(3)
    losses = [make(teacher).run_epoch([batch], constant(0.0)).loss for batch in batches]
    assert make(teacher).run_epoch(batches, constant(0.0)).loss == pytest.approx(np.mean(losses), rel=1e-4)


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


def test_a_loss_or_ranges_that_are_not_finite_are_named(teacher):
    tuner = make(teacher)
    tuner.student.model[2].cv1.conv.bias.data[0] = float("nan")
    with pytest.raises(DivergedError, match="nan"):
        tuner.run_epoch(images(1), constant(1e-3))
    with pytest.raises(DivergedError, match="the loss on held-out images is nan"):
        held_out(tuner, images(1))
    assert not any(m.training for m in tuner.student.modules())
    assert not any(one.trained_scale is not None for one in quantizers(tuner.student).values())
    tuner = make(teacher)
    before = parts(tuner)[1:]
    tuner.ranges.log_amax.data.fill_(float("nan"))
    with pytest.raises(DivergedError):
        tuner.run_epoch(images(1), constant(1e-3))
    after = zip(before, parts(tuner)[1:], strict=True)
    assert not any(moved(*pair) for pair in after), "they are not put in: the caller restores the best state"


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
        x = torch.cat([as_input(one, CPU) for one in batches])
        wanted = float(task_loss(tuner.student(x), teacher(x), 3))
    before = parts(tuner)
    assert held_out(tuner, batches).value == pytest.approx(wanted, rel=1e-3), "batches are taken together"
    assert not any(moved(one, other) for one, other in zip(before, parts(tuner), strict=True))
    assert not any(m.training for m in tuner.student.modules())


def test_images_become_fractions():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert as_input(images, CPU).flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])
    floats = torch.rand(1, 3, 2, 2)
    assert as_input(floats, CPU) is floats


def test_five_percent_of_the_steps_rise_in_a_line_and_the_rest_fall_as_half_a_cosine():
    found = [learning_rate(step, 200, 2.0) for step in range(200)]
    assert found[:10] == pytest.approx([2 * (i + 1) / 10 for i in range(10)])
    # 191 intervals from the highest rate to zero, which would be that of the step behind the last
    assert found[10:] == pytest.approx([1 + math.cos(math.pi * i / 191) for i in range(1, 191)])
    assert max(found) == found[9] == 2.0
    assert 0 < found[-1] < 1e-3
    assert [learning_rate(0, steps, 1.0) for steps in (1, 2, 3)] == [1.0] * 3
    assert 0 < learning_rate(2, 3, 1.0) < learning_rate(1, 3, 1.0) < 1


def test_auto_is_one_rate_whatever_the_number_of_steps():
    assert (Finetune().highest_rate, Finetune(lr="auto").highest_rate, Finetune(lr=2e-4).highest_rate) == (
        3e-5,
        3e-5,
        2e-4,
    )


def test_the_error_of_a_difference_of_losses_is_that_of_paired_images():
    """Against the delta method for a ratio of sums, image by image."""
    generator = np.random.default_rng(3)
    weights = generator.uniform(1, 9, 300)
    common = weights * generator.gamma(2, 0.02, 300)
    change = weights * generator.normal(-0.004, 0.01, 300)
    ptq, qat = (HeldOutLoss(torch.tensor(np.stack((one, weights), 1))) for one in (common, common + change))
    difference = qat.difference(ptq)
    value, error = difference.value, difference.error
    assert value == pytest.approx(change.sum() / weights.sum())
    assert error == pytest.approx(np.sqrt(((change - value * weights) ** 2).sum()) / weights.sum(), rel=0.1)
    assert ptq.difference(ptq) == Difference(0.0, 0.0, len(ptq.terms))
    assert error < 0.5 * HeldOutLoss(ptq.terms).difference(HeldOutLoss(ptq.terms.flip(0))).error, (
        "paired, and not apart"
    )


# ranges as parameters: where they begin, what a forward rounds with, and what is left behind


@pytest.fixture
def network(teacher):
    return quantized(teacher)


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
    maps = network(as_input(images(1)[0], CPU))[1]
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


# what student and teacher are compared by: against NumPy in float64

CLASSES, BINS = 3, 4


def maps(seed: int, *, certainty: float = 0.0, sizes: tuple[int, ...] = (6, 3)) -> list[Tensor]:
    """Raw maps of some levels; `certainty` is added to the logits of classes."""
    generator = torch.Generator().manual_seed(seed)
    found = [3 * torch.randn(2, 4 * BINS + CLASSES, size, size, generator=generator) for size in sizes]
    for one in found:
        one[:, 4 * BINS :] += certainty
    return found


def reference(student: list[Tensor], teacher: list[Tensor]) -> tuple[float, float]:
    """Anchor by anchor, from the definitions of the divergences."""
    distance = weight = 0.0
    for ours, theirs in zip(student, teacher, strict=True):
        for s, t in zip(*(one.double().permute(0, 2, 3, 1).reshape(-1, one.shape[1]).numpy() for one in (ours, theirs)),
                        strict=True):  # fmt: skip
            p, q = (1 / (1 + np.exp(-one[4 * BINS :])) for one in (t, s))
            distance += float((p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum())
            for side in range(4):
                a, b = (np.exp(one[side * BINS : (side + 1) * BINS]) for one in (t, s))
                a, b = a / a.sum(), b / b.sum()
                distance += float(p.max() * (a * np.log(a / b)).sum())
            weight += float(p.max())
    return distance, weight


@pytest.mark.parametrize(("size", "noise", "tolerance"), [(6, 3.0, 1e-5), (40, 1e-2, 1e-4)])
def test_the_terms_are_those_of_the_definition(size, noise, tolerance):
    """Also where the distance is small: it is no difference of large sums."""
    theirs, other = (maps(seed, sizes=(size, size // 2)) for seed in (1, 0))
    ours = [one + noise * change for one, change in zip(theirs, other, strict=True)]
    found = task_terms(ours, theirs, CLASSES)
    assert [float(one) for one in found] == pytest.approx(reference(ours, theirs), rel=tolerance)


# masks

MASKS = 5


def head(seed: int, *, certainty: float = 0.0) -> tuple[list[Tensor], Tensor, Tensor]:
    """What a segmentation head returns while training: maps, coefficients, prototypes."""
    generator = torch.Generator().manual_seed(100 + seed)
    found = maps(seed, certainty=certainty)
    anchors = sum(one.shape[2] * one.shape[3] for one in found)
    coefficients = 2 * torch.randn(2, MASKS, anchors, generator=generator) + 1
    return found, coefficients, 3 * torch.randn(2, MASKS, 12, 12, generator=generator) - 1


def mask_reference(ours: tuple, theirs: tuple) -> float:
    """All logits of all anchors' masks, image by image, in float64."""
    distance = 0.0
    for image in range(2):
        best: list[float] = []
        for one in theirs[0]:
            logits = one[image, 4 * BINS :].double().numpy().reshape(CLASSES, -1).T  # rows first, as anchors are
            best += [float(1 / (1 + np.exp(-row.max()))) for row in logits]
        near, far = (
            np.einsum("ma,mhw->ahw", *(one[index][image].double().numpy() for index in (1, 2)))
            for one in (ours, theirs)
        )
        error = sum(weight * ((near[a] - far[a]) ** 2).mean() for a, weight in enumerate(best))
        spread = sum(weight * far[a].var() for a, weight in enumerate(best))
        distance += sum(best) * error / spread
    return distance


def test_masks_add_the_relative_error_of_their_logits_for_each_object():
    ours, theirs = head(0), head(1)
    without, weight = reference(ours[0], theirs[0])
    found = task_terms(ours, theirs, CLASSES)
    expected = without + mask_reference(ours, theirs)
    assert expected > 1.1 * without
    assert [float(one) for one in found] == pytest.approx([expected, weight], rel=1e-5)


@pytest.mark.parametrize(("size", "tolerance"), [(0.1, 1e-4), (1e-4, 1e-2)])
@pytest.mark.parametrize("part", [1, 2])
def test_coefficients_and_prototypes_count_by_themselves(part, size, tolerance):
    """Also by little: the error is no difference of large sums."""
    ours, theirs = list(head(1)), head(1)
    ours[part] = ours[part] + size * torch.randn(ours[part].shape, generator=torch.Generator().manual_seed(3))
    best = torch.cat([one.flatten(2) for one in theirs[0]], 2)[:, 4 * BINS :].sigmoid().amax(1)
    expected = mask_reference(ours, theirs)
    assert float(mask_distance(ours[1:], theirs[1:], best).sum()) == pytest.approx(expected, rel=tolerance)


def test_images_count_by_themselves_so_that_parts_of_a_batch_add_up():
    ours, theirs = head(0), head(1)
    alone = []
    for image in (slice(0, 1), slice(1, 2)):
        part = [([one[image] for one in maps], *(one[image] for one in masks)) for maps, *masks in (ours, theirs)]
        alone.append([float(one) for one in task_terms(*part, CLASSES)])
    alone = torch.tensor(alone)
    whole = [float(one) for one in task_terms(ours, theirs, CLASSES)]
    assert alone.sum(0).tolist() == pytest.approx(whole, rel=1e-6)
    assert torch.allclose(torch.stack(task_terms(ours, theirs, CLASSES, by_image=True), 1), alone)


@pytest.mark.parametrize("certainty", [-30.0, -200.0])
def test_images_without_objects_give_finite_masks_and_gradients(certainty):
    ours, theirs = head(0, certainty=certainty), head(1, certainty=certainty)
    leaves = [*ours[0], *ours[1:]]
    for one in leaves:
        one.requires_grad_()
    loss = task_loss(ours, theirs, CLASSES)
    loss.backward()
    assert 0 <= float(loss.detach()) < 1e-3
    assert all(bool(one.grad.isfinite().all()) for one in leaves)


def test_raw_head_switches_only_the_head_itself():
    network = detector()
    with raw_head(network):
        assert network.model[-1].training
        assert not network.model[-1].drop.training
        assert not network.model[0].training
    assert not any(module.training for module in network.modules())


# training and calibration by two processes against one: the same batches, cut into parts that may be empty

SIZES = [5, 4, 1]  # of a batch of one image the second process has none
FORMS = list(shared_work.FORMS)


@pytest.fixture(scope="module")
def alone():
    return shared_work.everything(SIZES)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return together(shared_work.everything, 2, tmp_path_factory.mktemp("both"), SIZES)


def test_ranges_and_counts_are_those_of_one_process_to_the_last_bit(alone, both):
    for one in both:
        for kind in ("max", "percentile", "mse"):
            assert one["ranges"]["amax"][kind] == alone["ranges"]["amax"][kind]
        for name, counts in alone["ranges"]["counts"].items():
            assert torch.equal(one["ranges"]["counts"][name], counts)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_whole_batch(alone, both, form):
    expected = alone[form]["gradients"]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    assert largest > 0
    for one in both:
        for ours, theirs in zip(one[form]["gradients"], expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=5e-5 * largest)  # differences of near equals


@pytest.mark.parametrize("form", FORMS)
def test_both_train_the_same_network_and_tell_the_same_loss(alone, both, form):
    first, second = (one[form] for one in both)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    for key in ("loss", "held_out", "steps"):
        assert first[key] == second[key]
        # the distance is a difference of sums: what is held out comes out small, with the rounding of large ones
        assert first[key] == pytest.approx(alone[form][key], rel=1e-4, abs=1e-6)


def test_a_loss_of_parts_by_themselves_would_be_another(alone):
    """What the test of gradients would not see if the batch's parts were alike."""
    whole, part = (shared_work.trained([size], {})["gradients"] for size in (5, 3))
    largest = max(float(gradient.abs().max()) for gradient in whole)
    assert any(not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest) for a, b in zip(whole, part, strict=True))
