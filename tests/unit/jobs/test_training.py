"""The epochs of a run: their images depend on seed and epoch alone, their rates on the schedule, and both are told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_networks import detector
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from models.quantize import calibration, placement
from models.quantize.finetune import held_out_loss, learning_rate
from models.quantize.recipe import Calibration, Finetune, Recipe
from utils.evaluation.batch import Batch
from utils.evaluation.dataset import Batches
from utils.jobs.options import QuantizeOptions
from utils.jobs.quantize import Training

IMAGES = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LR = 1e-4


@pytest.fixture(scope="module")
def student() -> nn.Module:
    network = detector()
    placement.apply(network, placement.plan(network, Recipe()))
    calibration.calibrate(network, [IMAGES[:2].float() / 255], Calibration(method="max"))
    return network


class Given:
    """Stands for `Inputs`: eight images to train on, two that are held out, and what was read."""

    device = torch.device("cpu")
    held_out = frozenset({"an image"})

    def __init__(self) -> None:
        self.read: list[int] = []
        self.batch_size = 2

    def _loader(self, images: torch.Tensor, shuffle: bool) -> DataLoader[Any]:
        def collate(items: Any) -> Batch:
            return Batch(torch.stack([one[0] for one in items]), ("",) * len(items))

        dataset, generator = TensorDataset(images), torch.Generator()
        order = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
        batches = BatchSampler(order, self.batch_size, drop_last=False)
        sampler = Batches(batches, self.batch_size, len(images), shared=False)
        return DataLoader(dataset, batch_sampler=sampler, generator=generator, collate_fn=collate)

    def training_loader(self) -> DataLoader[Any]:
        loader = self._loader(IMAGES[:8], shuffle=True)
        collate = loader.collate_fn

        def watched(items: Any) -> Any:
            self.read += [int(torch.where((one[0] == IMAGES).all(3).all(2).all(1))[0]) for one in items]
            return collate(items)

        loader.collate_fn = watched
        return loader

    def held_out_loader(self) -> DataLoader[Any]:
        return self._loader(IMAGES[8:], shuffle=False)


def training(student: nn.Module, given: Given, state: Any = None, batch_size: int = 2, **settings: Any) -> Training:
    given.options = QuantizeOptions(seed=5, batch_size=batch_size)
    settings = Finetune(**{"epochs": 3, "iters": 4, "lr": LR, **settings})
    return Training(student, detector(), given, settings, state)


def test_an_epoch_tells_its_loss_its_mean_rate_and_the_loss_on_held_out_images(student):
    trains = training(copy.deepcopy(student), Given())
    done = trains.epoch(0)
    assert done["lr"] == pytest.approx(sum(learning_rate(step, 12, LR) for step in range(4)) / 4)
    assert done["loss"] > 0
    after = held_out_loss(*trains._networks, [IMAGES[8:]], Given.device)
    assert (done["held_out"], done["held_out_error"]) == (after.value, after.difference(trains.ptq)[1])
    assert done["held_out"] != trains.ptq.value


def test_an_epochs_images_depend_on_seed_and_epoch_alone(student):
    orders = []
    for epochs in ((0, 1, 2), (1,), (2,)):
        given = Given()
        trains = training(copy.deepcopy(student), given)
        for epoch in epochs:
            given.read.clear()
            trains.epoch(epoch)
            orders.append((epoch, tuple(given.read)))
    by_epoch = {epoch: {order for other, order in orders if other == epoch} for epoch in range(3)}
    assert [len(found) for found in by_epoch.values()] == [1, 1, 1]
    assert len(set.union(*by_epoch.values())) == 3
    assert all(sorted(order) == list(range(8)) for _, order in orders), "a pass over all that is not held out"
