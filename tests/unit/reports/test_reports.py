"""Reports: what is stored comes back, what is shown is what was measured, and nothing in it is markup or a link."""

from __future__ import annotations

import base64
import dataclasses
import html.parser
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.patches import PathPatch
from PIL import Image

from utils.core.errors import InputError
from utils.core.resampled import Resampled
from utils.core.text_tables import code, columns, markdown
from utils.reports import detections, figures
from utils.reports.html import page, write_html
from utils.reports.outlines import outline_of
from utils.reports.schema import Box, Report, Row, Sample
from utils.reports.tables import remarks, terminal_table

NASTY = '<script>alert("x")</script>'
ROW_KEYS = ["stage", "file", "ap", "ap50", "precision", "recall", "seconds", "device", "versions"]
ROW_KEYS += ["size_bytes", "ms_per_image", "measured_on", "ap_with", "ap_resampled", "ap_difference_error"]


def make_row(stage: str = "float", **changes) -> Row:
    values = {
        "stage": stage,
        "file": f"runs/{stage}.pt",
        "ap": 0.7412,
        "ap50": 0.9521,
        "precision": 0.9432,
        "recall": 0.9018,
        "seconds": 12.25,
        "device": "CPU",
        "versions": {"torch": "2.11.0"},
        "size_bytes": 1_812_345,
        "ms_per_image": 18.21,
        "measured_on": "PyTorch 2.11.0, CPU, 2 threads, batch 10",
    }
    return Row(**{**values, **changes})


def resampled(*ap: float, images: str = "a" * 32) -> str:
    return Resampled.of(images, ap).to_text()


@pytest.fixture
def compared() -> Report:
    """Rows with and without resampled AP, of the float row's images and of others."""
    return Report("x", rows=[
        make_row(ap_resampled=resampled(0.74, 0.75, 0.73)),
        make_row("PTQ", ap=0.7361, ap_resampled=resampled(0.73, 0.75, 0.73)),
        make_row("QAT", ap=0.7420, ap_resampled=resampled(0.74, 0.76, 0.72)),
        make_row("ONNX", ap=0.7, ap_resampled=resampled(0.7, 0.7, 0.7, images="b" * 32)),
        make_row("old", ap=0.7500),
        make_row("TensorRT INT8", ap=0.7, ap_with="30 images", ap_resampled=resampled(0.7, 0.7)),
    ])  # fmt: skip


@pytest.fixture
def segmented() -> Report:
    """A float network and its INT8 form with masks; and a detector beside them."""
    masks = {"mask_ap": 0.4412, "mask_ap50": 0.7, "mask_precision": 0.8, "mask_recall": 0.6}
    report = Report("x", rows=[
        make_row(ap_resampled=resampled(0.74, 0.75, 0.73), mask_ap_resampled=resampled(0.44, 0.45, 0.43), **masks),
        make_row("PTQ", ap=0.7361, ap_resampled=resampled(0.73, 0.75, 0.73),
                 mask_ap_resampled=resampled(0.43, 0.45, 0.41), **masks | {"mask_ap": 0.43}),
        make_row("detector"),
    ])  # fmt: skip
    report.history = [{"epoch": 0, "ap": 0.73, "ap50": 0.9, "mask_ap": 0.43, "mask_ap50": 0.69, "held_out": 1.0}]
    return report


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path, pixels


@pytest.fixture
def report(image) -> Report:
    report = Report("python qat.py quantize --weights float.pt", title="A report", hardware={"cpu": "a CPU"})
    report.add(make_row())
    report.add(make_row("PTQ", ap=0.7361, measured_on="somewhere else"))
    report.history = [
        {"epoch": 1, "ap": 0.7365, "ap50": 0.94, "loss": 0.5, "lr": 1e-6, "seconds": 3.5},
        {"epoch": 2, "ap": 0.7399, "ap50": 0.95, "loss": 0.25, "lr": 1e-5, "seconds": 3.25},
    ]
    report.ranges = [
        {
            "name": "model.0.conv.input_quantizer",
            "kind": "activation",
            "amax": 2.5,
            "min": 2.5,
            "max": 2.5,
            "channels": 1,
        },
        {
            "name": "model.0.conv.weight_quantizer",
            "kind": "weight",
            "amax": 0.75,
            "min": 0.125,
            "max": 0.75,
            "channels": 16,
        },
        {
            "name": "model.1.conv.input_quantizer",
            "kind": "activation",
            "amax": 0.0,
            "min": 0.0,
            "max": 0.0,
            "channels": 1,
        },
    ]
    both = Box((5, 5, 25, 30), "seven", 0.9)
    only = Box((40, 20, 70, 55), "one", 0.6)
    report.samples = [Sample(str(image[0]), {"float": [both, only], "INT8": [both]}, [Box((5, 5, 25, 30), "seven")])]
    report.notes = ["a note"]
    return report


