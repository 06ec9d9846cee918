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
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError
from utils.core.files import write_bytes
from utils.core.score import AGREEMENT, AtThreshold
from utils.core.split_counts import SplitCounts
from utils.reports import figures, tables
from utils.reports.detections import detection_sheet, unmatched
from utils.reports.schema import AP, Advice, Report, Row, Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html.j2")
MIME = {"png": "image/png", "jpg": "image/jpeg", "svg": "image/svg+xml"}
JSON_NAME = "report.json"
PAGE_NAME = "report.html"
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
# the folders of an absolute path: between quotation marks, of which the first stays, or as a word
FOLDERS = re.compile(r"(')/[^'\n]*/|(?<![^\s=(\"])/(?:[^\s'\"]*/)?(?=[^\s/])")
CSV_COLUMNS = (
    *("stage", "epoch", "file", "ap", "ap50", "ap_coco", "precision", "recall", "mask_ap", "mask_ap50", "agreement"),
    *("vs_fp32", "vs_fp32_error", "loss", "deciding_loss", "lr", "seconds", "ms_per_image", "chosen"),
)


def write_all(report: Report, folder: str | Path, advice: Advice, json_name: str = JSON_NAME) -> list[Path]:
    """Write the JSON, a plot of each part that has something to draw, and the page; each file whole or not at all."""
    folder = Path(folder)
    written = [report.save(folder / json_name)]
    drawings = []
    if report.scored_epochs:
        drawings.append(figures.per_epoch(report))
    if report.samples:
        drawings.append(("detections", detection_sheet(report.samples)))
    for name, figure in drawings:
        written.append(figures.save_figure(figure, folder / f"{name}.png"))
    written.append(write_page(report, folder, advice))
    return written


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
        values = {**row.to_dict(), "epoch": None}
        difference = report.difference(row)
        if difference:
            values["vs_fp32"] = difference.value
            values["vs_fp32_error"] = difference.error
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
        remarks: sentences on why the row does not compare, or compares in doubt.
    """

    row: Row
    cells: tuple[str, ...]
    tones: Mapping[int, str]
    remarks: list[str]
    is_judged: bool

    @classmethod
    def of(cls, report: Report, row: Row, name: str, advice: Advice) -> RowView:
        """The view of a row of a report, under its name."""
        columns = [column for column, head in enumerate(tables.headers(report)) if head == tables.DIFFERENCE]
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
    is_unlabelled = AGREEMENT in row.ap_with
    title = "agreement with FP32" if is_unlabelled else "AP, FP32 → INT8"
    ap_card = Card(title, f"{tables.fraction(base.ap)} → {tables.fraction(row.ap)}", str(difference or ""))
    return [ap_card, _time_card(report), _threshold_card(row, base)]


def _threshold_card(row: Row, base: Row) -> Card:
    """The confidence thresholds of best F1 of the FP32 model and of the judged row."""
    title = "confidence threshold of best F1"
    if base.best_threshold is None or row.best_threshold is None:
        return Card(title, "not measured")
    text = f"{base.best_threshold:.3f} → {row.best_threshold:.3f}"
    return Card(title, text, _missed_at_threshold(row, base))


def _missed_at_threshold(row: Row, base: Row) -> str:
    """The objects that both models miss at the FP32 model's threshold, in words; '' where that was not counted."""
    at = row.at_threshold
    base_at = base.at_threshold
    if at is None or base_at is None or at.threshold != base_at.threshold:
        return ""
    missed = at.objects - at.found
    return f"at {at.threshold:.3f}, INT8 misses {missed} and FP32 {base_at.objects - base_at.found} of {at.objects}"


def _time_card(report: Report) -> Card:
    """Milliseconds per image of the FP16 and the INT8 engine, or else of FP32 and INT8 in OpenVINO."""
    times = {row.stage: row.ms_per_image for row in report.rows if row.ms_per_image is not None}
    title = "ms per image, FP16 → INT8"
    int8 = times.get("TensorRT INT8")
    if int8 is not None:
        fp16 = times.get("TensorRT FP16")
        text = f"{int8:.2f}" if fp16 is None else f"{fp16:.2f} → {int8:.2f}"
        return Card(title, text, "in this evaluation; scripts/benchmark_trt.sh times engines alone")
    openvino = times.get("OpenVINO INT8")
    if openvino is not None:
        texts = []
        for row in report.rows:
            if row.stage == "float" and "OpenVINO" in row.measured_on and row.ms_per_image is not None:
                texts.append(f"{row.ms_per_image:.2f}")
        texts.append(f"{openvino:.2f}")
        return Card("ms per image, FP32 → INT8", " → ".join(texts), "by OpenVINO, in this evaluation")
    return Card(title, "not measured", "the speed of INT8 shows in an engine: scripts/benchmark_trt.sh")


