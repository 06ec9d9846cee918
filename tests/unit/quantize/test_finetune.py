"""QAT on toy models, without upstream or a quantizer library: what is compared, what trains, and that it learns."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.quantize import finetune
from models.quantize.finetune import DivergedError, Finetuner, LayerTaps

CPU = torch.device("cpu")


class Split(nn.Module):
    """A layer that returns a list, as upstream's CBLinear does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.conv(x).chunk(2, 1))


class DFL(nn.Module):
    """Constant bins, under upstream's name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = torch.arange(4.0).view(1, 4, 1, 1)


class Head(nn.Module):
    """Raw maps while training, `(decoded, raw maps)` otherwise, as upstream's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.drop = nn.Dropout(0.5)
        self.dfl = DFL()

    def forward(self, x: list[Tensor]) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        maps = [self.drop(self.conv(item)) for item in x]
        if self.training:
            return maps
        return self.dfl.conv(maps[0].softmax(1)), maps


class FakeQuantizedConv(nn.Conv2d):
    """A convolution with a fixed-range, coarsely fake-quantized weight (straight-through gradient)."""

    def forward(self, x: Tensor) -> Tensor:
        amax = self.amax
        weight = self.weight.clamp(-amax, amax)
        rounded = torch.round(weight / amax * 2) * amax / 2
        return self._conv_forward(x, weight + (rounded - weight).detach(), self.bias)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.SiLU(), Split(), Head())

    def forward(self, x: Tensor) -> object:
        return self.model(x)


def quantized(teacher: Toy) -> Toy:
    student = copy.deepcopy(teacher)
    conv = student.model[0]
    conv.__class__ = FakeQuantizedConv
    conv.register_buffer("amax", conv.weight.detach().abs().max())
    return student


@pytest.fixture
def teacher() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


def images(batches: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=generator) for _ in range(batches)]


def make(teacher: Toy, **options: object) -> Finetuner:
    arguments: dict = {"stride": 1, "grad_clip": 10.0, "device": CPU} | options
    return Finetuner(quantized(teacher), teacher, **arguments)


@pytest.mark.parametrize(
    ("count", "stride", "expected"),
    [(4, 1, [0, 1, 2, 3]), (6, 3, [0, 3, 4, 5]), (6, 100, [0, 4, 5]), (2, 1, [0, 1]), (23, 10, [0, 10, 20, 21, 22])],
)
def test_supervised_layers_are_every_nth_the_last_before_the_head_and_the_head(count, stride, expected):
    assert finetune.supervised_layers(count, stride) == expected


def test_a_supervision_stride_below_one_is_refused():
    with pytest.raises(ValueError, match="stride"):
        finetune.supervised_layers(5, 0)


def test_all_weights_train_except_constants(teacher):
    teacher.requires_grad_(False)
    student = quantized(teacher)
    parameters = finetune.trainable_parameters(student)
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in student.named_parameters()} - {"model.3.dfl.conv.weight"}
    assert len(parameters) == len(trained)


def test_taps_collect_lists_and_forget_them(teacher):
    with LayerTaps(teacher, [1, 2, 3]) as taps, torch.no_grad(), finetune.raw_head(teacher):
        x = torch.rand(1, 3, 8, 8)
        teacher(x)
        silu, split, head = taps.take()
        assert torch.equal(silu[0], teacher.model[:2](x))
        assert [t.shape[1] for t in split] == [4, 4]
        assert len(head) == 2
        watched = weakref.ref(silu[0])
        del silu, split, head
        taps.take()
        gc.collect()
        assert watched() is None
    assert not any(layer._forward_hooks for layer in teacher.model)


def test_taps_are_removed_when_the_forward_fails(teacher):
    with pytest.raises(RuntimeError), LayerTaps(teacher, [0]):
        teacher(torch.rand(1, 5, 8, 8))
    assert not teacher.model[0]._forward_hooks


def test_loss_is_the_sum_of_relative_squared_errors():
    rng = np.random.default_rng(0)
    ours = [[rng.standard_normal((2, 3)), rng.standard_normal((4,))], [rng.standard_normal((5,))]]
    theirs = [[rng.standard_normal((2, 3)), 9 * rng.standard_normal((4,))], [rng.standard_normal((5,))]]
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    expected = sum(((a - b) ** 2).mean() / b.var() for a, b in pairs)
    tensors = [[[torch.from_numpy(a) for a in layer] for layer in side] for side in (ours, theirs)]
    assert float(finetune.supervision_loss(*tensors)) == pytest.approx(expected, rel=1e-6)


def test_a_layers_scale_does_not_weigh():
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 100)
    small, large = (finetune.supervision_loss([[k * ours]], [[k * theirs]]) for k in (1e-2, 1e2))
    assert float(small) == pytest.approx(float(large), rel=1e-5)


