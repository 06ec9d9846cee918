"""The meaning of a result, and the next step: one table of sentences and commands.

    advice = advise(report)
    print(advice.text)         # INT8 (QAT) loses at most 0.0012 AP (95 %, 500 images; +0.0006 ± 0.0009). Export ...
    print(advice.command)      # python export_qat.py ...

`judgement.judge` decides whether INT8 loses too much. `STEPS` is the only place that decides what comes next: the first
of its rows whose condition holds is taken.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from utils.core.score import AGREEMENT, Difference
from utils.core.text import plural
from utils.jobs.commands import (
    benchmark_command,
    build_command,
    evaluation_command,
    export_command,
    verify_command,
)
from utils.jobs.judgement import Judgement, allowed_drop, judge, measured_on, more_units, score_name
from utils.reports.schema import AP, BEST_PTQ, UNFINISHED, Advice, AnyAp, Level, Report, Row
from utils.reports.tables import labels

RECIPE_STAGES = ("recipe", "INT8")  # stages of `qat.py sensitive`, whose file is a recipe
CORRECT = "correct what the warnings name, then run this again"

# Options of qat.py's commands that the next command gets, too.
RUN_OPTIONS = ("--seed", "--batch-size", "--workers", "--device")
CALIBRATION_OPTIONS = ("--recipe", "--calib-images", "--calib-method", "--percentile")
QAT_OPTIONS = ("--hyp", "--epochs", "--iters", "--lr", "--train")


# A result, and its facts


@dataclass(frozen=True)
class Context:
    """A report and one row of it, for the commands that can follow."""

    report: Report
    row: Row

    @property
    def suffix(self) -> str:
        """The suffix of the row's file, such as '.pt'."""
        return Path(self.row.file).suffix.lower()

    @property
    def is_unlabelled(self) -> bool:
        """True if AP is agreement, since there are no labels."""
        return AGREEMENT in self.row.ap_with

    @property
    def is_trained(self) -> bool:
        """True if QAT has run."""
        return bool(self.report.history)

    @property
    def float_file(self) -> str:
        """The FP32 checkpoint: that of the FP32 row, or else the one that `qat.py quantize` was given; or empty."""
        files = [row.file for row in self.report.rows if is_float(row) and row.file.endswith(".pt")]
        if files:
            return files[-1]
        if "qat.py quantize " not in self.report.command:
            return ""
        values = self.repeated(["--weights"])[1:]
        return values[-1] if values else ""

    @property
    def size(self) -> str:
        """The input size for a command: '640', or '384x640'."""
        size = self.row.input_size or "640"
        is_square = len(set(size.split("x"))) == 1
        if is_square or "rect" in size:
            return str(re.findall(r"\d+", size)[0])
        return size

    def repeated(self, flags: Sequence[str]) -> list[str]:
        """Return those of `flags`, with their values, that the report's only `qat.py` command gives a value."""
        commands = {line for line in self.report.command.splitlines() if "qat.py " in line}
        if len(commands) != 1:
            return []
        words = shlex.split(commands.pop())
        repeated: list[str] = []
        for place, word in enumerate(words):
            pair = word.split("=", 1) if "=" in word else words[place : place + 2]
            if pair[0] in flags and "" not in pair:
                repeated += pair
        return repeated

    @property
    def lacking_splits(self) -> list[str]:
        """The splits that qat.py reads and that the dataset's YAML does not have; empty where that is not known."""
        present = self.report.data_splits
        if not present:
            return []
        return [split for split in ("train", "val") if split not in present]

    def qat(self, command: str, *words: str) -> list[str]:
        """Return a command of qat.py for the FP32 checkpoint.

        Empty where the report does not know checkpoint and dataset, or the dataset has no train or val images.
        """
        if not self.float_file or not self.report.data or self.lacking_splits:
            return []
        line = ["python", "qat.py", command, "--weights", self.float_file, "--data", self.report.data]
        line += ["--imgsz", self.size]
        if self.is_unlabelled:
            line.append("--unlabelled")
        return [*line, *self.repeated(RUN_OPTIONS), *words]

    def evaluation(self) -> list[str]:
        """Return the command that compares the row's file with the FP32 model, on val images if there are any."""
        split = ""
        if "val" in self.lacking_splits:
            split = self.report.data_splits[-1]
        return evaluation_command(
            self.row.file,
            reference=self.float_file or "FLOAT.pt",
            data=self.report.data,
            split=split,
            unlabelled=self.is_unlabelled,
        )