def page(report: Report, advice: Advice) -> str:
    """The page's text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["shared"] = without_folders
    named = list(zip(tables.labels(report), report.rows, strict=True))
    thresholds = {f"{sample.confidence:g}" for sample in report.samples}
    devices = {row.device for row in report.rows if row.device}
    digest = base64.b64encode(hashlib.sha256(COPY_SCRIPT.encode()).digest()).decode()
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    values: dict[str, Any] = {
        "report": report,
        "created": _local_time(report.created),
        "advice": advice,
        "script": COPY_SCRIPT,
        "script_hash": f"sha256-{digest}",
    }
    # the first screen
    values |= {
        "cards": cards(report, advice),
        "difference_chart": _difference_chart(report, advice),
        "samples": _samples(report),
        "confidence": ", ".join(sorted(thresholds)),
    }
    # the tables
    counted = [(name, row.at_threshold) for name, row in named if row.at_threshold]
    values |= {
        "headers": tables.headers(report),
        "rows": [RowView.of(report, row, name, advice) for name, row in named],
        "coco": _coco_scores(named),
        "remarks": tables.remarks(report),
    }
    values |= {
        "against": tables.against_fp32(report),
        "against_headers": tables.THRESHOLD_HEADERS,
        "missed": _missed(counted),
        "by_class": _by_class(named),
    }
    # the parts below
    values |= {
        "charts": _charts(report),
        "machine": {**report.hardware, "device": ", ".join(sorted(devices))},
    }
    return template.render(values)


def _coco_scores(named: Sequence[tuple[str, Row]]) -> str:
    """AP of the rows by COCO's definition, in words; '' where no row has it."""
    return ", ".join(f"{name} {row.ap_coco:.4f}" for name, row in named if row.ap_coco is not None)


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
    return _svg(figures.differences(report, advice.allowed))


def _svg(figure: Figure) -> str:
    """A figure as an address that holds it."""
    return data_uri(figures.render(figure, "svg"), "svg")


def _charts(report: Report) -> dict[str, str]:
    """Heading → picture of the charts below the table."""
    charts = {}
    if report.scored_epochs:
        name, figure = figures.per_epoch(report)
        heading = "AP after each epoch of QAT" if name == "ap_per_epoch" else "Loss after each epoch of QAT"
        charts[heading] = _svg(figure)
    rows_with_f1 = [row for row in report.rows if row.f1]
    if len(rows_with_f1) > 1:
        charts["Confidence threshold"] = _svg(figures.f1_curves(report))
    for name, file in report.charts.items():
        if os.path.isfile(file):
            charts[name] = data_uri(Path(file).read_bytes(), "png")
    return charts


def _samples(report: Report) -> list[tuple[str, str]]:
    """Caption and picture of each image with detections; for a missing image the reason beside its name, and ''."""
    samples = []
    for sample in report.samples:
        name = Path(sample.image).name
        try:
            sheet = figures.render(detection_sheet([sample]), "jpg", dpi=200)
        except InputError as error:
            samples.append((f"{name}: {error}", ""))
        else:
            samples.append((f"{name}{_matches_in(sample)}", data_uri(sheet, "jpg")))
    return samples


def _matches_in(sample: Sample) -> str:
    """How many objects the first two models both find, and each alone, in words; '' for fewer models."""
    if len(sample.predictions) < 2:
        return ""
    (first, boxes), (second, others), *_ = sample.predictions.items()
    only_first = unmatched(boxes, others).count(True)
    only_second = unmatched(others, boxes).count(True)
    both = len(boxes) - only_first
    names = [tables.stage_name(first), tables.stage_name(second)]
    return f": {both} found by both, {only_first} by {names[0]} only, {only_second} by {names[1]} only"