class TestSchema:
    def test_what_is_saved_is_loaded(self, report, tmp_path):
        path = report.save(tmp_path / "new" / "report.json")
        assert Report.load(path) == report

    def test_rows_have_exactly_the_documented_keys(self, report):
        stored = json.loads(json.dumps(report.to_dict()))
        assert stored["schema_version"] == 2
        assert [list(row) for row in stored["rows"]] == [ROW_KEYS, ROW_KEYS]

    def test_ap_by_size_is_kept_and_left_out_where_there_is_none(self, report, tmp_path):
        report.rows = [make_row(), make_row("QAT", ap_by_size={"small": 0.25, "large": 0.5})]
        assert Report.load(report.save(tmp_path / "r.json")) == report
        stored = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert ["ap_by_size" in row for row in stored] == [False, True]

    def test_the_error_of_a_difference_is_in_the_json_and_computed_anew_when_read(self, compared, tmp_path):
        stored = json.loads(compared.save(tmp_path / "r.json").read_text())
        errors = [row["ap_difference_error"] for row in stored["rows"]]
        assert errors == [None, pytest.approx(0.01 / 3**0.5), pytest.approx(0.01), None, None, None]
        stored["rows"][1]["ap_difference_error"] = 0.5
        (tmp_path / "r.json").write_text(json.dumps(stored))
        assert Report.load(tmp_path / "r.json") == compared

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("ap_resampled", "abc", "'ap_resampled' is damaged"),
            ("ap_resampled", None, "'ap_resampled' is None, expected a text"),
            ("ap_resampled", "a" * 32 + " 0.5000000 1.5000000", "'ap_resampled' is damaged"),
            ("ap_difference_error", -1, "ap_difference_error is -1, expected"),
            ("ap_difference_error", "x", "ap_difference_error is 'x', expected"),
            ("ap_by_size", {"tiny": 0.5}, "'ap_by_size' is {'tiny': 0.5}, expected a mapping of small, medium, large"),
            ("ap_by_size", {"small": 1.5}, "'ap_by_size' has 1.5 for small, expected a number in 0..1"),
            ("ap_by_size", {"small": True}, "'ap_by_size' has True for small"),
        ],
    )
    def test_damaged_resamplings_are_refused_in_one_line(self, compared, tmp_path, name, value, says):
        content = compared.to_dict()
        content["rows"][1][name] = value
        (tmp_path / "r.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=rf"rows\[1\].*{says}") as caught:
            Report.load(tmp_path / "r.json")
        assert "\n" not in str(caught.value)

    def test_a_report_of_an_earlier_version_is_read(self, compared, tmp_path):
        content = compared.to_dict()
        for row in content["rows"]:
            del row["ap_resampled"], row["ap_difference_error"]
        (tmp_path / "r.json").write_text(json.dumps(content))
        assert Report.load(tmp_path / "r.json").rows[1] == make_row("PTQ", ap=0.7361)

    def test_a_report_of_schema_1_is_read(self, compared, tmp_path):
        (tmp_path / "r.json").write_text(json.dumps({**compared.to_dict(), "schema_version": 1}))
        assert Report.load(tmp_path / "r.json") == compared

    def test_masks_are_stored_where_they_were_measured(self, segmented, tmp_path):
        stored = json.loads(segmented.save(tmp_path / "r.json").read_text())
        assert Report.load(tmp_path / "r.json") == segmented
        keys = ["mask_ap", "mask_ap50", "mask_precision", "mask_recall", "mask_ap_resampled"]
        assert list(stored["rows"][0]) == [*ROW_KEYS[:-1], *keys, ROW_KEYS[-1], "mask_ap_difference_error"]
        errors = [row.get("mask_ap_difference_error") for row in stored["rows"]]
        assert errors == [None, pytest.approx(0.01), None]
        assert "mask_ap" not in stored["rows"][2]
        assert (segmented.rows[1].ap, segmented.rows[1].mask_ap) == (0.7361, 0.43)
        stored["rows"][1]["mask_ap_difference_error"] = -1
        (tmp_path / "r.json").write_text(json.dumps(stored))
        with pytest.raises(InputError, match=r"rows\[1\].mask_ap_difference_error is -1"):
            Report.load(tmp_path / "r.json")

    def test_numpy_numbers_are_stored_as_numbers_and_a_diverged_loss_as_null(self, report, tmp_path):
        report.add(make_row("QAT", ap=np.float32(0.5), size_bytes=np.int64(7)))
        report.history.append({"epoch": np.int64(3), "ap": np.float64(0.25), "loss": math.nan})
        report.ranges.append({"name": "x", "kind": "weight", "amax": np.float32(0.5), "channels": np.array([1, 2])})
        stored = json.loads(report.save(tmp_path / "r.json").read_text())
        assert (stored["rows"][-1]["ap"], stored["rows"][-1]["size_bytes"]) == (0.5, 7)
        assert stored["history"][-1] == {"epoch": 3, "ap": 0.25, "loss": None}
        assert stored["ranges"][-1]["channels"] == [1, 2]

    def test_a_row_measured_again_replaces_the_old_one(self, report):
        report.add(make_row(ap=0.5))
        assert [row.ap for row in report.rows] == [0.5, 0.7361]
        report.add(make_row(ap=0.25, measured_on="another machine"))
        assert len(report.rows) == 3

    @pytest.mark.parametrize(
        "changes",
        [
            {"ap": 1.5},
            {"ap": math.nan},
            {"recall": -0.1},
            {"ap50": "0.5"},
            {"seconds": math.inf},
            {"stage": ""},
            {"size_bytes": -1},
            {"versions": ["torch"]},
            {"measured_on": None},
        ],
    )
    def test_a_row_refuses_what_cannot_be_measured(self, changes):
        with pytest.raises(ValueError, match=next(iter(changes))):
            make_row(**changes)

    def test_not_measured_is_allowed(self):
        assert make_row(ap=None, ms_per_image=None).ap is None

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{", "is no report"),
            ("[]", "is no report"),
            ('{"rows": []}', "is no report"),
            ('{"schema_version": 99, "rows": [], "command": ""}', "schema 99"),
            (
                '{"schema_version": 1, "rows": [{"stage": "x"}], "command": ""}',
                r"or from another version: rows\[0\].file is missing",
            ),
            ('{"schema_version": 1, "rows": {}, "command": ""}', "rows is {}, expected a list"),
            (
                '{"schema_version": 1, "rows": [], "command": "", "samples": [{"image": "x"}]}',
                r"samples\[0\].predictions is missing",
            ),
            ('{"schema_version": 1, "rows": []}', "command is missing, expected this field; run it again"),
            ('{"schema_version": 1, "rows": [], "command": "", "surprise": 1}', "surprise"),
            ("\x00\x01", "is no report"),
        ],
    )
    def test_a_file_that_is_no_report_is_refused_in_one_line(self, tmp_path, text, says):
        path = tmp_path / "report.json"
        path.write_text(text)
        with pytest.raises(InputError, match=says) as caught:
            Report.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_bytes_that_are_no_text_and_a_missing_file_are_refused(self, tmp_path):
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
        for name in ("binary", "missing", "."):
            with pytest.raises(InputError):
                Report.load(tmp_path / name)

    def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(self, report, tmp_path, monkeypatch):
        path = report.save(tmp_path / "kept" / "report.json")
        old = path.read_bytes()
        monkeypatch.setattr("utils.reports.schema.Path.write_text", _fail)
        with pytest.raises(OSError, match="disk"):
            report.save(path)
        assert path.read_bytes() == old
        assert list(path.parent.iterdir()) == [path]

    def test_hardware_of_the_reader_is_not_taken_for_that_of_the_run(self, tmp_path):
        (tmp_path / "r.json").write_text('{"schema_version": 1, "rows": [], "command": "x"}')
        assert Report.load(tmp_path / "r.json").hardware == {}