@dataclass(frozen=True)
class Facts(Context):
    """An INT8 row that compares with its FP32 row, and how it is judged.

    Attributes:
        score: the AP that lost most of its standard errors, of boxes or of masks.
        allowed: the loss of it that is allowed.
    """

    score: AnyAp
    difference: Difference
    judgement: Judgement
    allowed: float

    @classmethod
    def of(cls, report: Report, row: Row) -> Facts:
        """Judge a row by boxes or masks, whichever lost more of its standard errors."""
        differences: dict[AnyAp, Difference] = {}
        for score in AP:
            difference = report.difference(row, score)
            if difference is not None:
                differences[score] = difference
        score = min(differences, key=lambda score: _standard_errors_gained(differences[score]))
        difference = differences[score]
        allowed = allowed_drop(report.target_drop, AGREEMENT in row.ap_with)
        judgement = judge(difference, allowed, score_name(row, score), measured_on(row))
        return cls(report, row, score, difference, judgement, allowed)

    @property
    def level(self) -> Level:
        """The verdict on the row.

        Without labels, agreement shows how much INT8 differs, and not that it is worse: after QAT that is to be
        checked.
        """
        if self.judgement.level is Level.LOSS and self.is_unlabelled and self.is_trained:
            return Level.CHECK
        if self.judgement.level is Level.OK and (self.row.caveat or self.report.doubts):
            return Level.CHECK
        return self.judgement.level

    @property
    def is_loss(self) -> bool:
        """True if something is to be done about a loss."""
        return self.level is Level.LOSS

    @property
    def needs_more_images(self) -> bool:
        """True if more images are needed to tell."""
        return self.judgement.level is Level.CHECK

    @cached_property
    def checkpoint_before(self) -> Row | None:
        """The INT8 checkpoint of an earlier step than the judged row."""
        int8 = int8_rows(self.report)
        earlier = int8[: int8.index(self.row)]
        checkpoints = [row for row in earlier if row.file.endswith(".pt")]
        return checkpoints[-1] if checkpoints else None

    @property
    def file_before(self) -> str:
        """The file of the step before; empty where there is none."""
        return self.checkpoint_before.file if self.checkpoint_before else ""

    @property
    def can_export_before(self) -> bool:
        """True if the step before is a checkpoint that can be exported in place of this one."""
        row = self.checkpoint_before
        if row is None or self.suffix != ".pt" or not self.report.difference(row):
            return False
        return Facts.of(self.report, row).level is Level.OK

    @property
    def has_lost_since_before(self) -> bool:
        """True if the row is measurably worse than the checkpoint of the step before."""
        if self.checkpoint_before is None:
            return False
        difference = self.row.difference(self.checkpoint_before, self.score)
        return difference is not None and difference.significant and difference.value < 0

    @property
    def is_recipe(self) -> bool:
        """True if the result is a recipe that a model is quantized by."""
        return self.row.stage in RECIPE_STAGES or (self.suffix == ".yaml" and not self.is_loss)

    @property
    def has_chosen_method(self) -> bool:
        """True if the row is the INT8 model of `qat.py sensitive`, by a method that the user chose."""
        if self.row.stage != "INT8":
            return False
        options = self.repeated(CALIBRATION_OPTIONS)
        return "--calib-method" in options or "--percentile" in options

    @property
    def can_train(self) -> bool:
        """True if QAT may help: the row is a model, and was not trained."""
        return self.suffix != ".yaml" and not self.is_trained and self.row.stage != BEST_PTQ

    @property
    def larger_target(self) -> str:
        """The option that allows as much as the row may have lost."""
        return f"--target-drop {rounded_up(self.difference.most_lost)}"

    @property
    def units_more(self) -> str:
        """Number of further images or groups that could tell, in words."""
        resampled = getattr(self.row, f"{self.score}_resampled")
        units = self.row.images or 1
        if resampled and resampled.units:
            units = resampled.units
        number = more_units(self.difference, self.allowed, units)
        what = "groups of images" if "group" in self.row.resampled_over else "images"
        return f"about {number} more {what}"


def _standard_errors_gained(difference: Difference) -> float:
    """Return a difference in standard errors; a loss is negative."""
    return difference.value / max(difference.error or 0, 1e-9)


def is_float(row: Row) -> bool:
    """True if a row is the FP32 model's."""
    return row.stage.lower() == "float"


def int8_rows(report: Report) -> list[Row]:
    """Return the rows that are neither of the FP32 model nor of an FP16 or FP32 engine."""
    return [row for row in report.rows if not re.match("float|.*FP(16|32)$", row.stage, re.IGNORECASE)]


# The next step


@dataclass(frozen=True)
class NextStep:
    """A row of the table: when it applies, what to do, and the command for it."""

    name: str
    applies: Callable[[Facts], bool]
    todo: Callable[[Facts], str]
    command: Callable[[Facts], list[str]]


