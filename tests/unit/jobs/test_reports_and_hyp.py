"""Reports and `--hyp` files with one field changed: refused in one line that names the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from utils.core.errors import CheckpointError, InputError
from utils.core.file_schema import check, listing, number, record
from utils.jobs.inputs import Augmentation, read_hyp
from utils.reports.schema import Report, Row

ROW = Row("PTQ", "a.pt", 0.5, 0.6, 0.5, 0.5, 1.0, "CPU", {"torch": "2.11"}, 1, 1.0, "PyTorch").to_dict()


def changed(content: Any, path: str, value: Any) -> Any:
    """A copy with the field at `path` (parts joined by '/') replaced."""
    content = copy.deepcopy(content)
    *way, last = path.split("/")
    place = content
    for part in way:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return content


def one_line(error: BaseException, path: Path, *texts: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert message.startswith(f"{path} is damaged or from another version: "), message
    assert len(message) < 700
    for text in texts:
        assert text in message


# --- report.json ------------------------------------------------------------------------------------------------------


@pytest.fixture
def report() -> dict[str, Any]:
    whole = Report("qat.py", [Row(**ROW)], history=[{"epoch": 0, "ap": 0.5}], notes=["a note"])
    whole.ranges = [{"name": "model.0", "kind": "weight", "amax": 1.0}]
    return {**whole.to_dict(), "samples": [{"image": "a.jpg", "predictions": {"float": [
        {"xyxy": [0, 0, 1, 1], "name": "cat", "score": 0.5}]}, "truth": []}]}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rows/0/ap", "high", "rows[0]: 'ap' is 'high'"),
        ("rows/0/versions", 5, "rows[0]: 'versions' is 5"),
        ("rows/0", None, "rows[0] is None"),
        ("history/0/epoch", "first", "history[0].epoch is 'first'"),
        ("history/0/ap", [], "history[0].ap is []"),
        ("ranges/0/amax", "x", "ranges[0].amax is 'x'"),
        ("ranges/0/kind", "bias", "ranges[0].kind is 'bias', expected activation or weight"),
        ("ranges/0", 3, "ranges[0] is 3"),
        ("samples/0/predictions/float/0/xyxy", [1, 2], "samples[0].predictions.float[0].xyxy is [1, 2]"),
        ("samples/0/image", None, "samples[0].image is None"),
        ("notes/0", {}, "notes[0] is {}, expected a text"),
        ("title", "\ud800", "title is '\\ud800', expected a text"),
        ("hardware", ["CPU"], "hardware is ['CPU']"),
        ("data", 1, "data is 1, expected a text"),
        ("created", [], "created is []"),
    ],
)
def test_a_changed_report_names_the_field(tmp_path, report, path, value, message):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert Report.load(file).rows[0].ap == 0.5
    file.write_text(json.dumps(changed(report, path, value)))
    with pytest.raises(InputError) as caught:
        Report.load(file)
    one_line(caught.value, file, message, "; run it again")


def test_a_report_nested_without_end_is_refused(tmp_path):
    (tmp_path / "report.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is no report"):
        Report.load(tmp_path / "report.json")


# --- --hyp ------------------------------------------------------------------------------------------------------------

GOOD = dict.fromkeys(Augmentation.model_fields, 0.0)


@pytest.mark.parametrize(
    "value", ["'half'", "[1]", "{a: 1}", "true", "null", ".nan", ".inf", "-1", "1000", "2020-01-01"]
)
@pytest.mark.parametrize("name", ["mosaic", "degrees", "perspective"])
def test_hyp_holds_numbers_within_bounds(tmp_path, name, value):
    path = tmp_path / "hyp.yaml"
    path.write_text("\n".join(f"{key}: {0.0 if key != name else value}" for key in GOOD) + "\nlr0: text\n")
    with pytest.raises(InputError) as caught:
        read_hyp(path)
    message = str(caught.value)
    assert message.startswith(f"--hyp {path}: {name} is ")
    assert "; expected " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["- 1", "5", "", "mosaic: 1", "a: 2020-13-99", "[" * 1000, "\x00", "? [a]\n: b", "&a [*a]"]
)
def test_hyp_that_is_none(tmp_path, text):
    (tmp_path / "hyp.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_hyp(tmp_path / "hyp.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_hyp_gives_what_the_augmentation_reads(tmp_path):
    path = tmp_path / "hyp.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in GOOD.items()) + "\nlr0: 0.01\n")
    assert read_hyp(path) == GOOD


# --- the checker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [10**5000, "x" * 100_000, [[[[[[1]]]]]] * 1000, {"a": {"b": {"c": "d" * 1000}}}, "a\nb", b"\x00" * 999],
    ids=["digits", "letters", "lists", "mappings", "lines", "bytes"],
)
def test_values_are_shown_on_one_short_line(value):
    with pytest.raises(CheckpointError) as caught:
        check({"scores": [value]}, record({"scores": listing(number(0, 1))}), "a.json", "run it again")
    message = str(caught.value)
    assert "scores[0] is " in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_file_that_fits_passes():
    rule: Callable[..., None] = record({"scores": listing(number(0, 1))})
    check({"scores": [0, 0.5, 1]}, rule, "a.json", "run it again")
