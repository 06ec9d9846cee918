"""Pictures of detections beside the truth."""

from __future__ import annotations

import dataclasses
import io
import os

import numpy as np
import pytest
from matplotlib.patches import PathPatch
from PIL import Image

from utils.core.errors import InputError
from utils.reports import detections, figures
from utils.reports.outlines import outline_of
from utils.reports.schema import Box, Sample


def test_images_are_drawn_with_their_boxes_where_they_are(report, image):
    figure = detections.detection_panel(report.samples[0], "float", "INT8")
    (axes,) = figure.axes
    np.testing.assert_array_equal(axes.images[0].get_array(), image[1])
    frames = {tuple(patch.get_bbox().extents) for patch in axes.patches}
    assert frames == {(5, 5, 25, 30), (40, 20, 70, 55)}
    assert [text.get_text() for text in axes.texts] == ["seven 0.90", "one 0.60"]
    styles = {tuple(patch.get_bbox().extents): patch.get_linestyle() for patch in axes.patches}
    assert styles == {(5, 5, 25, 30): "-", (40, 20, 70, 55): "--"}, "only what INT8 lacks is dashed"


def test_a_sheet_has_a_column_per_stage_and_a_line_per_image(report):
    figure = detections.detections(report.samples * 2)
    assert [axes.get_title() for axes in figure.axes] == ["truth", "float", "INT8", "", "", ""]
    image = Image.open(io.BytesIO(figures.render(figure, "png", dpi=50)))
    assert image.size == (3 * 180, 2 * 180)


def test_unmatched_pairs_one_to_one_and_by_class():
    box = Box((0, 0, 10, 10), "a", 0.9)
    moved = Box((1, 0, 11, 10), "a", 0.8)
    far = Box((8, 0, 18, 10), "a", 0.7)
    assert detections.unmatched([box, moved], [box]) == [False, True]
    assert detections.unmatched([moved, far], [box]) == [False, True]
    assert detections.unmatched([box], [dataclasses.replace(box, name="b")]) == [True]
    assert detections.unmatched([], [box]) == []


def test_the_first_stage_is_compared_with_the_second_and_others_with_the_first():
    sample = Sample("x", {"float": [], "PTQ": [], "QAT": []})
    pairs = {stage: detections.counterpart(sample, stage) for stage in ("float", "PTQ", "QAT", "truth")}
    assert pairs == {"float": "PTQ", "PTQ": "float", "QAT": "float", "truth": None}


def test_masks_are_filled_under_their_boxes_and_outlined(report, image):
    inside = np.zeros((60, 80), bool)
    inside[10:30, 8:24] = True
    inside[15:25, 12:20] = False  # a hole
    other = np.zeros((60, 80), bool)
    other[28:34, 20:30] = True  # two pixels of it lie on the first
    both = Box((5, 5, 25, 30), "seven", 0.9, outline_of(inside))
    only = Box((40, 20, 70, 55), "one", 0.6, outline_of(other))
    sample = dataclasses.replace(report.samples[0], predictions={"float": [both, only], "INT8": [both]})
    figure = detections.detection_panel(sample, "float", "INT8")
    (axes,) = figure.axes
    np.testing.assert_array_equal(axes.images[0].get_array(), image[1])
    layer = axes.images[1]
    assert layer.get_alpha() == 0.35
    np.testing.assert_array_equal(layer.get_array()[..., 3] == 255, inside | other)
    assert {tuple(colour) for colour in layer.get_array()[inside].tolist()} == {(0, 114, 178, 255)}
    assert {tuple(colour) for colour in layer.get_array()[other & ~inside].tolist()} == {(213, 94, 0, 255)}
    rings = [patch for patch in axes.patches if isinstance(patch, PathPatch)]
    corners = {tuple(np.concatenate([ring.get_path().vertices.min(0), ring.get_path().vertices.max(0)]))
               for ring in rings}  # fmt: skip
    assert corners == {(8.5, 10.5, 23.5, 29.5), (11.5, 14.5, 20.5, 25.5), (20.5, 28.5, 29.5, 33.5)}
    (truth,) = detections.detection_panel(sample, "truth").axes
    assert len(truth.images) == 1, "it has no mask"


