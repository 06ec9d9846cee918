"""Pictures of detections beside the truth, and masks as polygons: filled again they are the mask."""

import io

import cv2
import numpy as np
import pytest
from matplotlib.patches import PathPatch
from PIL import Image

from utils.core.errors import InputError
from utils.reports import detections, figures
from utils.reports.detections import POINTS, POLYGONS, outline_of, points_of
from utils.reports.schema import Box, Sample


def box(xyxy, name="a", score=0.9, outline=()):
    return Box(xyxy=xyxy, name=name, score=score, outline=outline)


def sample_of(path, **predictions):
    return Sample(image=str(path), predictions=predictions)


def test_a_sheet_has_a_column_per_stage_and_a_line_per_image(report):
    figure = detections.detection_sheet(report.samples * 2)
    assert [axes.get_title() for axes in figure.axes] == ["truth", "float", "INT8", "", "", ""]
    image = Image.open(io.BytesIO(figures.render(figure, "png", dpi=50)))
    assert image.size == (3 * 180, 2 * 180)


def test_images_are_drawn_with_their_boxes_where_they_are(report, image):
    _, axes, _ = detections.detection_sheet(report.samples).axes
    np.testing.assert_array_equal(axes.images[0].get_array(), image[1])
    assert [text.get_text() for text in axes.texts] == ["seven 0.90", "one 0.60"]
    styles = {tuple(patch.get_bbox().extents): patch.get_linestyle() for patch in axes.patches}
    assert styles == {(5, 5, 25, 30): "-", (40, 20, 70, 55): "--"}, "only what INT8 lacks is dashed"


def test_unmatched_pairs_one_to_one_and_by_class():
    one, moved, far = box((0, 0, 10, 10)), box((1, 0, 11, 10), score=0.8), box((8, 0, 18, 10), score=0.7)
    assert detections.unmatched([one, moved], [one]) == [False, True]
    assert detections.unmatched([moved, far], [one]) == [False, True]
    assert detections.unmatched([one], [box((0, 0, 10, 10), "b")]) == [True]
    assert detections.unmatched([], [one]) == []


def test_masks_are_filled_under_their_boxes_and_outlined(image):
    inside = np.zeros((60, 80), bool)
    inside[10:30, 8:24] = True
    inside[15:25, 12:20] = False  # a hole
    other = np.zeros((60, 80), bool)
    other[28:34, 20:30] = True  # two pixels of it lie on the first
    both = box((5, 5, 25, 30), "seven", 0.9, outline_of(inside))
    only = box((40, 20, 70, 55), "one", 0.6, outline_of(other))
    axes, _ = detections.detection_sheet([sample_of(image[0], float=[both, only], INT8=[both])]).axes
    np.testing.assert_array_equal(axes.images[0].get_array(), image[1])
    layer = axes.images[1]
    assert layer.get_alpha() == 0.35
    np.testing.assert_array_equal(layer.get_array()[..., 3] == 255, inside | other)
    assert {tuple(colour) for colour in layer.get_array()[inside].tolist()} == {(0, 114, 178, 255)}
    assert {tuple(colour) for colour in layer.get_array()[other & ~inside].tolist()} == {(213, 94, 0, 255)}
    rings = [patch.get_path().vertices for patch in axes.patches if isinstance(patch, PathPatch)]
    corners = {tuple(np.concatenate([ring.min(0), ring.max(0)])) for ring in rings}
    assert corners == {(8.5, 10.5, 23.5, 29.5), (11.5, 14.5, 20.5, 25.5), (20.5, 28.5, 29.5, 33.5)}


def test_large_images_are_drawn_in_fewer_pixels_and_boxes_stay_where_they_are(tmp_path):
    pixels = np.full((2000, 4000, 3), 255, np.uint8)
    pixels[500:1500, 1000:2000] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    drawn, size = detections.read_image(tmp_path / "a.png")
    assert (drawn.shape, size) == ((700, 1400, 3), (2000, 4000))
    (axes,) = detections.detection_sheet([sample_of(tmp_path / "a.png", a=[box((1000, 500, 2000, 1500))])]).axes
    assert axes.images[0].get_extent() == [0, 4000, 2000, 0]
    dark = axes.images[0].get_array()[..., 0] < 128
    np.testing.assert_allclose(np.argwhere(dark).min(0)[::-1] / 0.35, (1000, 500), atol=3)


@pytest.mark.parametrize("size", [(10, 30_000), (30_000, 10)])
def test_long_images_are_drawn(tmp_path, size):
    Image.new("RGB", size).save(tmp_path / "a.png")
    assert figures.render(detections.detection_sheet([sample_of(tmp_path / "a.png", a=[])]), "jpg", dpi=50)


def test_an_image_that_cannot_be_read_is_a_clear_error(tmp_path, monkeypatch):
    Image.new("RGB", (100, 100)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for name in ("gone.png", "large.png", "."):
        with pytest.raises(InputError, match="cannot read the image"):
            detections.read_image(tmp_path / name)


# masks as polygons


def refilled(outline, size):
    return cv2.fillPoly(np.zeros(size, np.uint8), [points_of(one) for one in outline], 1).astype(bool)


@pytest.mark.parametrize("seed", range(8))
def test_filled_again_they_are_the_mask(seed):
    """Smooth shapes with holes, and with islands in them."""
    noise = np.random.default_rng(seed).normal(0, 1, (60, 80)).astype(np.float32)
    mask = cv2.GaussianBlur(noise, (0, 0), 4) > 0.02
    outline = outline_of(mask)
    assert len(outline) > 1
    assert sum(len(points_of(one)) for one in outline) <= POINTS
    np.testing.assert_array_equal(refilled(outline, mask.shape), mask)


def test_a_ring_has_a_hole_by_the_even_odd_rule():
    mask = np.zeros((20, 20), bool)
    mask[2:18, 2:18] = True
    mask[6:14, 6:14] = False
    outer, hole = map(points_of, outline_of(mask, left=100, top=1000))
    assert (outer.min(0).tolist(), outer.max(0).tolist()) == ([102, 1002], [117, 1017])
    assert (hole.min(0).tolist(), hole.max(0).tolist()) == ([105, 1005], [114, 1014])  # the mask's pixels around it
    assert refilled(outline_of(mask), mask.shape).sum() == mask.sum()


def test_a_large_or_torn_mask_keeps_to_the_limits():
    torn = np.random.default_rng(0).random((200, 200)) < 0.5
    outline = outline_of(torn)
    assert len(outline) == POLYGONS
    assert sum(len(points_of(one)) for one in outline) <= POINTS
    angles = np.linspace(0, 2 * np.pi, 4000)
    radius = 700 + 30 * np.sin(60 * angles)
    star = np.stack([1000 + radius * np.cos(angles), 1000 + radius * np.sin(angles)], 1).astype(np.int32)
    wavy = cv2.fillPoly(np.zeros((2000, 2000), np.uint8), [star], 1).astype(bool)
    outline = outline_of(wavy)
    assert sum(len(points_of(one)) for one in outline) <= POINTS
    again = refilled(outline, wavy.shape)
    assert (again & wavy).sum() / (again | wavy).sum() > 0.97


def test_nothing_has_no_outline_and_a_pixel_has_one():
    assert outline_of(np.zeros((5, 5), bool)) == outline_of(np.zeros((0, 3), bool)) == ()
    lone = np.zeros((5, 5), bool)
    lone[3, 1] = True
    assert outline_of(lone) == ("1,3",)
