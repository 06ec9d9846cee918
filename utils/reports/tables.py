"""Results as tables: for the terminal, and as text cells for the HTML page; and what follows from them.

A number is never shown without what it was measured on, and what was not measured is a dash.
"""

from __future__ import annotations

import re
import shlex
import string
import textwrap
from collections.abc import Sequence
from pathlib import Path

from utils.core.files import distinct_names
from utils.core.score import AGREEMENT, Resampled
from utils.core.text import aligned, columns
from utils.reports.schema import AP, LOW_AP, UNFINISHED, AtThreshold, Report, Row

HEADERS = ("stage", "AP", "vs float", "AP50", "P", "R", "size", "ms/image")
FLOAT_HEADERS = ("stage", "agreement", "best F1 at", "P", "vs float", "R", "vs float", "missed")
MASK_HEADERS = ("stage", "AP", "vs float", "AP50", "mask AP", "vs float", "mask AP50", "size", "ms/image")
DASH = "-"
WIDTH = 80  # of the terminal
LONGEST_NAME = 24  # of a row
LITTLE_DISAGREEMENT = 0.025  # without labels, AP is the agreement, whose target is 0.97 of 0.995
LITTLE = 0.002  # AP that INT8 may lose without advice against it, as the default of `qat.py sensitive --target-drop`
WRONG = "correct what the warnings name, then run this again"  # the next step where there is no command
OF_RECIPES = ("recipe", "INT8")  # stages of `qat.py sensitive`, whose file is no network
# Options of qat.py's commands that the command which follows gets, too.
OF_A_RUN = ("--seed", "--batch-size", "--workers", "--device")
CALIBRATION = ("--recipe", "--calib-images", "--calib-method", "--percentile")
OF_QAT = (
    "--hyp", "--teacher", "--quantizer", "--epochs", "--iters", "--lr", "--train", "--supervision",
    "--supervision-stride",
)  # fmt: skip


def fraction(value: float | None) -> str:
    """A score in 0..1 with four decimals."""
    return DASH if value is None else f"{value:.4f}"


def headers(report: Report) -> tuple[str, ...]:
    """The columns of a report's table: with masks it has no room for precision and recall."""
    heads = MASK_HEADERS if report.has_masks else HEADERS
    unlabelled = any(AGREEMENT in row.ap_with for row in report.rows)
    return ("stage", "agreement", *heads[2:]) if unlabelled else heads


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


def labels(report: Report) -> list[str]:
    """A name for each row: its stage, and of rows of one stage what differs: words of file and run, size, images."""
    names = [row.stage for row in report.rows]
    for stage in dict.fromkeys(names):
        alike = {i: row for i, row in enumerate(report.rows) if row.stage == stage}
        texts = {i: f"{row.file} {row.run} {row.input_size} {row.ap_with}" for i, row in alike.items()}
        words = {i: dict.fromkeys(re.split(r"[-_/., ]+", text)) for i, text in texts.items()}
        common = set.intersection(*map(set, words.values()))
        for i, own in words.items():
            name = " ".join([stage, *(word for word in own if word not in common)])
            names[i] = textwrap.shorten(name, LONGEST_NAME, placeholder="") or stage
    return distinct_names(names)


def terminal_table(report: Report) -> str:
    """Aligned text, at most 80 columns wide unless masks or long names need more: what rows were measured on, below."""
    if not report.rows:
        return "(no results)"
    places = list(dict.fromkeys(row.measured_on for row in report.rows))
    rows = [
        (name, *cells(report, row)[1:], f"[{_mark(places.index(row.measured_on))}]")
        for name, row in zip(labels(report), report.rows, strict=True)
    ]
    heads = columns((*headers(report), "on"), left=["stage"])
    lines = aligned(heads, rows, rule=True)
    if max(map(len, lines)) > WIDTH:
        lines = aligned(heads, rows, rule=True, gap=" ")
    lines += [f"[{_mark(index)}] {place or 'not recorded'}" for index, place in enumerate(places)]
    if against := against_float(report):
        lines += ["", *textwrap.wrap(against[0], WIDTH), ""]
        lines += aligned(columns(FLOAT_HEADERS, left=["stage"]), against[1], rule=True)
    reasons = zip(labels(report), (not_compared(report, row) for row in report.rows), strict=True)
    sentences = [*(f"{name}: {reason}" for name, reason in reasons if reason), *remarks(report)]
    for sentence in filter(None, [*sentences, threshold_advice(report)]):
        lines += textwrap.wrap(sentence, WIDTH)
    return "\n".join(lines)


