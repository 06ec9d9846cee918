"""A report as files: JSON, plots, and one HTML page with a table, the curves and the images; and several put together.

The page fetches nothing. Its layout is `report.html.j2`; Jinja escapes every value, since class names, paths and notes
come from users.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import write_bytes
from utils.core.score import AGREEMENT, AtThreshold
from utils.reports import figures, tables
from utils.reports.detections import detection_sheet
from utils.reports.schema import AP, Advice, Report, Row

TEMPLATE = Path(__file__).with_name("report.html.j2")
MIME = {"png": "image/png", "jpg": "image/jpeg", "svg": "image/svg+xml"}
JSON_NAME, PAGE_NAME = "report.json", "report.html"
PLOTS = ("ap_per_epoch.png", "loss_per_epoch.png", "detections.png")
# The page runs one script, which copies the next command; the policy names it by its hash, so that nothing else runs.
COPY_SCRIPT = """
document.getElementById("copy").addEventListener("click", function () {
  const range = document.createRange();
  range.selectNodeContents(document.getElementById("command"));
  const selection = window.getSelection();
  selection.removeAllRanges();
  selection.addRange(range);
  this.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
});
"""
CSV_COLUMNS = (
    *("stage", "epoch", "file", "ap", "ap50", "ap_coco", "precision", "recall", "mask_ap", "mask_ap50", "agreement"),
    *("vs_fp32", "vs_fp32_error", "loss", "deciding_loss", "lr", "seconds", "ms_per_image", "chosen"),
)


def write_all(report: Report, folder: str | Path, advice: Advice, json_name: str = JSON_NAME) -> list[Path]:
    """Write the JSON, a plot of each part that has something to draw, and the page; each file whole or not at all."""
    folder = Path(folder)
    written = [report.save(folder / json_name)]
    drawings = [figures.per_epoch(report)] if report.scored_epochs else []
    if report.samples:
        drawings.append(("detections", detection_sheet(report.samples)))
    written += [figures.save_figure(figure, folder / f"{name}.png") for name, figure in drawings]
    return [*written, write_page(report, folder, advice)]


def write_page(report: Report, folder: Path, advice: Advice) -> Path:
    """Write the page alone."""
    write_bytes(folder / PAGE_NAME, page(report, advice).encode("utf-8", "backslashreplace"))
    return folder / PAGE_NAME


def csv_of(report: Report) -> str:
    """The rows, and the epochs of QAT in front of the last one, as CSV with a line of titles."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in report.rows:
        if row is report.rows[-1]:
            for epoch in report.history:
                values = {**epoch.to_dict(), "stage": "QAT epoch", "deciding_loss": epoch.held_out}
                writer.writerow(_without_none(values))
        difference = report.difference(row)
        values = {**row.to_dict(), "epoch": None}
        if difference:
            values |= {"vs_fp32": difference.value, "vs_fp32_error": difference.error}
        writer.writerow(_without_none(values))
    return text.getvalue()


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class RowView:
    """A row of the page's table.

    Attributes:
        cells: one text for each of `tables.headers`.
        tones: column → style of a difference that is more than noise, `up` or `down`.
        remarks: what a reader has to know about the row.
    """

    row: Row
    cells: tuple[str, ...]
    tones: Mapping[int, str]
    remarks: list[str]
    is_judged: bool

    @classmethod
    def of(cls, report: Report, row: Row, name: str, advice: Advice) -> RowView:
        """The view of a row of a report, under its name."""
        columns = [column for column, head in enumerate(tables.headers(report)) if head == "vs float"]
        tones = {}
        for column, ap in zip(columns, AP, strict=False):
            difference = report.difference(row, ap)
            if difference and difference.significant:
                tones[column] = "up" if difference.value > 0 else "down"
        cells = (name, *tables.cells(report, row)[1:])
        return cls(row, cells, tones, tables.row_remarks(report, row), row is advice.row)


@dataclass(frozen=True)
class Card:
    """One of the three cards of the first screen: a title, a large text, a small one below."""

    title: str
    text: str
    note: str = ""


def cards(report: Report, advice: Advice) -> list[Card]:
    """AP, time and confidence threshold of the FP32 model and of the judged row; none without a judged row."""
    row = advice.row
    base = report.baseline(row) if row else None
    if row is None or base is None:
        return []
    difference = report.difference(row)
    unlabelled = AGREEMENT in row.ap_with
    what = "agreement with FP32" if unlabelled else "AP, FP32 → INT8"
    ap = Card(what, f"{tables.fraction(base.ap)} → {tables.fraction(row.ap)}", str(difference or ""))
    title = "confidence threshold of best F1"
    threshold = Card(title, "not measured")
    if base.best_threshold is not None and row.best_threshold is not None:
        threshold = Card(
            title, f"{base.best_threshold:.3f} → {row.best_threshold:.3f}", _missed_at_threshold(row, base)
        )
    return [ap, _time_card(report), threshold]