class TestTables:
    def test_ap_of_another_set_of_images_is_not_compared(self):
        rows = [make_row(), make_row("ONNX", ap=0.9, ap_with="30 images"), make_row("INT8", ap=0.75)]
        report = Report("x", rows=rows)
        assert [line.split()[2] for line in terminal_table(report).splitlines()[3:5]] == ["-", "+0.0088"]

    def test_terminal_table_shows_every_number_and_where_it_was_measured(self, report):
        report.add(make_row("ONNX", ap=None, size_bytes=50_000, ms_per_image=None, measured_on="ONNX Runtime"))
        lines = terminal_table(report).splitlines()
        assert lines[0].split() == ["stage", "AP", "vs", "float", "AP50", "P", "R", "size", "ms/image", "on"]
        assert lines[2].split() == ["float", "0.7412", "0.9521", "0.9432", "0.9018", "1.81", "MB", "18.21", "[a]"]
        assert lines[3].split() == [
            "PTQ",
            "0.7361",
            "-0.0051",
            "0.9521",
            "0.9432",
            "0.9018",
            "1.81",
            "MB",
            "18.21",
            "[b]",
        ]
        assert lines[4].split() == ["ONNX", "-", "-", "0.9521", "0.9432", "0.9018", "50.0", "kB", "-", "[c]"]
        assert lines[5:] == ["[a] PyTorch 2.11.0, CPU, 2 threads, batch 10", "[b] somewhere else", "[c] ONNX Runtime"]
        assert len({len(line) for line in lines[:5]}) == 1
        assert max(map(len, lines)) <= 80

    def test_masks_have_their_columns(self, segmented):
        lines = [line.split() for line in terminal_table(segmented).splitlines()]
        assert " ".join(lines[0]) == "stage AP vs float AP50 mask AP vs float mask AP50 size ms/image on"
        assert lines[2][1:5] == ["0.7412", "0.9521", "0.4412", "0.7000"]
        assert lines[3][1:] == ["0.7361", "-0.0051", "±", "0.0058", "0.9521", "0.4300", "-0.0112", "±", "0.0100",
                                "0.7000", "1.81", "MB", "18.21", "[a]"]  # fmt: skip
        assert lines[4][1:6] == ["0.7412", "+0.0000", "0.9521", "-", "-"]  # a detector beside them

    def test_differences_have_standard_errors_where_the_images_are_the_same(self, compared):
        lines = terminal_table(compared).splitlines()
        assert [" ".join(line.split()[2:5]) for line in lines[3:5]] == ["-0.0051 ± 0.0058", "+0.0008 ± 0.0100"]
        assert [line.split()[2] for line in lines[5:7]] == ["-", "+0.0088"]
        assert lines[7].split()[3] == "-"
        assert max(map(len, lines)) <= 80
        words = " ".join(lines[8:])
        assert "±: the standard error of the difference" in words
        assert "not those of the float row: ONNX" in words
        assert words.endswith("or a single image gave AP: old")

    def test_nothing_is_said_of_errors_where_no_row_has_one(self, compared):
        rows = [dataclasses.replace(row, ap_resampled="") for row in compared.rows]
        assert remarks(dataclasses.replace(compared, rows=rows)) == []

    def test_the_widest_table_fits(self, compared):
        wide = dataclasses.replace(compared.rows[1], stage="TensorRT FP16", size_bytes=231_456_789, ms_per_image=1234.5)
        compared.rows.append(wide)
        assert max(map(len, terminal_table(compared).splitlines())) <= 80

    def test_a_markdown_table_escapes_markup(self):
        lines = markdown(columns(("stage", "file", "measured on")), [("a|b*", code("x|y`.pt"), NASTY)])
        assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines)
        assert r"a\|b\*" in lines[-1]
        assert "<script>" not in lines[-1].replace(r"\<", "")

    def test_no_rows(self):
        assert "no results" in terminal_table(Report("x"))


