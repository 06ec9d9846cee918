"""Tables of a report, and what it shows beside the float network: what was measured, and what compares."""

import math
import re

import pytest
from report_examples import NASTY, example_row, resampled

from utils.core.score import AGREEMENT
from utils.core.text import markdown_table
from utils.reports.figures import f1_curves
from utils.reports.page import page
from utils.reports.schema import Advice, AtThreshold, Level, Report
from utils.reports.tables import against_fp32, labels, terminal_table


def test_terminal_table_shows_every_number_and_where_it_was_measured(report):
    report.rows.append(
        example_row("ONNX", ap=None, weights_bytes=50_000, ms_per_image=None, measured_on="ONNX Runtime")
    )
    lines = terminal_table(report).splitlines()
    assert lines[0].split() == ["stage", "AP", "vs", "FP32", "AP50", "P", "R", "weights", "ms/image", "on"]
    assert lines[2].split() == ["FP32", "0.7412", "0.9521", "0.9432", "0.9018", "1.81", "MB", "18.21", "[1]"]
    assert lines[3].split() == ["PTQ", "0.7361", "-0.0051", "0.9521", "0.9432", "0.9018", "1.81", "MB", "18.21", "[2]"]
    assert lines[4].split() == ["ONNX", "-", "-", "0.9521", "0.9432", "0.9018", "0.05", "MB", "-", "[3]"]
    assert lines[5:] == ["[1] PyTorch 2.11.0, CPU, 2 threads, batch 10", "[2] somewhere else", "[3] ONNX Runtime"]
    assert len({len(line) for line in lines[:5]}) == 1
    assert max(map(len, lines)) <= 80
    assert "no results" in terminal_table(Report(command="x"))


def test_warnings_are_repeated_above_the_table_and_remarks_stand_below_it(compared):
    compared.warnings = ["many images are damaged " * 5, "a second one"]
    compared.rows[1] = compared.rows[1].model_copy(update={"caveat": "it was made from other weights"})
    lines = terminal_table(compared).splitlines()
    assert lines[0].startswith("warning: many images are damaged")
    assert max(map(len, lines)) <= 80
    place = lines.index("warning: a second one")
    assert lines[place + 1] == ""
    assert lines[place + 2].split()[0] == "stage"
    assert "PTQ: it was made from other weights" in lines


@pytest.mark.parametrize(
    ("coco", "words"),
    [
        (0.7349, ""),
        (0.7345, ""),  # -0.0017 by COCO's definition, -0.0013 by upstream's
        (0.7330, "AP differs by -0.0013 by upstream's definition and by -0.0032 by COCO's"),
        (0.7363, "AP differs by -0.0013 by upstream's definition and by +0.0001 by COCO's"),
        (None, ""),
    ],
)
def test_two_definitions_of_ap_that_see_a_difference_differently_are_named(coco, words):
    row = example_row("PTQ", ap=0.7399, ap_coco=coco)
    base = example_row(ap_coco=0.7362)
    assert row.definitions_differ(base) == words
    report = Report(command="x", rows=[base, row])
    assert (words in " ".join(terminal_table(report).split())) is True


def test_each_networks_rows_are_compared_with_its_own_float_row():
    """Runs of two networks on one dataset, on one page; what stands before any float row belongs to the first."""
    first = [example_row(ap=0.68, file="t.pt"), example_row("PTQ", ap=0.67, file="t8.pt")]
    second = [example_row(ap=0.81, file="s.pt"), example_row("PTQ", ap=0.80, file="s8.pt")]
    report = Report(command="x", rows=[example_row("ONNX", ap=0.66), *first, *second])
    assert [str(report.difference(row) or "") for row in report.rows] == ["-0.0200", "", "-0.0100", "", "-0.0100"]
    assert labels(report) == ["ONNX", "FP32 t", "PTQ t8", "FP32 s", "PTQ s8"]


def test_rows_of_one_file_kind_are_told_apart_by_what_ran_them():
    places = ("PyTorch 2.11.0, CPU, float32", "OpenVINO 2026.4.1, CPU (a Xeon), FP32")
    rows = [example_row(file=f"work/main/{i}.pt", measured_on=place) for i, place in enumerate(places)]
    assert labels(Report(command="x", rows=rows)) == ["FP32, PyTorch", "FP32, OpenVINO"]
    same = [*rows, example_row(file="work/main/2.pt", measured_on=places[0])]
    assert not any("," in name for name in labels(Report(command="x", rows=same)))


