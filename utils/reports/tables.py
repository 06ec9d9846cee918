"""Results as tables: for the terminal, and as text cells for the HTML page; and what follows from them.

What was not measured is a dash.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from utils.core.files import distinct_names
from utils.core.score import AGREEMENT, Difference
from utils.core.text import aligned
from utils.reports.schema import AP, UNFINISHED, AnyAp, Report, Row

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
OF_QAT = ("--hyp", "--epochs", "--iters", "--lr", "--train")


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
    size = DASH if row.size_bytes is None else f"{row.size_bytes / 1e6:.2f} MB"
    milliseconds = DASH if row.ms_per_image is None else f"{row.ms_per_image:.2f}"
    return row.stage, fraction(row.ap), boxes, fraction(row.ap50), *more, size, milliseconds


def labels(report: Report) -> list[str]:
    """A name for each row: its stage, and of rows of one stage what differs: words of file and run, size, images."""
    names = [row.stage for row in report.rows]
    for stage in dict.fromkeys(names):
        rows = {i: row for i, row in enumerate(report.rows) if row.stage == stage}
        texts = {i: f"{row.file} {row.run} {row.input_size} {row.ap_with}" for i, row in rows.items()}
        words = {i: dict.fromkeys(re.split(r"[-_/., ]+", text)) for i, text in texts.items()}
        common = set.intersection(*map(set, words.values()))
        for i, of_row in words.items():
            name = " ".join([stage, *(word for word in of_row if word not in common)])
            names[i] = textwrap.shorten(name, LONGEST_NAME, placeholder="") or stage
    return distinct_names(names)


def terminal_table(report: Report) -> str:
    """Aligned text, if possible at most 80 columns wide: the rows, then what they were measured on."""
    if not report.rows:
        return "(no results)"
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
    sentences = [f"{name}: {reason}" for name, row in named if (reason := not_compared(report, row))]
    for sentence in [*sentences, *remarks(report)]:
        lines += textwrap.wrap(sentence, WIDTH)
    return "\n".join(lines)


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
    own = " against its own detections" * (AGREEMENT in report.rows[-1].ap_with)
    heading = (
        "Against the float network: AP with its detections as labels (agreement; 0.995 if all are alike, since "
        "upstream's curve falls to precision 0 at recall 1), and precision and recall at its confidence threshold of "
        f"best F1{own}, {thresholds} (all classes together, IoU 0.5)"
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
    return [f"±: the standard error of the difference, from resampling the {over}"]


def export_command(weights: str) -> list[str]:
    """The command that exports a checkpoint."""
    return ["python", "export_qat.py", "--weights", weights, "--include", "onnx", "--simplify", "--dynamic", "batch"]


def repeated(report: Report, flags: Sequence[str]) -> list[str]:
    """Those of `flags`, with their values, that a report's only `qat.py` command has, for the command that follows."""
    commands = {line for line in report.command.splitlines() if "qat.py " in line}
    words = shlex.split(commands.pop()) if len(commands) == 1 else []
    pairs = [word.split("=", 1) if "=" in word else [word, *words[at + 1 : at + 2]] for at, word in enumerate(words)]
    return [word for pair in pairs if pair[0] in flags for word in pair]


def verdict(report: Report) -> tuple[str, str]:
    """What an INT8 row that compares with float says and what to do, in a sentence; and the command for it, or ''.

    Of one run it is the last row; of several the one with the highest AP against float.
    """
    alone = len(report.command.splitlines()) <= 1
    left = [note.partition("continue with: ")[2] for note in report.notes if note.startswith(UNFINISHED)]
    if left and alone:
        return "This run is not finished: continue it.", left[0]
    int8 = _int8(report)
    if not (rows := [row for row in int8 if report.difference(row)]):
        baseline = int8 and report.baseline(int8[0])
        reason = "no row compares with the float row" if baseline else "no float row (val_trt.py --reference FLOAT.pt)"
        return (f"What INT8 costs is not known: {reason}.", "") if int8 else ("", "")
    rows = [row for row in rows if row.stage not in OF_RECIPES and not row.file.endswith(".yaml")] or rows
    worst = [_worst(report, row) for row in rows]
    index = len(rows) - 1 if alone else max(range(len(rows)), key=lambda index: worst[index][1].value)
    row, (kind, difference) = rows[index], worst[index]
    base = report.baseline(row)
    if base and base.finds_nothing:
        return f"The float network has AP {base.ap:.4f}: nothing can be said of INT8; check data, size and weights.", ""
    name = labels(report)[report.rows.index(row)]
    what = {"ap": "agreement" if AGREEMENT in row.ap_with else "AP", "mask_ap": "mask AP"}[kind]
    if difference.error is None:
        sentence = f"INT8 is {difference} {what} from float ({name}), and no standard error says if that is noise"
    elif not difference.significant:
        sentence = f"INT8 is within the noise of float ({name}: {difference} {what})"
    else:
        verb = "gains" if difference.value > 0 else "loses"
        sentence = f"INT8 {verb} {abs(difference.value):.4f} ± {difference.error:.4f} {what} ({name})"
    todo, command = next_step(report, row)
    return f"{sentence}: {todo}.", shlex.join(command)


