"""What student and teacher are compared by: against NumPy in float64, and on small networks with quantizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_finetuners import task_loss
from small_networks import detector, segmenter, segmenter_with_own_input
from torch import Tensor

from models.quantize.distillation import mask_distance, raw_head, task_terms

CLASSES, BINS = 3, 4
X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


# the task loss


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


def test_the_terms_are_those_of_the_definition():
    ours, theirs = maps(0), maps(1)
    distance, weight = reference(ours, theirs)
    found = task_terms(ours, theirs, CLASSES)
    assert [float(one) for one in found] == pytest.approx([distance, weight], rel=1e-5)
    assert float(task_loss(ours, theirs, CLASSES)) == pytest.approx(distance / weight, rel=1e-5)


def test_a_small_distance_is_no_difference_of_large_sums():
    theirs = maps(1, sizes=(40, 20))
    ours = [one + 1e-2 * noise for one, noise in zip(theirs, maps(0, sizes=(40, 20)), strict=True)]
    distance, _ = reference(ours, theirs)
    assert float(task_terms(ours, theirs, CLASSES)[0]) == pytest.approx(distance, rel=1e-4)


def test_equal_maps_are_no_distance_and_give_no_gradient():
    ours = [one.requires_grad_() for one in maps(0)]
    loss = task_loss(ours, maps(0), CLASSES)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-5)
    assert all(float(one.grad.abs().max()) < 1e-6 for one in ours)


def test_a_level_without_objects_weighs_nothing():
    (ours,), (theirs,) = maps(0, sizes=(6,)), maps(1, sizes=(6,))
    (empty,) = maps(2, certainty=-60, sizes=(3,))
    other = empty.clone()
    other[:, : 4 * BINS] = maps(3, sizes=(3,))[0][:, : 4 * BINS]
    alone, beside = task_loss([ours], [theirs], CLASSES), task_loss([ours, other], [theirs, empty], CLASSES)
    assert float(beside) == pytest.approx(float(alone), rel=1e-6)


def test_a_class_that_is_only_the_students_counts_where_the_teacher_sees_nothing():
    ours, theirs = maps(1, certainty=-60), maps(1, certainty=-60)
    ours[0][0, 4 * BINS, 2, 2] = 4.0
    assert float(task_loss(ours, theirs, CLASSES)) == pytest.approx(np.log(1 + np.exp(4.0)), rel=1e-4)


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
    assert float(task_loss(ours, theirs, CLASSES)) == pytest.approx(expected / weight, rel=1e-5)


def near(theirs: tuple, part: int, size: float = 0.1) -> tuple[list[Tensor], Tensor, Tensor]:
    """The teacher's, with noise on one part: 1 are coefficients, 2 prototypes."""
    ours = list(theirs)
    ours[part] = ours[part] + size * torch.randn(ours[part].shape, generator=torch.Generator().manual_seed(3))
    return tuple(ours)


@pytest.mark.parametrize(("size", "tolerance"), [(0.1, 1e-4), (1e-4, 1e-2)])
@pytest.mark.parametrize("part", [1, 2])
def test_coefficients_and_prototypes_count_by_themselves(part, size, tolerance):
    """Also by little: the error is no difference of large sums."""
    theirs = head(1)
    ours = near(theirs, part, size)
    best = torch.cat([one.flatten(2) for one in theirs[0]], 2)[:, 4 * BINS :].sigmoid().amax(1)
    expected = mask_reference(ours, theirs)
    assert expected > 0
    assert float(mask_distance(ours[1:], theirs[1:], best).sum()) == pytest.approx(
        expected, rel=1e-2 if size < 1e-2 else 1e-4
    )


def test_images_count_by_themselves_so_that_parts_of_a_batch_add_up():
    ours, theirs = head(0), head(1)
    parts = [
        [tuple([one[image : image + 1] for one in side[0]] if index == 0 else side[index][image : image + 1]
               for index in range(3)) for side in (ours, theirs)]
        for image in range(2)
    ]  # fmt: skip
    whole = [float(one) for one in task_terms(ours, theirs, CLASSES)]
    alone = torch.tensor([[float(one) for one in task_terms(*part, CLASSES)] for part in parts])
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


def test_constant_masks_give_a_finite_loss():
    ours, theirs = head(0), head(1)
    flat = (theirs[0], torch.ones_like(theirs[1]), torch.ones_like(theirs[2]))
    assert torch.isfinite(task_loss(ours, flat, CLASSES))
    assert torch.isfinite(task_loss((ours[0], *flat[1:]), flat, CLASSES))


@pytest.mark.parametrize("make", [segmenter, segmenter_with_own_input])
def test_the_head_of_a_segmentation_network_gives_what_the_loss_takes(make):
    network, other = make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        with raw_head(network), raw_head(other):
            theirs, ours = network(X), other(X)
        found = task_terms(ours, theirs, CLASSES)
    without, weight = reference(ours[0], theirs[0])
    assert [float(one) for one in found] == pytest.approx(
        [without + mask_reference(ours, theirs), weight], rel=1e-4
    )  # fmt: skip


def test_raw_head_switches_only_the_head_itself():
    network = detector()
    with raw_head(network):
        assert network.model[-1].training
        assert not network.model[-1].drop.training
        assert not network.model[0].training
    assert not any(module.training for module in network.modules())