@pytest.mark.parametrize(
    ("files", "names"),  # files, or their runs
    [(("w/best.onnx", "w/best-strong.onnx"), ["ONNX", "ONNX strong"]),
     (("runs/a/x.onnx", "runs/b/x.onnx"), ["ONNX a", "ONNX b"]), (("x.onnx", "x.onnx"), ["ONNX", "ONNX-2"]),
     (("x.onnx in runs/qat/exp", "x.onnx in runs/qat_calibrate/exp"), ["ONNX", "ONNX calibrate"])],
)  # fmt: skip
def test_rows_of_one_stage_have_names_that_tell_them_apart(files, names):
    rows = [example_row("ONNX", file=file, run=run) for file, _, run in (file.partition(" in ") for file in files)]
    report = Report(command="x", rows=rows)
    assert labels(report) == names
    lines = terminal_table(report).splitlines()[2:4]
    assert all(line.startswith(f"{name} ") for line, name in zip(lines, names, strict=True))


def test_ap_at_another_size_of_the_input_is_not_compared(compared):
    """Of the same images: 640 pixels instead of 320, or rectangles."""
    known = compared.rows[0].ap_resampled
    rows = [row.model_copy(update={"input_size": "320x320"}) for row in compared.rows[:2]]
    rows += [example_row("ONNX", input_size="640x640", ap_resampled=known), example_row("older", ap_resampled=known)]
    report = Report(command="x", rows=rows)
    assert [line.split()[2] for line in terminal_table(report).splitlines()[3:6]] == ["-0.0051", "-", "+0.0000"]
    assert re.search(r"ONNX: AP does not .* 640x640 .* 320x320", " ".join(terminal_table(report).splitlines()))


def test_masks_have_their_columns(segmented):
    lines = [line.split() for line in terminal_table(segmented).splitlines()]
    assert " ".join(lines[0]) == "stage AP vs FP32 AP50 mask AP vs FP32 mask AP50 weights ms/image on"
    assert lines[2][1:5] == ["0.7412", "0.9521", "0.4412", "0.7000"]
    assert lines[3][1:] == ["0.7361", "-0.0051", "±", "0.0058", "0.9521", "0.4300", "-0.0112", "±", "0.0100",
                            "0.7000", "1.81", "MB", "18.21", "[1]"]  # fmt: skip
    assert lines[4][1:6] == ["0.7412", "+0.0000", "0.9521", "-", "-"]  # a detector beside them


def test_differences_have_standard_errors_where_the_images_are_the_same(compared):
    lines = terminal_table(compared).splitlines()
    assert [" ".join(line.split()[2:5]) for line in lines[3:5]] == ["-0.0051 ± 0.0058", "+0.0008 ± 0.0100"]
    assert [line.split()[2] for line in lines[5:7]] == ["-", "+0.0088"]
    assert lines[7].split()[3] == "-"
    assert max(map(len, lines)) <= 80
    words = " ".join(lines[8:])
    assert "±: the standard error, of a difference and of agreement, from resampling the images" in words
    compared.rows = [row.model_copy(update={"resampled_over": "12 groups"}) for row in compared.rows]
    assert "from resampling the 12 groups" in " ".join(terminal_table(compared).split())
    assert re.search(r"ONNX: AP does not compare [^:]*: other images or labels", words)
    assert re.search(r"TensorRT INT8: AP does not compare [^:]*: 30 images", words)


def test_a_markdown_table_escapes_markup():
    lines = markdown_table(("stage", "file", "measured on"), [("a|b*", "`x|y.pt`", NASTY)])
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines)
    assert r"a\|b\*" in lines[-1]
    assert "<script>" not in lines[-1].replace(r"\<", "")


def at(recall: float, replicates: tuple[float, ...], threshold: float = 0.312, **changes) -> AtThreshold:
    return AtThreshold(
        threshold=threshold, objects=100, found=round(100 * recall), precision=0.9, recall=recall,
        precision_resampled=resampled(0.9, 0.9, 0.9), recall_resampled=resampled(*replicates),
        by_class={"cat <b>": (60, 50), "dog": (40, 30)}, by_size={"small": (70, 51)}, **changes,
    )  # fmt: skip