def _missed_at_threshold(row: Row, base: Row) -> str:
    """The objects that both models miss at the FP32 model's threshold, in words; '' where that was not counted."""
    at, base_at = row.at_threshold, base.at_threshold
    if at is None or base_at is None or at.threshold != base_at.threshold:
        return ""
    missed = at.objects - at.found
    return f"at {at.threshold:.3f}, INT8 misses {missed} and FP32 {base_at.objects - base_at.found} of {at.objects}"


def _time_card(report: Report) -> Card:
    """Milliseconds per image of the FP16 and the INT8 engine, or else of FP32 and INT8 in OpenVINO."""
    times = {row.stage: row.ms_per_image for row in report.rows if row.ms_per_image is not None}
    title, int8 = "ms per image, FP16 → INT8", times.get("TensorRT INT8")
    if int8 is None and (in_openvino := times.get("OpenVINO INT8")) is not None:
        fp32 = [row.ms_per_image for row in report.rows if row.stage == "float" and "OpenVINO" in row.measured_on]
        text = " → ".join(f"{ms:.2f}" for ms in (*fp32, in_openvino) if ms is not None)
        return Card("ms per image, FP32 → INT8", text, "by OpenVINO, in this evaluation")
    if int8 is None:
        return Card(title, "not measured", "the speed of INT8 shows in an engine: scripts/benchmark_trt.sh")
    fp16 = times.get("TensorRT FP16")
    text = f"{int8:.2f}" if fp16 is None else f"{fp16:.2f} → {int8:.2f}"
    return Card(title, text, "in this evaluation; scripts/benchmark_trt.sh times engines alone")


def page(report: Report, advice: Advice) -> str:
    """The page's text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["shared"] = without_folders
    named = list(zip(tables.labels(report), report.rows, strict=True))
    digest = base64.b64encode(hashlib.sha256(COPY_SCRIPT.encode()).digest()).decode()
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        created=_local_time(report.created),
        advice=advice,
        script=COPY_SCRIPT,
        script_hash=f"sha256-{digest}",
        cards=cards(report, advice),
        difference_chart=_difference_chart(report, advice),
        headers=tables.headers(report),
        rows=[RowView.of(report, row, name, advice) for name, row in named],
        coco=_coco_scores(named),
        remarks=tables.remarks(report),
        against=tables.against_float(report),
        against_headers=tables.FLOAT_HEADERS,
        missed=_missed([(name, row.at_threshold) for name, row in named if row.at_threshold]),
        by_class=_by_class(named),
        charts=_charts(report),
        samples=_samples(report),
        confidence=", ".join(sorted({f"{sample.confidence:g}" for sample in report.samples})),
        machine={**report.hardware, "device": ", ".join(sorted({row.device for row in report.rows} - {""}))},
    )


def _coco_scores(named: Sequence[tuple[str, Row]]) -> str:
    """AP of the rows by COCO's definition, in words; '' where no row has it."""
    scores = ((name, row.ap_coco) for name, row in named)
    return ", ".join(f"{name} {ap:.4f}" for name, ap in scores if ap is not None)


def _local_time(created: str) -> str:
    """A time in ISO 8601 as a reader knows it; another text as it is."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except ValueError:
        return created


def _difference_chart(report: Report, advice: Advice) -> str:
    """The differences to FP32 as a picture; empty where no row compares."""
    if not any(report.difference(row) for row in report.rows):
        return ""
    return data_uri(figures.render(figures.differences(report, advice.allowed), "svg"), "svg")


def _charts(report: Report) -> dict[str, str]:
    """Heading → picture of the charts below the table."""
    charts = {}
    if report.scored_epochs:
        name, figure = figures.per_epoch(report)
        heading = "AP after each epoch of QAT" if name == "ap_per_epoch" else "Loss after each epoch of QAT"
        charts[heading] = data_uri(figures.render(figure, "svg"), "svg")
    if sum(bool(row.f1) for row in report.rows) > 1:
        charts["Which confidence threshold"] = data_uri(figures.render(figures.f1_curves(report), "svg"), "svg")
    for name, file in report.charts.items():
        if os.path.isfile(file):
            charts[name] = data_uri(Path(file).read_bytes(), "png")
    return charts


def _samples(report: Report) -> list[tuple[str, str]]:
    """Name and picture of each image with detections; one that is gone has the reason in its name, and no picture."""
    samples = []
    for sample in report.samples:
        name = Path(sample.image).name
        try:
            samples.append((name, data_uri(figures.render(detection_sheet([sample]), "jpg", dpi=200), "jpg")))
        except InputError as error:
            samples.append((f"{name}: {error}", ""))
    return samples


def _by_class(named: Sequence[tuple[str, Row]]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The rows that have AP by class, and for each class their AP."""
    by_row = {name: row.ap_by_class for name, row in named if row.ap_by_class}
    classes = dict.fromkeys(label for scores in by_row.values() for label in scores)
    lines = []
    for label in classes:
        lines.append((label, [tables.fraction(scores.get(label)) for scores in by_row.values()]))
    return [*by_row], lines


