"""What a result means, and what comes next: one rule for a loss, one table of sentences and commands.

    advice = advise(report)
    print(advice.text)         # INT8 (QAT) loses at most 0.0012 AP (95 %, 500 images; +0.0006 ± 0.0009). Export ...
    print(advice.command)      # python export_qat.py ...

`judge` is the only place that decides whether INT8 loses too much. `STEPS` is the only place that decides what comes
next; the first of its rows whose condition holds is taken.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from utils.core.score import AGREEMENT, Difference
from utils.core.text import plural
from utils.reports.schema import AP, BEST_PTQ, UNFINISHED, Advice, AnyAp, Level, Report, Row
from utils.reports.tables import labels

TARGET_DROP = 0.002  # AP that INT8 may lose, unless a user says otherwise
TARGET_DISAGREEMENT = 0.025  # the same of agreement, which is AP where there are no labels
OF_RECIPES = ("recipe", "INT8")  # stages of `qat.py sensitive`, whose file is not a network
CORRECT = "correct what the warnings name, then run this again"

# Options of qat.py's commands that the command which follows gets, too.
OF_A_RUN = ("--seed", "--batch-size", "--workers", "--device")
CALIBRATION = ("--recipe", "--calib-images", "--calib-method", "--percentile")
OF_QAT = ("--hyp", "--epochs", "--iters", "--lr", "--train")


# The rule


class Judgement(NamedTuple):
    """Whether a difference is a loss, and why, as words that follow 'INT8'."""

    level: Level
    words: str


def judge(difference: Difference, target: float, what: str = "AP", images: str = "these images") -> Judgement:
    """Judge a difference to the FP32 model by its value, its standard error and the loss that is allowed.

    OK: the loss is at most `target`, as far as 95 % of repetitions go. LOSS: it is a measurable loss, and larger than
    `target`. CHECK: these images cannot tell.

    Args:
        what: the score, such as 'mask AP'.
        images: what was measured on, such as '500 images'.
    """
    if difference.error is None or difference.most_lost is None:
        return Judgement(
            Level.CHECK, f"differs by {difference} {what}, and no standard error tells whether that is noise"
        )
    size = f"{abs(difference.value):.4f} ± {difference.error:.4f} {what}"
    if difference.significant and difference.value < -target:
        return Judgement(Level.LOSS, f"loses {size} ({images}), more than the {target:g} allowed")
    bound = f"loses at most {difference.most_lost:.4f} {what} (95 %, {images}; measured {difference})"
    if difference.most_lost > target:
        return Judgement(Level.CHECK, f"{bound}, and {target:g} is allowed: not enough images to tell")
    if difference.significant and difference.value > 0:
        return Judgement(Level.OK, f"gains {size} ({images})")
    return Judgement(Level.OK, bound)


def more_units(difference: Difference, target: float, units: int) -> int:
    """How many more images (or groups) could tell whether a loss exceeds `target`, if the difference stays as it is.

    The margin falls as one over the square root of their number. It has to become as small as the distance from the
    measured loss to the target, or a quarter of the target where it lies nearer; at least as many again.
    """
    distance = max(abs(target + difference.value), target / 4, 1e-6)
    needed = units * ((difference.margin or 0.0) / distance) ** 2
    return max(math.ceil(needed) - units, units)


# What is known about a result


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
    def unlabelled(self) -> bool:
        """Whether AP is agreement, since there are no labels."""
        return AGREEMENT in self.row.ap_with

    @property
    def trained(self) -> bool:
        """Whether QAT has run."""
        return bool(self.report.history)

    @property
    def float_file(self) -> str:
        """The FP32 checkpoint: that of the FP32 row, or else the one that `qat.py quantize` was given; or empty."""
        files = [row.file for row in self.report.rows if is_float(row) and row.file.endswith(".pt")]
        if not files and "qat.py quantize " in self.report.command:
            files = self.repeated(["--weights"])[1:]
        return files[-1] if files else ""

    @property
    def size(self) -> str:
        """The input size for a command: '640', or '384x640'."""
        size = self.row.input_size or "640"
        is_square = len({*size.split("x")}) == 1
        return re.findall(r"\d+", size)[0] if is_square or "rect" in size else size

    def repeated(self, flags: Sequence[str]) -> list[str]:
        """Those of `flags`, with their values, that the report's only `qat.py` command gives a value."""
        commands = {line for line in self.report.command.splitlines() if "qat.py " in line}
        if len(commands) != 1:
            return []
        words = shlex.split(commands.pop())
        pairs = [word.split("=", 1) if "=" in word else words[at : at + 2] for at, word in enumerate(words)]
        return [word for pair in pairs if pair[0] in flags and "" not in pair for word in pair]

    @property
    def lacking_splits(self) -> list[str]:
        """The splits that qat.py reads and that the dataset's YAML does not have; empty where that is not known."""
        present = self.report.data_splits
        return [split for split in ("train", "val") if split not in present] if present else []

    def qat(self, command: str, *words: str) -> list[str]:
        """A command of qat.py for the FP32 checkpoint.

        Empty where the report does not know checkpoint and dataset, or the dataset has no train or val images.
        """
        if not (self.float_file and self.report.data) or self.lacking_splits:
            return []
        line = ["python", "qat.py", command, "--weights", self.float_file, "--data", self.report.data]
        line += ["--imgsz", self.size]
        if self.unlabelled:
            line.append("--unlabelled")
        return [*line, *self.repeated(OF_A_RUN), *words]

    def evaluation(self) -> list[str]:
        """The command that compares the row's file with the FP32 model, on the dataset's val images if it has any."""
        line = ["python", "val_trt.py", self.row.file, "--reference", self.float_file or "FLOAT.pt"]
        line += ["--data", self.report.data or "DATA.yaml"]
        if "val" in self.lacking_splits:
            line += ["--task", self.report.data_splits[-1]]
        if self.unlabelled:
            line.append("--unlabelled")
        return line