def against_float(report: Report) -> tuple[str, list[tuple[str, ...]]] | None:
    """What a product notices of INT8: a heading, and the texts of a row for each of FLOAT_HEADERS.

    None unless a row was measured against the float network's detections and threshold.
    """
    pairs = [(name, row, report.baseline(row)) for name, row in zip(labels(report), report.rows, strict=True)]
    compared = [(name, row, *both) for name, row, base in pairs if (both := _at_one_threshold(row, base))]
    if all(at is base for _, _, at, base in compared):
        return None
    rows: list[tuple[str, ...]] = []
    for name, row, at, base in compared:
        precision, recall = ("" if at is base else str(at.difference(base, what)) for what in ("precision", "recall"))
        agreement = fraction(row.agreement)
        if row.agreement_resampled:
            agreement += f" ± {Resampled.from_text(row.agreement_resampled).error:.4f}"
        rows.append((name, agreement, f"{row.best_threshold or 0:.3f}", fraction(at.precision), precision,
                     fraction(at.recall), recall, f"{at.objects - at.found} of {at.objects}"))  # fmt: skip
    thresholds = " or ".join(dict.fromkeys(f"{at.threshold:.3f}" for _, _, at, _ in compared))
    unlabelled = AGREEMENT in report.rows[-1].ap_with
    what = f"confidence threshold of best F1{' against its own detections' * unlabelled}"
    heading = (
        "Against the float network: AP with its detections as labels (agreement; 0.995 if all are alike, since "
        "upstream's curve falls to precision 0 at recall 1), and precision and recall at its "
        f"{what}, {thresholds} (all classes together, IoU 0.5)"
    )
    return heading, rows


def _at_one_threshold(row: Row, base: Row | None) -> tuple[AtThreshold, AtThreshold] | None:
    """What both find, if they compare: NMS inside a file leaves out what is below a threshold of its own."""
    if base and base.at and row.at and row.at.threshold == base.at.threshold and not row.incomparable(base):
        return row.at, base.at
    return None


def threshold_advice(report: Report) -> str:
    """A sentence where the last row misses or invents objects at the float network's threshold; else empty."""
    row = report.rows[-1]
    both = _at_one_threshold(row, report.baseline(row))
    moved = [f"{what} {change}" for what in ("recall", "precision")
             if both and (change := both[0].difference(both[1], what)).significant and change.value < 0]  # fmt: skip
    if not both or not moved:
        return ""
    return (
        f"{labels(report)[-1]}: a product that keeps the threshold {both[1].threshold:.3f} has "
        f"{' and '.join(moved)}; F1 is best at {row.best_threshold or 0:.3f} now"
    )


def not_compared(report: Report, row: Row) -> str:
    """Why a row's AP has no difference to that of its float row, which was measured; else empty."""
    base = report.baseline(row)
    if base is None or row is base or None in (row.ap, base.ap):
        return ""
    reason = row.incomparable(base)
    remedy = "; give the float network, exported in the same form, as --reference" if "NMS in" in reason else ""
    return reason and f"AP does not compare with that of the float row: {reason}{remedy}"


def remarks(report: Report) -> list[str]:
    """What the standard errors of AP differences are, and which rows have none though others do."""
    rows = zip(labels(report), report.rows, strict=True)
    differences = {name: difference for name, row in rows if (difference := report.difference(row))}
    sentences = []
    if any(difference.error is not None for difference in differences.values()):
        over = ", ".join(dict.fromkeys(row.resampled_over for row in report.rows if row.ap_resampled))
        sentences.append(f"±: the standard error of the difference, from resampling the {over}")
    bare = [name for name, difference in differences.items() if difference.error is None]
    if bare and any(row.ap_resampled for row in report.rows):
        sentences.append(
            f"without standard error, since an earlier version or a single image gave AP: {', '.join(bare)}"
        )
    return sentences


def export_command(weights: str) -> list[str]:
    """The command that exports a checkpoint."""
    return ["python", "export_qat.py", "--weights", weights, "--include", "onnx", "--simplify", "--dynamic", "batch"]


def given(report: Report, flags: Sequence[str]) -> list[str]:
    """Those of `flags`, with their values, that a report's only `qat.py` command has, for the command that follows."""
    commands = {line for line in report.command.splitlines() if "qat.py " in line}
    words = shlex.split(commands.pop()) if len(commands) == 1 else []
    pairs = [word.split("=", 1) if "=" in word else [word, *words[at + 1 : at + 2]] for at, word in enumerate(words)]
    return [word for pair in pairs if pair[0] in flags for word in pair]


