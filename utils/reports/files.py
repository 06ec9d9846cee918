"""A report's files in a run folder: the JSON, the plots and the page, under names that stay the same."""

from __future__ import annotations

from pathlib import Path

from utils.reports import detections, figures
from utils.reports.html import write_html
from utils.reports.schema import Report

JSON_NAME = "report.json"
PAGE_NAME = "report.html"


def write_all(report: Report, folder: str | Path) -> list[Path]:
    """Write `report.json`, the plots and `report.html` into `folder`; each file appears complete or not at all."""
    folder = Path(folder)
    return [report.save(folder / JSON_NAME), *write_plots(report, folder), write_html(report, folder / PAGE_NAME)]


def write_plots(report: Report, folder: str | Path) -> list[Path]:
    """Write a PNG for each part of the report that has something to draw, and return their paths.

    Raises:
        InputError: a sample's picture cannot be read.
    """
    drawings = []
    if any(entry.get("ap") is not None for entry in report.history):
        drawings.append(("ap_per_epoch.png", figures.ap_per_epoch(report)))
    if report.ranges:
        drawings.append(("ranges.png", figures.ranges_per_layer(report.ranges)))
    if report.samples:
        drawings.append(("detections.png", detections.detections(report.samples)))
    return [figures.save(figure, Path(folder) / name) for name, figure in drawings]