@dataclass(frozen=True)
class Facts(Context):
    """An INT8 row that compares with its FP32 row, and how it is judged.

    Attributes:
        score: the AP that lost most of its standard errors, of boxes or of masks.
        allowed: what may be lost of it.
    """

    score: AnyAp
    difference: Difference
    judgement: Judgement
    allowed: float

    @classmethod
    def of(cls, report: Report, row: Row) -> Facts:
        """Judge a row by boxes or masks, whichever lost more of its standard errors."""
        differences = [(score, difference) for score in AP if (difference := report.difference(row, score))]
        score, difference = min(differences, key=lambda pair: pair[1].value / max(pair[1].error or 0, 1e-9))
        allowed = allowed_drop(report.target_drop, AGREEMENT in row.ap_with)
        judgement = judge(difference, allowed, score_name(row, score), measured_on(row))
        return cls(report, row, score, difference, judgement, allowed)

    @property
    def level(self) -> Level:
        """How the row stands.

        Without labels, agreement says how much INT8 differs, and not that it is worse: after QAT that is to be checked.
        """
        if self.judgement.level is Level.LOSS and self.unlabelled and self.trained:
            return Level.CHECK
        if self.judgement.level is Level.OK and (self.row.caveat or self.report.doubts):
            return Level.CHECK
        return self.judgement.level

    @property
    def is_loss(self) -> bool:
        """Whether something is to be done about a loss."""
        return self.level is Level.LOSS

    @property
    def too_few_images(self) -> bool:
        """Whether more images are needed to tell."""
        return self.judgement.level is Level.CHECK

    @cached_property
    def before(self) -> Row | None:
        """The INT8 checkpoint of an earlier step than the judged row."""
        int8 = int8_rows(self.report)
        networks = [row for row in int8[: int8.index(self.row)] if row.file.endswith(".pt")]
        return networks[-1] if networks else None

    @property
    def file_before(self) -> str:
        """The file of the step before; empty where there is none."""
        return self.before.file if self.before else ""

    @property
    def before_is_ok(self) -> bool:
        """Whether the step before is a checkpoint that can be exported in place of this one."""
        if self.before is None or self.suffix != ".pt" or not self.report.difference(self.before):
            return False
        return Facts.of(self.report, self.before).level is Level.OK

    @property
    def lost_since_before(self) -> bool:
        """Whether the row is measurably worse than the checkpoint of the step before."""
        own_loss = self.before and self.row.difference(self.before, self.score)
        return bool(own_loss and own_loss.significant and own_loss.value < 0)

    @property
    def is_recipe(self) -> bool:
        """Whether the result is a recipe that a network is quantized by."""
        return self.row.stage in OF_RECIPES or (self.suffix == ".yaml" and not self.is_loss)

    @property
    def method_was_chosen(self) -> bool:
        """Whether the row is the INT8 network of `qat.py sensitive`, by a method that the user chose."""
        return self.row.stage == "INT8" and bool({"--calib-method", "--percentile"} & {*self.repeated(CALIBRATION)})

    @property
    def can_train(self) -> bool:
        """Whether QAT may help: the row is a network, and was not trained."""
        return self.suffix != ".yaml" and not self.trained and self.row.stage != BEST_PTQ

    @property
    def larger_target(self) -> str:
        """The option that allows as much as the row may have lost."""
        return f"--target-drop {rounded_up(self.difference.most_lost)}"

    @property
    def units_more(self) -> str:
        """How many more images or groups could tell, in words."""
        resampled = getattr(self.row, f"{self.score}_resampled")
        units = resampled.units if resampled and resampled.units else self.row.images or 1
        number = more_units(self.difference, self.allowed, units)
        return f"about {number} more {'groups of ' if 'group' in self.row.resampled_over else ''}images"


