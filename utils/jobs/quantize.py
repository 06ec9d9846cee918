"""The quantize job: FP32 evaluation → PTQ → its evaluation → QAT → evaluation of the best, resumable at every step.

The best state is the one with the smallest loss on training images that are held out from calibration and QAT, and PTQ
unless that is lower by two standard errors. AP on the validation images chooses nothing: the best of several draws of
it would be too good. Each step ends with the state being saved (`run_state.py`), and is skipped where the state says
that it is done. Several processes all take every step, and come to the same numbers.
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
from utils.core.score import Difference, Score
from utils.core.text import plural
from utils.core.weights import FLOAT_HASH
from utils.evaluation.results import EvalResult
from utils.jobs.advice import advise, allowed_drop, export_command, judge, measured_on, worse_after_qat
from utils.jobs.calibrate import find_ranges
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, check_float_ap, without_tables
from utils.jobs.inputs import FEWEST_HELD_OUT, Inputs, check_left_out, image_batches
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import STOPPED, RunState, checkpoint_name, open_run, stem_of
from utils.reports import figures, tables
from utils.reports.curve_figures import curve_figures
from utils.reports.detections import differences_in
from utils.reports.page import PAGE_NAME, csv_of, write_page
from utils.reports.schema import AP, BEST_PTQ, UNFINISHED, Epoch, Level, Report, Row

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

FEWEST_IMAGES = 2 * FEWEST_HELD_OUT  # training images; of fewer, none can be held out to choose between PTQ and QAT
SAMPLES, CANDIDATES = 4, 16  # images on the page, and those that they are chosen from
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
        logger.info("\n%s", "\n".join(session.last_lines(report)))
    return report


class Session:
    """One quantize run: what it works on, where it stands, and the steps; each step saves the state at its end."""

    def __init__(self, folder: Path, state: RunState, inputs: Inputs[QuantizeOptions]) -> None:
        self.folder, self.state, self.inputs, self.options = folder, state, inputs, inputs.options
        self.recipe = inputs.recipe  # with the calibration method that `auto` has chosen
        self.weights, self.stem = folder / "weights", stem_of(self.options.weights, folder)
        self.float_model = upstream.call_fused(inputs.network())
        self.measurer = Measurer.of(inputs)
        # without labels, AP is that with the FP32 model's detections, which have to be known
        has_val = "val" in inputs.data.splits
        self.measures = not self.options.unlabelled or (has_val and not self.options.no_eval_origin)
        logger.info("recipe:\n%s", yaml.safe_dump(state.recipe, sort_keys=False).rstrip())
        logger.info("%s → %s", self.options.weights, folder)

    @property
    def final(self) -> Path:
        """The file to export."""
        if self.options.qat == "never":
            return self.weights / self.state.best_file
        return self.weights / checkpoint_name("qat_best", self.stem)

    def evaluate_float(self) -> None:
        """Evaluate the FP32 model, in a resumed run, too: the others are compared with its detections.

        Raises:
            DataError: it finds nothing, or many images turn out to be damaged, and `--force` was not given.
        """
        if not self.measures or self.options.no_eval_origin:
            return
        result = self.measurer.measure(self.float_model, FLOAT_MODEL, as_reference=True)
        check_float_ap(result.ap, self.options.force)
        check_left_out(self.inputs.data, self.options.force)
        self.save(self.measurer.row("float", self.options.weights, result, result.seconds))

    def calibrated(self) -> nn.Module:
        """The network as the last checkpoint has it; before the first, a calibrated copy, which is evaluated."""
        if self.state.files:
            return checkpoint.load_quantized(self.weights / self.state.files[-1]).model.to(self.inputs.device)
        began, student = time.perf_counter(), self.inputs.placed()
        text, path = placement.describe(self.inputs.plan), self.folder / "placement.txt"
        write_text(path, text + "\n")
        logger.info("%s\nall of it: %s", text.partition(f"\n{placement.SCALES}")[0], path)
        self.recipe, why = find_ranges(student, self.float_model, self.inputs)
        if why:
            self.state.recipe = self.recipe.to_dict()
            self.note(why)
        result = None
        if self.measures and not self.options.no_eval_ptq:
            result = self.measure(student, "PTQ")
        name = self.write_checkpoint("ptq", student, result.score if result else None, stage="PTQ")
        self.save(self.measurer.row("PTQ", self.weights / name, result, time.perf_counter() - began))
        return student

    def measure(self, model: nn.Module, stage: str, name: str = "") -> EvalResult:
        """Evaluate a network, and keep what the run's page and plots show of the last one of a stage."""
        result = self.measurer.measure(model, name or stage, curves=self.options.plots)
        self.state.disagreements[stage] = dict(result.disagreements)
        if result.curves:
            self.state.curves[stage] = result.curves.to_dict()
        return result

    def why_no_qat(self) -> str:
        """Why QAT is left out, as a clause; empty where it trains.

        `--qat auto` trains unless AP, of boxes and of masks, is shown to lose at most what is allowed.
        """
        options, images = self.options, len(self.inputs.data.read("train").images)
        if options.qat == "never":
            return "--qat never"
        if options.epochs is None and not self.inputs.held_out:
            return (
                f"{plural(images, 'training image')} are too few to hold some of them out and choose between PTQ and "
                f"QAT ({FEWEST_IMAGES} are enough; --epochs 10 trains all the same, and the images that train choose)"
            )
        if options.qat == "always":
            return ""
        why = self._why_ptq_is_enough()
        if why:
            self.note(f"--qat auto: {why}: QAT is left out")
        else:
            self.note("--qat auto: PTQ is not shown to lose at most what is allowed: QAT trains")
        return why

    def _why_ptq_is_enough(self) -> str:
        """For `--qat auto`: how PTQ is judged, where it is shown to lose at most what is allowed; empty elsewhere."""
        ptq, base = Row(**self.state.rows["PTQ"]), Row(**self.state.rows["float"])
        allowed = allowed_drop(self.options.target_drop, self.options.unlabelled)
        differences = [difference for ap in AP if (difference := ptq.difference(base, ap))]
        judgements = [judge(difference, allowed, images=measured_on(ptq)) for difference in differences]
        if not judgements or any(judgement.level is not Level.OK for judgement in judgements):
            return ""
        return f"PTQ {' and '.join(judgement.words for judgement in judgements)}"

    def train(self, student: nn.Module) -> None:
        """Train the epochs that are left, until the network diverges."""
        settings, state = self.recipe.finetune, self.state
        epochs = range(len(state.history), 0 if state.stopped else settings.epochs)
        if epochs:
            training = Training(student, self.float_model, self.inputs, settings, state.trainer)
            for epoch in epochs:
                self.train_epoch(epoch, student, training)
                if state.stopped:
                    break

    def train_epoch(self, epoch: int, student: nn.Module, training: Training) -> None:
        """Train and evaluate an epoch, write its checkpoint, and keep it if it is the best; or stop training."""
        state, began = self.state, time.perf_counter()
        try:
            trained = training.epoch(epoch)
        except DivergedError as error:
            state.stopped = f"epoch {epoch}: {error}"
            return
        result = None
        if self.options.eval_epochs and self.measures:
            result = self.measure(student, "QAT epoch", f"QAT epoch {epoch}")
        seconds = time.perf_counter() - began
        state.history.append({"epoch": epoch, **_scores_of_epoch(result), **trained, "seconds": seconds})
        score = result.score if result else None
        name = self.write_checkpoint(f"qat_ep_{epoch}", student, score, stage="QAT", epoch=epoch)
        state.trainer = training.state_dict()
        row = self.measurer.row("QAT", self.weights / name, result, seconds) if result else None
        if row:
            for ap in AP:
                difference = row.difference(Row(**state.rows["PTQ"]), ap)
                state.history[-1][f"{ap}_error"] = difference.error if difference else None
        is_best = self._is_best(training.ptq, trained)
        if is_best:
            state.best_epoch = epoch
            if result:
                state.keep_as("QAT", "QAT epoch")
        self.save(row if is_best else None)
        losses = f"loss {trained['loss']:.4g}, on {self.inputs.deciding_images} {trained['held_out']:.4g}"
        scores = f"{score}, " if score else ""
        logger.info("epoch %d: %s%s%s", epoch, scores, losses, ", the best so far" if is_best else "")

    def _is_best(self, ptq: HeldOutLoss, trained: Mapping[str, float]) -> bool:
        """Whether an epoch's loss is lower than PTQ's by two standard errors, and lower than that of the best epoch."""
        difference = Difference(trained["held_out"] - ptq.value, trained["held_out_error"], len(ptq.terms))
        if not difference.significant or difference.value > 0:
            return False
        best = self.state.best_epoch
        return best is None or trained["held_out"] < self.state.history[best]["held_out"]

    def finish(self, why_no_qat: str) -> None:
        """Give the best state its final name, evaluate it, note why it is the best, and write all files of the run."""
        state = self.state
        if state.stopped:
            self.note(f"{STOPPED} {state.stopped}; the best state is restored")
            state.save(self.folder)
        model = checkpoint.load_quantized(self.weights / state.best_file).model.to(self.inputs.device)
        if self.options.qat != "never":
            write_bytes(self.final, (self.weights / state.best_file).read_bytes())
            self.note(self.why_best(why_no_qat))
            self._measure_best(model)
        report = self.report()
        report.ranges = calibration.tensor_ranges(model)
        if "val" in self.inputs.data.splits:
            self._add_samples(report, model)
        state.save(self.folder)
        self._write_files(report)
        state.finished = True  # after all else is written: what is not finished is done again
        state.save(self.folder)

    def _measure_best(self, model: nn.Module) -> None:
        """Add the row of the best state, under the name of the final file."""
        state, best = self.state, self.state.best_epoch
        if best is None:
            row = {**state.rows["PTQ"], "stage": BEST_PTQ}
            state.keep_as("QAT", "PTQ")
        elif not (row := state.rows.get("QAT", {})):  # --eval-epochs has measured it
            result = self.measure(model, "QAT", f"QAT epoch {best}") if self.measures else None
            row = self.measurer.row("QAT", self.final, result, 0.0).model_dump()
        seconds = sum(entry["seconds"] for entry in state.history)
        state.rows["QAT"] = {**row, "file": str(self.final), "seconds": seconds}

    def _add_samples(self, report: Report, model: nn.Module) -> None:
        """Add the images on which the best state and the FP32 model differ most; others where that is not known.

        The evaluation, which has an NMS threshold of its own, says which images come into question; what is drawn
        decides.
        """
        counts = self.state.disagreements.get("QAT" if self.options.qat != "never" else "PTQ", {})
        ranked = sorted(counts, key=lambda path: (-counts[path], path))
        differing = [path for path in ranked if counts[path]]
        if differing:
            agreeing = len(counts) - len(differing)
            report.samples_are = (
                f"The images of {len(counts)} on which FP32 and INT8 differ most; on {agreeing} they detect the same"
            )
        models = {"FP32": self.float_model, f"INT8 ({report.rows[-1].stage})": model}
        samples = self.measurer.samples(models, differing[:CANDIDATES])
        report.samples = sorted(samples, key=differences_in, reverse=True)[:SAMPLES]

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

    def remove_epochs(self) -> None:
        """Remove the checkpoints of single epochs of a finished run, unless `--keep-epochs` was given."""
        if self.options.keep_epochs or self.options.qat == "never":
            return
        for name in self.state.files[1:]:
            (self.weights / name).unlink(missing_ok=True)

    def why_best(self, why_no_qat: str) -> str:
        """Why the best state is QAT's or PTQ's, as a sentence."""
        state, best = self.state, self.state.best_epoch
        if not (state.history and state.trainer):
            why = f", because {why_no_qat}" if why_no_qat else ""
            return f"QAT trained no epoch{why}: {self.final.name} is the PTQ state"
        entry = min(state.history, key=lambda epoch: (epoch["epoch"] != best, epoch["held_out"]))
        difference = f"{entry['held_out'] - entry['held_out_ptq']:+.2g} ± {entry['held_out_error']:.2g}"
        return (
            f"{'PTQ' if best is None else 'QAT'} is kept by the loss on {self.inputs.deciding_images}: "
            f"{entry['held_out']:.4g} after epoch {entry['epoch']}, PTQ {entry['held_out_ptq']:.4g}, difference "
            f"{difference}; QAT has to be lower by two standard errors"
        )

    def last_lines(self, report: Report) -> list[str]:
        """The last lines of the program: the table, which file to use, the verdict, and what comes next."""
        advice, export = advise(report), shlex.join(export_command(str(self.final)))
        lines = [tables.terminal_table(report), self.result_line()]
        lines += [line for line in (worse_after_qat(report.rows), advice.text) if line]
        lines.append(f"report: {self.folder / PAGE_NAME}")
        nothing_measured = all(row.ap is None for row in report.rows)
        lines.append(f"next: {export if nothing_measured else advice.next_line}")
        if not nothing_measured and advice.command and "export_qat.py" not in advice.command:
            lines.append(f"or export it as it is: {export}")
        return lines

    def result_line(self) -> str:
        """A line with the file to use."""
        if self.options.qat == "never":
            return f"quantized: {self.final}"
        best, score = self.state.best_epoch, Score.from_dict(self.state.rows["QAT"])
        words = "the PTQ state" if best is None else f"epoch {best}"
        if score:
            text = str(score)
            words += ", " + (text.replace("AP", "agreement") if self.options.unlabelled else text)
        return f"best: {self.final} ({words})"

    def write_checkpoint(self, step: str, student: nn.Module, score: Score | None, **extra: Any) -> str:
        """Write the student, with `extra` beside what every checkpoint of the run says; returns the file's name."""
        source, weights, name = self.inputs.source, self.options.weights, checkpoint_name(step, self.stem, score)
        extra |= {"ap": None, **(score.to_dict() if score else {}), "imgsz": self.inputs.imgsz}
        extra |= {"data": self.options.data, "float_weights": weights, "float_sha256": self.state.weights_hash}
        extra |= {FLOAT_HASH: source.weights_hash, "origin": source.origin}
        if self.options.unlabelled:
            extra["labels_of"] = weights
        checkpoint.save(self.weights / name, checkpoint.QuantizedCheckpoint(
            student, self.recipe, source.names, source.nc, source.stride, source.yaml, extra
        ))  # fmt: skip
        self.state.files.append(name)
        return name

    def save(self, row: Row | None) -> None:
        """A step is finished: write the state, then the report, which is made anew from the state."""
        if row is not None:
            self.state.rows[row.stage] = row.model_dump()
        self.state.save(self.folder)
        report = self.report()
        go_on = shlex.join(["python", "qat.py", "quantize", "--resume", str(self.folder)])
        report.notes.append(f"{UNFINISHED}; continue with: {go_on}")
        report.save(self.folder / "report.json")

    def report(self) -> Report:
        """What was measured until now."""
        state = self.state
        rows = [Row(**state.rows[stage]) for stage in ("float", "PTQ", "QAT") if stage in state.rows]
        state.warnings = list(dict.fromkeys([*state.warnings, *warnings_until_now()]))
        return Report(
            command=state.command,
            rows=rows,
            history=[Epoch(**entry, chosen=entry["epoch"] == state.best_epoch) for entry in state.history],
            notes=list(state.notes),
            warnings=list(state.warnings),
            doubts=self.inputs.doubts,
            target_drop=self.options.target_drop,
            held_out_images=len(self.inputs.held_out),
            data=str(self.options.data),
            created=state.created,
            splits=self.inputs.data.counts(),
        )

    def note(self, text: str) -> None:
        """Say something in the log, and once in the report."""
        logger.info("%s", text)
        if text not in self.state.notes:
            self.state.notes.append(text)