def verdict(report: Report) -> tuple[str, str]:
    """What an INT8 row that compares with float says, in a sentence; and the command that comes next, or ''.

    Of one run it is the last row; of several the one with the highest AP against float.
    """
    alone = len(report.command.splitlines()) <= 1
    left = [note.partition("continue with: ")[2] for note in report.notes if note.startswith(UNFINISHED)]
    if left and alone:
        return "This run is not finished: continue it.", left[0]
    int8 = [row for row in report.rows if not re.match("float|.*FP(16|32)$", row.stage, re.IGNORECASE)]
    if not (rows := [row for row in int8 if report.difference(row)]):
        baseline = int8 and report.baseline(int8[0])
        reason = "no row compares with the float row" if baseline else "no float row (val_trt.py --reference FLOAT.pt)"
        return (f"What INT8 costs is not known: {reason}.", "") if int8 else ("", "")
    of_networks = [row for row in rows if row.stage not in OF_RECIPES and not row.file.endswith(".yaml")]
    worst = {  # of boxes and masks, for each row
        index: min(
            ((ap, difference) for ap in AP if (difference := report.difference(row, ap))),
            key=lambda pair: pair[1].value / max(pair[1].error or 0, 1e-9),
        )
        for index, row in enumerate(of_networks or rows)
    }
    chosen = max(worst) if alone else max(worst, key=lambda index: worst[index][1].value)
    row, (kind, difference) = (of_networks or rows)[chosen], worst[chosen]
    base = report.baseline(row)
    if base and base.ap is not None and base.ap < LOW_AP:
        return f"The float network has AP {base.ap:.4f}: nothing can be said of INT8; check data, size and weights.", ""
    name = labels(report)[report.rows.index(row)]
    unlabelled = AGREEMENT in row.ap_with
    what, size = {"ap": "agreement" if unlabelled else "AP", "mask_ap": "mask AP"}[kind], row.input_size or "640"
    if len({*size.split("x")}) == 1 or "rect" in size:
        size = re.findall(r"\d+", size)[0]
    if difference.error is None:
        sentence = f"INT8 is {difference} {what} from float ({name}), and no standard error says if that is noise"
    elif not difference.significant:
        sentence = f"INT8 is within the noise of float ({name}: {difference} {what})"
    else:
        verb = "gains" if difference.value > 0 else "loses"
        sentence = f"INT8 {verb} {abs(difference.value):.4f} ± {difference.error:.4f} {what} ({name})"
    suffix = Path(row.file).suffix.lower()
    floats = [one.file for one in report.rows if one.stage.lower() == "float" and one.file.endswith(".pt")]
    of_float = ["--weights", *floats[-1:], "--data", report.data, "--imgsz", size]
    of_float += ["--unlabelled"] * unlabelled + given(report, OF_A_RUN)
    own = given(report, CALIBRATION)
    step, command = {
        ".pt": ("export", export_command(row.file)),
        ".onnx": ("build the engine of", ["scripts/generate_trt_engine.sh", row.file, size]),
        ".yaml": ("quantize with", ["python", "qat.py", "quantize", *of_float, "--recipe", row.file]),
    }.get(suffix, ("deploy", []))
    todo = f"{step} {row.file}"
    little = LITTLE_DISAGREEMENT if unlabelled else LITTLE
    loses = difference.significant and difference.value <= -little
    if loses and row.stage == "INT8" and "--calib-method" in own:
        todo, command = "look for a better calibration", ["python", "qat.py", "calibrate", *of_float]
    elif loses and row.stage not in OF_RECIPES:
        networks = [one for one in int8[: int8.index(row)] if one.file.endswith(".pt")]
        more = row.difference(networks[-1], kind) if networks else None
        before = report.difference(networks[-1], kind) if networks and suffix == ".pt" else None
        if before and before.error is not None and not before.significant:
            todo = f"{networks[-1].stage} is within the noise of float, so export {networks[-1].file}"
            command = export_command(networks[-1].file)
        elif more and more.significant and more.value < 0:
            todo = f"{networks[-1].stage} does not lose as much, so compare {row.file} with {networks[-1].file}"
            verify = ["python", "export_qat.py", "--verify", row.file]
            command = verify if suffix == ".onnx" else export_command(networks[-1].file)
        elif suffix != ".yaml" and not report.history:
            own += given(report, OF_QAT)
            todo, command = "let QAT regain it", ["python", "qat.py", "quantize", *of_float, *own]
        elif "auto" in own:  # for which sensitive needs the method by name
            todo, command = "look for a better calibration", ["python", "qat.py", "calibrate", *of_float]
            command += given(report, CALIBRATION[:2])
        else:
            todo, command = "keep the layers that lose it in float", ["python", "qat.py", "sensitive", *of_float]
            command += ["--recipe", row.file] if suffix == ".yaml" else own
    if "qat.py" in command and not (floats and report.data):
        command = []  # a report of a file alone does not know the float checkpoint
    return f"{sentence}: {todo}.", shlex.join(command)


def _mark(index: int) -> str:
    return string.ascii_lowercase[index] if index < 26 else str(index + 1)
