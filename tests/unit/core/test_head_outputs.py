"""The tensors that matter, found in what toy heads of each task and mode return."""

from __future__ import annotations

import pytest
import torch
from small_networks import detector, segmenter, segmenter_with_own_input

from utils.core.tasks import predicted, trained

X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [segmenter, segmenter_with_own_input])
def test_masks_are_a_second_output(make):
    network = make()
    with torch.no_grad():
        rows, (maps, coefficients, prototypes) = network(X)
        found = predicted((rows, (maps, coefficients, prototypes)))
        assert all(one is other for one, other in zip(found, (rows, prototypes), strict=True))
        found = predicted((rows, prototypes))  # what the head returns for an export
        assert all(one is other for one, other in zip(found, (rows, prototypes), strict=True))
        network.model[-1].training = True
        levels, masks = trained(network(X))
    assert [tuple(one.shape) for one in levels] == [(2, 19, 16, 16), (2, 19, 8, 8)]
    assert [tuple(one.shape) for one in masks] == [(2, 5, 320), (2, 5, 32, 32)]
    assert rows.shape == (2, 19 + 5, 320)


def test_a_detector_has_one_output():
    network = detector()
    with torch.no_grad():
        prediction, maps = network(X)
        network.model[-1].training = True
        levels = network(X)
    assert all(len(predicted(one)) == 1 for one in (prediction, [prediction], (prediction,), (prediction, maps)))
    assert all(predicted(one)[0] is prediction for one in (prediction, (prediction,), (prediction, maps)))
    assert predicted(([prediction, prediction + 1], [maps, maps]))[0] is prediction  # with an auxiliary branch
    assert trained(levels) == (levels, ())
    assert trained(tuple(levels)) == (tuple(levels), ())