def next_step(report: Report, row: Row) -> tuple[str, list[str]]:
    """What to do about an INT8 row that compares with float, in words; and the command, empty where there is none."""
    kind, difference = _worst(report, row)
    suffix, unlabelled = Path(row.file).suffix.lower(), AGREEMENT in row.ap_with
    size = row.input_size or "640"
    if len({*size.split("x")}) == 1 or "rect" in size:
        size = re.findall(r"\d+", size)[0]
    floats = [other.file for other in report.rows if other.stage.lower() == "float" and other.file.endswith(".pt")]
    calibration = repeated(report, CALIBRATION)

    def qat(command: str, *words: str) -> list[str]:
        """A command of qat.py for the float checkpoint, which the report of a file alone does not know."""
        inputs = ["--weights", *floats[-1:], "--data", report.data, "--imgsz", size, *["--unlabelled"] * unlabelled]
        line = ["python", "qat.py", command, *inputs, *repeated(report, OF_A_RUN), *words]
        return line if floats and report.data else []

    loses = difference.significant and difference.value <= -(LITTLE_DISAGREEMENT if unlabelled else LITTLE)
    if unlabelled and report.history:  # agreement says how much INT8 differs, and not that it is worse
        loses = False
    if loses and row.stage == "INT8" and {"--calib-method", "--percentile"} & {*calibration}:
        return "look for a better calibration", qat("calibrate")
    if not loses or row.stage in OF_RECIPES:
        if suffix == ".pt":
            return f"export {row.file}", export_command(row.file)
        if suffix == ".onnx":
            return f"build the engine of {row.file}", ["scripts/generate_trt_engine.sh", row.file, size]
        if suffix == ".yaml":
            return f"quantize with {row.file}", qat("quantize", "--recipe", row.file)
        return f"deploy {row.file}", []
    int8 = _int8(report)
    if networks := [other for other in int8[: int8.index(row)] if other.file.endswith(".pt")]:
        before, own_loss = networks[-1], row.difference(networks[-1], kind)
        of_before = report.difference(before, kind)
        if suffix == ".pt" and of_before and of_before.error is not None and not of_before.significant:
            return f"{before.stage} is within the noise of float, so export {before.file}", export_command(before.file)
        if own_loss and own_loss.significant and own_loss.value < 0:
            verify = ["python", "export_qat.py", "--verify", row.file]
            return (f"{before.stage} does not lose as much, so compare {row.file} with {before.file}",
                    verify if suffix == ".onnx" else export_command(before.file))  # fmt: skip
    if suffix != ".yaml" and not report.history:
        return "let QAT regain it", qat("quantize", *calibration, *repeated(report, OF_QAT))
    recipe = ["--recipe", row.file] if suffix == ".yaml" else calibration
    return "keep the layers that lose it in float", qat("sensitive", *recipe)


def _int8(report: Report) -> list[Row]:
    """The rows that are neither of a float network nor of a float engine."""
    return [row for row in report.rows if not re.match("float|.*FP(16|32)$", row.stage, re.IGNORECASE)]


def _worst(report: Report, row: Row) -> tuple[AnyAp, Difference]:
    """Boxes or masks, of which AP lost more of its standard errors against float, and the difference."""
    differences = ((ap, difference) for ap in AP if (difference := report.difference(row, ap)))
    return min(differences, key=lambda pair: pair[1].value / max(pair[1].error or 0, 1e-9))