STEPS: tuple[NextStep, ...] = (
    NextStep(
        "other FP32 weights",
        lambda facts: bool(facts.row.caveat),
        lambda facts: f"{facts.row.caveat}; compare with the FP32 weights that the file was made from",
        lambda facts: [],
    ),
    NextStep(
        "doubt",
        lambda facts: bool(facts.report.doubts),
        lambda facts: f"{'; '.join(facts.report.doubts)}; {CORRECT}",
        lambda facts: [],
    ),
    NextStep(
        "calibration",
        lambda facts: facts.is_loss and facts.has_chosen_method,
        lambda facts: "look for a better calibration",
        lambda facts: facts.qat("calibrate"),
    ),
    NextStep(
        "no layer helps",
        lambda facts: facts.is_loss and facts.row.stage == "INT8",
        lambda facts: "no layer regains a measurable part of it by staying in FP16: let QAT regain it",
        lambda facts: facts.qat("quantize", "--recipe", facts.row.file),
    ),
    NextStep(
        "recipe",
        lambda facts: facts.is_recipe,
        lambda facts: f"quantize with {facts.row.file}",
        lambda facts: facts.qat("quantize", "--recipe", facts.row.file),
    ),
    NextStep(
        "too few images",
        lambda facts: facts.needs_more_images,
        lambda facts: (
            f"add {facts.units_more} to the val split and evaluate again, or allow the loss with {facts.larger_target}"
        ),
        lambda facts: facts.evaluation(),
    ),
    NextStep(
        "export",
        lambda facts: not facts.is_loss and facts.suffix == ".pt",
        lambda facts: f"export {facts.row.file}",
        lambda facts: export_command(facts.row.file),
    ),
    NextStep(
        "build",
        lambda facts: not facts.is_loss and facts.suffix == ".onnx",
        lambda facts: f"build the engine of {facts.row.file}",
        lambda facts: build_command(facts.row.file, facts.size),
    ),
    NextStep(
        "deploy",
        lambda facts: not facts.is_loss,
        lambda facts: f"measure the speed of {facts.row.file}, then deploy it",
        lambda facts: benchmark_command(facts.row.file),
    ),
    NextStep(
        "step before",
        lambda facts: facts.can_export_before,
        lambda facts: f"export {facts.file_before}, which loses less",
        lambda facts: export_command(facts.file_before),
    ),
    NextStep(
        "verify",
        lambda facts: facts.has_lost_since_before and facts.suffix == ".onnx",
        lambda facts: f"its checkpoint {facts.file_before} loses less: verify the file",
        lambda facts: verify_command(facts.row.file),
    ),
    NextStep(
        "export anew",
        lambda facts: facts.has_lost_since_before,
        lambda facts: f"{facts.file_before} loses less: export it again",
        lambda facts: export_command(facts.file_before),
    ),
    NextStep(
        "QAT",
        lambda facts: facts.can_train,
        lambda facts: "let QAT regain it",
        lambda facts: facts.qat("quantize", *facts.repeated(CALIBRATION_OPTIONS), *facts.repeated(QAT_OPTIONS)),
    ),
    NextStep(
        "layers in FP16",
        lambda facts: True,
        lambda facts: "keep the layers that cause the loss in FP16",
        lambda facts: facts.qat("sensitive", *_recipe_so_far(facts)),
    ),
)


def _recipe_so_far(facts: Facts) -> list[str]:
    """Return the options by which the row was calibrated: its file if that is a recipe, or those of its command."""
    if facts.suffix == ".yaml":
        return ["--recipe", facts.row.file]
    return facts.repeated(CALIBRATION_OPTIONS)


def rounded_up(drop: float | None) -> str:
    """Return a loss rounded up to three digits after the point; 1 for an unknown loss."""
    if drop is None:
        return "1"
    return f"{math.ceil(drop * 1000) / 1000:g}"


def next_step(facts: Facts) -> NextStep:
    """Return the first row of `STEPS` that applies."""
    return next(step for step in STEPS if step.applies(facts))


# The verdict


def advise(report: Report) -> Advice:
    """Judge a report, and name the next step.

    Of one run, the model that it ended with is judged, by its last row; a checkpoint and the files that were made of it
    are one model, and a measurable loss of one of them is a loss. Of several runs it is the row with the highest AP
    against FP32.
    """
    resume_command = _resume_command(report)
    if resume_command:
        return Advice(Level.NONE, "This run is not finished", "continue it", resume_command)
    problems = problems_of(report)
    if problems:
        return Advice(Level.CHECK, f"No verdict: {'; '.join(problems)}", CORRECT)
    facts = _judged(report)
    if facts is None:
        return _without_comparison(report)
    name = labels(report)[report.rows.index(facts.row)]
    subject = "INT8" if name == "INT8" else f"INT8 ({name})"
    sentence = f"{subject} {facts.judgement.words}"
    step = next_step(facts)
    command = shlex.join(step.command(facts))
    return Advice(facts.level, sentence, step.todo(facts), command, facts.allowed, facts.row)


