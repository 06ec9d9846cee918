"""A report as one HTML file: styles, charts and images inside, nothing fetched from anywhere.

The layout is `report.html.j2`; Jinja escapes every value, since class names, paths and notes come from users.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.resampled import Difference
from utils.reports import detections, figures
from utils.reports.schema import Report, Row, Sample
from utils.reports.tables import DASH, cells, fraction, headers, remarks

TEMPLATE = Path(__file__).with_name("report.html.j2")
MIME = {"png": "image/png", "jpg": "image/jpeg", "svg": "image/svg+xml"}


def write_html(report: Report, path: str | Path) -> Path:
    """Write `report` as one self-contained page to `path`; a crash leaves no half file."""
    path = Path(path)
    text = page(report)
    with atomic_path(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def page(report: Report) -> str:
    """The page's text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["number"] = _number
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        headers=headers(report),
        rows=[
            (row, cells(row, report.baseline(row), masks=report.has_masks), _tones(report, row)) for row in report.rows
        ],
        remarks=remarks(report),
        cards=list(_cards(report)),
        history_chart=as_data_uri(figures.ap_per_epoch(report), "svg") if _has_history(report) else None,
        ranges_chart=as_data_uri(figures.ranges_per_layer(report.ranges), "svg") if report.ranges else None,
        samples=[_sample(sample) for sample in report.samples],
        masks=any(sample.has_masks for sample in report.samples),
        confidence=", ".join(dict.fromkeys(f"{sample.confidence:g}" for sample in report.samples)),
        versions=_versions(report),
        hardware=_hardware(report),
    )


def _has_history(report: Report) -> bool:
    return any(entry.get("ap") is not None for entry in report.history)


def _tones(report: Report, row: Row) -> dict[int, str]:
    """The styles of a row's AP differences, by column: of boxes, and of masks."""
    return {2: _tone(report.difference(row)), 5: _tone(report.mask_difference(row))}


def _tone(found: Difference | None) -> str:
    """The style of an AP difference: none for one that its standard error may explain."""
    if found is None or not found.beyond_error or f"{found.value:.4f}" in ("0.0000", "-0.0000"):
        return ""
    return "up" if found.value > 0 else "down"


def _cards(report: Report) -> Iterator[dict[str, str]]:
    """The first thing a reader sees: AP of each stage and its distance to the float model."""
    for row in report.rows:
        for name, ap, change in (("AP", row.ap, report.difference), ("mask AP", row.mask_ap, report.mask_difference)):
            if ap is not None:
                yield {
                    "label": f"{row.stage} {name}",
                    "value": fraction(ap),
                    "remark": _against_float(report, row, change(row)),
                }


def _against_float(report: Report, row: Row, change: Difference | None) -> str:
    baseline = report.baseline(row)
    if baseline is None:
        return "no float row beside it"
    if row is baseline:
        return "the reference"
    return f"{change} to float" if change else "not compared with float"


def _sample(sample: Sample) -> dict[str, Any]:
    """The panels of one image; an image that is gone is named on the page instead of costing the whole report."""
    panels = []
    try:
        for stage in detections.columns_of([sample]):
            boxes = detections.boxes_of(sample, stage) or []
            figure = detections.detection_panel(sample, stage, detections.counterpart(sample, stage))
            caption = f"{stage}: {len(boxes)} {'object' if len(boxes) == 1 else 'objects'}"
            panels.append(
                {
                    "image": as_data_uri(figure, "jpg", dpi=200),
                    "alt": f"{caption} in {Path(sample.image).name}",
                    "caption": caption,
                }
            )
    except InputError as error:
        return {"name": Path(sample.image).name, "error": str(error), "panels": []}
    return {"name": Path(sample.image).name, "error": "", "panels": panels}


def _versions(report: Report) -> dict[str, str]:
    """Every library's version; several where the rows were measured with different ones."""
    found: dict[str, dict[str, None]] = {}
    for row in report.rows:
        for name, value in row.versions.items():
            found.setdefault(name, {})[value] = None
    return {name: ", ".join(values) for name, values in found.items()}


def _hardware(report: Report) -> dict[str, str]:
    devices = dict.fromkeys(row.device for row in report.rows if row.device)
    return {**report.hardware, **({"device": ", ".join(devices)} if devices else {})}


def as_data_uri(figure: Any, kind: str, dpi: int = 150) -> str:
    """A figure as the address of an image that lies in the page itself; `kind` is one of MIME."""
    return f"data:{MIME[kind]};base64,{base64.b64encode(figures.render(figure, kind, dpi)).decode('ascii')}"


def _number(value: Any, form: str) -> str:
    """`value` in the given format; a dash for what is missing (Jinja's undefined) or null."""
    return format(value, form) if isinstance(value, (int, float)) else DASH
