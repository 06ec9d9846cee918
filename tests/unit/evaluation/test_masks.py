"""Masks of detections and their overlaps, against NumPy, detection by detection, torch's sampling, and pycocotools.

They are sums of prototypes, or what a network with NMS inside gives: on the prototypes' grid, or in the boxes' frames.
Masks of labels are filled polygons, on the grid by torch's interpolation.
"""

import cv2
import numpy as np
import pytest
import torch
import torchvision
from known_images import SQUARE
from known_masks import write_outlined_set
from pycocotools import mask as coco_mask
from torch.nn.functional import grid_sample, interpolate

from utils.core.errors import DataError, InputError
from utils.core.tasks import Prediction
from utils.evaluation import masks as masks_module
from utils.evaluation import nms
from utils.evaluation.batch import collate, on_grid, polygon_masks
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.letterbox import Letterbox
from utils.evaluation.masks import Masks, image_pixels, mask_overlaps, pasted, patches, run_lengths
from utils.evaluation.nms import non_max_suppression

SIZE, GRID, CLASSES, COEFFICIENTS = (48, 64), (12, 16), 3, 6
TWICE = Letterbox((96, 128), (48, 64), (0.0, 0.0))  # the original has twice the input's pixels


def prediction(batch=3, anchors=40, seed=0, smooth=False):
    random = torch.Generator().manual_seed(seed)
    middle = torch.rand(batch, 2, anchors, generator=random) * torch.tensor([64.0, 48.0])[:, None]
    size = torch.rand(batch, 2, anchors, generator=random) * 30 + 8
    scores = torch.rand(batch, CLASSES, anchors, generator=random) ** 2
    coefficients = torch.randn(batch, COEFFICIENTS, anchors, generator=random)
    raw = torch.cat([middle, size, scores, coefficients], 1)
    maps = torch.randn(batch, COEFFICIENTS, *((4, 5) if smooth else GRID), generator=random)
    return Prediction(raw, interpolate(maps, GRID, mode="bicubic") if smooth else maps)


def detected(batch=3, **how):
    found = prediction(batch, **how)
    rows = non_max_suppression(found, 0.3, 0.6)
    return found, rows, Masks.of(found, rows, SIZE)


def plain_mask(found, image, row, upsampled=False):
    """The mask of one row of NMS, without any batching: sum, sigmoid, then cropped."""
    sums = np.einsum("k,khw->hw", found.coefficients[image, :, int(row[6])].numpy(), found.prototypes[image].numpy())
    share = torch.from_numpy(1 / (1 + np.exp(-sums.astype(np.float64))))
    scale = 1 if upsampled else 4
    if upsampled:
        share = interpolate(share[None, None], SIZE, mode="bilinear", align_corners=False)[0, 0]
    x1, y1, x2, y2 = (float(value) / scale for value in row[:4])
    y, x = np.mgrid[: share.shape[0], : share.shape[1]]
    return (share.numpy() > 0.5) & (x1 <= x) & (x < x2) & (y1 <= y) & (y < y2)


def test_nms_says_which_anchor_a_detection_comes_from():
    found, rows, _ = detected()
    for image, one in enumerate(rows):
        assert len(one) > 5
        for x1, y1, x2, y2, score, label, anchor in one.tolist():
            cx, cy, w, h = found.boxes[image, :, int(anchor)].tolist()
            assert [x1, y1, x2, y2] == pytest.approx([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], abs=1e-4)
            assert score == pytest.approx(float(found.scores[image, int(label), int(anchor)]))
    plain = Prediction(torch.cat([found.boxes, found.scores], 1))  # a detector's rows have no anchor
    assert Masks.of(plain, [], SIZE) is None
    assert all(
        torch.equal(one, other[:, :6]) for one, other in zip(non_max_suppression(plain, 0.3, 0.6), rows, strict=True)
    )
    expected = non_max_suppression(found, 0.2, 0.5, max_det=7)
    assert all(map(torch.equal, nms.suppress_together(found, nms.candidates(found, 0.2), 0.5, 7, False), expected))


@pytest.mark.parametrize("upsampled", [False, True])
def test_pixels_are_those_of_each_mask_by_itself(upsampled):
    found, rows, masks = detected()
    assert masks.grid == GRID
    for image, one in enumerate(rows):
        inside = masks.pixels(image, torch.arange(len(one)), SIZE if upsampled else None)
        for mask, row in zip(inside, one, strict=True):
            np.testing.assert_array_equal(mask, plain_mask(found, image, row, upsampled))
        assert 0.01 < inside.float().mean() < 0.5