def _is_single_run(report: Report) -> bool:
    """True if a report is one run's."""
    return len(report.command.splitlines()) <= 1


def _resume_command(report: Report) -> str:
    """Return the command that continues a run; empty if it is finished, or if there are several."""
    if not _is_single_run(report):
        return ""
    for note in report.notes:
        if note.startswith(UNFINISHED):
            return note.partition("continue with: ")[2]
    return ""


def problems_of(report: Report) -> list[str]:
    """Return why AP means nothing here: the reasons that the run has noted, and those that its counts and rows show."""
    problems: list[str] = list(report.problems)
    for counts in report.splits:
        if counts.is_all_in_train:
            images = plural(counts.images, "image")
            problems.append(
                f"all {images} of {counts.name} are training images, so that AP does not show how good the model is on "
                "new images"
            )
    for row in report.rows:
        if is_float(row) and row.finds_nothing:
            problems.append(f"the FP32 model has AP {row.ap:.4f}; check data, image size and weights")
    return list(dict.fromkeys(problems))


def _judged(report: Report) -> Facts | None:
    """Return the row that is judged; None where no INT8 row compares with an FP32 row."""
    compared = [row for row in int8_rows(report) if report.difference(row)]
    models = [row for row in compared if row.stage not in RECIPE_STAGES and not row.file.endswith(".yaml")]
    candidates = [Facts.of(report, row) for row in models or compared]
    if not candidates:
        return None
    if _is_single_run(report):
        return _last_model(candidates)
    return max(candidates, key=lambda candidate: candidate.difference.value)


def _last_model(candidates: Sequence[Facts]) -> Facts:
    """Return the last row, or a row of the same model that shows a loss where the last one does not."""
    last = candidates[-1]
    if last.suffix == ".yaml":
        return last
    start = max((place for place, facts in enumerate(candidates) if facts.suffix == ".pt"), default=0)
    losses = [facts for facts in candidates[start:] if facts.is_loss]
    return losses[-1] if losses else last


def _without_comparison(report: Report) -> Advice:
    """Return the advice for a report in which no INT8 row compares with an FP32 row."""
    int8 = int8_rows(report)
    if int8:
        row = int8[-1]
        reason = "no row compares with the FP32 row" if report.baseline(row) else "there is no FP32 row"
        command = shlex.join(Context(report, row).evaluation())
        return Advice(Level.NONE, f"The loss of INT8 is unknown: {reason}", "evaluate both models", command)
    if not report.rows:
        return Advice(Level.NONE, "")
    if report.doubts:
        return Advice(Level.NONE, "", f"{'; '.join(report.doubts)}; {CORRECT}")
    return _after_fp32(Context(report, report.rows[-1]))


def _after_fp32(context: Context) -> Advice:
    """Return the advice for a model that is not INT8, by the kind of its file."""
    if context.suffix == ".pt":
        todo = "quantize it"
        if context.lacking_splits:
            todo += f" with a dataset that has {' and '.join(context.lacking_splits)} images, too"
        return Advice(Level.NONE, "", todo, shlex.join(context.qat("quantize")))
    if context.suffix == ".onnx":
        return Advice(Level.NONE, "", "build the engine", shlex.join(build_command(context.row.file)))
    return Advice(Level.NONE, "", "measure its speed", shlex.join(benchmark_command(context.row.file)))


def worse_after_qat(rows: Sequence[Row]) -> str:
    """Return a sentence where QAT's AP or agreement is measurably below PTQ's; empty elsewhere.

    The best state is chosen by the loss on training images, so that AP on validation images stays a fair score.
    """
    stages = {row.stage: row for row in rows}
    ptq = stages.get("PTQ")
    qat = stages.get("QAT")
    if ptq is None or qat is None:
        return ""
    scores: tuple[AnyAp, ...] = ("ap", "agreement")
    for score in scores:
        difference = qat.difference(ptq, score)
        if difference and difference.significant and difference.value < 0:
            is_agreement = score == "agreement" or AGREEMENT in ptq.ap_with
            words = "agrees more with the FP32 model" if is_agreement else "has the higher AP"
            return f"PTQ {words} on these validation images (QAT {difference} against it): {ptq.file}"
    return ""
