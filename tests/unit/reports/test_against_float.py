"""Agreement, and what is found at the float network's threshold, as tables, a page and a plot show them."""

import math

import pytest
from report_examples import example_row, resampled

from utils.core.score import AGREEMENT, Difference
from utils.reports.figures import f1_curves
from utils.reports.page import page
from utils.reports.schema import AtThreshold, Report
from utils.reports.tables import against_float, terminal_table


def at(recall: float, replicates: tuple[float, ...], threshold: float = 0.312, **changes) -> AtThreshold:
    return AtThreshold(
        threshold=threshold, objects=100, found=round(100 * recall), precision=0.9, recall=recall,
        precision_resampled=resampled(0.9, 0.9, 0.9), recall_resampled=resampled(*replicates),
        by_class={"cat <b>": (60, 50), "dog": (40, 30)}, by_size={"small": (70, 51)}, **changes,
    )  # fmt: skip


@pytest.fixture
def compared():
    curve = (*(round(math.sin(math.pi * x / 100), 4) for x in range(100)), 0.0)
    base = example_row(at_threshold=at(0.8, (0.80, 0.82, 0.78)), best_threshold=0.312, f1=curve)
    int8 = example_row("INT8", ap=0.74, at_threshold=at(0.7, (0.70, 0.73, 0.67)), best_threshold=0.281, f1=curve,
                    agreement=0.9669, agreement_resampled=resampled(0.96, 0.97, 0.98))  # fmt: skip
    return Report(command="x", rows=[base, int8])


def test_a_row_says_what_a_product_notices(compared):
    heading, rows = against_float(compared)
    assert "0.312" in heading
    assert rows == [
        ("float", "-", "0.312", "0.9000", "", "0.8000", "", "20 of 100"),
        ("INT8", "0.9669 ± 0.0100", "0.281", "0.9000", "+0.0000 ± 0.0000", "0.7000", "-0.1000 ± 0.0100", "30 of 100"),
    ]
    text = terminal_table(compared)
    assert "0.9669 ± 0.0100" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_difference_is_that_of_paired_resamplings(compared):
    base, int8 = (row.at_threshold for row in compared.rows)
    expected = Difference(pytest.approx(-0.1), pytest.approx(0.01))  # of -.10, -.09, -.11
    assert int8.difference(base, "recall") == expected
    elsewhere = int8.model_copy(update={"recall_resampled": resampled(0.7, 0.7, images="b" * 32)})
    assert elsewhere.difference(base, "recall").error is None


def test_rows_keep_the_float_row_that_they_were_counted_with(compared):
    others = [example_row(file="b.pt"), example_row(file="c.pt", at_threshold=at(0.8, (0.8, 0.8, 0.8), threshold=0.2))]
    report = Report(command="x", rows=[compared.rows[0], *others, compared.rows[1]])
    assert report.baseline(report.rows[-1]) is report.rows[0]
    assert [report.baseline(row) for row in report.rows[:3]] == report.rows[:3]
    assert "-0.1000 ± 0.0100" in against_float(report)[1][-1]


def test_no_table_where_thresholds_differ_or_nms_is_inside(compared):
    base, int8 = compared.rows
    other = int8.model_copy(update={"at_threshold": at(0.7, (0.70, 0.73, 0.67), threshold=0.4)})
    inside = int8.model_copy(update={"ap_with": "confidence 0.25 and IoU 0.45 in the file"})
    for rows in ([base, other], [base, inside], [base], [example_row(), example_row("PTQ")]):
        assert against_float(Report(command="x", rows=rows)) is None
    unlabelled = [row.model_copy(update={"ap_with": AGREEMENT}) for row in compared.rows]
    assert "best F1 against its own detections, 0.312" in against_float(Report(command="x", rows=unlabelled))[0]


def test_the_page_has_the_table_the_classes_and_the_curves(compared):
    text = page(compared)
    words = ("What a product notices", "0.9669 ± 0.0100", "cat &lt;b&gt;", "10 of 60", "19 of 70", "Which confidence")
    assert [word for word in words if word not in text] == []
    assert "cat <b>" not in text
    assert "What a product notices" not in page(Report(command="x", rows=[example_row(), example_row("PTQ")]))


def test_f1_is_drawn_for_each_row_with_the_float_threshold(compared):
    (axes,) = f1_curves(compared).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["INT8, best at 0.281"].get_ydata() == pytest.approx(compared.rows[1].f1)
    assert list(lines["float: 0.312"].get_xdata()) == [0.312, 0.312]


def test_groups_are_named_beside_the_standard_error():
    rows = [
        example_row(stage, ap_resampled=resampled(0.7, 0.8), resampled_over="12 groups") for stage in ("float", "PTQ")
    ]
    assert "from resampling the 12 groups" in terminal_table(Report(command="x", rows=rows))