def is_float(row: Row) -> bool:
    """Whether a row is the FP32 model's."""
    return row.stage.lower() == "float"


def int8_rows(report: Report) -> list[Row]:
    """The rows that are neither of the FP32 model nor of an FP16 or FP32 engine."""
    return [row for row in report.rows if not re.match("float|.*FP(16|32)$", row.stage, re.IGNORECASE)]


def allowed_drop(target_drop: float | None, unlabelled: bool) -> float:
    """The AP, or without labels the agreement, that INT8 may lose; `target_drop` is the user's, if there is one."""
    if target_drop is not None:
        return target_drop
    return TARGET_DISAGREEMENT if unlabelled else TARGET_DROP


def score_name(row: Row, score: AnyAp) -> str:
    """The name of a score in a sentence."""
    if score == "mask_ap":
        return "mask AP"
    return "agreement" if AGREEMENT in row.ap_with else "AP"


def measured_on(row: Row) -> str:
    """What a row was measured on, in words: '500 images', '13 groups of 800 images'."""
    images = plural(row.images, "image") if row.images else "these images"
    return images if row.resampled_over == "images" else f"{row.resampled_over} of {images}"


# What comes next


@dataclass(frozen=True)
class NextStep:
    """A row of the table: when it applies, what to do, and the command for it."""

    name: str
    applies: Callable[[Facts], bool]
    todo: Callable[[Facts], str]
    command: Callable[[Facts], list[str]]


def export_command(weights: str) -> list[str]:
    """The command that exports a checkpoint."""
    return ["python", "export_qat.py", "--weights", weights, "--include", "onnx", "--simplify", "--dynamic", "batch"]


