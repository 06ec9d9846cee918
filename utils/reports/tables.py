"""Results as tables: for the terminal, and as text cells for the HTML page.

A dash stands for a value that was not measured.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from utils.core.files import distinct_names
from utils.core.score import AGREEMENT, AtThreshold
from utils.core.text import aligned
from utils.reports.schema import AnyAp, Report, Row

DIFFERENCE = "vs FP32"  # title of a column
HEADERS = ("stage", "AP", DIFFERENCE, "AP50", "P", "R", "weights", "ms/image")
THRESHOLD_HEADERS = ("stage", "agreement", "best F1 at", "P", DIFFERENCE, "R", DIFFERENCE, "missed")
MASK_HEADERS = ("stage", "AP", DIFFERENCE, "AP50", "mask AP", DIFFERENCE, "mask AP50", "weights", "ms/image")
DASH = "-"
WIDTH = 80  # of the terminal
LONGEST_NAME = 26  # of a row
NMS_INSIDE = "NMS in"  # begins the setting of AP of a file with NMS, see `Row.ap_with`


def fraction(value: float | None) -> str:
    """A score in 0..1 with four decimals."""
    return DASH if value is None else f"{value:.4f}"


def stage_name(stage: str) -> str:
    """Name of a stage as tables show it: `FP32` for `float`, as reports store the FP32 model."""
    return re.sub(r"^float\b", "FP32", stage, flags=re.IGNORECASE)


def headers(report: Report) -> tuple[str, ...]:
    """The columns of a report's table; AP without labels is agreement, and is called so.

    With masks there is no room for precision and recall.
    """
    names = MASK_HEADERS if report.has_masks else HEADERS
    if not any(AGREEMENT in row.ap_with for row in report.rows):
        return names
    renamed = {"AP": "agreement", "AP50": "agree50"}
    return tuple(renamed.get(name, name) for name in names)


def cells(report: Report, row: Row) -> tuple[str, ...]:
    """The texts of one row, one for each of `headers`; a difference is empty for the FP32 row itself."""
    texts = [stage_name(row.stage), fraction(row.ap), _difference(report, row, "ap"), fraction(row.ap50)]
    if report.has_masks:
        texts += [fraction(row.mask_ap), _difference(report, row, "mask_ap"), fraction(row.mask_ap50)]
    else:
        texts += [fraction(row.precision), fraction(row.recall)]
    texts.append(DASH if row.weights_bytes is None else f"{row.weights_bytes / 1e6:.2f} MB")
    texts.append(DASH if row.ms_per_image is None else f"{row.ms_per_image:.2f}")
    return tuple(texts)


def _difference(report: Report, row: Row, ap: AnyAp) -> str:
    """The difference of AP to the FP32 row; empty for the FP32 row itself, and where there is none."""
    base = report.baseline(row)
    if base is None or base is row:
        return ""
    return str(report.difference(row, ap) or DASH)


def labels(report: Report) -> list[str]:
    """A name for each row: its stage, and for rows of one stage words that tell them apart.

    These words are the runtime if it differs in every row; else the words of file, run, size and AP's settings that the
    rows do not share, cut to `LONGEST_NAME` characters. Rows that are still alike are numbered.
    """
    names = [stage_name(row.stage) for row in report.rows]
    for stage in dict.fromkeys(names):
        indices = [index for index, row in enumerate(report.rows) if stage_name(row.stage) == stage]
        for index, name in zip(indices, _names_in_stage([report.rows[index] for index in indices]), strict=True):
            names[index] = name
    return distinct_names(names, are_files=False)


def _names_in_stage(rows: Sequence[Row]) -> list[str]:
    """Names of rows of one stage, see `labels`."""
    stage = stage_name(rows[0].stage)
    runtimes = [re.split(r" \d|,", row.measured_on)[0] for row in rows]
    if len(rows) > 1 and len(set(runtimes)) == len(rows):
        return [f"{stage}, {runtime}" for runtime in runtimes]
    words_of_rows = []
    for row in rows:
        text = f"{row.file} {row.run} {row.input_size} {row.ap_with}"
        words_of_rows.append(dict.fromkeys(re.split(r"[-_/., ]+", text)))
    common = set.intersection(*(set(words) for words in words_of_rows))
    names = []
    for words in words_of_rows:
        own_words = [word for word in words if word not in common]
        short = textwrap.shorten(" ".join([stage, *own_words]), LONGEST_NAME, placeholder="")
        names.append(short or stage)
    return names


def terminal_table(report: Report) -> str:
    """Aligned text, if possible at most 80 columns wide.

    In order: the warnings; the rows; what they were measured on; the table against the FP32 model; remarks.
    """
    if not report.rows:
        return "\n".join([*warning_block(report), "(no results)"])
    runtimes = list(dict.fromkeys(row.measured_on for row in report.rows))
    named = list(zip(labels(report), report.rows, strict=True))
    rows = []
    for name, row in named:
        footnote = f"[{runtimes.index(row.measured_on) + 1}]"
        rows.append((name, *cells(report, row)[1:], footnote))
    titles = (*headers(report), "on")
    lines = aligned(titles, rows, ["stage"], rule=True)
    if max(len(line) for line in lines) > WIDTH:
        lines = aligned(titles, rows, ["stage"], rule=True, gap=" ")
    lines += [f"[{number}] {runtime}" for number, runtime in enumerate(runtimes, 1)]
    against = against_fp32(report)
    if against:
        lines += ["", *textwrap.wrap(against[0], WIDTH), ""]
        lines += aligned(THRESHOLD_HEADERS, against[1], ["stage"], rule=True)
    for name, row in named:
        for sentence in row_remarks(report, row):
            lines += textwrap.wrap(f"{name}: {sentence}", WIDTH)
    for sentence in remarks(report):
        lines += textwrap.wrap(sentence, WIDTH)
    return "\n".join([*warning_block(report), *lines])


def warning_block(report: Report) -> list[str]:
    """Lines that repeat the run's warnings above its table; none without warnings."""
    lines: list[str] = []
    for warning in report.warnings:
        lines += textwrap.wrap(f"warning: {warning}", WIDTH, subsequent_indent="  ")
    return [*lines, ""] if lines else []