def _missed(counted: Sequence[tuple[str, AtThreshold]]) -> tuple[list[str], list[list[str]]]:
    """A column for each row that was counted, and for each size and class the objects that it misses."""
    lines = []
    for part in ("by_size", "by_class"):
        for kind in dict.fromkeys(kind for _, at in counted for kind in getattr(at, part)):
            numbers = [getattr(at, part).get(kind, (0, 0)) for _, at in counted]
            lines.append([kind, *(f"{objects - found} of {objects}" for objects, found in numbers)])
    return [name for name, _ in counted], lines


def without_folders(text: str, path: bool = False) -> str:
    """A text (or a path) to be shared: of absolute paths the last part, or that in the working folder."""
    text = text.replace(f"{Path.cwd()}/", "")
    if path:
        return text.rpartition("/")[2] if text.startswith("/") else text
    return re.sub(r"'/[^'\n]*/|(?<![^\s=(\"])/(?:[^\s'\"]*/)?(?=[^\s/])", lambda m: "'" * m[0].startswith("'"), text)


def data_uri(content: bytes, kind: str) -> str:
    """An image file as an address that holds it; `kind` is one of MIME."""
    return f"data:{MIME[kind]};base64,{base64.b64encode(content).decode('ascii')}"


def merged(reports: Mapping[Path, Report]) -> Report:
    """One report of several runs by file: all commands, rows, charts and notes, the first ranges and samples.

    Epochs of QAT are kept where one run alone has some; else a note names the runs, whose own pages draw them.
    Of two rows of one stage and file, measured on the same, the one that knows more is kept, or else the first one.
    `InputError` where some runs have labels, and others the FP32 model's detections.
    """
    _refuse_other_labels(reports)
    runs = {path.parent: report for path, report in reports.items()}
    datasets = {run: report.data for run, report in runs.items() if report.data}
    trained = {run: report for run, report in runs.items() if report.scored_epochs}
    several = len({*datasets.values()}) > 1
    notes = _all_of("notes", reports)
    if several:
        whose = ", ".join(f"{run} of {data}" for run, data in datasets.items())
        notes.append(f"the runs are of several datasets, whose rows do not compare: {whose}")
    if len(trained) > 1:
        notes.append(f"the epochs of QAT are on the pages of the runs: {', '.join(map(str, trained))}")
    only_trained = next(iter(trained.values())) if len(trained) == 1 else Report(command="")
    with_samples = next((report for report in reports.values() if report.samples), Report(command=""))
    charts: dict[str, str] = {}
    for report in reports.values():
        charts |= report.charts
    splits = {str(split): split for report in reports.values() for split in report.splits}
    return next(iter(reports.values())).model_copy(
        update={
            "command": "\n".join(dict.fromkeys(report.command for report in reports.values())),
            "rows": _merged_rows(reports, several),
            "data": "" if several else next(iter(datasets.values()), ""),
            "history": only_trained.history,
            "held_out_images": only_trained.held_out_images,
            "ranges": next((report.ranges for report in reports.values() if report.ranges), []),
            "samples": with_samples.samples,
            "samples_are": with_samples.samples_are,
            "splits": list(splits.values()),
            "charts": charts,
            "notes": notes,
            "warnings": _all_of("warnings", reports),
            "problems": _all_of("problems", reports),
            "doubts": _all_of("doubts", reports),
            "target_drop": next(filter(None, (report.target_drop for report in reports.values())), None),
        }
    )


def _refuse_other_labels(reports: Mapping[Path, Report]) -> None:
    """Raise `InputError` where some runs have labels, and others the FP32 model's detections."""
    kinds: dict[bool, Path] = {}
    for path, report in reports.items():
        kinds |= {AGREEMENT in row.ap_with: path.parent for row in report.rows if row.ap is not None}
    if len(kinds) > 1:
        raise InputError(
            f"{kinds[True]} is a run with --unlabelled and {kinds[False]} has labels, so that their AP does not "
            "compare; make a page of each"
        )


def _merged_rows(reports: Mapping[Path, Report], several: bool) -> list[Row]:
    """The rows of all runs; those of one stage and file, measured on the same, once, unless datasets differ."""
    rows: dict[tuple[str, ...], Row] = {}
    for path, report in reports.items():
        for row in report.rows:
            new = row.model_copy(update={"run": str(path.parent)} if len(reports) > 1 else {})
            key = (row.stage, row.file, row.measured_on, str(path) if several else "")
            known = rows.get(key, new)
            rows[key] = max(known, new, key=lambda entry: len(entry.model_dump(exclude_none=True)))
    return list(rows.values())


def _all_of(name: str, reports: Mapping[Path, Report]) -> list[str]:
    """The texts of a list that several reports have, each once."""
    return list(dict.fromkeys(text for report in reports.values() for text in getattr(report, name)))