def _scores_of_epoch(result: EvalResult | None) -> dict[str, float]:
    """AP of an epoch as the history has it; empty where it was not measured."""
    if result is None:
        return {}
    scores = {"ap": result.ap, "ap50": result.ap50}
    if result.masks:
        scores |= {"mask_ap": result.masks.ap, "mask_ap50": result.masks.ap50}
    return scores


class Training:
    """The epochs of a run: a student, its teacher, the training images, and those that are held out from training.

    `state` is that of `state_dict` after an epoch, None before the first; `ptq` the held-out loss before training.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, inputs: Inputs[QuantizeOptions], settings: Finetune,
        state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        options = inputs.options
        self._settings, self._seed, self._networks = settings, options.seed, (student, teacher)
        self._tuner = Finetuner(student, teacher, settings, device=inputs.device)
        self._images = inputs.training_loader()
        self._held_out = inputs.held_out_images  # 200 at most, for the end of each epoch
        self._steps = steps = min(settings.iters, len(self._images))
        self._highest = settings.highest_rate
        logger.info(
            "QAT: %s x %d steps = %d steps of %d images, learning rate up to %.2g",
            plural(settings.epochs, "epoch"), steps, settings.epochs * steps,
            min(options.batch_size, len(self._images.dataset)), self._highest,
        )  # fmt: skip
        if state:
            self._tuner.load_state_dict(state)
            self.ptq = HeldOutLoss(state["ptq"])
        else:
            self.ptq = self._measure()
            what = "PTQ: loss %.4g on %s; in the first epochs the loss often rises"
            logger.info(what, self.ptq.value, inputs.deciding_images)

    def epoch(self, number: int) -> dict[str, float]:
        """Train an epoch on images whose order and augmentation depend on nothing but the seed and the epoch.

        Returns:
            The mean loss, the held-out loss after it and the standard error of its difference to PTQ's, and the mean
            learning rate, as history has them. `DivergedError` if the loss is not finite.
        """
        from tqdm import tqdm

        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        seed_everything(seed)
        self._images.order.manual_seed(seed)
        batches = itertools.islice(image_batches(self._images), self._settings.iters)
        total, before = self._settings.epochs * self._steps, number * self._steps
        rates = [learning_rate(before + step, total, self._highest) for step in range(self._steps)]
        name, quiet = f"QAT epoch {number}/{self._settings.epochs - 1}", not logger.isEnabledFor(logging.INFO)
        with tqdm(batches, name, self._steps, disable=quiet) as bar:
            trained = self._tuner.run_epoch(
                bar, rates.__getitem__, lambda loss: bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
            )
        held_out = self._measure()
        losses = {"loss": trained.loss, "held_out": held_out.value, "held_out_ptq": self.ptq.value}
        error = held_out.difference(self.ptq).error or 0.0
        return {**losses, "held_out_error": error, "lr": sum(rates) / self._steps}

    def state_dict(self) -> dict[str, Any]:
        """What a killed run needs to train the next epoch, beside the network."""
        return {**self._tuner.state_dict(), "ptq": self.ptq.terms}

    def _measure(self) -> HeldOutLoss:
        return held_out_loss(*self._networks, self._held_out, self._tuner.device)
