"""Reports as files: the JSON, the plots and the page of a run folder, and several runs put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from utils.reports import detections, figures
from utils.reports.html import write_html
from utils.reports.schema import Report

JSON_NAME = "report.json"
MERGED_NAME = "report-merged.json"  # where JSON_NAME is a run's own, which is read
PAGE_NAME = "report.html"


def write_all(report: Report, folder: str | Path, json_name: str = JSON_NAME) -> list[Path]:
    """Write `report.json`, the plots and `report.html` into `folder`; each file appears complete or not at all."""
    folder = Path(folder)
    return [report.save(folder / json_name), *write_plots(report, folder), write_html(report, folder / PAGE_NAME)]


def write_plots(report: Report, folder: str | Path) -> list[Path]:
    """Write a PNG for each part of the report that has something to draw, and return their paths.

    Raises:
        InputError: a sample's image cannot be read.
    """
    drawings = []
    if report.scored_epochs:
        drawings.append(("ap_per_epoch.png", figures.ap_per_epoch(report)))
    if report.ranges:
        drawings.append(("ranges.png", figures.ranges_per_layer(report.ranges)))
    if report.samples:
        drawings.append(("detections.png", detections.detections(report.samples)))
    return [figures.save(figure, Path(folder) / name) for name, figure in drawings]


def json_of(run: str | Path) -> Path:
    """The JSON of a run, which is a folder or that file."""
    path = Path(run)
    return path / JSON_NAME if path.is_dir() else path


def planned(folder: str | Path, json_name: str) -> list[Path]:
    """What `write_all` may write."""
    names = (json_name, "ap_per_epoch.png", "ranges.png", "detections.png", PAGE_NAME)
    return [Path(folder) / name for name in names]


def merged(reports: Sequence[Report]) -> Report:
    """One report of several runs: all commands, rows and notes, and the first history, ranges and samples there are.

    Raises:
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("there is no report to merge")
    result = reports[0].model_copy(
        update={
            "command": "\n".join(dict.fromkeys(report.command for report in reports)),
            "rows": [],
            "history": next((report.history for report in reports if report.history), []),
            "ranges": next((report.ranges for report in reports if report.ranges), []),
            "samples": next((report.samples for report in reports if report.samples), []),
            "notes": list(dict.fromkeys(note for report in reports for note in report.notes)),
        }
    )
    for report in reports:
        for row in report.rows:
            result.add(row)
    return result
