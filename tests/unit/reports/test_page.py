"""The page of a report holds every number, and nothing in it is markup, a script or a link; and the files beside it."""

import base64
import csv
import hashlib
import html.parser
import io
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from documentation import ROOT
from PIL import Image
from report_examples import NASTY, example_row, resampled

from docs import photograph
from utils.core.errors import InputError
from utils.core.score import AGREEMENT
from utils.core.split_counts import SplitCounts
from utils.jobs.advice import advise
from utils.reports.page import cards, csv_of, merged, write_all
from utils.reports.page import page as page_of
from utils.reports.schema import Box, Epoch, Report, Sample
from utils.reports.tables import headers

NONE = dict.fromkeys(("backgrounds", "without_a_label_file", "bad_label_lines", "clipped_labels",
                      "boxes_among_polygons"), 0)  # fmt: skip


def page(report: Report) -> str:
    """The page with the advice of the report itself."""
    return page_of(report, advise(report))


class _Page(html.parser.HTMLParser):
    """Tags, addresses and text of a page, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [
            text for name, text in attrs if name in {"src", "href", "srcset", "action"} or "url(" in (text or "")
        ]

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.usefixtures("unrendered")
def test_the_page_holds_every_number(report, image):
    report.rows.append(example_row("QAT"))
    report.splits = [SplitCounts(name="val", images=6, objects=9, left_out=2, first={"left_out": "a.jpg"}, **NONE)]
    report.charts = {"Sensitivity (exp)": str(image[0]), "a chart that is gone": "gone.png"}
    report.samples.append(report.samples[0].model_copy(update={"image": "gone.png"}))
    shown = _Page(page(report))
    text = " ".join(shown.words)
    assert f"data:image/png;base64,{base64.b64encode(image[0].read_bytes()).decode()}" in shown.links
    assert "a chart that is gone" not in text
    for word in ("0.7412", "0.7361", "-0.0051", "0.9521", "0.9432", "0.9018", "1.81 MB", "18.21", "A report",
                 "python qat.py quantize", "somewhere else", "a CPU", "a note",
                 "runs/PTQ.pt", "Sensitivity (exp)", "cannot read the image",
                 "val: images 6, objects 9", "left out 2 (first: a"):  # fmt: skip
        assert word in text


@pytest.mark.usefixtures("unrendered")
def test_differences_within_their_error_have_no_colour(compared):
    compared.rows.append(example_row("better", ap=0.78, ap_resampled=compared.rows[1].ap_resampled))
    compared.rows.append(example_row("worse", ap=0.70, ap_resampled=compared.rows[1].ap_resampled))
    text = page(compared)
    assert re.findall(r'<td[^>]* class="(up|down)">(.*?)</td>', text) == [
        ("up", "+0.0388 ± 0.0058"), ("down", "-0.0412 ± 0.0058"),
    ]  # fmt: skip
    assert "±: the standard error, of a difference and of agreement" in text
    lines = re.findall(r"<tr>.*?</tr>", text)
    reasons = [re.findall("<b>(AP does not compare .*?)</b>", line) for line in lines]
    assert [bool(reason) for reason in reasons] == [False, False, False, False, True, False, True, False, False]
    assert "30 images" in reasons[6][0]


def test_the_page_fetches_nothing_and_runs_nothing_but_the_script_that_copies_the_command(report):
    text = page(report)
    parsed = _Page(text)
    assert len(parsed.links) == 3, "two charts, and an image with its columns"
    assert all(link.startswith("data:image/") for link in parsed.links)
    assert not {"link", "iframe", "object", "embed"} & set(parsed.tags)
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    written = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", written)
    first, sheet, chart = (base64.b64decode(link.split(";base64,")[1], validate=True) for link in parsed.links)
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert ElementTree.fromstring(chart).tag.endswith("svg")
    assert Image.open(io.BytesIO(sheet)).size[0] > 300


def test_markup_in_names_is_shown_and_not_run(report):
    tags = set(_Page(page(report)).tags)
    report.title = report.command = report.data = NASTY
    report.notes = [NASTY]
    report.rows = [example_row(NASTY, file=NASTY, device=NASTY, measured_on=NASTY)]
    box = Box(xyxy=(1, 1, 9, 9), name="$" + NASTY, score=0.5)
    report.samples = [Sample(image=report.samples[0].image, predictions={NASTY: [box]})]
    nasty = _Page(page(report))
    assert set(nasty.tags) <= tags
    assert nasty.tags.count("script") <= 1
    assert NASTY in "".join(nasty.words)


@pytest.mark.usefixtures("unrendered")
def test_a_reader_is_told_what_to_do_in_local_time_and_only_the_command_names_folders(report, monkeypatch, tmp_path):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    report.created, report.data = "2026-11-25T20:05:00+00:00", "/home/someone/my sets/data.yaml"
    report.command = "python qat.py --weights '/home/someone/a b/f.pt' --data=/home/someone/d.yaml --project out/x"
    report.notes = [f"left out: /home/someone/1.jpg: damaged; {tmp_path}/runs/a.pt", "AP50 / AP, 1/2, a//b"]
    error = resampled(0.74, 0.75, 0.73)
    report.rows = [
        example_row(file="/home/someone/f.pt", ap_resampled=error, ap_by_class={"cat": 0.25, "dog": 0.5}),
        example_row("QAT", file=f"{tmp_path}/runs/q.pt", ap_resampled=error, ap_by_class={"dog": 0.625}),
    ]
    monkeypatch.chdir(tmp_path)
    text = page(report)
    monkeypatch.undo()
    time.tzset()
    parsed = _Page(text)
    words = " ".join(parsed.words)
    command = f"export_qat.py --weights {tmp_path}/runs/q.pt"
    assert command in words, "it can be copied and run"
    assert "someone" not in text
    assert str(tmp_path) not in text.replace(command, "")
    for part in ("2026-11-26 05:05 JST", "data.yaml", "--weights 'f.pt' --data=d.yaml --project out/x",
                 "1.jpg: damaged", "runs/a.pt", "AP50 / AP, 1/2, a//b"):  # fmt: skip
        assert part in words
    places = [words.index(part) for part in ("loses at most", command, "vs FP32")]
    assert places == sorted(places)
    (by_class,) = re.findall("<summary>AP of each class</summary>.*?</details>", text, re.DOTALL)
    found = re.findall(r"<td[^>]*>([^<]*)</td>", by_class)
    assert found == ["cat", "0.2500", "-", "dog", "0.5000", "0.6250"]
    report.rows[1] = report.rows[1].model_copy(update={"file": "recipe.yaml"})
    words = " ".join(_Page(page(report)).words)
    assert "quantize --weights /home/someone/f.pt --data '/home/someone/my sets/data.yaml' --imgsz 640" in words


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    ("ap", "resampled_ap", "level"),
    [(0.7412, (0.74, 0.75, 0.73), "OK"), (0.7412, (0.71, 0.77, 0.74), "CHECK"), (0.70, (0.70, 0.71, 0.69), "LOSS")],
)
def test_the_first_screen_has_verdict_warnings_cards_and_the_next_command(report, ap, resampled_ap, level):
    report.warnings, report.data = ["some images are damaged"], "d.yaml"
    report.rows = [example_row(ap_resampled=resampled(0.74, 0.75, 0.73), best_threshold=0.312)]
    report.rows.append(example_row("PTQ", ap=ap, ap_resampled=resampled(*resampled_ap), best_threshold=0.281))
    text = page(report)
    first_screen = text.partition("Detections side by side")[0]
    assert f'<span class="chip {level}">{level}</span>' in first_screen
    words = " ".join(_Page(first_screen).words)
    for part in ("some images are damaged", f"0.7412 → {ap:.4f}", "0.312 → 0.281", "not measured", "python "):
        assert part in words
    assert "All numbers" not in words


def test_without_an_engine_the_cards_have_the_times_of_openvino(report):
    row = example_row("OpenVINO INT8", ms_per_image=9.85)
    report.rows = [example_row(), example_row(ms_per_image=14.06, measured_on="OpenVINO 2026.4.1, CPU"), row]
    card = cards(report, advise(report))[1]
    assert (card.title, card.text) == ("ms per image, FP32 → INT8", "14.06 → 9.85")


def test_the_cards_have_the_times_of_engines(report):
    report.rows = [example_row(), example_row("TensorRT FP16", ms_per_image=1.3), example_row("TensorRT INT8")]
    report.rows[2] = report.rows[2].model_copy(update={"ms_per_image": 0.9})
    assert [card.text for card in cards(report, advise(report))][1] == "1.30 → 0.90"
    del report.rows[1]
    assert [card.text for card in cards(report, advise(report))][1] == "0.90"
    report.rows[1] = report.rows[1].model_copy(update={"stage": "QAT"})
    assert [card.text for card in cards(report, advise(report))][1] == "not measured", "a simulation has no speed"


def test_a_table_of_values_has_the_epochs_in_front_of_the_last_row(report):
    rows = list(csv.DictReader(io.StringIO(csv_of(report))))
    assert [(row["stage"], row["epoch"]) for row in rows] == [
        ("float", ""), ("QAT epoch", "1"), ("QAT epoch", "2"), ("PTQ", ""),
    ]  # fmt: skip
    assert (rows[0]["ap"], rows[0]["vs_fp32"]) == ("0.7412", "")
    assert (rows[2]["loss"], rows[2]["lr"], rows[2]["chosen"]) == ("0.25", "1e-05", "True")
    assert float(rows[3]["vs_fp32"]) == pytest.approx(-0.0051)
    assert csv_of(Report(command="nothing")).count("\n") == 1


def test_runs_with_rows_of_one_file_keep_the_row_that_knows_more():
    first = Report(command="a", rows=[example_row(ap=0.5, ms_per_image=2.0), example_row("PTQ", ap=0.4)])
    second = Report(command="b", rows=[example_row(ap=0.5, ms_per_image=1.0, agreement=1.0), example_row("ONNX")])
    runs = {Path("one/report.json"): first, Path("two/report.json"): second}
    both = merged(runs)
    assert [(row.stage, row.run) for row in both.rows] == [("float", "two"), ("PTQ", "one"), ("ONNX", "two")]
    assert (both.rows[0].agreement, both.rows[0].ms_per_image) == (1.0, 1.0)
    first.data, second.data = "cells.yaml", "cards.yaml"
    both = merged(runs)
    assert ([row.run for row in both.rows], both.data) == (["one", "one", "two", "two"], "")
    assert both.notes[-1].endswith("do not compare: one of cells.yaml, two of cards.yaml")
    first.data = second.data = ""
    first.history = second.history = [Epoch(epoch=0, held_out=0.1)]
    assert (merged(runs).history, merged(runs).notes[0][-8:]) == ([], "one, two")
    unlabelled = Report(command="c", rows=[example_row("PTQ", ap=0.9, ap_with=AGREEMENT)])
    assert headers(unlabelled)[:4] == ("stage", "agreement", "vs FP32", "agree50")
    with pytest.raises(InputError, match="three is a run with --unlabelled and one has labels"):
        merged({Path("one/report.json"): first, Path("three/report.json"): unlabelled})


def test_all_files_of_a_report_are_written(report, tmp_path):
    written = write_all(report, tmp_path / "run", advise(report))
    assert [path.name for path in written] == ["report.json", "ap_per_epoch.png", "detections.png", "report.html"]
    assert sorted(written) == sorted((tmp_path / "run").iterdir())
    nothing = Report(command="nothing")
    written = write_all(nothing, tmp_path / "empty", advise(nothing))
    assert [path.name for path in written] == ["report.json", "report.html"]


def test_runs_are_put_together(tmp_path):
    def make(*words):
        command = [sys.executable, "scripts/make_report.py", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    report = Report(command="qat.py", rows=[example_row(ap=0.5), example_row("QAT")], notes=["one"])
    report.history, report.charts = [Epoch(epoch=0, ap=0.5)], {"a chart": "a.png"}
    report.save(tmp_path / "qat/report.json")
    report = Report(command="val_trt.py", rows=[example_row("ONNX"), example_row("QAT")], notes=["two", "one"])
    report.save(tmp_path / "onnx.json")
    files = (tmp_path / "qat", tmp_path / "onnx.json")
    assert "0.5000" in make(*files, "--output", tmp_path / "out", "--note", "three", "--title", "Title")
    report = Report.load(tmp_path / "out/report.json")
    assert [row.stage for row in report.rows] == ["float", "QAT", "ONNX"]
    assert (report.notes, report.title, report.command) == (["one", "two", "three"], "Title", "qat.py\nval_trt.py")
    assert (len(report.history), report.charts) == (1, {"a chart": "a.png"})
    assert [row.run for row in report.rows] == [str(tmp_path / "qat"), str(tmp_path / "qat"), str(tmp_path)]
    assert "Title" in (tmp_path / "out" / "report.html").read_text()
    for path, report.data in ((tmp_path / "out/report.json", "a.yaml"), (tmp_path / "other.json", "b.yaml")):
        report.save(path)
    both = make(tmp_path / "out", tmp_path / "other.json", "--output", tmp_path / "both")
    assert "the runs have different datasets" in both.splitlines()[0]


@pytest.mark.usefixtures("unrendered")
def test_a_caption_counts_what_both_models_find_and_what_each_finds_alone(report):
    text = " ".join(_Page(page(report)).words)
    assert "1 found by both, 1 by FP32 only, 0 by INT8 only" in text


@pytest.mark.usefixtures("unrendered")
def test_the_photograph_numbers_the_parts_that_the_documents_explain(report):
    """`docs/photograph.py` finds them in the page by its markup; docs/reading-the-report.md has a line for each."""
    report.data = "d.yaml"
    report.rows = [example_row(ap_resampled=resampled(0.74, 0.75, 0.73))]
    report.rows.append(example_row("PTQ", ap=0.7361, ap_resampled=resampled(0.73, 0.75, 0.73)))
    numbered = photograph.numbered(page(report))
    numbers = re.findall(r'<span class="part">(\d)</span><(?:p|div|img|figure)', numbered)
    explained = (ROOT / "docs/reading-the-report.md").read_text(encoding="utf-8").partition("report.jpg")[2]
    assert numbers == re.findall(r"^(\d)\. ", explained.partition("\n## ")[0], re.MULTILINE) == [*"12345"]