def build_command(file: str, size: str = "") -> list[str]:
    """The command that builds an engine of an ONNX file."""
    return ["scripts/generate_trt_engine.sh", file, *([size] if size else [])]


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
        lambda facts: facts.is_loss and facts.method_was_chosen,
        lambda facts: "look for a better calibration",
        lambda facts: facts.qat("calibrate"),
    ),
    NextStep(
        "no layer helps",
        lambda facts: facts.is_loss and facts.row.stage == "INT8",
        lambda facts: "no layer in float regains a measurable part of it: let QAT regain it",
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
        lambda facts: facts.too_few_images,
        lambda facts: f"add {facts.units_more} to the val split, or allow the loss with {facts.larger_target}",
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
        lambda facts: ["python", "scripts/benchmark_trt.py", facts.row.file],
    ),
    NextStep(
        "step before",
        lambda facts: facts.before_is_ok,
        lambda facts: f"export {facts.file_before}, which does not lose as much",
        lambda facts: export_command(facts.file_before),
    ),
    NextStep(
        "verify",
        lambda facts: facts.lost_since_before and facts.suffix == ".onnx",
        lambda facts: f"its checkpoint {facts.file_before} does not lose as much: verify the file",
        lambda facts: ["python", "export_qat.py", "--verify", facts.row.file],
    ),
    NextStep(
        "export anew",
        lambda facts: facts.lost_since_before,
        lambda facts: f"{facts.file_before} does not lose as much: export it anew",
        lambda facts: export_command(facts.file_before),
    ),
    NextStep(
        "QAT",
        lambda facts: facts.can_train,
        lambda facts: "let QAT regain it",
        lambda facts: facts.qat("quantize", *facts.repeated(CALIBRATION), *facts.repeated(OF_QAT)),
    ),
    NextStep(
        "layers in FP16",
        lambda facts: True,
        lambda facts: "keep the layers that lose it in FP16",
        lambda facts: facts.qat("sensitive", *_recipe_so_far(facts)),
    ),
)


def _recipe_so_far(facts: Facts) -> list[str]:
    return ["--recipe", facts.row.file] if facts.suffix == ".yaml" else facts.repeated(CALIBRATION)


def rounded_up(drop: float | None) -> str:
    """A loss rounded up to three digits after the point; an unknown one is 1."""
    return "1" if drop is None else f"{math.ceil(drop * 1000) / 1000:g}"


def next_step(facts: Facts) -> NextStep:
    """The first row of `STEPS` that applies."""
    return next(step for step in STEPS if step.applies(facts))


def advise(report: Report) -> Advice:
    """Judge a report, and name the next step.

    Of one run, the network that it ended with is judged, by its last row; a checkpoint and the files that were made of
    it are one network, and a measurable loss of one of them is a loss. Of several runs it is the row with the highest
    AP against FP32.
    """
    is_single_run = len(report.command.splitlines()) <= 1
    unfinished = [note.partition("continue with: ")[2] for note in report.notes if note.startswith(UNFINISHED)]
    if unfinished and is_single_run:
        return Advice(Level.NONE, "This run is not finished", "continue it", unfinished[0])
    if problems := problems_of(report):
        return Advice(Level.CHECK, f"No verdict: {'; '.join(problems)}", CORRECT)
    int8 = int8_rows(report)
    compared = [row for row in int8 if report.difference(row)]
    if not compared:
        return _without_comparison(report, int8)
    networks = [row for row in compared if row.stage not in OF_RECIPES and not row.file.endswith(".yaml")]
    candidates = [Facts.of(report, row) for row in networks or compared]
    if is_single_run:
        facts = _last_network(candidates)
    else:
        facts = max(candidates, key=lambda candidate: candidate.difference.value)
    step = next_step(facts)
    name = labels(report)[report.rows.index(facts.row)]
    sentence = f"INT8 {facts.judgement.words}" if name == "INT8" else f"INT8 ({name}) {facts.judgement.words}"
    command = shlex.join(step.command(facts))
    return Advice(facts.level, sentence, step.todo(facts), command, facts.allowed, facts.row)


def _last_network(candidates: Sequence[Facts]) -> Facts:
    """The last row, or a row of the same network that shows a loss where the last one does not."""
    if candidates[-1].suffix == ".yaml":
        return candidates[-1]
    start = max((at for at, facts in enumerate(candidates) if facts.suffix == ".pt"), default=0)
    losses = [facts for facts in candidates[start:] if facts.is_loss]
    return losses[-1] if losses else candidates[-1]


