"""The quantize job: float evaluation → PTQ → its evaluation → QAT → evaluation of the best, resumable at every step.

The best state is the one with the smallest loss on training images that are held out from QAT, and PTQ unless that is
lower by two standard errors. AP on the validation images is that of the float network, of PTQ and of the best state,
with `--eval-epochs` of every epoch, and chooses nothing: the best of several draws of it would be too good.

Each step ends with the state being saved (`run_state.py`), and is skipped where the state says that it is done, so that
a run killed at any moment continues with the step that was interrupted.

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
from models.quantize.recipe import AUTO, Finetune
from utils import upstream
from utils.core.files import write_bytes, write_text
from utils.core.score import Score
from utils.core.text import plural
from utils.jobs.calibrate import choose_by_loss
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
    """`qat.py quantize`: begin a run in a new folder, or resume one, and carry it to its end.

    Raises:
        InputError: something given cannot be used, for which nothing was written; or the run cannot be resumed so.
    """
    with open_run(options, RunState) as (folder, state, inputs), without_tables():
        if options.resume is not None:
            logger.info("resuming %s: %s", folder, state.summary())
        session = Session(folder, state, inputs)
        if not state.finished:
            if session.measures and not inputs.options.no_eval_origin:
                # a resumed run, too: the others are compared with its detections
                result = session.measurer.measure(session.float_model, FLOAT_MODEL, as_reference=True)
                session.save(session.measurer.row("float", inputs.options.weights, result, result.seconds))
            if state.files:
                student = checkpoint.load_quantized(session.weights / state.files[-1]).model.to(inputs.device)
            else:
                began = time.perf_counter()
                student = session.place_and_calibrate()
                session.evaluate_ptq(student, began)
            why_no_qat = session.why_no_qat()
            epochs = range(0 if why_no_qat or state.stopped else session.recipe.finetune.epochs)[len(state.history) :]
            if epochs:
                training = Training(student, session.float_model, inputs, session.recipe.finetune, state.trainer)
                for epoch in epochs:
                    session.train_epoch(epoch, student, training)
                    if state.stopped:
                        break
            model = session.choose(why_no_qat)
            session.write_results(model)
        report = session.report()
    export = shlex.join(tables.export_command(str(session.final)))
    low = any(row.stage == "float" and row.finds_nothing for row in report.rows)
    wrong = low or any(counts.lacks_labels and counts.name != "train" for counts in report.splits)
    command = tables.verdict(report)[1] or export
    if wrong and not options.unlabelled:
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

    def place_and_calibrate(self) -> nn.Module:
        """A copy of the float model with quantizers, and ranges from training images as validation sees them."""
        student = self.inputs.placed()
        text, path = placement.describe(self.inputs.plan), self.folder / "placement.txt"
        write_text(path, text + "\n")
        logger.info("%s\nall of it: %s", text.partition(f"\n{placement.SCALES}")[0], path)
        if self.recipe.calibration.method == AUTO:
            chosen, why = choose_by_loss(student, self.float_model, self.inputs)
            self.recipe = self.recipe.replace(calibration=chosen)
            self.state.recipe = self.recipe.to_dict()
            self.note(why)
        else:
            calibration.calibrate(student, self.inputs.calibration_images(), self.recipe.calibration)
        return student

    def evaluate_ptq(self, student: nn.Module, began: float) -> None:
        """Evaluate the calibrated network unless `--no-eval-ptq` says otherwise, and write its checkpoint."""
        measures = self.measures and not self.options.no_eval_ptq
        result = self.measurer.measure(student, "PTQ") if measures else None
        score = result.score if result else None
        name = self.write_checkpoint("ptq", student, score, stage="PTQ")
        if result is None:
            logger.info("PTQ is not evaluated, so its file has no score: %s", name)
        self.save(self.measurer.row("PTQ", self.weights / name, result, time.perf_counter() - began))

    def why_no_qat(self) -> str:
        """Why QAT is left out, as a clause; empty where it trains. What `--qat auto` decides is said with the numbers.

        `auto` trains where AP, of boxes or of masks, lies below float's by more than `--target-drop` and its standard
        error, or cannot be compared.
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
        compared = f"PTQ has {' and '.join(map(str, differences)) or 'no comparable'} AP against float"
        verb = "misses" if misses else "does not miss"
        decided = f"{compared}, which {verb} --target-drop {target:g} by its standard error"
        self.note(f"--qat auto: {decided}: QAT {'trains' if misses else 'is left out'}")
        return "" if misses else decided

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
        score, collapse = result.score if result else None, self.recipe.finetune.collapse
        reference = Score.from_dict(state.rows["PTQ"]) or Score.from_dict(state.rows.get("QAT", {}))
        if score and reference and score.decides < collapse * reference.decides:
            fell = f"{score.what} fell to {score.decides:.4f}, below {collapse:g} of {reference.decides:.4f}"
            state.stopped = f"epoch {epoch}: {fell}"
            return
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
        text = f"epoch {epoch}: {f'{score}, ' if score else ''}loss {trained['loss']:.4g}, "
        text += f"{'held out' if self.inputs.held_out else 'on all training images'} {trained['held_out']:.4g}"
        logger.info("%s%s", text, ", the best so far" if better else "")

    def choose(self, why_no_qat: str) -> nn.Module:
        """Give the best state its final name, evaluate it, and note why it is the best; returns its network."""
        state, best, final = self.state, self.state.best_epoch, self.final
        if state.stopped:
            self.note(f"{STOPPED} {state.stopped}; the best state is restored")
            state.save(self.folder)
        model = checkpoint.load_quantized(self.weights / state.best_file).model.to(self.inputs.device)
        if self.options.qat == "never":
            return model
        write_bytes(final, (self.weights / state.best_file).read_bytes())
        ended = state.history[: len(state.files) - 1]  # not one that collapsed
        if ended and state.trainer:
            entry = min(ended, key=lambda one: (one["epoch"] != best, one["held_out"]))
            self.note(
                f"{'PTQ' if best is None else 'QAT'} is kept by the loss on {len(state.trainer['ptq'])} training "
                f"images ({HELD_OUT[bool(self.inputs.held_out)]}): {entry['held_out']:.4g} after epoch "
                f"{entry['epoch']}, PTQ {entry['held_out_ptq']:.4g}, difference "
                f"{entry['held_out'] - entry['held_out_ptq']:+.2g} ± {entry['held_out_error']:.2g}; QAT has to be "
                "lower by two standard errors"
            )
        else:
            why = f", because {why_no_qat}" if why_no_qat else ""
            self.note(f"no epoch of QAT was trained{why}: {final.name} is the PTQ state")
        if best is None:
            row = {**state.rows["PTQ"], "stage": BEST_PTQ}
        elif not (row := state.rows.get("QAT", {})):  # --eval-epochs has measured it
            result = self.measurer.measure(model, f"QAT epoch {best}") if self.measures else None
            row = self.measurer.row("QAT", final, result, 0.0).model_dump()
        seconds = sum(entry["seconds"] for entry in state.history)
        state.rows["QAT"] = {**row, "file": str(final), "seconds": seconds}
        return model

    def write_results(self, model: nn.Module) -> None:
        """Write what the report shows of the final network, and then that the run is finished."""
        report = self.report()
        report.ranges = calibration.tensor_ranges(model)
        if "val" in self.inputs.data.splits:
            stage = "PTQ" if self.options.qat == "never" else report.rows[-1].stage
            report.samples = self.measurer.samples({"float": self.float_model, stage: model})
        self.state.save(self.folder)
        report.save(self.folder / "report.json")
        if report.scored_epochs:
            name, figure = figures.per_epoch(report)
            figures.save_figure(figure, self.folder / f"{name}.png")
        self.state.finished = True  # after all else is written: what is not finished is done again
        self.state.save(self.folder)

    def verdict(self, report: Report) -> str:
        """The last lines of the program: which file to use, and why."""
        if self.options.qat == "never":
            return f"quantized: {self.final}"
        state, score = self.state, Score.from_dict(self.state.rows["QAT"])
        words = [f"epoch {state.best_epoch}"]
        if state.best_epoch is None:
            trained = state.history or state.stopped
            words = ["the PTQ state, which no epoch beat by two standard errors" if trained else "the PTQ state"]
        if score:
            words.append(str(score).replace("AP", "agreement") if self.options.unlabelled else str(score))
        return "\n".join(filter(None, [f"best: {self.final} ({', '.join(words)})", lost_by_qat(report.rows)]))

    def write_checkpoint(self, step: str, student: nn.Module, score: Score | None, **extra: Any) -> str:
        """Write the student, with `extra` beside what every checkpoint of the run says; returns the file's name."""
        source, weights, name = self.inputs.source, self.options.weights, checkpoint_name(step, self.stem, score)
        extra |= {**(score.to_dict() if score else {"ap": None}), "imgsz": self.inputs.imgsz, "data": self.options.data}
        extra |= {"float_weights": weights, "float_sha256": self.state.weights_hash}
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

    Attributes:
        ptq: the loss on the held-out images of the state that training begins with.

    Args:
        state: as `state_dict` gave it after an epoch; None before the first.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, inputs: Inputs[QuantizeOptions], settings: Finetune,
        state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        options = inputs.options
        self._settings, self._seed, self._networks = settings, options.seed, (student, teacher)
        self._tuner = Finetuner(student, teacher, settings, device=inputs.device)
        self._images = inputs.training_loader()
        self._held_out = list(image_batches(inputs.held_out_loader()))  # 200 at most, for the end of each epoch
        self._steps = steps = min(settings.iters, len(self._images))
        self._highest = highest_rate(settings.lr, settings.epochs * steps)
        images = len(self._images.dataset)
        short = "" if steps == settings.iters else f"; an epoch is one pass over {plural(images, 'image')}"
        logger.info(
            "QAT: %s x %d steps = %d steps of %d images, learning rate up to %.2g%s",
            plural(settings.epochs, "epoch"), steps, settings.epochs * steps, min(options.batch_size, images),
            self._highest, short,
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
            The mean loss, the loss on the held-out images after it with the standard error of its difference to PTQ's,
            and the mean learning rate, as history has them.

        Raises:
            DivergedError: the loss is not finite.
        """
        from tqdm import tqdm

        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        seed_everything(seed)
        self._images.generator.manual_seed(seed)
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