def test_a_mask_on_a_panel_is_its_colour_over_the_image(tmp_path):
    path = tmp_path / "grey.png"
    Image.new("RGB", (100, 100), (200, 200, 200)).save(path)
    inside = np.zeros((100, 100), bool)
    inside[20:80, 20:80] = True
    inside[40:60, 40:60] = False
    sample = Sample(str(path), {"float": [Box((5, 5, 95, 95), "a", 0.9, outline_of(inside))]})
    drawn = np.asarray(Image.open(io.BytesIO(
        figures.render(detections.detection_panel(sample, "float"), "png", dpi=100)
    )).convert("RGB"))  # fmt: skip
    assert drawn.shape == (340, 340, 3)
    blue = np.array([0, 114, 178])
    for x, y in ((30, 30), (70, 50), (50, 70)):
        np.testing.assert_allclose(drawn[int(y * 3.4), int(x * 3.4)], 0.65 * 200 + 0.35 * blue, atol=1)
    for x, y in ((50, 50), (12, 50)):
        assert drawn[int(y * 3.4), int(x * 3.4)].tolist() == [200, 200, 200]


def test_masks_of_large_images_are_filled_in_fewer_pixels():
    (axes,) = figures.new_figure(3, 2, 1)[1]
    box = Box((0, 0, 9000, 6000), "a", 0.9, ("0,0 4499,0 4499,5999 0,5999",))
    detections._draw_masks(axes, (6000, 9000), [box], ["#0072B2"])
    covered = axes.images[0].get_array()[..., 3] > 0
    assert covered.shape == (933, 1400)
    assert abs(covered.mean() - 0.5) < 0.01
    assert axes.images[0].get_extent() == [0, 9000, 6000, 0]


def test_a_image_that_is_gone_is_a_clear_error(tmp_path):
    with pytest.raises(InputError, match=r"gone\.png"):
        detections.read_image(tmp_path / "gone.png")


def test_an_image_is_read_once_for_all_its_columns(report, monkeypatch):
    read, opened = Image.open, []
    monkeypatch.setattr(Image, "open", lambda path: opened.append(path) or read(path))
    detections.detections(report.samples * 2)
    assert len(opened) == 1


def test_large_images_are_drawn_in_fewer_pixels_and_boxes_stay_where_they_are(tmp_path):
    pixels = np.full((2000, 4000, 3), 255, np.uint8)
    pixels[500:1500, 1000:2000] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    drawn, size = detections.read_image(tmp_path / "a.png")
    assert (drawn.shape, size) == ((700, 1400, 3), (2000, 4000))
    sample = Sample(str(tmp_path / "a.png"), {"a": [Box((1000, 500, 2000, 1500), "x", 0.5)]})
    (axes,) = detections.detection_panel(sample, "a").axes
    assert axes.images[0].get_extent() == [0, 4000, 2000, 0]
    dark = axes.images[0].get_array()[..., 0] < 128
    np.testing.assert_allclose(np.argwhere(dark).min(0)[::-1] / 0.35, (1000, 500), atol=3)


@pytest.mark.parametrize(("size", "inches"), [((10, 30_000), 27.2), ((30_000, 10), 0.425), ((60, 80), 3.4 * 4 / 3)])
def test_panels_of_long_images_have_margins(tmp_path, size, inches):
    Image.new("RGB", size).save(tmp_path / "a.png")
    figure = detections.detection_panel(Sample(str(tmp_path / "a.png"), {"a": []}), "a")
    assert figure.get_size_inches().tolist() == pytest.approx([3.4, inches])
    assert figures.render(figure, "jpg", dpi=50)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_an_image_that_is_no_regular_file_is_not_opened(tmp_path, make):
    make(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"cannot read the image: .* is not a regular file; samples need the images"):
        detections.read_image(tmp_path / "a.png")


def test_an_image_of_more_pixels_than_pillow_decodes_is_a_clear_error(tmp_path, monkeypatch):
    Image.new("RGB", (100, 100)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"cannot read the image .*a\.png: .* exceeds limit"):
        detections.read_image(tmp_path / "a.png")
