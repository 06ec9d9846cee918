"""Results as tables: for the terminal, and as text cells for the HTML page.

What was not measured is a dash.
"""

from __future__ import annotations

import re
import textwrap

from utils.core.files import distinct_names
from utils.core.score import AGREEMENT
from utils.core.text import aligned
from utils.reports.schema import AP, Report, Row

HEADERS = ("stage", "AP", "vs float", "AP50", "P", "R", "weights", "ms/image")
FLOAT_HEADERS = ("stage", "agreement", "best F1 at", "P", "vs float", "R", "vs float", "missed")
MASK_HEADERS = ("stage", "AP", "vs float", "AP50", "mask AP", "vs float", "mask AP50", "weights", "ms/image")
DASH = "-"
WIDTH = 80  # of the terminal
LONGEST_NAME = 26  # of a row


def fraction(value: float | None) -> str:
    """A score in 0..1 with four decimals."""
    return DASH if value is None else f"{value:.4f}"


def headers(report: Report) -> tuple[str, ...]:
    """The columns of a report's table: with masks it has no room for precision and recall."""
    heads = MASK_HEADERS if report.has_masks else HEADERS
    unlabelled = any(AGREEMENT in row.ap_with for row in report.rows)
    names = {"AP": "agreement", "AP50": "agree50"} if unlabelled else {}
    return tuple(names.get(head, head) for head in heads)


def cells(report: Report, row: Row) -> tuple[str, ...]:
    """The texts of one row, one for each of `headers`; a difference is empty for the float row itself."""
    alone = report.baseline(row) in (None, row)
    boxes, masks = ("" if alone else str(report.difference(row, ap) or DASH) for ap in AP)
    more: tuple[str, ...] = (fraction(row.precision), fraction(row.recall))
    if report.has_masks:
        more = (fraction(row.mask_ap), masks, fraction(row.mask_ap50))
    weights = DASH if row.weights_bytes is None else f"{row.weights_bytes / 1e6:.2f} MB"
    milliseconds = DASH if row.ms_per_image is None else f"{row.ms_per_image:.2f}"
    return row.stage, fraction(row.ap), boxes, fraction(row.ap50), *more, weights, milliseconds


def labels(report: Report) -> list[str]:
    """A name for each row: its stage, and of rows of one stage what differs.

    That is what ran them, if each was run by something else, or else words of file and run, size and images.
    """
    names = [row.stage for row in report.rows]
    for stage in dict.fromkeys(names):
        rows = {i: row for i, row in enumerate(report.rows) if row.stage == stage}
        runtimes = {i: re.split(r" \d|,", row.measured_on)[0] for i, row in rows.items()}
        if len(rows) > 1 and len({*runtimes.values()}) == len(rows):
            names = [f"{name}, {runtimes[i]}" if i in runtimes else name for i, name in enumerate(names)]
            continue
        texts = {i: f"{row.file} {row.run} {row.input_size} {row.ap_with}" for i, row in rows.items()}
        words = {i: dict.fromkeys(re.split(r"[-_/., ]+", text)) for i, text in texts.items()}
        common = set.intersection(*map(set, words.values()))
        for i, of_row in words.items():
            name = " ".join([stage, *(word for word in of_row if word not in common)])
            names[i] = textwrap.shorten(name, LONGEST_NAME, placeholder="") or stage
    return distinct_names(names)