@pytest.mark.parametrize("largest", [None, 1, 5000])  # bytes of masks at a time
def test_overlaps_are_pycocotools(monkeypatch, largest):
    """Labels are some detections with errors; the second image shows nothing, in the third there is one label."""
    monkeypatch.setitem(masks_module.LARGEST, "cpu", largest or masks_module.LARGEST["cpu"])
    found, rows, masks = detected()
    random, labels, planes = np.random.default_rng(1), [], []
    for image, (one, step, last) in enumerate(zip(rows, (3, 1, 1), (99, 0, 1), strict=True)):
        chosen = torch.arange(len(one))[:last:step]
        inside = masks.pixels(image, chosen).numpy()
        planes += [mask ^ (random.random(mask.shape) < 0.05) for mask in inside]
        labels.append(torch.cat([one[chosen, 5:6], one[chosen, :4]], 1))
    whole = mask_overlaps(masks, torch.from_numpy(np.stack(planes)), rows, labels)
    first = 0
    for image, (one, theirs, overlap) in enumerate(zip(rows, labels, whole, strict=True)):
        expected = np.zeros((len(theirs), len(one)))
        if len(theirs):
            encoded = [
                coco_mask.encode(np.asfortranarray(np.stack(parts, 2).astype(np.uint8)))
                for parts in (planes[first : first + len(theirs)], [plain_mask(found, image, row) for row in one])
            ]
            expected = coco_mask.iou(*encoded, [0] * len(one))
            expected[:, ~np.isin(one[:, 5], theirs[:, 0])] = 0  # of other classes are skipped
        np.testing.assert_allclose(overlap, expected, atol=1e-6)
        first += len(theirs)
    assert sum(float(overlap.sum()) for overlap in whole) > 3
    assert float(whole[2].sum()) > 0
    with pytest.raises(InputError, match="prototypes of 12x16 do not fit an input of 48x64"):
        mask_overlaps(masks, torch.zeros(0, 6, 8, dtype=torch.bool), rows, [torch.zeros(0, 5)] * 3)


def test_run_lengths_are_those_of_the_images_pixels():
    raw, rows, masks = detected()
    letterbox = Letterbox((40, 128), (20, 64), (0.0, 14.0))
    pixels = np.concatenate(list(image_pixels(masks, 0, letterbox)))
    wide = [plain_mask(raw, 0, row, upsampled=True).astype(np.uint8) for row in rows[0]]
    np.testing.assert_array_equal(pixels, np.stack([cv2.resize(mask[14:34], (128, 40)) for mask in wide]))
    found = run_lengths(masks, 0, letterbox)
    np.testing.assert_array_equal(coco_mask.decode(found).transpose(2, 0, 1), pixels)
    assert all(isinstance(one["counts"], str) for one in found)
    nothing = Masks(masks.source, (masks.picks[0][:0],), (masks.boxes[0][:0],), SIZE)
    assert run_lengths(nothing, 0, TWICE) == []


# masks of a network with NMS inside


