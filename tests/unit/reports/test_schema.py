"""Reports: what is stored comes back, and a damaged file is refused in one line."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from report_examples import ROW_KEYS, make_row

from utils.core.errors import InputError
from utils.reports import limits
from utils.reports.schema import Report


def _fail(*args, **kwargs):
    raise OSError("the disk is full")


def test_what_is_saved_is_loaded(report, tmp_path):
    path = report.save(tmp_path / "new" / "report.json")
    assert Report.load(path) == report


def test_rows_have_exactly_the_documented_keys(report):
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["schema_version"] == 2
    assert [list(row) for row in stored["rows"]] == [ROW_KEYS, ROW_KEYS]


def test_ap_by_size_is_kept_and_left_out_where_there_is_none(report, tmp_path):
    report.rows = [make_row(), make_row("QAT", ap_by_size={"small": 0.25, "large": 0.5})]
    assert Report.load(report.save(tmp_path / "r.json")) == report
    stored = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert ["ap_by_size" in row for row in stored] == [False, True]


def test_the_error_of_a_difference_is_in_the_json_and_computed_anew_when_read(compared, tmp_path):
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
def test_damaged_resamplings_are_refused_in_one_line(compared, tmp_path, name, value, says):
    content = compared.to_dict()
    content["rows"][1][name] = value
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"rows\[1\].*{says}") as caught:
        Report.load(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["channels", "tensors"])
def test_numbers_of_channels_are_whole(report, tmp_path, name):
    content = report.to_dict()
    content["ranges"][0][name] = 3.5
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"ranges\[0\]\.{name}"):
        Report.load(tmp_path / "r.json")


def test_a_report_of_an_earlier_version_is_read(compared, tmp_path):
    content = compared.to_dict()
    for row in content["rows"]:
        del row["ap_resampled"], row["ap_difference_error"]
    (tmp_path / "r.json").write_text(json.dumps(content))
    assert Report.load(tmp_path / "r.json").rows[1] == make_row("PTQ", ap=0.7361)


def test_a_report_of_schema_1_is_read(compared, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps({**compared.to_dict(), "schema_version": 1}))
    assert Report.load(tmp_path / "r.json") == compared


def test_masks_are_stored_where_they_were_measured(segmented, tmp_path):
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


def test_numpy_numbers_are_stored_as_numbers_and_a_diverged_loss_as_null(report, tmp_path):
    report.add(make_row("QAT", ap=np.float32(0.5), size_bytes=np.int64(7)))
    report.history.append({"epoch": np.int64(3), "ap": np.float64(0.25), "loss": math.nan})
    report.ranges.append({"name": "x", "kind": "weight", "amax": np.float32(0.5), "channels": np.array([1, 2])})
    stored = json.loads(report.save(tmp_path / "r.json").read_text())
    assert (stored["rows"][-1]["ap"], stored["rows"][-1]["size_bytes"]) == (0.5, 7)
    assert stored["history"][-1] == {"epoch": 3, "ap": 0.25, "loss": None}
    assert stored["ranges"][-1]["channels"] == [1, 2]


def test_a_row_measured_again_replaces_the_old_one(report):
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
def test_a_row_refuses_what_cannot_be_measured(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        make_row(**changes)


def test_not_measured_is_allowed():
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
def test_a_file_that_is_no_report_is_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        Report.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


BOX = {"xyxy": [0, 0, 1, 1], "name": "a"}
TOO_MUCH = {
    "rows": ([make_row().to_dict()] * 1001, "rows is .*, expected at most 1000 items"),
    "notes": (["x"] * 1001, "notes is .*, expected at most 1000 items"),
    "history": ([{"epoch": 0}] * 20_001, "history is .*, expected at most 20000 items"),
    "ranges": ([{"name": "a", "kind": "weight", "amax": 1}] * 10_001, "ranges is .*, expected at most 10000 items"),
}
TOO_MANY_SAMPLES = {
    "images": ([{"image": "x", "predictions": {}}] * 101, "samples is .*, expected at most 100 items"),
    "panels": (
        [{"image": "x", "predictions": {f"{stage}": [] for stage in range(9)}}] * 60,
        "samples has 60 images of 9 stages, expected 400 at most",
    ),
    "a column": (
        [{"image": "x", "predictions": {"a": [BOX] * 2001}}],
        r"samples\[0\].predictions.a is .*, expected at most 2000 items",
    ),
    "truth": ([{"image": "x", "predictions": {}, "truth": [BOX] * 2001}], r"samples\[0\].truth is .* at most 2000"),
    "boxes": (
        [{"image": "x", "predictions": {"a": [BOX] * 1000}, "truth": [BOX]}] * 10,
        "samples has 10,010 boxes, expected 10,000 at most",
    ),
}


@pytest.mark.parametrize(
    ("change", "says"),
    [({key: value}, says) for key, (value, says) in TOO_MUCH.items()]
    + [({"samples": value}, says) for value, says in TOO_MANY_SAMPLES.values()],
    ids=[*TOO_MUCH, *TOO_MANY_SAMPLES],
)
def test_more_than_a_page_can_show_is_refused(change, says):
    with pytest.raises(InputError, match=says) as caught:
        Report.from_dict({"schema_version": 1, "rows": [], "command": "", **change})
    assert len(str(caught.value)) < 500
    for key, value in change.items():
        if key in TOO_MUCH:
            assert Report.from_dict({"schema_version": 1, "rows": [], "command": "", key: value[:-1]})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_report_that_is_no_regular_file_is_not_opened(tmp_path, make):
    make(tmp_path / "report.json")
    with pytest.raises(InputError, match=r"is not a regular file; give the path of a report\.json"):
        Report.load(tmp_path / "report.json")


def test_a_report_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "report.json").open("wb") as stream:
        stream.truncate(limits.LARGEST_FILE + 1)
    with pytest.raises(InputError, match=r"has 64\.0 MiB, which is more than such a file can have"):
        Report.load(tmp_path / "report.json")


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    for name in ("binary", "missing", "."):
        with pytest.raises(InputError):
            Report.load(tmp_path / name)


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(report, tmp_path, monkeypatch):
    path = report.save(tmp_path / "kept" / "report.json")
    old = path.read_bytes()
    monkeypatch.setattr("utils.reports.schema.Path.write_text", _fail)
    with pytest.raises(OSError, match="disk"):
        report.save(path)
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_hardware_of_the_reader_is_not_taken_for_that_of_the_run(tmp_path):
    (tmp_path / "r.json").write_text('{"schema_version": 1, "rows": [], "command": "x"}')
    assert Report.load(tmp_path / "r.json").hardware == {}
