"""Augmented images depend on the seed, the pass and the image, and not on which process makes them."""

import random
from functools import partial

import numpy as np
import pytest
import torch

from utils import upstream
from utils.evaluation import dataset as dataset_module
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.dataset import SeededImages, make_loader
from utils.evaluation.labels import Labels
from utils.evaluation.split import ImageFile, SplitImages
from utils.jobs.inputs import image_batches

COUNT = 11
SPLIT = SplitImages("train", [ImageFile("0.jpg", (64, 64), Labels(), True)], [], [])


class Drawing:
    """An augmenting dataset that draws as upstream's does; how often depends on what it draws."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int):
        draws = [random.random(), float(np.random.uniform())]
        if draws[0] < 0.5:  # a mosaic draws more
            draws += [random.uniform(-1, 1), float(np.random.beta(32.0, 32.0))]
        image = torch.tensor([index, *draws, *[0.0] * (4 - len(draws))], dtype=torch.float64)
        return image, torch.zeros((0, 6)), f"{index}.jpg", None


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Makes a loader of augmented images."""
    monkeypatch.setattr(upstream, "make_dataset", lambda *_, **__: Drawing())
    monkeypatch.setattr(dataset_module, "cpu_cores", lambda: 2)
    monkeypatch.setattr(DataConfig, "read", lambda *_, **__: SPLIT)
    data = DataConfig(tmp_path / "data.yaml", tmp_path, {0: "a"}, {}, False)
    return partial(make_loader, data, "train", imgsz=64, batch_size=2, augment=True)


@pytest.fixture
def passes(make):
    """A function: workers, seeds of passes → for each pass, image → what was drawn for it, in the pass's order."""

    def run(workers: int, *seeds: int | None) -> list[dict[int, tuple[float, ...]]]:
        loader, found = make(workers=workers, shuffle=True), []
        for seed in seeds:
            if seed is not None:
                loader.order.manual_seed(seed)
            rows = torch.cat([batch.images for batch in loader]).tolist()
            found.append({int(index): tuple(draws) for index, *draws in rows})
        return found

    return run


def test_the_number_of_workers_changes_no_image(passes):
    alone = passes(0, 3, 4, None)
    for workers in (1, 2):
        for ours, theirs in zip(passes(workers, 3, 4, None), alone, strict=True):
            assert list(ours.items()) == list(theirs.items())


def test_the_seed_decides_and_every_pass_and_image_has_its_own(passes):
    first, again, other, after = passes(0, 3, 3, 4, None)
    assert first == again
    everything = [draws for one in (first, other, after) for draws in one.values()]
    assert len(set(everything)) == 3 * COUNT
    assert sorted(first) == list(range(COUNT))


def test_an_image_that_cannot_be_decoded_is_left_out_and_said(make, monkeypatch, caplog):
    """One in the middle of a QAT ended it, and every attempt to resume it."""
    whole = Drawing.__getitem__

    def lacking(self: Drawing, index: int):
        assert index not in (2, 5), f"Image Not Found {index}.jpg"
        return whole(self, index)

    monkeypatch.setattr(Drawing, "__getitem__", lacking)
    loader = make(workers=0)
    for _ in range(2):
        found = sorted(row[0] for batch in image_batches(loader) for row in batch.tolist())
        assert found == [0, 1, 3, 4, 6, 7, 8, 9, 10]
    assert [message.startswith(f"2 of {COUNT} images are left out") for message in caplog.messages] == [True]


def test_who_else_draws_is_not_disturbed():
    images = SeededImages(Drawing())
    random.seed(1), np.random.seed(1)
    before = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    images[0]
    assert (random.random(), np.random.rand()) == before
