"""Reports: what is stored comes back, and what is no report, or one of a newer version, is refused in one line."""

import json
import math

import pytest
from report_examples import example_row, resampled

from utils.core.errors import InputError
from utils.core.score import AGREEMENT
from utils.reports.schema import AtThreshold, Epoch, Report


def test_what_is_saved_is_loaded(report, segmented, tmp_path):
    at = AtThreshold(threshold=0.3, objects=9, found=8, precision=0.9, recall=8 / 9, by_class={"cat": (6, 5)})
    report.rows.append(
        example_row("QAT", ap_by_size={"small": 0.25, "large": 0.5}, file="odd-\udcff.pt", at_threshold=at)
    )
    report.notes.append("of odd-\udcff.png")
    report.history.append(Epoch(epoch=3, ap=0.25, loss=math.nan, held_out=math.inf))
    path = report.save(tmp_path / "new" / "report.json")
    report.notes[-1], report.history[-1] = "of odd-?.png", Epoch(epoch=3, ap=0.25)
    assert Report.load(path) == report
    assert Report.load(segmented.save(path)) == segmented


def test_the_error_of_a_difference_is_in_the_json_and_computed_anew_when_read(compared, segmented, tmp_path):
    stored = json.loads(compared.save(tmp_path / "r.json").read_text())
    errors = [row["ap_difference_error"] for row in stored["rows"]]
    assert errors == [None, pytest.approx(0.01 / 3**0.5), pytest.approx(0.01), None, None, None]
    stored["rows"][1]["ap_difference_error"] = 0.5
    (tmp_path / "r.json").write_text(json.dumps(stored))
    assert Report.load(tmp_path / "r.json") == compared
    assert [row["mask_ap_difference_error"] for row in segmented.to_dict()["rows"]] == [None, pytest.approx(0.01), None]


@pytest.mark.parametrize("unlabelled", [False, True])
def test_agreement_of_schema_3_is_scaled_so_that_a_network_agrees_with_itself_by_1(unlabelled, tmp_path):
    """Schema 3 counted a network's agreement with itself as 0.995: AP interpolated over 101 recalls."""
    scores = resampled(0.99, 0.98)
    row = example_row("PTQ", agreement=0.99, agreement_resampled=scores)
    if unlabelled:
        row = row.model_copy(update={"ap": 0.99, "ap_resampled": scores, "ap_with": AGREEMENT})
    for version, factor in ((3, 1 / 0.995), (4, 1)):
        content = {**Report(command="x", rows=[row]).to_dict(), "schema_version": version}
        (tmp_path / "r.json").write_text(json.dumps(content))
        (read,) = Report.load(tmp_path / "r.json").rows
        assert read.agreement == pytest.approx(0.99 * factor)
        assert read.agreement_resampled.ap == pytest.approx([0.99 * factor, 0.98 * factor], abs=1e-5)
        expected = 0.99 * factor if unlabelled else row.ap
        assert read.ap == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [(("rows", 0, "ap"), 1.5, "rows[0].ap"), (("rows", 0, "ap_resampled"), "abc", "rows[0].ap_resampled"),
     (("rows", 0, "ap_by_size"), {"tiny": 0.5}, "rows[0].ap_by_size"), (("rows", 0), {"stage": "x"}, "rows[0].file"),
     (("samples", 0, "predictions", "INT8", 0, "outline"), ["<svg>"], "predictions.INT8[0].outline"),
     (("surprise",), 1, "surprise"), *((("schema_version",), number, f"schema {number}") for number in (2, 99))],
)  # fmt: skip
def test_a_changed_report_is_refused_in_one_line(report, tmp_path, path, value, named):
    content = place = report.to_dict()
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    file = tmp_path / "report.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        Report.load(file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"rows": []}', b"\x00\x01"])
def test_a_file_that_is_no_report_is_refused_by_name(tmp_path, content):
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(InputError, match=r"report\.json"):
        Report.load(tmp_path / "report.json")
