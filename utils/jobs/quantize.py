"""The quantize job: FP32 evaluation → PTQ → its evaluation → QAT → evaluation of the best, resumable at every step.

The best state is the one with the smallest loss on training images that are held out from calibration and QAT. It is
PTQ's unless the loss after an epoch of QAT is lower by two standard errors. AP on the validation images chooses
nothing, since choosing the best epoch by it would bias it upwards.

`run` is the whole command, and `Session` has its steps. Each step saves the state at its end (`run_state.py`), and is
skipped where the state holds its result. Several processes all take every step, and come to the same numbers.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from models.quantize import calibration, checkpoint, placement
from models.quantize.finetune import (
    DivergedError,
    Finetuner,
    HeldOutLoss,
    held_out_loss,
    learning_rate,
    seed_everything,
)
from models.quantize.recipe import Finetune
from utils import upstream
from utils.core.curves import Curves
from utils.core.files import write_bytes, write_text
from utils.core.logging import warnings_until_now
from utils.core.run_folder import stem_of
from utils.core.score import Score, standard_errors
from utils.core.text import plural
from utils.core.weights import FLOAT_HASH
from utils.evaluation.results import EvalResult
from utils.jobs.advice import advise, worse_after_qat
from utils.jobs.calibrate import find_ranges
from utils.jobs.commands import export_command
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, check_float_ap, without_tables
from utils.jobs.inputs import FEWEST_HELD_OUT, Inputs, check_left_out, image_batches
from utils.jobs.judgement import allowed_drop, judge, measured_on
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import STOPPED, RunState, checkpoint_name, open_run
from utils.reports import figures, tables
from utils.reports.curve_figures import curve_figures
from utils.reports.detections import differences_in
from utils.reports.page import PAGE_NAME, csv_of, write_page
from utils.reports.schema import AP, BEST_PTQ, UNFINISHED, Advice, Epoch, Level, Report, Row

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

STAGES = ("float", "PTQ", "QAT")  # of the rows, in the order of the pipeline
FEWEST_IMAGES = 2 * FEWEST_HELD_OUT  # training images; of fewer, none can be held out to choose between PTQ and QAT
SAMPLES = 4  # images on the page
CANDIDATES = 16  # images that these are chosen from
CSV_NAME = "results.csv"


def run(options: QuantizeOptions) -> Report:
    """`qat.py quantize`: begin a run in a new folder, or resume one, and carry it to its end."""
    with open_run(options, RunState) as (folder, state, inputs), without_tables():
        if options.resume is not None:
            logger.info("resuming %s: %s", folder, state.summary())
        session = Session(folder, state, inputs)
        if not state.finished:
            session.evaluate_float()
            student = session.calibrated()
            why_no_qat = session.why_no_qat()
            if not why_no_qat:
                session.train(student)
            session.finish(why_no_qat)
        session.remove_epochs()
        report = session.report()
        session.log_result(report)
    return report


class Session:
    """One quantize run: what it works on, where it stands, and the steps; each step saves the state at its end."""

    def __init__(self, folder: Path, state: RunState, inputs: Inputs[QuantizeOptions]) -> None:
        self.folder = folder
        self.state = state
        self.inputs = inputs
        self.options = inputs.options
        self.recipe = inputs.recipe  # with the calibration method that `auto` has chosen
        self.weights = folder / "weights"
        self.stem = stem_of(self.options.weights, folder)
        self.float_model = upstream.call_fused(inputs.network())
        self.measurer = Measurer.of(inputs)
        logger.info("recipe:\n%s", yaml.safe_dump(state.recipe, sort_keys=False).rstrip())
        logger.info("%s → %s", self.options.weights, folder)

    @property
    def can_measure(self) -> bool:
        """True if networks can be evaluated: without labels, the detections of the FP32 model take their place."""
        if not self.options.unlabelled:
            return True
        return "val" in self.inputs.data.splits and not self.options.no_eval_origin

    @property
    def remaining_epochs(self) -> range:
        """The epochs of QAT that are left; none once the network has diverged."""
        if self.state.stopped:
            return range(0)
        return range(len(self.state.history), self.recipe.finetune.epochs)

    @property
    def final(self) -> Path:
        """The file to export."""
        if self.options.qat == "never":
            return self.weights / self.state.best_file
        return self.weights / checkpoint_name("qat_best", self.stem)

    # The steps

    def evaluate_float(self) -> None:
        """Evaluate the FP32 model, again in a resumed run: the other networks are compared with its detections.

        Raises:
            DataError: it detects nothing, or many images turn out to be damaged, and `--force` was not given.
        """
        if not self.can_measure or self.options.no_eval_origin:
            return
        result = self.measurer.measure(self.float_model, FLOAT_MODEL, as_reference=True)
        check_float_ap(result.ap, self.options.force)
        check_left_out(self.inputs.data, self.options.force)
        self.save(self.measurer.row("float", self.options.weights, result, result.seconds))

    def calibrated(self) -> nn.Module:
        """Return the network of the last checkpoint; before the first, a calibrated copy, which is evaluated."""
        if self.state.files:
            return self.load(self.state.files[-1])
        start = time.perf_counter()
        student = self.inputs.placed()
        self._write_placement()
        self._find_ranges(student)
        result = None
        if self.can_measure and not self.options.no_eval_ptq:
            result = self.measure(student, "PTQ")
        name = self.write_checkpoint("ptq", student, result, stage="PTQ")
        seconds = time.perf_counter() - start
        self.save(self.measurer.row("PTQ", self.weights / name, result, seconds))
        return student

    def why_no_qat(self) -> str:
        """Return why QAT is skipped, as a clause; empty where it trains.

        `--qat auto` trains unless AP, of boxes and of masks, is shown to lose at most what is allowed.
        """
        if self.options.qat == "never":
            return "--qat never"
        if self.options.epochs is None and not self.inputs.held_out:
            images = len(self.inputs.data.read("train").images)
            return (
                f"{plural(images, 'training image')} are too few to hold some out for the choice between PTQ and QAT "
                f"({FEWEST_IMAGES} are enough; with --epochs 10 QAT trains anyway, and the loss on its own training "
                "images chooses)"
            )
        if self.options.qat == "always":
            return ""
        reason = self._why_ptq_is_enough()
        if reason:
            self.note(f"--qat auto: {reason}: QAT is skipped")
        else:
            self.note("--qat auto: PTQ may lose more than is allowed: QAT trains")
        return reason

    def train(self, student: nn.Module) -> None:
        """Train the epochs that are left, until the network diverges."""
        epochs = self.remaining_epochs
        if not epochs:
            return
        training = Training(student, self.float_model, self.inputs, self.recipe.finetune, self.state.trainer)
        for epoch in epochs:
            self.train_epoch(epoch, student, training)
            if self.state.stopped:
                break

    def train_epoch(self, epoch: int, student: nn.Module, training: Training) -> None:
        """Train and evaluate an epoch, write its checkpoint, keep it if it is the best; or note that it diverged."""
        start = time.perf_counter()
        try:
            losses = training.epoch(epoch)
        except DivergedError as error:
            self.state.stopped = f"epoch {epoch}: {error}"
            self.save(None)
            return
        result = None
        if self.options.eval_epochs and self.can_measure:
            result = self.measure(student, "QAT epoch", f"QAT epoch {epoch}")
        seconds = time.perf_counter() - start
        name = self.write_checkpoint(f"qat_ep_{epoch}", student, result, stage="QAT", epoch=epoch)
        row = None
        if result:
            row = self.measurer.row("QAT", self.weights / name, result, seconds)
        self.state.history.append({**self._history_entry(epoch, losses, row), "seconds": seconds})
        self.state.trainer = training.state_dict()
        is_best = self._is_best(training.ptq, losses)
        if is_best:
            self.state.best_epoch = epoch
            if result:
                self.state.keep_as("QAT", "QAT epoch")
        self.save(row if is_best else None)
        self._log_epoch(epoch, losses, result, is_best)

    def finish(self, why_no_qat: str) -> None:
        """Give the best state its final name, evaluate it, note why it is the best, and write all files of the run."""
        if self.state.stopped:
            self.note(f"{STOPPED} {self.state.stopped}; the best state is restored")
            self.state.save(self.folder)
        model = self.load(self.state.best_file)
        if self.options.qat != "never":
            write_bytes(self.final, (self.weights / self.state.best_file).read_bytes())
            self.note(self.why_best(why_no_qat))
            self._measure_best(model)
        report = self.report()
        report.ranges = calibration.tensor_ranges(model)
        if "val" in self.inputs.data.splits:
            self._add_samples(report, model)
        self.state.save(self.folder)
        self._write_files(report)
        self.state.finished = True  # after all files are written: what is not finished is done again
        self.state.save(self.folder)

    def remove_epochs(self) -> None:
        """Remove the checkpoints of single epochs of a finished run, unless `--keep-epochs` was given."""
        if self.options.keep_epochs or self.options.qat == "never":
            return
        for name in self.state.files[1:]:
            (self.weights / name).unlink(missing_ok=True)

    def log_result(self, report: Report) -> None:
        """Log the last lines of the program: the table, which file to use, the verdict, and what comes next."""
        advice = advise(report)
        lines = [tables.terminal_table(report), self.result_line()]
        for sentence in (worse_after_qat(report.rows), advice.text):
            if sentence:
                lines.append(sentence)
        lines.append(f"report: {self.folder / PAGE_NAME}")
        lines += self._next_lines(report, advice)
        logger.info("\n%s", "\n".join(lines))

    # What every step does

    def load(self, file: str) -> nn.Module:
        """Load the network of one of the run's checkpoints, on the device."""
        return checkpoint.load_quantized(self.weights / file).model.to(self.inputs.device)

    def measure(self, model: nn.Module, stage: str, name: str = "") -> EvalResult:
        """Evaluate a network, and keep its disagreements and curves, for page and plots, as those of its stage."""
        result = self.measurer.measure(model, name or stage, curves=self.options.plots)
        self.state.disagreements[stage] = dict(result.disagreements)
        if result.curves:
            self.state.curves[stage] = result.curves.to_dict()
        return result

    def write_checkpoint(self, step: str, student: nn.Module, result: EvalResult | None, **extra: Any) -> str:
        """Write the student, with `extra` beside what every checkpoint of the run holds; return the file's name."""
        source = self.inputs.source
        score = result.score if result else None
        extra["ap"] = None
        if score:
            extra |= score.to_dict()
        extra["imgsz"] = self.inputs.imgsz
        extra["data"] = self.options.data
        extra["float_weights"] = self.options.weights
        extra["float_sha256"] = self.state.weights_hash
        extra[FLOAT_HASH] = source.weights_hash
        extra["origin"] = source.origin
        if self.options.unlabelled:
            extra["labels_of"] = self.options.weights
        content = checkpoint.QuantizedCheckpoint(
            student, self.recipe, source.names, source.nc, source.stride, source.yaml, extra
        )
        name = checkpoint_name(step, self.stem, score)
        checkpoint.save(self.weights / name, content)
        self.state.files.append(name)
        return name

    def save(self, row: Row | None) -> None:
        """Finish a step: write the state, then the report, which is made anew from the state."""
        if row is not None:
            self.state.rows[row.stage] = row.model_dump()
        self.state.save(self.folder)
        report = self.report()
        resume_command = shlex.join(["python", "qat.py", "quantize", "--resume", str(self.folder)])
        report.notes.append(f"{UNFINISHED}; continue with: {resume_command}")
        report.save(self.folder / "report.json")

    def report(self) -> Report:
        """Return everything measured until now; warnings up to now become part of the state."""
        state = self.state
        rows = [Row(**state.rows[stage]) for stage in STAGES if stage in state.rows]
        history = [Epoch(**entry, chosen=entry["epoch"] == state.best_epoch) for entry in state.history]
        warnings = [*state.warnings, *warnings_until_now()]
        state.warnings = list(dict.fromkeys(warnings))
        report = Report(command=state.command, rows=rows, history=history, notes=list(state.notes))
        report.warnings = list(state.warnings)
        report.doubts = self.inputs.doubts
        report.target_drop = self.options.target_drop
        report.held_out_images = len(self.inputs.held_out)
        report.data = str(self.options.data)
        report.splits = self.inputs.data.counts()
        report.created = state.created
        return report

    def note(self, text: str) -> None:
        """Log a sentence, and keep it for the report, once."""
        logger.info("%s", text)
        if text not in self.state.notes:
            self.state.notes.append(text)

    # PTQ

    def _write_placement(self) -> None:
        """Write where quantizers are, and log the first part of it."""
        text = placement.describe(self.inputs.plan)
        path = self.folder / "placement.txt"
        write_text(path, text + "\n")
        summary = text.partition(f"\n{placement.SCALES}")[0]
        logger.info("%s\nfull list: %s", summary, path)

    def _find_ranges(self, student: nn.Module) -> None:
        """Set the ranges of a placed network, and keep the method that `auto` has chosen."""
        self.recipe, why = find_ranges(student, self.float_model, self.inputs)
        if why:
            self.state.recipe = self.recipe.to_dict()
            self.note(why)

    def _why_ptq_is_enough(self) -> str:
        """Return how PTQ is judged, where it is shown to lose at most what is allowed; empty elsewhere."""
        ptq = Row(**self.state.rows["PTQ"])
        base = Row(**self.state.rows["float"])
        allowed = allowed_drop(self.options.target_drop, self.options.unlabelled)
        clauses = []
        for ap in AP:
            difference = ptq.difference(base, ap)
            if difference is None:
                continue
            judgement = judge(difference, allowed, images=measured_on(ptq))
            if judgement.level is not Level.OK:
                return ""
            clauses.append(judgement.words)
        return f"PTQ {' and '.join(clauses)}" if clauses else ""

    # QAT

    def _history_entry(self, epoch: int, losses: Mapping[str, float], row: Row | None) -> dict[str, Any]:
        """Return an epoch for the history: losses; if AP was measured, AP and the error of its difference to PTQ."""
        entry: dict[str, Any] = {"epoch": epoch, **losses}
        if row is None:
            return entry
        entry |= {"ap": row.ap, "ap50": row.ap50}
        if row.mask_ap is not None:
            entry |= {"mask_ap": row.mask_ap, "mask_ap50": row.mask_ap50}
        ptq = Row(**self.state.rows["PTQ"])
        for ap in AP:
            difference = row.difference(ptq, ap)
            entry[f"{ap}_error"] = difference.error if difference else None
        return entry

    def _is_best(self, ptq: HeldOutLoss, losses: Mapping[str, float]) -> bool:
        """True if an epoch's loss is lower than PTQ's by two standard errors, and lower than that of the best epoch."""
        loss = losses["held_out"]
        error = losses["held_out_error"]
        if ptq.value - loss <= standard_errors(len(ptq.terms)) * error:
            return False
        best = self.state.best_epoch
        return best is None or loss < self.state.history[best]["held_out"]

    def _log_epoch(self, epoch: int, losses: Mapping[str, float], result: EvalResult | None, is_best: bool) -> None:
        """Log a line about an epoch."""
        parts = [str(result.score)] if result else []
        parts.append(f"training loss {losses['loss']:.4g}")
        parts.append(f"loss on {self.inputs.deciding_images} {losses['held_out']:.4g}")
        if is_best:
            parts.append("the best so far")
        logger.info("epoch %d: %s", epoch, ", ".join(parts))

    # The best state

    def why_best(self, why_no_qat: str) -> str:
        """Return why the best state is QAT's or PTQ's, as a sentence."""
        state = self.state
        if not (state.history and state.trainer):
            reason = f", because {why_no_qat}" if why_no_qat else ""
            return f"QAT trained no epoch{reason}: {self.final.name} is the PTQ state"
        best = state.best_epoch
        if best is None:
            entry = min(state.history, key=lambda epoch: epoch["held_out"])
        else:
            entry = state.history[best]
        difference = f"{entry['held_out'] - entry['held_out_ptq']:+.2g} ± {entry['held_out_error']:.2g}"
        return (
            f"{'PTQ' if best is None else 'QAT'} is chosen by the loss on {self.inputs.deciding_images}: "
            f"{entry['held_out']:.4g} after epoch {entry['epoch']}, {entry['held_out_ptq']:.4g} after PTQ, difference "
            f"{difference}; QAT is chosen only if its loss is lower by two standard errors"
        )

    def _measure_best(self, model: nn.Module) -> None:
        """Add the row of the best state, under the name of the final file."""
        row = self._row_of_best(model)
        seconds = sum(entry["seconds"] for entry in self.state.history)
        self.state.rows["QAT"] = {**row, "file": str(self.final), "seconds": seconds}

    def _row_of_best(self, model: nn.Module) -> dict[str, Any]:
        """Return the row of the best state: PTQ's, that of --eval-epochs, or that of an evaluation now."""
        best = self.state.best_epoch
        if best is None:
            self.state.keep_as("QAT", "PTQ")
            return {**self.state.rows["PTQ"], "stage": BEST_PTQ}
        if "QAT" in self.state.rows:
            return self.state.rows["QAT"]
        result = self.measure(model, "QAT", f"QAT epoch {best}") if self.can_measure else None
        return self.measurer.row("QAT", self.final, result, 0.0).model_dump()

    def _add_samples(self, report: Report, model: nn.Module) -> None:
        """Add the images on which the best state and the FP32 model differ most; others if none is known to differ.

        Candidates are the images with the most differences in the evaluation. Drawings have another NMS threshold, so
        the candidates are ranked again by the differences that are drawn.
        """
        stage = "PTQ" if self.options.qat == "never" else "QAT"
        counts = self.state.disagreements.get(stage, {})
        ranked = sorted(counts, key=lambda path: (-counts[path], path))
        differing = [path for path in ranked if counts[path]]
        if differing:
            agreeing = len(counts) - len(differing)
            report.samples_are = (
                f"The images on which FP32 and INT8 differ most, of {len(counts)}; both detect the same on {agreeing}"
            )
        models = {"FP32": self.float_model, f"INT8 ({report.rows[-1].stage})": model}
        samples = self.measurer.samples(models, differing[:CANDIDATES])
        report.samples = sorted(samples, key=differences_in, reverse=True)[:SAMPLES]

    # Files and last lines

    def _write_files(self, report: Report) -> None:
        """Write the report, its page, the table as CSV, and the plots."""
        report.save(self.folder / "report.json")
        write_text(self.folder / CSV_NAME, csv_of(report))
        write_page(report, self.folder, advise(report))
        if report.scored_epochs:
            name, figure = figures.per_epoch(report)
            figures.save_figure(figure, self.folder / f"{name}.png")
        stage = "PTQ" if self.options.qat == "never" else "QAT"
        if self.options.plots and stage in self.state.curves:
            curves = Curves.from_dict(self.state.curves[stage])
            for file, figure in curve_figures(curves, report.rows[-1].stage).items():
                figures.save_figure(figure, self.folder / file)

    def result_line(self) -> str:
        """Return a line with the file to use."""
        if self.options.qat == "never":
            return f"quantized: {self.final}"
        best = self.state.best_epoch
        words = "the PTQ state" if best is None else f"epoch {best}"
        score = Score.from_dict(self.state.rows["QAT"])
        if score:
            text = str(score)
            if self.options.unlabelled:
                text = text.replace("AP", "agreement")
            words += f", {text}"
        return f"best: {self.final} ({words})"

    def _next_lines(self, report: Report, advice: Advice) -> list[str]:
        """Return the line with the next command, and a line with the export command if the next one is another."""
        export = shlex.join(export_command(str(self.final)))
        if all(row.ap is None for row in report.rows):
            return [f"next: {export}"]
        lines = [f"next: {advice.next_line}"]
        if advice.command and "export_qat.py" not in advice.command:
            lines.append(f"or export it as it is: {export}")
        return lines


