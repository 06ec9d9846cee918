"""Charts of a report."""

import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image
from report_examples import example_row

from utils.reports import figures
from utils.reports.schema import Epoch


def test_ap_per_epoch_plots_the_history_and_the_lines(report):
    report.history.insert(1, Epoch(epoch=7))
    axes = figures.per_epoch(report)[1].axes[0]
    curve, *_ = axes.lines
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1, 2], [0.7365, 0.7399])
    assert [line.get_ydata()[0] for line in axes.lines[2:]] == [0.7412, 0.7361]
    assert {text.get_text() for text in axes.texts} == {"chosen 0.7399", "float 0.7412", "PTQ 0.7361"}


def test_the_loss_of_each_epoch_is_drawn_where_ap_is_not_known_and_ptq_is_marked_where_it_is_the_result(report):
    report.history = [Epoch(epoch=place, held_out=loss, held_out_ptq=0.3) for place, loss in enumerate((0.2, 0.1))]
    name, figure = figures.per_epoch(report)
    (axes,) = figure.axes
    assert (name, list(axes.lines[0].get_ydata()), axes.get_ylabel()) == ("loss_per_epoch", [0.2, 0.1], "loss")
    assert [text.get_text() for text in axes.texts] == ["PTQ 0.3000"]
    report.rows[-1] = example_row("best (PTQ)")
    assert [text.get_text() for text in figures.per_epoch(report)[1].axes[0].texts] == ["chosen: PTQ 0.3000"]


def test_bars_are_the_errors_of_the_epochs(report):
    assert not figures.per_epoch(report)[1].axes[0].containers
    report.history = [epoch.model_copy(update={"ap_error": 0.002}) for epoch in report.history]
    (bars,) = figures.per_epoch(report)[1].axes[0].containers[0].lines[2]
    assert [list(bar[:, 1]) for bar in bars.get_segments()] == [
        pytest.approx([ap - 0.002, ap + 0.002]) for ap in (0.7365, 0.7399)
    ]


def test_files_have_the_size_and_svg_keeps_its_text_and_is_reproducible(report, tmp_path):
    image = Image.open(figures.save_figure(figures.per_epoch(report)[1], tmp_path / "chart.jpg", dpi=100))
    assert (image.format, image.size) == ("JPEG", (900, 340))
    one, two = (figures.render(figures.per_epoch(report)[1], "svg") for _ in range(2))
    assert one == two
    assert "chosen 0.7399" in "".join(ElementTree.fromstring(one).itertext())