def _by_class(named: Sequence[tuple[str, Row]]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The rows that have AP by class, and for each class their AP."""
    by_row = {name: row.ap_by_class for name, row in named if row.ap_by_class}
    lines: dict[str, list[str]] = {}  # class → AP of each row
    for scores in by_row.values():
        lines |= {label: [] for label in scores}
    for label, texts in lines.items():
        texts += [tables.fraction(scores.get(label)) for scores in by_row.values()]
    return list(by_row), list(lines.items())


def _missed(counted: Sequence[tuple[str, AtThreshold]]) -> tuple[list[str], list[list[str]]]:
    """A column for each row that was counted, and for each size and class the objects that it misses."""
    by_size = [at.by_size for _, at in counted]
    by_class = [at.by_class for _, at in counted]
    names = [name for name, _ in counted]
    return names, [*_missed_lines(by_size), *_missed_lines(by_class)]


def _missed_lines(columns: Sequence[Mapping[str, tuple[int, int]]]) -> list[list[str]]:
    """A line for each kind of object: its name, and of each column (kind → objects, detected) the missed ones."""
    lines: dict[str, list[str]] = {}
    for column in columns:
        lines |= {kind: [kind] for kind in column}
    for kind, line in lines.items():
        for column in columns:
            objects, detected = column.get(kind, (0, 0))
            line.append(f"{objects - detected} of {objects}")
    return list(lines.values())


def without_folders(text: str, path: bool = False) -> str:
    """A text (or a path) to be shared: absolute paths without their folders, or relative to the working folder."""
    text = text.replace(f"{Path.cwd()}/", "")
    if not path:
        return FOLDERS.sub(r"\1", text)
    if text.startswith("/"):
        return text.rpartition("/")[2]
    return text


def data_uri(content: bytes, kind: str) -> str:
    """An image file as an address that holds it; `kind` is one of MIME."""
    return f"data:{MIME[kind]};base64,{base64.b64encode(content).decode('ascii')}"


def merged(reports: Mapping[Path, Report]) -> Report:
    """One report of several runs by file: all commands, rows, charts and notes, the first ranges and samples.

    The report has epochs of QAT if exactly one run trained; else a note names the runs, whose own pages draw them.
    Two rows of one stage and file, measured on the same, become one: the row with more values, or else the first one.
    `InputError` where some runs have labels, and others the FP32 model's detections.
    """
    _refuse_other_labels(reports)
    runs = {path.parent: report for path, report in reports.items()}
    datasets = {run: report.data for run, report in runs.items() if report.data}
    trained = {run: report for run, report in runs.items() if report.scored_epochs}
    has_several_datasets = len(set(datasets.values())) > 1
    notes = _all_of("notes", reports)
    if has_several_datasets:
        texts = [f"{run} of {data}" for run, data in datasets.items()]
        notes.append(f"the runs have different datasets, so their rows do not compare: {', '.join(texts)}")
    if len(trained) > 1:
        notes.append(f"the epochs of QAT are on the pages of the runs: {', '.join(map(str, trained))}")
    result = Report(command="\n".join(dict.fromkeys(report.command for report in reports.values())))
    first = next(iter(reports.values()))
    result.title = first.title
    result.created = first.created
    result.hardware = first.hardware
    result.rows = _merged_rows(reports, has_several_datasets)
    if not has_several_datasets:
        result.data = next(iter(datasets.values()), "")
        result.data_splits = next((report.data_splits for report in reports.values() if report.data_splits), [])
    if len(trained) == 1:
        only_trained = next(iter(trained.values()))
        result.history = only_trained.history
        result.held_out_images = only_trained.held_out_images
    _add_parts(result, list(reports.values()))
    result.notes = notes
    result.warnings = _all_of("warnings", reports)
    result.problems = _all_of("problems", reports)
    result.doubts = _all_of("doubts", reports)
    return result


def _add_parts(result: Report, reports: Sequence[Report]) -> None:
    """Fill ranges, samples and target from the first report that has them, charts and splits from all."""
    splits: dict[str, SplitCounts] = {}  # each once
    for report in reports:
        result.ranges = result.ranges or report.ranges
        if report.target_drop and not result.target_drop:
            result.target_drop = report.target_drop
        if report.samples and not result.samples:
            result.samples = report.samples
            result.samples_are = report.samples_are
        result.charts |= report.charts
        splits |= {str(split): split for split in report.splits}
    result.splits = list(splits.values())


def _refuse_other_labels(reports: Mapping[Path, Report]) -> None:
    """Raise `InputError` where some runs have labels, and others the FP32 model's detections."""
    run_of: dict[bool, Path] = {}  # whether labels are the FP32 model's detections → a run
    for path, report in reports.items():
        for row in report.rows:
            if row.ap is not None:
                run_of[AGREEMENT in row.ap_with] = path.parent
    if len(run_of) > 1:
        raise InputError(
            f"{run_of[True]} is a run with --unlabelled and {run_of[False]} has labels, so their AP does not compare; "
            "make a page of each"
        )


def _merged_rows(reports: Mapping[Path, Report], has_several_datasets: bool) -> list[Row]:
    """The rows of all runs; those of one stage and file, measured on the same, once, unless datasets differ."""
    rows: dict[tuple[str, ...], Row] = {}
    for path, report in reports.items():
        dataset_key = str(path) if has_several_datasets else ""
        for row in report.rows:
            if len(reports) > 1:
                row = row.model_copy(update={"run": str(path.parent)})
            key = (row.stage, row.file, row.measured_on, dataset_key)
            if key not in rows or _count_of_values(row) > _count_of_values(rows[key]):
                rows[key] = row
    return list(rows.values())


def _count_of_values(row: Row) -> int:
    return len(row.model_dump(exclude_none=True))


def _all_of(name: str, reports: Mapping[Path, Report]) -> list[str]:
    """The texts of a list that several reports have, each once."""
    texts: dict[str, None] = {}  # a set in order
    for report in reports.values():
        texts |= dict.fromkeys(getattr(report, name))
    return list(texts)