def test_loss_of_half_precision_outputs_does_not_vanish():
    theirs = torch.tensor([1.0, 3.0] * 4, dtype=torch.float16)
    loss = finetune.supervision_loss([[theirs + 2**-9]], [[theirs]])  # the square of that is below half precision
    assert float(loss) == pytest.approx(2.0**-18)


def test_a_constant_layer_gives_a_finite_loss():
    assert torch.isfinite(finetune.supervision_loss([[torch.ones(4)]], [[torch.zeros(4)]]))


def test_raw_head_switches_only_the_head_itself(teacher):
    with finetune.raw_head(teacher):
        assert teacher.model[-1].training
        assert not teacher.model[-1].drop.training
        assert not teacher.model[0].training
    assert not any(m.training for m in teacher.modules())


def test_finetuning_lowers_the_loss_and_leaves_teacher_and_ranges_alone(teacher):
    before = copy.deepcopy(teacher.state_dict())
    tuner = make(teacher)
    amax = tuner.student.model[0].amax.clone()
    constants = tuner.student.model[-1].dfl.conv.weight.clone()
    losses = [tuner.run_epoch(images(8), lr=1e-4).loss for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(tuner.student.model[0].amax, amax)
    assert torch.equal(tuner.student.model[-1].dfl.conv.weight, constants)
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(layer._forward_hooks for m in (teacher, tuner.student) for layer in m.model)
    assert all(p.grad is None for p in tuner.student.parameters())


def test_finetuning_finds_the_way_back_to_the_teacher(teacher):
    student = copy.deepcopy(teacher)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in finetune.trainable_parameters(student):
            parameter.add_(0.02 * torch.randn_like(parameter))
    tuner = Finetuner(student, teacher, stride=1, grad_clip=10.0, device=CPU)
    losses = [tuner.run_epoch(images(8), lr=1e-3).loss for _ in range(12)]
    assert losses[-1] < 0.05 * losses[0]


def test_a_student_that_equals_its_teacher_stays_equal(teacher):
    tuner = Finetuner(copy.deepcopy(teacher), teacher, stride=1, grad_clip=10.0, device=CPU)
    result = tuner.run_epoch(images(3), lr=0.1)
    assert (result.loss, result.iterations) == (0.0, 3)
    for ours, theirs in zip(tuner.student.parameters(), teacher.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_epochs_are_deterministic(teacher):
    first, second = make(teacher), make(teacher)
    assert first.run_epoch(images(4), 1e-3).loss == second.run_epoch(images(4), 1e-3).loss
    for a, b in zip(first.student.parameters(), second.student.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_continues_exactly(teacher):
    whole = make(teacher)
    whole.run_epoch(images(4, seed=1), 1e-3)
    state, weights = copy.deepcopy(whole.state_dict()), copy.deepcopy(whole.student.state_dict())
    whole.run_epoch(images(4, seed=2), 1e-3)

    resumed = make(teacher)
    resumed.student.load_state_dict(weights)
    resumed.load_state_dict(state)
    resumed.run_epoch(images(4, seed=2), 1e-3)
    for a, b in zip(whole.student.parameters(), resumed.student.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_moves_no_weight_further_than_adam_allows(teacher):
    tuner = make(teacher)
    before = [p.detach().clone() for p in tuner.student.parameters()]
    tuner.run_epoch(images(1), lr=1e-4)
    moved = max(float((a.detach() - b).abs().max()) for a, b in zip(tuner.student.parameters(), before, strict=True))
    assert 0 < moved <= 1.01e-4


def test_gradients_are_clipped(teacher, monkeypatch):
    seen = []
    original = nn.utils.clip_grad_norm_
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda p, limit: (seen.append(limit), original(p, limit))[1])
    make(teacher, grad_clip=0.25).run_epoch(images(2), 1e-3)
    assert seen == [0.25, 0.25]


def test_a_loss_that_is_not_finite_is_named(teacher):
    tuner = make(teacher)
    with torch.no_grad():
        tuner.student.model[2].conv.weight[0, 0] = float("nan")
    with pytest.raises(DivergedError, match="nan"):
        tuner.run_epoch(images(1), 1e-3)
    assert not any(m.training for m in tuner.student.modules())


def test_the_mean_loss_is_told_after_every_step(teacher):
    told = []
    result = make(teacher).run_epoch(images(3), 1e-4, on_step=told.append)
    assert len(told) == 3
    assert told[-1] == result.loss


def test_no_images_is_an_error(teacher):
    with pytest.raises(ValueError, match="no images"):
        make(teacher).run_epoch([], 1e-3)


def test_a_model_without_layers_is_refused():
    with pytest.raises(TypeError, match="model"):
        finetune.top_layers(nn.Conv2d(1, 1, 1))


def test_images_become_fractions():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert finetune.as_input(images, CPU).flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])
    floats = torch.rand(1, 3, 2, 2)
    assert finetune.as_input(floats, CPU) is floats


def test_seeding_covers_what_augmentation_draws_from():
    import random

    draws = []
    for _ in range(2):
        finetune.seed_everything(57)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]