class TestFigures:
    def test_ap_per_epoch_plots_the_history_and_the_lines(self, report):
        report.history.insert(1, {"epoch": 7, "ap": None, "loss": None})
        axes = figures.ap_per_epoch(report).axes[0]
        curve, *_ = axes.lines
        assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1, 2], [0.7365, 0.7399])
        assert [line.get_ydata()[0] for line in axes.lines[2:]] == [0.7412, 0.7361]
        assert {text.get_text() for text in axes.texts} == {"chosen 0.7399", "float 0.7412", "PTQ 0.7361"}
        assert axes.get_xlabel()
        assert axes.get_ylabel()

    def test_masks_have_a_panel_of_their_own(self, report, segmented):
        report.rows = segmented.rows
        for entry, ap in zip(report.history, (0.42, 0.41), strict=True):
            entry["mask_ap"] = ap
        boxes, masks = figures.ap_per_epoch(report).axes
        assert (list(boxes.lines[0].get_ydata()), list(masks.lines[0].get_ydata())) == ([0.7365, 0.7399], [0.42, 0.41])
        assert {"float 0.4412", "PTQ 0.4300"} <= {text.get_text() for text in masks.texts}
        assert ["boxes" in boxes.get_title(loc="left"), "masks" in masks.get_title(loc="left")] == [True, True]
        del report.history[0]["mask_ap"]
        assert len(figures.ap_per_epoch(report).axes) == 1

    def test_no_epoch_is_marked_where_ptq_is_the_result(self, report):
        report.rows = [make_row(), make_row("PTQ", ap=0.7401), make_row("QAT", ap=0.7401)]
        axes = figures.ap_per_epoch(report).axes[0]
        assert not any("chosen" in text.get_text() for text in axes.texts)
        report.rows[-1] = make_row("QAT", ap=0.7365)
        for entry, loss in zip(report.history, (0.1, 0.2), strict=True):
            entry["held_out"] = loss
        axes = figures.ap_per_epoch(report).axes[0]
        assert "chosen 0.7365" in {text.get_text() for text in axes.texts}, "the loss chooses, and not AP"

    def test_labels_do_not_overlap(self, report):
        report.rows = [make_row(), make_row("PTQ", ap=0.74119)]
        axes = figures.ap_per_epoch(report).axes[0]
        low, high = axes.get_ylim()
        heights = sorted(text.get_position()[1] for text in axes.texts)
        assert min(np.diff(heights)) >= 0.05 * (high - low)

    def test_ranges_plot_amax_on_a_log_axis_with_one_panel_per_kind(self, report):
        activations, weights = figures.ranges_per_layer(report.ranges).axes
        assert list(activations.lines[0].get_ydata()) == [2.5, 2.5], "a zero amax is drawn at the smallest one"
        assert list(weights.lines[0].get_ydata()) == [0.75]
        assert activations.get_yscale() == weights.get_yscale() == "log"
        assert [text.get_text() for text in weights.get_xticklabels()] == ["0"]

    def test_ranges_stand_in_the_order_of_the_network(self):
        names = ["model.12.conv", "images", "model.2.conv"]
        rows = [{"name": name, "kind": "activation", "amax": 1.0 + i} for i, name in enumerate(names)]
        (axes,) = figures.ranges_per_layer(rows).axes
        assert list(axes.lines[0].get_ydata()) == [2.0, 3.0, 1.0]
        assert [text.get_text() for text in axes.get_xticklabels()] == ["", "2", "12"]

    def test_many_layers_do_not_write_over_each_other(self):
        rows = [
            {"name": f"model.{i}.conv", "kind": "weight", "amax": 1.0 + i, "min": 1.0, "max": 2.0} for i in range(250)
        ]
        (axes,) = figures.ranges_per_layer(rows).axes
        assert 20 < len(axes.get_xticklabels()) < 60
        assert len(axes.lines[0].get_ydata()) == 250

    @pytest.mark.parametrize(("kind", "format_"), [("png", "PNG"), ("jpg", "JPEG")])
    def test_images_have_the_expected_size(self, report, kind, format_, tmp_path):
        path = figures.save(figures.ap_per_epoch(report), tmp_path / f"chart.{kind}", dpi=100)
        image = Image.open(path)
        assert (image.format, image.size) == (format_, (900, 340))
        assert np.asarray(image.convert("L")).std() > 5, "the image is blank"

    def test_svg_is_valid_keeps_its_text_and_is_reproducible(self, report):
        one, two = (figures.render(figures.ap_per_epoch(report), "svg") for _ in range(2))
        assert one == two
        assert "chosen 0.7399" in "".join(ElementTree.fromstring(one).itertext())

    def test_nothing_to_draw_is_an_error(self):
        with pytest.raises(ValueError, match="no epoch"):
            figures.ap_per_epoch(Report("x"))
        with pytest.raises(ValueError, match="no ranges"):
            figures.ranges_per_layer([])
        with pytest.raises(ValueError, match="no samples"):
            detections.detections([])


