"""The loader: batches, shapes, order, processes that read ahead."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from known_images import write_set

from utils.core.errors import DataError
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import ImageDataset, loading_processes, make_loader
from utils.evaluation.images import find_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("set")
    write_set(path, 20)
    return path


def test_items(folder):
    dataset = ImageDataset(load_data(folder / "data.yaml").read("val"), 64, single_cls=True)
    image, labels, path, shapes, masks = dataset[0]
    assert masks is None
    assert image.shape == (3, 64, 64)
    assert image.dtype == torch.uint8
    entry = cv2.imread(path)[:, :, ::-1]
    np.testing.assert_array_equal(image.permute(1, 2, 0), entry)  # 64×64 needs no resizing
    assert (labels[:, 0] == 0).all()  # single class
    cx, cy, w, h = dataset.images[0].labels.rows[:, 1:].T * 64
    np.testing.assert_allclose(labels[:, 1:], np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1), atol=1e-4)
    assert shapes[0] == (64, 64)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 50])
@pytest.mark.parametrize("rect", [True, False])
def test_every_image_comes_once_and_batches_have_one_shape(folder, batch_size, rect):
    data = load_data(folder / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=batch_size, workers=0, rect=rect)
    seen = []
    for batch in loader:
        assert len(batch) == len(batch.images) == len(batch.paths) == len(batch.shapes) <= batch_size
        assert len(batch.labels) == len(batch)
        seen += batch.paths
    assert sorted(seen) == sorted(str(path) for path in (folder / "images/val").iterdir())


def test_shuffling_is_fixed_by_the_seed(folder):
    data = load_data(folder / "data.yaml")

    def order(seed, state, batch_size=3):
        random.seed(state)
        torch.manual_seed(state)
        loader = make_loader(data, "train", imgsz=64, batch_size=batch_size, workers=0, shuffle=True, seed=seed)
        return [path for batch in loader for path in batch.paths]

    assert order(1, 0) == order(1, 99) == order(1, 0, batch_size=7)  # calibration's images
    assert order(1, 0) != order(2, 0)
    assert sorted(order(1, 0)) == sorted(order(2, 0))


def test_workers_give_the_same_batches(folder):
    data = load_data(folder / "data.yaml")
    loaders = [make_loader(data, "val", imgsz=64, batch_size=8, workers=workers, rect=True) for workers in (0, 2)]
    for alone, helped in zip(*loaders, strict=True):
        torch.testing.assert_close(alone.images, helped.images)
        torch.testing.assert_close(alone.labels.flat, helped.labels.flat)
        assert (alone.paths, alone.shapes) == (helped.paths, helped.shapes)


def test_limit_takes_images_evenly_spread(folder):
    data = load_data(folder / "data.yaml")
    assert [Path(image.path).stem[-2:] for image in data.read("val", 3).images] == ["01", "10", "20"]
    assert len(data.read("val", 99).images) == 20


def test_keep_takes_only_the_images_that_it_holds_for(folder):
    files = find_images([str(folder / "images/val")])
    kept = files[1::3]
    data = load_data(folder / "data.yaml")
    dataset = ImageDataset(data.read("val"), 64, keep=kept.__contains__)
    assert [one.path for one in dataset.images] == kept
    loader = make_loader(data, "val", imgsz=64, batch_size=3, workers=0, shuffle=True, keep=kept.__contains__)
    assert sorted(one for batch in loader for one in batch.paths) == kept
    with pytest.raises(DataError, match="'val'"):
        ImageDataset(data.read("val"), 64, keep=lambda _: False)


@pytest.mark.parametrize(("free", "workers"), [(0, 0), (64, 0), (500, 4), (24_000, 8)])
def test_as_many_processes_read_as_their_batches_have_room(monkeypatch, caplog, free, workers):
    batch = 32 * 3 * 640 * 640  # bytes
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free * 1_000_000))
    assert loading_processes(8, batch) == workers
    assert not workers or (2 * workers + 2) * batch <= 0.8e6 * free
    assert len(caplog.records) == (workers < 8)
    assert loading_processes(0, batch) == 0


def test_a_loader_gives_the_same_without_shared_memory(folder, monkeypatch):
    data = load_data(folder / "data.yaml")
    wanted = [batch.images for batch in make_loader(data, "val", imgsz=64, batch_size=8, workers=0)]
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    loader = make_loader(data, "val", imgsz=64, batch_size=8, workers=2)
    assert loader.num_workers == 0
    assert all((batch.images == images).all() for batch, images in zip(loader, wanted, strict=True))
