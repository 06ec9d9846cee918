"""A report as files: JSON, plots, and one HTML page with a table, the curves and the images; and several put together.

The page fetches nothing. Its layout is `report.html.j2`; Jinja escapes every value, since class names, paths and notes
come from users.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from utils.core.errors import InputError
from utils.core.files import write_bytes
from utils.core.score import AGREEMENT, AtThreshold
from utils.reports import figures, tables
from utils.reports.detections import detection_sheet
from utils.reports.schema import AP, Report, Row

TEMPLATE = Path(__file__).with_name("report.html.j2")
MIME = {"png": "image/png", "jpg": "image/jpeg", "svg": "image/svg+xml"}
JSON_NAME, PAGE_NAME = "report.json", "report.html"
PLOTS = ("ap_per_epoch.png", "loss_per_epoch.png", "detections.png")


def write_all(report: Report, folder: str | Path, json_name: str = JSON_NAME) -> list[Path]:
    """Write the JSON, a plot of each part that has something to draw, and the page; each file whole or not at all."""
    folder = Path(folder)
    written = [report.save(folder / json_name)]
    drawings = [figures.per_epoch(report)] if report.scored_epochs else []
    drawings += [("detections", detection_sheet(report.samples))] if report.samples else []
    written += [figures.save_figure(figure, folder / f"{name}.png") for name, figure in drawings]
    write_bytes(folder / PAGE_NAME, page(report).encode("utf-8", "backslashreplace"))
    return [*written, folder / PAGE_NAME]


def page(report: Report) -> str:
    """The page's text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["shared"] = without_folders
    charts = {}
    if report.scored_epochs:
        name, figure = figures.per_epoch(report)
        charts[f"{'AP' if name == 'ap_per_epoch' else 'Loss'} after each epoch of QAT"] = data_uri(
            figures.render(figure, "svg"), "svg"
        )
    if sum(bool(row.f1) for row in report.rows) > 1:
        charts["Which confidence threshold"] = data_uri(figures.render(figures.f1_curves(report), "svg"), "svg")
    for name, file in report.charts.items():
        if os.path.isfile(file):
            charts[name] = data_uri(Path(file).read_bytes(), "png")
    samples = []
    for sample in report.samples:
        name = Path(sample.image).name
        try:
            samples.append((name, data_uri(figures.render(detection_sheet([sample]), "jpg", dpi=200), "jpg")))
        except InputError as error:  # an image that is gone does not cost the whole report
            samples.append((f"{name}: {error}", ""))
    created = report.created
    with contextlib.suppress(ValueError):
        created = datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    sentence, command = tables.verdict(report)
    # the page says nothing of where files lie: who copies the command fills their folders in
    words = [re.sub("^/.*/", "FOLDER/", word.removeprefix(f"{Path.cwd()}/")) for word in shlex.split(command)]
    named = list(zip(tables.labels(report), report.rows, strict=True))
    by_class = {name: row.ap_by_class for name, row in named if row.ap_by_class}
    classes = dict.fromkeys(label for scores in by_class.values() for label in scores)
    differences = [column for column, head in enumerate(tables.headers(report)) if head == "vs float"]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        created=created,
        verdict=sentence,
        next_command=shlex.join(words),
        headers=tables.headers(report),
        rows=[
            (row, (name, *tables.cells(report, row)[1:]), tables.not_compared(report, row),
             {column: "up" if difference.value > 0 else "down" for column, ap in zip(differences, AP, strict=False)
              if (difference := report.difference(row, ap)) and difference.significant})
            for name, row in named
        ],  # with the styles of differences that are more than noise, by column
        remarks=tables.remarks(report),
        against=tables.against_float(report),
        against_headers=tables.FLOAT_HEADERS,
        missed=_missed([(name, row.at_threshold) for name, row in named if row.at_threshold]),
        by_class=([*by_class], [(label, [tables.fraction(scores.get(label)) for scores in by_class.values()])
                                for label in classes]),
        charts=charts,
        samples=samples,
        confidence=", ".join(sorted({f"{sample.confidence:g}" for sample in report.samples})),
        machine={**report.hardware, "device": ", ".join(sorted({row.device for row in report.rows} - {""}))},
    )  # fmt: skip


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
    `InputError` where some runs have labels, and others the float network's detections.
    """
    kinds: dict[bool, Path] = {}
    for path, report in reports.items():
        kinds |= {AGREEMENT in row.ap_with: path.parent for row in report.rows if row.ap is not None}
    if len(kinds) > 1:
        raise InputError(
            f"{kinds[True]} is a run with --unlabelled and {kinds[False]} has labels, so that their AP does not "
            "compare; make a page of each"
        )
    runs = {path.parent: report for path, report in reports.items()}
    datasets = {run: report.data for run, report in runs.items() if report.data}
    trained = {run: report.history for run, report in runs.items() if report.scored_epochs}
    several = len({*datasets.values()}) > 1
    notes = list(dict.fromkeys(note for report in reports.values() for note in report.notes))
    if several:
        whose = ", ".join(f"{run} of {data}" for run, data in datasets.items())
        notes.append(f"the runs are of several datasets, whose rows do not compare: {whose}")
    if len(trained) > 1:
        notes.append(f"the epochs of QAT are on the pages of the runs: {', '.join(map(str, trained))}")
    rows: dict[tuple[str, ...], Row] = {}
    for path, report in reports.items():
        for row in report.rows:
            new = row.model_copy(update={"run": str(path.parent)} if len(reports) > 1 else {})
            key = (row.stage, row.file, row.measured_on, str(path) * several)
            rows[key] = max(rows.get(key, new), new, key=lambda entry: len(entry.model_dump(exclude_none=True)))
    return next(iter(reports.values())).model_copy(
        update={
            "command": "\n".join(dict.fromkeys(report.command for report in reports.values())),
            "rows": list(rows.values()),
            "data": "" if several else next(iter(datasets.values()), ""),
            "history": next(iter(trained.values())) if len(trained) == 1 else [],
            "ranges": next((report.ranges for report in reports.values() if report.ranges), []),
            "samples": next((report.samples for report in reports.values() if report.samples), []),
            "splits": list({str(split): split for report in reports.values() for split in report.splits}.values()),
            "charts": {name: file for report in reports.values() for name, file in report.charts.items()},
            "notes": notes,
        }
    )