class TestDetections:
    def test_images_are_drawn_with_their_boxes_where_they_are(self, report, image):
        figure = detections.detection_panel(report.samples[0], "float", "INT8")
        (axes,) = figure.axes
        np.testing.assert_array_equal(axes.images[0].get_array(), image[1])
        frames = {tuple(patch.get_bbox().extents) for patch in axes.patches}
        assert frames == {(5, 5, 25, 30), (40, 20, 70, 55)}
        assert [text.get_text() for text in axes.texts] == ["seven 0.90", "one 0.60"]
        styles = {tuple(patch.get_bbox().extents): patch.get_linestyle() for patch in axes.patches}
        assert styles == {(5, 5, 25, 30): "-", (40, 20, 70, 55): "--"}, "only what INT8 lacks is dashed"

    def test_a_sheet_has_a_column_per_stage_and_a_line_per_image(self, report):
        figure = detections.detections(report.samples * 2)
        assert [axes.get_title() for axes in figure.axes] == ["truth", "float", "INT8", "", "", ""]
        image = Image.open(io.BytesIO(figures.render(figure, "png", dpi=50)))
        assert image.size == (3 * 180, 2 * 180)

    def test_unmatched_pairs_one_to_one_and_by_class(self):
        box = Box((0, 0, 10, 10), "a", 0.9)
        moved = Box((1, 0, 11, 10), "a", 0.8)
        far = Box((8, 0, 18, 10), "a", 0.7)
        assert detections.unmatched([box, moved], [box]) == [False, True]
        assert detections.unmatched([moved, far], [box]) == [False, True]
        assert detections.unmatched([box], [dataclasses.replace(box, name="b")]) == [True]
        assert detections.unmatched([], [box]) == []

    def test_the_first_stage_is_compared_with_the_second_and_others_with_the_first(self):
        sample = Sample("x", {"float": [], "PTQ": [], "QAT": []})
        pairs = {stage: detections.counterpart(sample, stage) for stage in ("float", "PTQ", "QAT", "truth")}
        assert pairs == {"float": "PTQ", "PTQ": "float", "QAT": "float", "truth": None}

    def test_masks_are_filled_under_their_boxes_and_outlined(self, report, image):
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

    def test_a_mask_on_a_panel_is_its_colour_over_the_image(self, tmp_path):
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

    def test_masks_of_large_images_are_filled_in_fewer_pixels(self):
        (axes,) = figures.new_figure(3, 2, 1)[1]
        box = Box((0, 0, 9000, 6000), "a", 0.9, ("0,0 4499,0 4499,5999 0,5999",))
        detections._draw_masks(axes, (6000, 9000), [box], ["#0072B2"])
        covered = axes.images[0].get_array()[..., 3] > 0
        assert covered.shape == (933, 1400)
        assert abs(covered.mean() - 0.5) < 0.01
        assert axes.images[0].get_extent() == [0, 9000, 6000, 0]

    def test_a_image_that_is_gone_is_a_clear_error(self, tmp_path):
        with pytest.raises(InputError, match=r"gone\.png"):
            detections.read_image(tmp_path / "gone.png")