def test_masks_in_frames_are_pasted_pixel_by_pixel():
    """One pixel of the grid after the other looks up the frame bilinearly; outside lies what is at the border."""
    boxes = torch.tensor([[3.0, 5, 40, 30], [-9, -4, 20, 60], [30.2, 10.1, 30.9, 45], [12, 12, 12, 12]])
    frames = torch.rand(4, 10, 10, generator=torch.Generator().manual_seed(0))
    for grid in (GRID, SIZE):
        found = pasted(frames, boxes, SIZE, grid)
        assert found.isfinite().all()
        for share, (x1, y1, x2, y2), mask in zip(frames[:3].double().numpy(), boxes.tolist(), found, strict=False):
            for row, column in np.ndindex(grid):
                y = ((row + 0.5) * SIZE[0] / grid[0] - y1) / (y2 - y1) * 10 - 0.5
                x = ((column + 0.5) * SIZE[1] / grid[1] - x1) / (x2 - x1) * 10 - 0.5
                (top, down), (left, right) = (
                    (int(min(place, 8)), place - int(min(place, 8))) for place in np.clip([y, x], 0, 9)
                )
                corners = share[top : top + 2, left : left + 2]
                expected = np.array([1 - down, down]) @ corners @ np.array([1 - right, right])
                assert float(mask[row, column]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("framed", [True, False])
def test_masks_of_a_network_are_the_sums_of_prototypes(framed):
    """In frames nearly, on the grid to the bit; in another order than best first."""
    found, rows, sums = detected(smooth=True, seed=3)
    rows, everything = [rows[0]], torch.arange(len(rows[0]))
    numbers, coefficients = [everything.flip(0)], found.coefficients[0][:, rows[0][:, 6].long()].T
    if framed:
        maps = torchvision.ops.roi_align(found.prototypes[:1], [rows[0][:, :4]], 64, 0.25, 1, aligned=True)
        whole = torch.zeros(1, 80, 64 * 64)
        whole[0, numbers[0]] = torch.einsum("nk,nkhw->nhw", coefficients, maps).sigmoid().flatten(1)
    else:
        whole = torch.zeros(1, 80, *GRID)
        whole[0, numbers[0]] = torch.einsum("nk,khw->nhw", coefficients, found.prototypes[0]).sigmoid()
    masks = Masks.from_model(whole, numbers, [one[:, :4] for one in rows], SIZE)
    assert (masks.framed, masks.grid) == (framed, GRID)
    assert len(everything) > 8
    one, other = (which.pixels(0, everything) for which in (masks, sums))
    assert other.float().mean() > 0.05
    assert (one != other).float().mean() <= 0.01 * framed
    pictures = [np.concatenate(list(image_pixels(which, 0, TWICE))) for which in (masks, sums)]
    assert pictures[0].shape == (len(everything), 96, 128)
    assert (pictures[0] != pictures[1]).mean() < 0.01


@pytest.mark.parametrize("count", [0, 99])
def test_masks_that_are_no_square(count):
    with pytest.raises(InputError, match=rf"masks are \[1, 5, {count}\]; expected \[batch, detections, R \* R\]"):
        Masks.from_model(torch.zeros(1, 5, count), [torch.arange(5)], [torch.zeros(5, 4)], SIZE)


# for drawing


PLACES = [(14.2, 20.7, 80.3, 70.0), (-20.0, -9.0, 60.5, 50.5), (70.1, 40.0, 300.0, 200.0), (3.0, 2.0, 125.0, 90.0)]
WIDE = (96, 128)


def drawable(boxes, framed=False):
    """Smooth masks of one image: as many detections as there are boxes, in pixels of the input."""
    random = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, COEFFICIENTS, 7, 9, generator=random) * 2
    boxes = [torch.tensor(boxes, dtype=torch.float32).view(-1, 4)]
    if framed:
        frames = interpolate(coarse, (20, 20), mode="bilinear").sigmoid()
        return Masks.from_model(frames.flatten(2), [torch.tensor([5, 2, 0, 1])], boxes, WIDE)
    coefficients = torch.randn(len(boxes[0]), COEFFICIENTS, generator=random)
    return Masks(interpolate(coarse, (24, 32), mode="bicubic"), [coefficients], boxes, WIDE)


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("original", [(96, 128), (240, 320), (41, 55), (31, 128), (97, 60)])
def test_masks_are_the_bilinear_sigmoid_above_one_half_in_their_boxes(original, framed):
    """Sampled by torch at the middles of the image's pixels, in float64."""
    masks, box, filled = drawable(PLACES, framed), Letterbox.of(original, WIDE, WIDE), 0
    chosen = torch.tensor([2, 0, 3])
    y, x = np.indices(original)
    left, top = (np.floor(pad) for pad in box.pad)  # where it lies
    for patch, number in zip(patches(masks, 0, chosen, box), chosen.tolist(), strict=True):
        ours = np.zeros(original, bool)
        h, w = patch.inside.shape
        assert ours[patch.top : patch.top + h, patch.left : patch.left + w].shape == (h, w)
        ours[patch.top : patch.top + h, patch.left : patch.left + w] = patch.inside
        x1, y1, x2, y2 = PLACES[number] if framed else (0, 0, WIDE[1], WIDE[0])
        places = [((x + 0.5) * box.ratio[1] + left - x1) / (x2 - x1), ((y + 0.5) * box.ratio[0] + top - y1) / (y2 - y1)]
        grid = torch.from_numpy(np.stack(places, 2) * 2 - 1)[None]
        shares = masks.shares(0, torch.tensor([number]))[None].double()
        share = grid_sample(shares, grid, padding_mode="border", align_corners=False)[0, 0].numpy()
        x1, y1, x2, y2 = (
            (value - box.pad[axis % 2]) / box.ratio[1 - axis % 2] for axis, value in enumerate(PLACES[number])
        )
        certain = np.abs(share - 0.5) > 1e-4
        expected = (share > 0.5) & (y1 <= y) & (y < y2) & (x1 <= x) & (x < x2)
        np.testing.assert_array_equal(ours[certain], expected[certain])
        filled += ours.mean()
    assert 0.1 < filled < 2.0


def test_a_box_between_two_pixels_has_an_empty_mask_and_no_box_has_none():
    masks = drawable([(10.2, 10.2, 10.8, 40.0), (50.0, 20.0, 50.0, 20.0)])
    letterbox = Letterbox(WIDE, WIDE, (0.0, 0.0))
    assert [patch.inside.any() for patch in patches(masks, 0, torch.arange(2), letterbox)] == [False, False]
    assert list(patches(drawable([]), 0, torch.arange(0), letterbox)) == []


# of labels


def interpolated(mask):
    """Upstream's definition."""
    wide = torch.from_numpy(mask)[None, None].float()
    size = (mask.shape[0] // 4, mask.shape[1] // 4)
    return (interpolate(wide, size, mode="bilinear", align_corners=False)[0, 0] > 0.5).numpy()


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
