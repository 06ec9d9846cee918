"""Pictures of detections beside the truth, masks as polygons, which filled again are the mask, and charts."""

import io
import xml.etree.ElementTree as ElementTree

import cv2
import numpy as np
import pytest
from PIL import Image
from report_examples import example_row, resampled

from utils.core.errors import InputError
from utils.reports import detections, figures
from utils.reports.detections import outline_of, points_of
from utils.reports.schema import Box, Epoch, Report, Sample


def box(xyxy, name="a", score=0.9, outline=()):
    return Box(xyxy=xyxy, name=name, score=score, outline=outline)


def test_a_sheet_has_a_column_per_stage_and_a_line_per_image(report):
    figure = detections.detection_sheet(report.samples * 2)
    assert [axes.get_title() for axes in figure.axes] == ["ground truth", "FP32", "INT8", "", "", ""]
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


def test_masks_are_filled_with_their_holes_left_out(tmp_path):
    Image.new("RGB", (80, 60), "white").save(tmp_path / "a.png")
    ring, other = np.zeros((60, 80), bool), np.zeros((60, 80), bool)
    ring[10:30, 8:24], ring[15:25, 12:20], other[40:50, 30:50] = True, False, True
    both = box((5, 5, 25, 30), "", 0.9, outline_of(ring))
    only = box((26, 36, 70, 55), "", 0.6, outline_of(other))
    found = {"float": [both, only], "INT8": [both]}
    figure = detections.detection_sheet([Sample(image=str(tmp_path / "a.png"), predictions=found)])
    drawn = np.asarray(Image.open(io.BytesIO(figures.render(figure, "png", dpi=100))).convert("RGB"))
    axes = figure.axes[0]
    colours = {}
    for name, point in {"ring": (10, 20), "hole": (16, 20), "other": (40, 45), "outside": (60, 10)}.items():
        x, y = axes.transData.transform(point)
        colours[name] = tuple(drawn[drawn.shape[0] - round(y), round(x)].tolist())
    assert colours["hole"] == colours["outside"] == (255, 255, 255)
    tints = {"ring": detections.BLUE, "other": detections.VERMILLION}
    for name, colour in tints.items():
        rgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
        np.testing.assert_allclose(colours[name], 255 + detections.FILL * (rgb - 255), atol=2)


def test_large_images_are_drawn_in_fewer_pixels_and_boxes_stay_where_they_are(tmp_path):
    pixels = np.full((2000, 4000, 3), 255, np.uint8)
    pixels[500:1500, 1000:2000] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    drawn, size = detections.read_image(tmp_path / "a.png")
    assert (drawn.shape, size) == ((700, 1400, 3), (2000, 4000))
    found = Sample(image=str(tmp_path / "a.png"), predictions={"a": [box((1000, 500, 2000, 1500))]})
    (axes,) = detections.detection_sheet([found]).axes
    assert axes.images[0].get_extent() == [0, 4000, 2000, 0]
    dark = axes.images[0].get_array()[..., 0] < 128
    np.testing.assert_allclose(np.argwhere(dark).min(0)[::-1] / 0.35, (1000, 500), atol=3)