@pytest.fixture
def beside():
    curve = (*(round(math.sin(math.pi * x / 100), 4) for x in range(100)), 0.0)
    base = example_row(at_threshold=at(0.8, (0.80, 0.82, 0.78)), best_threshold=0.312, f1=curve)
    int8 = example_row("INT8", ap=0.74, at_threshold=at(0.7, (0.70, 0.73, 0.67)), best_threshold=0.281, f1=curve,
                    agreement=0.9669, agreement_resampled=resampled(0.96, 0.97, 0.98))  # fmt: skip
    return Report(command="x", rows=[base, int8])


def test_a_row_says_what_a_product_notices(beside):
    heading, rows = against_fp32(beside)
    assert "0.312" in heading
    assert rows == [
        ("FP32", "-", "0.312", "0.9000", "", "0.8000", "", "20 of 100"),
        ("INT8", "0.9669 ± 0.0100", "0.281", "0.9000", "+0.0000 ± 0.0000", "0.7000", "-0.1000 ± 0.0100", "30 of 100"),
    ]
    text = terminal_table(beside)
    assert "0.9669 ± 0.0100" in text
    assert max(map(len, text.splitlines())) <= 100


def test_rows_keep_the_float_row_that_they_were_counted_with(beside):
    others = [example_row(file="b.pt"), example_row(file="c.pt", at_threshold=at(0.8, (0.8, 0.8, 0.8), threshold=0.2))]
    report = Report(command="x", rows=[beside.rows[0], *others, beside.rows[1]])
    assert report.baseline(report.rows[-1]) is report.rows[0]
    assert [report.baseline(row) for row in report.rows[:3]] == report.rows[:3]
    assert "-0.1000 ± 0.0100" in against_fp32(report)[1][-1]


def test_no_table_where_thresholds_differ_or_nms_is_inside(beside):
    base, int8 = beside.rows
    other = int8.model_copy(update={"at_threshold": at(0.7, (0.70, 0.73, 0.67), threshold=0.4)})
    inside = int8.model_copy(update={"ap_with": "confidence 0.25 and IoU 0.45 in the file"})
    for rows in ([base, other], [base, inside], [base], [example_row(), example_row("PTQ")]):
        assert against_fp32(Report(command="x", rows=rows)) is None
    unlabelled = [row.model_copy(update={"ap_with": AGREEMENT}) for row in beside.rows]
    assert "F1 is best against its own detections, 0.312" in against_fp32(Report(command="x", rows=unlabelled))[0]


def test_the_page_has_the_table_the_classes_and_the_curves(beside):
    text = page(beside, Advice(Level.OK, "fine"))
    words = (
        "At the confidence threshold",
        "0.9669 ± 0.0100",
        "cat &lt;b&gt;",
        "10 of 60",
        "19 of 70",
        "Confidence",
    )
    assert [word for word in words if word not in text] == []
    assert "cat <b>" not in text
    other = Report(command="x", rows=[example_row(), example_row("PTQ")])
    assert "At the confidence threshold" not in page(other, Advice(Level.OK, "fine"))


def test_f1_is_drawn_for_each_row_with_the_float_threshold_and_below_it_the_difference(beside):
    upper, lower = f1_curves(beside).axes
    lines = {line.get_label(): line for line in upper.get_lines()}
    assert lines["INT8, best at 0.281 (-0.031)"].get_ydata() == pytest.approx(beside.rows[1].f1)
    assert list(lines["FP32: 0.312"].get_xdata()) == [0.312, 0.312]
    assert upper.get_xlim() == lower.get_xlim() == pytest.approx((0.081, 0.512))
    change, zero = lower.get_lines()
    expected = [int8 - fp32 for int8, fp32 in zip(beside.rows[1].f1, beside.rows[0].f1, strict=True)]
    assert change.get_ydata() == pytest.approx(expected)
    assert set(zero.get_ydata()) == {0}


def test_f1_of_a_row_without_fp32_is_one_panel(beside):
    (axes,) = f1_curves(beside.model_copy(update={"rows": beside.rows[:1]})).axes
    assert axes.get_xlabel() == "confidence threshold"
