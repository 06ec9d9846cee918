"""Polygons as masks: read, filled, and on the grid by torch's interpolation."""

import cv2
import numpy as np
import pytest
import torch
from known_images import SQUARE
from known_masks import write_outlined_set

from utils.core.errors import DataError
from utils.evaluation.batch import collate, on_grid, polygon_masks
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.images import read_labels
from utils.evaluation.letterbox import Letterbox


def interpolated(mask):
    """Upstream's definition."""
    wide = torch.from_numpy(mask)[None, None].float()
    size = (mask.shape[0] // 4, mask.shape[1] // 4)
    return (torch.nn.functional.interpolate(wide, size, mode="bilinear", align_corners=False)[0, 0] > 0.5).numpy()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_the_grid_is_what_interpolation_gives(share):
    mask = (np.random.default_rng(0).random((96, 160)) < share).astype(np.uint8)
    found = on_grid(mask)
    np.testing.assert_array_equal(found, interpolated(mask))
    assert 0.01 < found.mean() < 0.99


def test_a_polygon_lies_where_the_letterbox_puts_it():
    """An image of 30x20 in the middle of 64x64, twice as large, with half pixels of padding; truncated, not rounded."""
    box = Letterbox((20, 30), (40, 60), (2.0, 12.5))
    square = np.array([[0, 0], [0.5, 0], [0.5, 1], [0, 1]], np.float32)
    found = polygon_masks([square], box, (64, 64))[0].numpy()
    expected = np.zeros((64, 64), np.uint8)
    cv2.fillPoly(expected, [np.array([[2, 12], [32, 12], [32, 52], [2, 52]], np.int32)], 1)
    np.testing.assert_array_equal(found, interpolated(expected))


def test_polygons_are_read_with_the_boxes_that_a_detector_gets(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("1 0.5 0.5 0.7 0.5 0.6 0.9\n\n0 0.1 0.1 0.3 0.1 0.3 0.4 0.1 0.4\n1 0.6 0.9 0.7 0.5 0.5 0.5\n")
    labels, polygons, *_ = read_labels(file, 2)
    np.testing.assert_allclose(labels, [[0, 0.2, 0.25, 0.2, 0.3], [1, 0.6, 0.7, 0.2, 0.4]], atol=1e-6)
    assert [one.tolist() for one in polygons] == [  # of two with one box the first stays
        np.array(rows, np.float32).tolist()
        for rows in ([[0.1, 0.1], [0.3, 0.1], [0.3, 0.4], [0.1, 0.4]], [[0.5, 0.5], [0.7, 0.5], [0.6, 0.9]])
    ]


@pytest.mark.parametrize("lines", ["0 0.5 0.5 0.2 0.2\n", "0 0.1 0.1 0.3 0.1 0.3 0.4\n\n0 0.1 0.1 0.9 0.9\n"])
def test_a_box_is_no_outline(tmp_path, lines):
    write_outlined_set(tmp_path, 3, SQUARE)
    file = tmp_path / "labels/val/000000000002.txt"
    file.write_text(lines)
    with pytest.raises(DataError, match=rf"outlines, and 1 image of 'val' have boxes.*{file}"):
        make_loader(load_data(tmp_path / "data.yaml"), "val", imgsz=64, batch_size=2, workers=0, masks=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_the_masks_of_their_labels(tmp_path, workers):
    """Images of 64x64 need no resizing, so that the outlines are where they were drawn; the last batch has none."""
    samples = write_outlined_set(tmp_path, 12, SQUARE)
    for sample in samples[8:]:
        (tmp_path / f"labels/val/{sample.path.stem}.txt").write_text("")
    data = load_data(tmp_path / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=4, workers=workers, masks=True)
    count = 0
    for batch in loader:
        owners = batch.labels.owners().tolist()
        for mask, owner, (label, *corners) in zip(batch.masks, owners, batch.labels.flat.tolist(), strict=True):
            sample = next(one for one in samples if str(one.path) == batch.paths[owner])
            place = np.abs(sample.labels[:, 1:] - corners).sum(1).argmin()
            assert sample.labels[place, 0] == label
            points = (sample.outlines[place] / 64).clip(0, 1).round(6).astype(np.float32) * 64
            filled = cv2.fillPoly(np.zeros((64, 64), np.uint8), [points.astype(np.int32)], 1)
            np.testing.assert_array_equal(mask, interpolated(filled))
            count += 1
    assert batch.masks.shape == (0, 16, 16)
    assert count == sum(len(sample.labels) for sample in samples[:8]) > 10
    assert collate([]).masks is None