def problems_of(report: Report) -> list[str]:
    """The reasons why AP means nothing here: those that the run has noted, and those that its counts and rows show."""
    problems: list[str] = list(report.problems)
    for counts in report.splits:
        if counts.is_all_in_train:
            images = plural(counts.images, "image")
            problems.append(f"all {images} of {counts.name} are training images: AP says nothing about new images")
    for row in report.rows:
        if is_float(row) and row.finds_nothing:
            problems.append(f"the FP32 model has AP {row.ap:.4f}; check data, image size and weights")
    return list(dict.fromkeys(problems))


def _without_comparison(report: Report, int8: Sequence[Row]) -> Advice:
    """The advice for a report in which no INT8 row compares with an FP32 row."""
    if int8:
        context = Context(report, int8[-1])
        reason = "no row compares with the FP32 row" if report.baseline(int8[-1]) else "there is no FP32 row"
        command = shlex.join(context.evaluation())
        return Advice(Level.NONE, f"What INT8 costs is unknown: {reason}", "evaluate both models", command)
    if not report.rows:
        return Advice(Level.NONE, "")
    if report.doubts:
        return Advice(Level.NONE, "", f"{'; '.join(report.doubts)}; {CORRECT}")
    context = Context(report, report.rows[-1])
    if context.suffix == ".pt":
        todo = "quantize it"
        if context.lacking_splits:
            todo += f" with a dataset that has {' and '.join(context.lacking_splits)} images, too"
        return Advice(Level.NONE, "", todo, shlex.join(context.qat("quantize")))
    if context.suffix == ".onnx":
        return Advice(Level.NONE, "", "build the engine", shlex.join(build_command(context.row.file)))
    benchmark = ["python", "scripts/benchmark_trt.py", context.row.file]
    return Advice(Level.NONE, "", "measure its speed", shlex.join(benchmark))


def worse_after_qat(rows: Sequence[Row]) -> str:
    """A sentence where QAT's AP or agreement is measurably below PTQ's; empty elsewhere.

    The best state is chosen by the loss on training images, so that AP on validation images stays a fair score.
    """
    stages = {row.stage: row for row in rows}
    ptq, qat = stages.get("PTQ"), stages.get("QAT")
    if ptq is None or qat is None:
        return ""
    scores: tuple[AnyAp, ...] = ("ap", "agreement")
    for score in scores:
        difference = qat.difference(ptq, score)
        if difference and difference.significant and difference.value < 0:
            by_agreement = score == "agreement" or AGREEMENT in ptq.ap_with
            words = "agrees more with the FP32 model" if by_agreement else "has the higher AP"
            return f"PTQ {words} on these validation images (QAT {difference} against it): {ptq.file}"
    return ""


@dataclass(frozen=True)
class AfterExport:
    """What is known where a file was exported, for the commands that follow.

    Attributes:
        data: the dataset's YAML; empty where it is not here.
        reference: the FP32 checkpoint that an INT8 file was made from; empty for an FP32 file, or if it is not known.
        unlabelled: the images have no labels.
    """

    has_gpu: bool
    data: str
    reference: str
    unlabelled: bool

    def lines(self, path: str, *, engine_only: bool, for_openvino: bool = False) -> list[str]:
        """The lines that follow the export of a file: without a GPU, first what can be done here.

        Args:
            engine_only: the file holds a TensorRT plugin, which ONNX Runtime cannot run.
            for_openvino: the file is for OpenVINO, and no engine is built of it.
        """
        build = shlex.join(build_command(path))
        if self.has_gpu and not for_openvino:
            return [f"next: {build}"]
        if engine_only:
            return [f"next, on the machine with the GPU: {build}"]
        evaluation = ["python", "val_trt.py", path]
        if for_openvino:
            evaluation += ["--runtime", "openvino"]
        if self.reference:
            evaluation += ["--reference", self.reference]
        evaluation += ["--data", self.data or "DATA.yaml"]
        if self.unlabelled:
            evaluation.append("--unlabelled")
        if for_openvino:
            return [f"next: {shlex.join(evaluation)}"]
        return [f"next: {shlex.join(evaluation)}", f"then, on the machine with the GPU: {build}"]