class _Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [
            value for name, value in attrs if name in {"src", "href", "srcset", "action"} or "url(" in (value or "")
        ]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def unrendered(monkeypatch):
    """Charts are made, and not rendered, which takes 0.2 s each: for tests of a page's words."""
    monkeypatch.setattr(figures, "render", lambda *_: b"not rendered")


class TestPage:
    @pytest.mark.usefixtures("unrendered")
    def test_the_page_holds_every_number(self, report):
        text = " ".join(_Page(page(report)).words)
        for number in ("0.7412", "0.7361", "-0.0051", "0.9521", "0.9432", "0.9018", "1.81 MB", "18.21"):
            assert number in text
        for number in ("0.7365", "0.7399", "1.0e-05", "2.500", "0.7500", "0.1250", "16"):
            assert number in text
        for word in (
            "A report",
            "python qat.py quantize",
            "somewhere else",
            "2.11.0",
            "a CPU",
            "a note",
            "runs/PTQ.pt",
        ):
            assert word in text

    @pytest.mark.usefixtures("unrendered")
    def test_differences_within_their_error_have_no_colour(self, compared):
        compared.rows.append(make_row("better", ap=0.78, ap_resampled=compared.rows[1].ap_resampled))
        compared.rows.append(make_row("worse", ap=0.70, ap_resampled=compared.rows[1].ap_resampled))
        text = page(compared)
        assert re.findall(r'<td class="(up|down)">(.*?)</td>', text) == [
            ("up", "+0.0088"), ("up", "+0.0388 ± 0.0058"), ("down", "-0.0412 ± 0.0058"),
        ]  # fmt: skip
        assert "-0.0051 ± 0.0058 to float" in text
        assert "±: the standard error of the difference" in text
        assert "Not compared, since" in text

    def test_the_page_fetches_nothing(self, report):
        text = page(report)
        parsed = _Page(text)
        assert len(parsed.links) == 5, "two charts and three panels"
        assert all(link.startswith("data:image/") for link in parsed.links)
        assert not {"link", "iframe", "object", "embed"} & set(parsed.tags)
        written = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
        assert not re.search(r"https?:|//[a-z]|@import|url\(", written)

    def test_the_images_inside_are_images(self, report):
        for link in _Page(page(report)).links:
            kind, data = link.removeprefix("data:image/").split(";base64,")
            content = base64.b64decode(data, validate=True)
            if kind == "svg+xml":
                assert ElementTree.fromstring(content).tag.endswith("svg")
            else:
                assert Image.open(io.BytesIO(content)).size[0] > 300

    def test_markup_in_names_is_shown_and_not_run(self, report):
        plain = _Page(page(report))
        report.title = report.command = report.data = NASTY
        report.notes = [NASTY]
        report.rows = [make_row(NASTY, file=NASTY, device=NASTY, measured_on=NASTY, versions={NASTY: NASTY})]
        report.ranges[0]["name"] = NASTY
        report.samples = [
            dataclasses.replace(report.samples[0], predictions={NASTY: [Box((1, 1, 9, 9), "$" + NASTY, 0.5)]})
        ]
        nasty = _Page(page(report))
        assert nasty.tags.count("script") == plain.tags.count("script") == 1
        assert NASTY in "".join(nasty.words)

    @pytest.mark.usefixtures("unrendered")
    def test_only_pages_with_masks_speak_of_them(self, report):
        assert "Masks are filled" not in page(report)
        assert "outline" not in json.dumps(report.to_dict())
        (sample,) = report.samples
        report.samples = [dataclasses.replace(sample, truth=[Box((5, 5, 25, 30), "seven", None, ("6,6 20,6 20,28",))])]
        assert "Masks are filled, and outlined, in the colour of their box." in page(report)

    @pytest.mark.usefixtures("unrendered")
    def test_precision_and_recall_are_explained_where_they_are_shown(self, report, segmented):
        assert "P and R: precision" in page(report)
        assert "P and R: precision" not in page(segmented)

    @pytest.mark.usefixtures("unrendered")
    def test_a_missing_image_costs_its_panels_only(self, report, image):
        image[0].unlink()
        text = page(report)
        assert "cannot read the image" in text
        assert "0.7412" in text

    def test_an_empty_report_is_a_page(self, tmp_path):
        path = write_html(Report("nothing was run", hardware={}), tmp_path / "report.html")
        assert "nothing was run" in path.read_text()
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.usefixtures("unrendered")
    def test_several_versions_are_all_named(self, report):
        report.add(make_row("QAT", versions={"torch": "2.8.0"}))
        assert "2.11.0, 2.8.0" in page(report)


def _fail(*args, **kwargs):
    raise OSError("the disk is full")