def row_remarks(report: Report, row: Row) -> list[str]:
    """Sentences on a row: why it does not compare, or is compared in doubt, and where definitions of AP differ."""
    sentences = [not_compared(report, row), row.caveat]
    base = report.baseline(row)
    if base and base is not row:
        sentences.append(row.definitions_differ(base))
    return [sentence for sentence in sentences if sentence]


def against_fp32(report: Report) -> tuple[str, list[tuple[str, ...]]] | None:
    """Effects of INT8 at a fixed threshold: a heading, and rows with a text for each of THRESHOLD_HEADERS.

    None unless a row was measured against the FP32 model's detections, and at its threshold.
    """
    rows: list[tuple[str, ...]] = []
    thresholds: dict[str, None] = {}  # a set in order
    is_compared = False
    for name, row in zip(labels(report), report.rows, strict=True):
        base = _base_at_threshold(report, row)
        if row.at_threshold is None or base is None:
            continue
        rows.append((name, *_cells_at_threshold(row, row.at_threshold, base)))
        thresholds[f"{row.at_threshold.threshold:.3f}"] = None
        is_compared = is_compared or row.at_threshold is not base
    if not is_compared:
        return None
    heading = (
        "Against the FP32 model: AP with the FP32 model's detections as labels (agreement; 1 if all are alike), and "
        "precision and recall at the confidence threshold at which the FP32 model's F1 is best"
    )
    if any(AGREEMENT in row.ap_with for row in report.rows):
        heading += " against its own detections"
    return f"{heading}, {' or '.join(thresholds)} (all classes together, IoU 0.5)", rows


def _base_at_threshold(report: Report, row: Row) -> AtThreshold | None:
    """The FP32 model's counts at the threshold at which `row` was counted.

    None if either was not counted, if they were counted at other thresholds, or if their AP does not compare.
    """
    fp32_row = report.baseline(row)
    if fp32_row is None or fp32_row.at_threshold is None or row.at_threshold is None:
        return None
    if row.at_threshold.threshold != fp32_row.at_threshold.threshold or row.incomparable(fp32_row):
        return None
    return fp32_row.at_threshold


def _cells_at_threshold(row: Row, at: AtThreshold, base: AtThreshold) -> tuple[str, ...]:
    """The texts of a row for THRESHOLD_HEADERS without the first; differences are empty for the FP32 model itself."""
    agreement = fraction(row.agreement)
    if row.agreement_resampled:
        agreement += f" ± {row.agreement_resampled.error:.4f}"
    precision = ""
    recall = ""
    if at is not base:
        precision = str(at.difference(base, "precision"))
        recall = str(at.difference(base, "recall"))
    threshold = DASH if row.best_threshold is None else f"{row.best_threshold:.3f}"
    missed = f"{at.objects - at.found} of {at.objects}"
    return agreement, threshold, fraction(at.precision), precision, fraction(at.recall), recall, missed


def not_compared(report: Report, row: Row) -> str:
    """Why a row's AP is not compared with that of a measured FP32 row; empty if it is."""
    base = report.baseline(row)
    if base is None or row is base or None in (row.ap, base.ap):
        return ""
    reason = row.incomparable(base)
    if not reason:
        return ""
    sentence = f"AP does not compare with that of the FP32 model: {reason}"
    if (NMS_INSIDE in row.ap_with) != (NMS_INSIDE in base.ap_with):
        sentence += "; give the FP32 model, exported in the same form, as --reference"
    return sentence


def remarks(report: Report) -> list[str]:
    """Explanation of the standard errors in the tables, where there are some."""
    differences = [report.difference(row) for row in report.rows]
    has_errors = any(difference and difference.error is not None for difference in differences)
    if not has_errors and not any(row.agreement_resampled for row in report.rows):
        return []
    resampled = [row for row in report.rows if row.ap_resampled or row.agreement_resampled]
    over = ", ".join(dict.fromkeys(row.resampled_over for row in resampled))
    return [
        f"±: the standard error, of a difference and of agreement, from resampling the {over}; it does not include how "
        "the seed of the calibration and the machine vary AP (about 0.001)"
    ]
