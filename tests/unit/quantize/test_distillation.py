"""What student and teacher are compared by: against NumPy in float64, and on small networks with quantizers."""

import numpy as np
import pytest
import torch
from small_finetuners import task_loss
from small_networks import detector
from torch import Tensor

from models.quantize.distillation import mask_distance, raw_head, task_terms

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


def test_the_terms_are_those_of_the_definition():
    ours, theirs = maps(0), maps(1)
    distance, weight = reference(ours, theirs)
    found = task_terms(ours, theirs, CLASSES)
    assert [float(one) for one in found] == pytest.approx([distance, weight], rel=1e-5)


def test_a_small_distance_is_no_difference_of_large_sums():
    theirs = maps(1, sizes=(40, 20))
    ours = [one + 1e-2 * noise for one, noise in zip(theirs, maps(0, sizes=(40, 20)), strict=True)]
    distance, _ = reference(ours, theirs)
    assert float(task_terms(ours, theirs, CLASSES)[0]) == pytest.approx(distance, rel=1e-4)


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
