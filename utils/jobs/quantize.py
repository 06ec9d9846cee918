"""The quantize job: float evaluation → PTQ → its evaluation → QAT → evaluation of the best, resumable at every step.

The best state is the one with the smallest loss on training images that are held out from QAT, and PTQ unless that is
lower by two standard errors. AP on the validation images chooses nothing: the best of several draws of it would be too
good. Each step ends with the state being saved (`run_state.py`), and is skipped where the state says that it is done.
Several processes all take every step, and come to the same numbers.
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
    highest_rate,
    learning_rate,
    seed_everything,
)
from models.quantize.recipe import Finetune
from utils import upstream
from utils.core.files import write_bytes, write_text
from utils.core.score import Score
from utils.core.text import plural
from utils.jobs.calibrate import find_ranges
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, lost_by_qat, without_tables
from utils.jobs.inputs import HELD_OUT, Inputs, image_batches
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import STOPPED, RunState, checkpoint_name, open_run
from utils.reports import figures, tables
from utils.reports.schema import AP, BEST_PTQ, UNFINISHED, Epoch, Report, Row

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

FEWEST_IMAGES = 50  # training images; fewer are not trained on unless `--epochs` says so
SIGNIFICANT = 2  # standard errors by which QAT has to be better


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
        report = session.report()
    export = shlex.join(tables.export_command(str(session.final)))
    command = tables.verdict(report)[1] or export
    wrong = any(row.stage == "float" and row.finds_nothing for row in report.rows)
    wrong |= [*inputs.source.names.values()] != [*inputs.data.names.values()]
    if wrong or (not options.unlabelled and any(one.lacks_labels for one in report.splits if one.name != "train")):
        command = tables.WRONG
    elif "export_qat.py" not in command:
        command += f"\nor export it as it is: {export}"
    logger.info("\n%s\n%s\nnext: %s", tables.terminal_table(report), session.verdict(report), command)
    return report


class Session:
    """One quantize run: what it works on, where it stands, and the steps; each step saves the state at its end."""

    def __init__(self, folder: Path, state: RunState, inputs: Inputs[QuantizeOptions]) -> None:
        self.folder, self.state, self.inputs, self.options = folder, state, inputs, inputs.options
        self.recipe = inputs.recipe  # with the calibration method that `auto` has chosen
        self.weights, self.stem = folder / "weights", Path(self.options.weights).stem  # which names files
        self.float_model = upstream.call_fused(inputs.network())
        self.measurer = Measurer.of(inputs)
        # without labels, AP is that with the float network's detections, which have to be known
        self.measures = not self.options.unlabelled or ("val" in inputs.data.splits and not self.options.no_eval_origin)
        logger.info("recipe:\n%s", yaml.safe_dump(state.recipe, sort_keys=False).rstrip())
        logger.info("%s → %s", self.options.weights, folder)

    @property
    def final(self) -> Path:
        """The file to export."""
        never = self.options.qat == "never"
        return self.weights / (self.state.best_file if never else checkpoint_name("qat_best", self.stem))

    def evaluate_float(self) -> None:
        """Evaluate the float network, in a resumed run, too: the others are compared with its detections."""
        if self.measures and not self.options.no_eval_origin:
            result = self.measurer.measure(self.float_model, FLOAT_MODEL, as_reference=True)
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
        measures = self.measures and not self.options.no_eval_ptq
        result = self.measurer.measure(student, "PTQ") if measures else None
        name = self.write_checkpoint("ptq", student, result.score if result else None, stage="PTQ")
        self.save(self.measurer.row("PTQ", self.weights / name, result, time.perf_counter() - began))
        return student

    def why_no_qat(self) -> str:
        """Why QAT is left out, as a clause; empty where it trains.

        `--qat auto` trains where AP, of boxes or of masks, lies below float's by more than `--target-drop` and its
        standard error, or cannot be compared.
        """
        options, images, rows = self.options, len(self.inputs.data.read("train").images), self.state.rows
        if options.qat == "never":
            return "--qat never"
        if options.epochs is None and images < FEWEST_IMAGES:
            return f"there are {images} training images and not {FEWEST_IMAGES} (--epochs 10 trains anyway)"
        if options.qat == "always":
            return ""
        ptq, base, target = Row(**rows["PTQ"]), Row(**rows["float"]), options.target_drop
        differences = [one for ap in AP if (one := ptq.difference(base, ap))]
        misses = not differences or any(-one.value - (one.error or 0.0) > target for one in differences)
        decided = (
            f"PTQ has {' and '.join(map(str, differences)) or 'no comparable'} AP against float, which "
            f"{'misses' if misses else 'does not miss'} --target-drop {target:g} by its standard error"
        )
        self.note(f"--qat auto: {decided}: QAT {'trains' if misses else 'is left out'}")
        return "" if misses else decided

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
        measures = self.options.eval_epochs and self.measures
        result = self.measurer.measure(student, f"QAT epoch {epoch}") if measures else None
        seconds = time.perf_counter() - began
        measured = {"ap": result.ap, "ap50": result.ap50} if result else {}
        masks = {"mask_ap": result.masks.ap, "mask_ap50": result.masks.ap50} if result and result.masks else {}
        state.history.append({"epoch": epoch, **measured, **masks, **trained, "seconds": seconds})
        score = result.score if result else None
        name = self.write_checkpoint(f"qat_ep_{epoch}", student, score, stage="QAT", epoch=epoch)
        state.trainer = training.state_dict()
        row = self.measurer.row("QAT", self.weights / name, result, seconds) if result else None
        if row:
            differences = {ap: row.difference(Row(**state.rows["PTQ"]), ap) for ap in AP}
            state.history[-1] |= {f"{ap}_error": one.error if one else None for ap, one in differences.items()}
        best = training.ptq.value - SIGNIFICANT * trained["held_out_error"]
        if state.best_epoch is not None:
            best = min(best, state.history[state.best_epoch]["held_out"])
        if better := trained["held_out"] < best:
            state.best_epoch = epoch
        self.save(row if better else None)
        losses = f"{f'{score}, ' if score else ''}loss {trained['loss']:.4g}, held out {trained['held_out']:.4g}"
        logger.info("epoch %d: %s%s", epoch, losses, ", the best so far" if better else "")

    def finish(self, why_no_qat: str) -> None:
        """Give the best state its final name, evaluate it, note why it is the best, and write the report."""
        state, best, final, never = self.state, self.state.best_epoch, self.final, self.options.qat == "never"
        if state.stopped:
            self.note(f"{STOPPED} {state.stopped}; the best state is restored")
            state.save(self.folder)
        model = checkpoint.load_quantized(self.weights / state.best_file).model.to(self.inputs.device)
        if not never:
            write_bytes(final, (self.weights / state.best_file).read_bytes())
            self.note(self.why_best(why_no_qat))
            if best is None:
                row = {**state.rows["PTQ"], "stage": BEST_PTQ}
            elif not (row := state.rows.get("QAT", {})):  # --eval-epochs has measured it
                result = self.measurer.measure(model, f"QAT epoch {best}") if self.measures else None
                row = self.measurer.row("QAT", final, result, 0.0).model_dump()
            seconds = sum(entry["seconds"] for entry in state.history)
            state.rows["QAT"] = {**row, "file": str(final), "seconds": seconds}
        report = self.report()
        report.ranges = calibration.tensor_ranges(model)
        if "val" in self.inputs.data.splits:
            report.samples = self.measurer.samples({"float": self.float_model, report.rows[-1].stage: model})
        state.save(self.folder)
        report.save(self.folder / "report.json")
        if report.scored_epochs:
            name, figure = figures.per_epoch(report)
            figures.save_figure(figure, self.folder / f"{name}.png")
        state.finished = True  # after all else is written: what is not finished is done again
        state.save(self.folder)

    def why_best(self, why_no_qat: str) -> str:
        """Why the best state is QAT's or PTQ's, as a sentence."""
        state, best = self.state, self.state.best_epoch
        if not (state.history and state.trainer):
            why = f", because {why_no_qat}" if why_no_qat else ""
            return f"no epoch of QAT was trained{why}: {self.final.name} is the PTQ state"
        entry = min(state.history, key=lambda one: (one["epoch"] != best, one["held_out"]))
        difference = f"{entry['held_out'] - entry['held_out_ptq']:+.2g} ± {entry['held_out_error']:.2g}"
        return (
            f"{'PTQ' if best is None else 'QAT'} is kept by the loss on {len(state.trainer['ptq'])} training images "
            f"({HELD_OUT[bool(self.inputs.held_out)]}): {entry['held_out']:.4g} after epoch {entry['epoch']}, PTQ "
            f"{entry['held_out_ptq']:.4g}, difference {difference}; QAT has to be lower by two standard errors"
        )

    def verdict(self, report: Report) -> str:
        """The last lines of the program: which file to use."""
        if self.options.qat == "never":
            return f"quantized: {self.final}"
        best, score = self.state.best_epoch, Score.from_dict(self.state.rows["QAT"])
        words = "the PTQ state" if best is None else f"epoch {best}"
        if score:
            words += ", " + (str(score).replace("AP", "agreement") if self.options.unlabelled else str(score))
        return "\n".join(filter(None, [f"best: {self.final} ({words})", lost_by_qat(report.rows)]))

    def write_checkpoint(self, step: str, student: nn.Module, score: Score | None, **extra: Any) -> str:
        """Write the student, with `extra` beside what every checkpoint of the run says; returns the file's name."""
        source, weights, name = self.inputs.source, self.options.weights, checkpoint_name(step, self.stem, score)
        extra |= {"ap": None, **(score.to_dict() if score else {}), "imgsz": self.inputs.imgsz}
        extra |= {"data": self.options.data, "float_weights": weights, "float_sha256": self.state.weights_hash}
        extra |= {"labels_of": weights} if self.options.unlabelled else {}
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
        return Report(
            command=state.command, rows=rows,
            history=[Epoch(**entry, chosen=entry["epoch"] == state.best_epoch) for entry in state.history],
            notes=list(state.notes), data=str(self.options.data), created=state.created,
            splits=self.inputs.data.counts(),
        )  # fmt: skip

    def note(self, text: str) -> None:
        """Say something in the log, and once in the report."""
        logger.info("%s", text)
        if text not in self.state.notes:
            self.state.notes.append(text)


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
        self._highest = highest_rate(settings.lr, settings.epochs * steps)
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
            seen = HELD_OUT[bool(inputs.held_out)]
            what = "PTQ: loss %.4g on %d training images, %s; in the first epochs the loss often rises"
            logger.info(what, self.ptq.value, len(self.ptq.terms), seen)

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
        return {**losses, "held_out_error": held_out.difference(self.ptq)[1], "lr": sum(rates) / self._steps}

    def state_dict(self) -> dict[str, Any]:
        """What a killed run needs to train the next epoch, beside the network."""
        return {**self._tuner.state_dict(), "ptq": self.ptq.terms}

    def _measure(self) -> HeldOutLoss:
        return held_out_loss(*self._networks, self._held_out, self._tuner.device)
