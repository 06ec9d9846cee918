"""Results as tables: for the terminal, and as text cells for the HTML page.

A number is never shown without what it was measured on, and what was not measured is a dash.
"""

from __future__ import annotations

import string
import textwrap

from utils.core.text import aligned, columns
from utils.reports.schema import AP, Report, Row

HEADERS = ("stage", "AP", "vs float", "AP50", "P", "R", "size", "ms/image")
MASK_HEADERS = ("stage", "AP", "vs float", "AP50", "mask AP", "vs float", "mask AP50", "size", "ms/image")
DASH = "-"
WIDTH = 80  # of the terminal


def fraction(value: float | None) -> str:
    """A score in 0..1 with four decimals."""
    return DASH if value is None else f"{value:.4f}"


def headers(report: Report) -> tuple[str, ...]:
    """The columns of a report's table: with masks it has no room for precision and recall."""
    return MASK_HEADERS if report.has_masks else HEADERS


def size(size_bytes: int | None) -> str:
    """Bytes in kB or MB (powers of ten, as file managers show them)."""
    if size_bytes is None:
        return DASH
    if size_bytes < 1e5:
        return f"{size_bytes / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.{1 if size_bytes >= 1e8 else 2}f} MB"


def milliseconds(value: float | None) -> str:
    """Milliseconds with two decimals, so that points stand below each other."""
    return DASH if value is None else f"{value:.2f}"


def cells(report: Report, row: Row) -> tuple[str, ...]:
    """The texts of one row, one for each of `headers`.

    A difference has its sign and its standard error where that is known; it is empty for the float row itself, and a
    dash where the rows do not compare.
    """
    baseline = report.baseline(row)
    alone = baseline is None or row is baseline
    boxes, masks = ("" if alone else str(report.difference(row, ap) or DASH) for ap in AP)
    more: tuple[str, ...] = (fraction(row.precision), fraction(row.recall))
    if report.has_masks:
        more = (fraction(row.mask_ap), masks, fraction(row.mask_ap50))
    return (row.stage, fraction(row.ap), boxes, fraction(row.ap50), *more, size(row.size_bytes),
            milliseconds(row.ms_per_image))  # fmt: skip


def terminal_table(report: Report) -> str:
    """Aligned text, at most 80 columns wide, 92 with masks: what rows were measured on stands below, by letters."""
    if not report.rows:
        return "(no results)"
    places = list(dict.fromkeys(row.measured_on for row in report.rows))
    rows = [(*cells(report, row), f"[{_mark(places.index(row.measured_on))}]") for row in report.rows]
    heads = columns((*headers(report), "on"), left=["stage"])
    lines = aligned(heads, rows, rule=True)
    if max(map(len, lines)) > WIDTH:
        lines = aligned(heads, rows, rule=True, gap=" ")
    lines += [f"[{_mark(index)}] {place or 'not recorded'}" for index, place in enumerate(places)]
    for remark in remarks(report):
        lines += textwrap.wrap(remark, WIDTH)
    return "\n".join(lines)


def remarks(report: Report) -> list[str]:
    """What the standard errors of AP differences are, and which rows have none though others do."""
    alike = [row for row in report.rows if (base := report.baseline(row)) and row is not base
             and None not in (row.ap, base.ap) and row.ap_with == base.ap_with]  # fmt: skip
    sentences = []
    if any(difference and difference.error is not None for difference in map(report.difference, alike)):
        sentences.append("±: the standard error of the difference, from resampling the images")
    apart = [row for row in alike if report.difference(row) is None]
    sizes = [row.stage for row in apart if not row.same_size(report.baseline(row) or row)]
    if sizes:
        sentences.append(f"not compared, since the input has another size than the float row's: {', '.join(sizes)}")
    if other := [row.stage for row in apart if row.same_size(report.baseline(row) or row)]:
        sentences.append(f"not compared, since the images or labels are not those of the float row: {', '.join(other)}")
    bare = [row.stage for row in alike if (difference := report.difference(row)) and difference.error is None]
    if bare and any(row.ap_resampled for row in report.rows):
        sentences.append(
            f"without standard error, since an earlier version or a single image gave AP: {', '.join(bare)}"
        )
    return sentences


def _mark(index: int) -> str:
    return string.ascii_lowercase[index] if index < 26 else str(index + 1)