def terminal_table(report: Report) -> str:
    """Aligned text, if possible at most 80 columns wide: the warnings, the rows, then what they were measured on."""
    if not report.rows:
        return "\n".join([*warning_block(report), "(no results)"])
    places = list(dict.fromkeys(row.measured_on for row in report.rows))
    named = list(zip(labels(report), report.rows, strict=True))
    rows = [(name, *cells(report, row)[1:], f"[{places.index(row.measured_on) + 1}]") for name, row in named]
    titles = (*headers(report), "on")
    lines = aligned(titles, rows, ["stage"], rule=True)
    if max(map(len, lines)) > WIDTH:
        lines = aligned(titles, rows, ["stage"], rule=True, gap=" ")
    lines += [f"[{number}] {place}" for number, place in enumerate(places, 1)]
    if against := against_float(report):
        lines += ["", *textwrap.wrap(against[0], WIDTH), ""]
        lines += aligned(FLOAT_HEADERS, against[1], ["stage"], rule=True)
    for name, row in named:
        for sentence in row_remarks(report, row):
            lines += textwrap.wrap(f"{name}: {sentence}", WIDTH)
    for sentence in remarks(report):
        lines += textwrap.wrap(sentence, WIDTH)
    return "\n".join([*warning_block(report), *lines])


def warning_block(report: Report) -> list[str]:
    """The run's warnings, once more, for the place above its table; no lines where there are none."""
    lines: list[str] = []
    for warning in report.warnings:
        lines += textwrap.wrap(f"warning: {warning}", WIDTH, subsequent_indent="  ")
    return [*lines, ""] if lines else []


def row_remarks(report: Report, row: Row) -> list[str]:
    """What a reader of a row has to know: why it does not compare, or compares in doubt, and a doubtful difference."""
    base = report.baseline(row)
    differ = row.definitions_differ(base) if base and base is not row else ""
    return [remark for remark in (not_compared(report, row), row.caveat, differ) if remark]


def against_float(report: Report) -> tuple[str, list[tuple[str, ...]]] | None:
    """What a product notices of INT8: a heading, and the texts of a row for each of FLOAT_HEADERS.

    None unless a row was measured against the float network's detections and threshold.
    """
    compared = []
    for name, row in zip(labels(report), report.rows, strict=True):
        float_row = report.baseline(row)  # NMS inside a file leaves out what is below a threshold of its own
        at, base = row.at_threshold, float_row and float_row.at_threshold
        if float_row and base and at and at.threshold == base.threshold and not row.incomparable(float_row):
            compared.append((name, row, at, base))
    if all(at is base for _, _, at, base in compared):
        return None
    rows: list[tuple[str, ...]] = []
    for name, row, at, base in compared:
        precision, recall = ("" if at is base else str(at.difference(base, what)) for what in ("precision", "recall"))
        error = f" ± {row.agreement_resampled.error:.4f}" if row.agreement_resampled else ""
        agreement = fraction(row.agreement) + error
        rows.append((name, agreement, f"{row.best_threshold or 0:.3f}", fraction(at.precision), precision,
                     fraction(at.recall), recall, f"{at.objects - at.found} of {at.objects}"))  # fmt: skip
    thresholds = " or ".join(dict.fromkeys(f"{at.threshold:.3f}" for _, _, at, _ in compared))
    own = " against its own detections" if AGREEMENT in report.rows[-1].ap_with else ""
    heading = (
        "Against the FP32 model: AP with its detections as labels (agreement; 1 if all are alike), and precision and "
        f"recall at its confidence threshold of best F1{own}, {thresholds} (all classes together, IoU 0.5)"
    )
    return heading, rows


def not_compared(report: Report, row: Row) -> str:
    """Why a row's AP has no difference to that of its float row, which was measured; else empty."""
    base = report.baseline(row)
    if base is None or row is base or None in (row.ap, base.ap):
        return ""
    reason = row.incomparable(base)
    remedy = "; give the float network, exported in the same form, as --reference" if "NMS in" in reason else ""
    return reason and f"AP does not compare with that of the float row: {reason}{remedy}"


def remarks(report: Report) -> list[str]:
    """What the standard errors of AP differences are, where there are some."""
    if not any((difference := report.difference(row)) and difference.error is not None for row in report.rows):
        return []
    over = ", ".join(dict.fromkeys(row.resampled_over for row in report.rows if row.ap_resampled))
    return [
        f"±: the standard error of the difference, from resampling the {over}; it leaves out the seed of the "
        "calibration and the machine (about 0.001 AP)"
    ]
