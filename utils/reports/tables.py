"""Results as tables: for the terminal, and as text cells for the HTML page.

A number is never shown without what it was measured on, and what was not measured is a dash.
"""

from __future__ import annotations

import string

from utils.core.text_tables import aligned, columns
from utils.reports.schema import Report, Row

HEADERS = ("stage", "AP", "vs float", "AP50", "P", "R", "size", "ms/image")
DASH = "-"


def fraction(value: float | None) -> str:
    """A score in 0..1 with four decimals."""
    return DASH if value is None else f"{value:.4f}"


def difference(row: Row, baseline: Row | None) -> str:
    """AP of `row` minus AP of the float row, with its sign; empty for the float row, a dash if they do not compare."""
    if baseline is None or row is baseline:
        return ""
    if row.ap is None or baseline.ap is None or row.ap_with != baseline.ap_with:
        return DASH
    return f"{row.ap - baseline.ap:+.4f}"


def size(size_bytes: int | None) -> str:
    """Bytes in kB or MB (powers of ten, as file managers show them)."""
    if size_bytes is None:
        return DASH
    return f"{size_bytes / 1e6:.2f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def milliseconds(value: float | None) -> str:
    """Milliseconds with two decimals, so that points stand below each other."""
    return DASH if value is None else f"{value:.2f}"


def cells(row: Row, baseline: Row | None) -> tuple[str, ...]:
    """The texts of one row, one for each of `HEADERS`."""
    return (
        row.stage,
        fraction(row.ap),
        difference(row, baseline),
        fraction(row.ap50),
        fraction(row.precision),
        fraction(row.recall),
        size(row.size_bytes),
        milliseconds(row.ms_per_image),
    )


def terminal_table(report: Report) -> str:
    """Aligned text, at most 80 columns wide: what rows were measured on stands below, marked by letters."""
    if not report.rows:
        return "(no results)"
    baseline = report.baseline()
    places = list(dict.fromkeys(row.measured_on for row in report.rows))
    rows = [(*cells(row, baseline), f"[{_mark(places.index(row.measured_on))}]") for row in report.rows]
    lines = aligned(columns((*HEADERS, "on"), left=["stage"]), rows, rule=True)
    lines += [f"[{_mark(index)}] {place or 'not recorded'}" for index, place in enumerate(places)]
    return "\n".join(lines)


def _mark(index: int) -> str:
    return string.ascii_lowercase[index] if index < 26 else str(index + 1)