class Training:
    """The epochs of a run: a student, its teacher, the training images, and those that are held out from training.

    Attributes:
        ptq: the held-out loss before training.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        inputs: Inputs[QuantizeOptions],
        settings: Finetune,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the first epoch, or the one that follows `state`, which `state_dict` has returned."""
        self._settings = settings
        self._seed = inputs.options.seed
        self._student = student
        self._teacher = teacher
        self._tuner = Finetuner(student, teacher, settings, device=inputs.device)
        self._images = inputs.training_loader()
        self._held_out = inputs.held_out_images  # 200 at most, for the end of each epoch
        self._steps = min(settings.iters, len(self._images))
        self._log_plan(inputs.options.batch_size)
        if state:
            self._tuner.load_state_dict(state)
            self.ptq = HeldOutLoss(state["ptq"])
        else:
            self.ptq = self._measure()
            text = "PTQ: loss %.4g on %s; in the first epochs the loss often rises"
            logger.info(text, self.ptq.value, inputs.deciding_images)

    def epoch(self, number: int) -> dict[str, float]:
        """Train an epoch on images whose order and augmentation depend on nothing but the seed and the epoch.

        Returns:
            The mean loss, the held-out loss after it and the standard error of its difference to PTQ's, and the mean
            learning rate, as the history has them.

        Raises:
            DivergedError: the loss is not finite.
        """
        from tqdm import tqdm

        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        seed_everything(seed)
        self._images.order.manual_seed(seed)
        rates = self._rates(number)
        batches = itertools.islice(image_batches(self._images), self._settings.iters)
        title = f"QAT epoch {number}/{self._settings.epochs - 1}"
        is_quiet = not logger.isEnabledFor(logging.INFO)
        with tqdm(batches, title, self._steps, disable=is_quiet) as bar:

            def show(loss: float) -> None:
                bar.set_postfix(loss=f"{loss:.4g}", refresh=False)

            trained = self._tuner.run_epoch(bar, rates.__getitem__, show)
        held_out = self._measure()
        return {
            "loss": trained.loss,
            "held_out": held_out.value,
            "held_out_ptq": self.ptq.value,
            "held_out_error": held_out.difference(self.ptq).error or 0.0,
            "lr": sum(rates) / self._steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a killed run needs to train the next epoch, beside the network."""
        return {**self._tuner.state_dict(), "ptq": self.ptq.terms}

    def _log_plan(self, batch_size: int) -> None:
        """Log how many steps are trained, and on how many images each."""
        epochs = self._settings.epochs
        images = min(batch_size, len(self._images.dataset))
        text = "QAT: %s x %d steps = %d steps of %d images, learning rate up to %.2g"
        total = epochs * self._steps
        logger.info(text, plural(epochs, "epoch"), self._steps, total, images, self._settings.highest_rate)

    def _rates(self, epoch: int) -> list[float]:
        """Return the learning rate of each step of an epoch."""
        first = epoch * self._steps
        total = self._settings.epochs * self._steps
        highest = self._settings.highest_rate
        return [learning_rate(step, total, highest) for step in range(first, first + self._steps)]

    def _measure(self) -> HeldOutLoss:
        """Return the loss of the student on the held-out images."""
        return held_out_loss(self._student, self._teacher, self._held_out, self._tuner.device)