def test_an_image_that_cannot_be_read_is_a_clear_error(tmp_path, monkeypatch):
    Image.new("RGB", (100, 100)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for name in ("gone.png", "large.png", "."):
        with pytest.raises(InputError, match="cannot read the image"):
            detections.read_image(tmp_path / name)


# masks as polygons


def refilled(outline, size):
    return cv2.fillPoly(np.zeros(size, np.uint8), [points_of(one) for one in outline], 1).astype(bool)


@pytest.mark.parametrize("seed", range(4))
def test_filled_again_they_are_the_mask(seed):
    """Smooth shapes with holes, and with islands in them."""
    noise = np.random.default_rng(seed).normal(0, 1, (60, 80)).astype(np.float32)
    mask = cv2.GaussianBlur(noise, (0, 0), 4) > 0.02
    outline = outline_of(mask)
    assert len(outline) > 1
    np.testing.assert_array_equal(refilled(outline, mask.shape), mask)
    moved = np.concatenate([points_of(one) for one in outline_of(mask, left=100, top=1000)])
    assert np.array_equal(moved, np.concatenate([points_of(one) for one in outline]) + np.array([100, 1000]))


def test_nothing_has_no_outline_and_a_pixel_has_one():
    assert outline_of(np.zeros((5, 5), bool)) == outline_of(np.zeros((0, 3), bool)) == ()
    lone = np.zeros((5, 5), bool)
    lone[3, 1] = True
    assert outline_of(lone) == ("1,3",)


def test_ap_per_epoch_plots_the_history_and_the_lines(report):
    report.history.insert(1, Epoch(epoch=7))
    axes = figures.per_epoch(report)[1].axes[0]
    curve, *_ = axes.lines
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1, 2], [0.7365, 0.7399])
    assert [line.get_ydata()[0] for line in axes.lines[2:]] == [0.7412, 0.7361]
    assert {text.get_text() for text in axes.texts} == {"chosen 0.7399", "FP32 0.7412", "PTQ 0.7361"}
    assert not axes.containers
    report.history = [epoch.model_copy(update={"ap_error": 0.002}) for epoch in report.history if epoch.ap]
    (bars,) = figures.per_epoch(report)[1].axes[0].containers[0].lines[2]
    ends = [list(bar[:, 1]) for bar in bars.get_segments()]
    assert ends == [pytest.approx([ap - 0.002, ap + 0.002]) for ap in (0.7365, 0.7399)]


def test_the_loss_of_each_epoch_is_drawn_where_ap_is_not_known_and_ptq_is_marked_where_it_is_the_result(report):
    report.history = [Epoch(epoch=place, held_out=loss, held_out_ptq=0.3) for place, loss in enumerate((0.2, 0.1))]
    name, figure = figures.per_epoch(report)
    (axes,) = figure.axes
    assert (name, list(axes.lines[0].get_ydata()), axes.get_ylabel()) == ("loss_per_epoch", [0.2, 0.1], "loss")
    assert [text.get_text() for text in axes.texts] == ["PTQ 0.3000"]
    report.rows[-1] = example_row("best (PTQ)")
    assert [text.get_text() for text in figures.per_epoch(report)[1].axes[0].texts] == ["chosen: PTQ 0.3000"]


def test_the_chart_of_differences_has_a_bar_for_each_row_that_compares(compared):
    del compared.rows[4]  # without resamplings: a difference without a bar
    axes = figures.differences(compared, allowed=0.003).axes[0]
    points = [container.lines[0].get_xydata()[0] for container in axes.containers]
    ptq, qat = (compared.difference(row) for row in compared.rows[1:3])
    assert [tuple(point) for point in points] == [(pytest.approx(ptq.value), 1), (pytest.approx(qat.value), 0)]
    for container, difference in zip(axes.containers, (ptq, qat), strict=True):
        (bar,) = container.lines[2][0].get_segments()
        left, right = bar[:, 0]
        assert right - left == pytest.approx(2 * difference.margin)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["PTQ  0.7361", "QAT  0.7420"]
    lines = {line.get_label(): line.get_xdata()[0] for line in axes.lines}
    assert lines["FP32: 0.7412"] == 0
    assert lines["allowed loss: 0.003"] == -0.003


def test_a_measurable_loss_has_another_colour():
    scores = [example_row(stage, ap_resampled=resampled(*values)) for stage, values in (
        ("float", (0.74, 0.75, 0.73)), ("PTQ", (0.70, 0.711, 0.69)), ("QAT", (0.74, 0.751, 0.729)),
    )]  # fmt: skip
    scores[1] = scores[1].model_copy(update={"ap": 0.70})
    axes = figures.differences(Report(command="x", rows=scores), allowed=0.002).axes[0]
    colours = [container.lines[0].get_color() for container in axes.containers]
    assert colours == [figures.VERMILLION, figures.BLUE]


def test_files_have_the_size_and_svg_keeps_its_text(report, tmp_path):
    image = Image.open(figures.save_figure(figures.per_epoch(report)[1], tmp_path / "chart.jpg", dpi=100))
    assert (image.format, image.size) == ("JPEG", (900, 340))
    svg = figures.render(figures.per_epoch(report)[1], "svg")
    assert "chosen 0.7399" in "".join(ElementTree.fromstring(svg).itertext())
