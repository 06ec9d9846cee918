"""Polygons as masks: read, filled, on the grid by torch's interpolation, and packed to bits."""

import cv2
import numpy as np
import pytest
import torch
from known_images import SQUARE
from known_masks import write_outlined_set

from utils.core.errors import DataError
from utils.evaluation.batch import PackedMasks, collate, on_grid, packed_truth
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.images import read_labels
from utils.evaluation.letterbox import Letterbox


def interpolated(mask, stride):
    """Upstream's definition."""
    wide = torch.from_numpy(mask)[None, None].float()
    size = (mask.shape[0] // stride, mask.shape[1] // stride)
    return (torch.nn.functional.interpolate(wide, size, mode="bilinear", align_corners=False)[0, 0] > 0.5).numpy()


@pytest.mark.parametrize("stride", [2, 4, 8])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_the_grid_is_what_interpolation_gives(stride, share):
    mask = (np.random.default_rng(0).random((96, 160)) < share).astype(np.uint8)
    found = on_grid(mask, stride)
    np.testing.assert_array_equal(found, interpolated(mask, stride))
    assert 0.01 < found.mean() < 0.99


def test_every_pattern_of_the_inner_pixels():
    """Of a block of 4x4 its four inner pixels decide, three of them being enough."""
    blocks = np.zeros((16, 4, 4), np.uint8)
    for number, block in enumerate(blocks):
        block[1:3, 1:3] = np.array([number >> shift & 1 for shift in range(4)]).reshape(2, 2)
    found = [bool(on_grid(block, 4)[0, 0]) for block in blocks]
    assert found == [number.bit_count() >= 3 for number in range(16)]
    assert found == [bool(interpolated(block, 4)[0, 0]) for block in blocks]


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 3)])
def test_bits_come_back(shape):
    masks = np.random.default_rng(1).random((6, *shape)) < 0.5
    packed = PackedMasks.pack(masks)
    assert packed.bits.shape == (6, -(-shape[0] * shape[1] // 8))
    np.testing.assert_array_equal(packed.unpacked(), masks.reshape(6, -1))
    twice = PackedMasks.together([packed, packed])
    assert (len(twice), twice.shape) == (12, shape)
    assert torch.equal(twice.unpacked()[6:], packed.unpacked())


def test_a_polygon_lies_where_the_letterbox_puts_it():
    """An image of 30x20 in the middle of 64x64, twice as large, with half pixels of padding; truncated, not rounded."""
    box = Letterbox((20, 30), (2.0, 2.0), (2.0, 12.5))
    square = np.array([[0, 0], [0.5, 0], [0.5, 1], [0, 1]], np.float32)
    found = packed_truth([square], box, (64, 64), 1).unpacked().view(64, 64).numpy()
    expected = np.zeros((64, 64), np.uint8)
    cv2.fillPoly(expected, [np.array([[2, 12], [32, 12], [32, 52], [2, 52]], np.int32)], 1)
    np.testing.assert_array_equal(found, expected)
    assert packed_truth([], box, (64, 64)).bits.shape == (0, 32)


# reading


def test_polygons_are_read_with_the_boxes_that_a_detector_gets(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("1 0.5 0.5 0.7 0.5 0.6 0.9\n\n0 0.1 0.1 0.3 0.1 0.3 0.4 0.1 0.4\n1 0.6 0.9 0.7 0.5 0.5 0.5\n")
    labels, polygons, *_ = read_labels(file, 2)
    np.testing.assert_allclose(labels, [[0, 0.2, 0.25, 0.2, 0.3], [1, 0.6, 0.7, 0.2, 0.4]], atol=1e-6)
    assert [one.tolist() for one in polygons] == [  # of two with one box the first stays
        np.array(rows, np.float32).tolist()
        for rows in ([[0.1, 0.1], [0.3, 0.1], [0.3, 0.4], [0.1, 0.4]], [[0.5, 0.5], [0.7, 0.5], [0.6, 0.9]])
    ]
    file.write_text("")
    labels, polygons, *_ = read_labels(file, 2)
    assert (labels.shape, polygons) == ((0, 5), ())


@pytest.mark.parametrize("lines", ["0 0.5 0.5 0.2 0.2\n", "0 0.1 0.1 0.3 0.1 0.3 0.4\n\n0 0.1 0.1 0.9 0.9\n"])
def test_a_box_is_no_outline(tmp_path, lines):
    write_outlined_set(tmp_path, 3, SQUARE)
    file = tmp_path / "labels/val/000000000002.txt"
    file.write_text(lines)
    with pytest.raises(DataError, match=rf"outlines, and 1 image of 'val' have boxes.*{file}"):
        make_loader(load_data(tmp_path / "data.yaml"), "val", imgsz=64, batch_size=2, workers=0, mask_stride=4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stride", [1, 4])
def test_batches_hold_the_masks_of_their_labels(tmp_path, workers, stride):
    """Images of 64x64 need no resizing, so that the outlines are where they were drawn."""
    samples = write_outlined_set(tmp_path, 10, SQUARE)
    data = load_data(tmp_path / "data.yaml")
    loader = make_loader(data, "val", imgsz=64, batch_size=4, workers=workers, mask_stride=stride)
    count = 0
    for batch in loader:
        assert batch.masks is not None
        assert len(batch.masks) == len(batch.labels)
        masks = batch.masks.unpacked().view(-1, 64 // stride, 64 // stride)
        for mask, (owner, label, cx, cy, *_) in zip(masks, batch.labels.tolist(), strict=True):
            sample = next(one for one in samples if str(one.path) == batch.paths[int(owner)])
            boxes = sample.labels
            away = np.abs(np.stack([boxes[:, [1, 3]].mean(1), boxes[:, [2, 4]].mean(1)], 1) - [cx * 64, cy * 64])
            place = away.sum(1).argmin()
            assert boxes[place, 0] == label
            points = (sample.outlines[place] / 64).clip(0, 1).round(6).astype(np.float32) * 64
            filled = cv2.fillPoly(np.zeros((64, 64), np.uint8), [points.astype(np.int32)], 1)
            np.testing.assert_array_equal(mask, filled if stride == 1 else interpolated(filled, stride))
            count += 1
    assert count == sum(len(sample.labels) for sample in samples) > 10


def test_images_without_objects_and_batches_without_images(tmp_path):
    samples = write_outlined_set(tmp_path, 8, SQUARE)
    for sample in samples[:4]:
        (tmp_path / f"labels/val/{sample.path.stem}.txt").write_text("")
    loader = make_loader(load_data(tmp_path / "data.yaml"), "val", imgsz=64, batch_size=4, workers=0, mask_stride=4)
    first, _ = list(loader)
    assert first.masks.bits.shape == (0, 32)
    assert collate([]).masks is None
    with pytest.raises(ValueError, match="without masks"):
        make_loader(load_data(tmp_path / "data.yaml"), "val", imgsz=64, batch_size=4, mask_stride=4, augment=True)
