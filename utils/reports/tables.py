"""Results as tables: for the terminal, for Markdown, and as text cells for the HTML page.

A number is never shown without what it was measured on, and what was not measured is a dash.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

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
    table: list[tuple[str, ...]] = [(*HEADERS, "on")]
    table += [(*cells(row, baseline), f"[{_mark(places.index(row.measured_on))}]") for row in report.rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"[{_mark(index)}] {place or 'not recorded'}" for index, place in enumerate(places)]
    return "\n".join(lines)


def markdown_table(report: Report) -> str:
    """A Markdown table; text that Markdown would read as markup is escaped."""
    baseline = report.baseline()
    header = (*HEADERS, "measured on", "file")
    rule = ["---", *["---:"] * (len(HEADERS) - 1), "---", "---"]
    lines = [_markdown_line(header), _markdown_line(rule)]
    for row in report.rows:
        file = "`" + row.file.replace("`", "'").replace("|", "\\|") + "`"
        lines.append(_markdown_line([*(_escape(text) for text in (*cells(row, baseline), row.measured_on)), file]))
    return "\n".join(lines)


def _markdown_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _mark(index: int) -> str:
    return string.ascii_lowercase[index] if index < 26 else str(index + 1)


def _escape(text: str) -> str:
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
