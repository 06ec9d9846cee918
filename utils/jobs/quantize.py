"""The quantize job: float evaluation → PTQ → PTQ evaluation → QAT epochs → the best, resumable after every step.

The best state is the one with the smallest loss on training images that are held out from QAT. AP on the validation
images is reported after every epoch, and chooses nothing: the best of several draws of it would be too good.

Each step ends with the state being saved (`run_state.py`), and is skipped where the state says that it is done, so that
a run killed at any moment continues with the step that was interrupted. `start` begins a run, `resume` continues one.

Several processes all take every step, and come to the same numbers; the main one writes.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from models.quantize import calibration, checkpoint, placement
from models.quantize.finetune import (
    DivergedError,
    Finetuner,
    as_input,
    highest_rate,
    learning_rate,
    seed_everything,
)
from models.quantize.recipe import AUTO, Finetune, Recipe
from utils import upstream
from utils.core import distributed
from utils.core.errors import InputError
from utils.core.files import copy_file, file_hash, write_text
from utils.core.run_folder import held, new_run
from utils.core.score import Score
from utils.evaluation.dataset import check_unchanged
from utils.evaluation.loop import EvalConfig
from utils.jobs import calibrate
from utils.jobs.evaluate import Measurer, without_tables
from utils.jobs.evaluate_file import lost_by_qat
from utils.jobs.inputs import Inputs, image_batches
from utils.jobs.options import QuantizeOptions
from utils.jobs.run_state import STOPPED, Best, RunState, checkpoint_name, find_run, weights_folder
from utils.reports import figures
from utils.reports.schema import Epoch, Range, Report, Row
from utils.reports.tables import terminal_table

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def start(options: QuantizeOptions, command: str) -> Report:
    """Begin a run in a new folder and carry it to its end.

    Raises:
        InputError: something given cannot be used; nothing was written then.
    """
    recipe = options.merged_recipe()
    inputs = Inputs.load(options, recipe)
    dataset = inputs.dataset_hash(options.further_files())
    with new_run(options.project, options.name, options.exist_ok) as folder:
        state = RunState(
            options.model_dump(), recipe.to_dict(), file_hash(options.weights),
            dataset=dataset, command=command, created=Report(command=command).created,
        )  # fmt: skip
        state.save(folder)
        return Session(folder, state, options, recipe, inputs).run()


def resume(given: QuantizeOptions) -> Report:
    """Continue the run that `--resume` names; the options of this command line must agree with the run's.

    Raises:
        InputError: the run cannot be continued as asked, or another program is at it.
    """
    folder = find_run(given.resume or "", given.project)
    with held(folder):
        state = distributed.from_main(lambda: RunState.load(folder))
        options = given.resumed(state.options)
        recipe = Recipe.from_stored(state.recipe)
        if given.given("recipe"):
            options.check_recipe(recipe)
        state.options = options.model_dump()
        inputs = Inputs.load(options, recipe)
        if file_hash(options.weights) != state.weights_hash:
            raise InputError(f"{options.weights} has changed since the run in {folder} was started; start a new run")
        check_unchanged(state.dataset, inputs.dataset_hash(options.further_files()), folder)
        logger.info("resuming %s: %s", folder, state.summary())
        return Session(folder, state, options, recipe, inputs).run()


class Session:
    """One quantize run: what it works on, where it stands, and the steps."""

    def __init__(self, folder: Path, state: RunState, options: QuantizeOptions, recipe: Recipe, inputs: Inputs) -> None:
        self._folder, self._state, self._options, self._recipe, self._inputs = folder, state, options, recipe, inputs
        self._weights = weights_folder(folder)
        self._teacher = upstream.call_fused(inputs.network())
        config = EvalConfig(imgsz=inputs.imgsz, batch_size=options.batch_size, workers=options.workers)
        self._measurer = Measurer(inputs.data, inputs.device, config)

    def run(self) -> Report:
        """Do what is left to do, and return the report, which also lies in the run folder."""
        logger.info("recipe:\n%s", yaml.safe_dump(self._state.recipe, sort_keys=False).rstrip())
        logger.info("%s → %s", self._options.weights, self._folder)
        try:
            with without_tables():
                if not self._state.finished:
                    self._evaluate_origin()
                    student = self._calibrated()
                    if not self._options.ptq_only:
                        self._finetune(student)
                    if distributed.is_main():
                        self._finish()
        except KeyboardInterrupt:
            where = shlex.quote(str(self._folder))
            logger.info("\nstopped; continue with: python qat.py quantize --resume %s", where)
            raise
        report = self._report()
        logger.info("\n%s\n%s", terminal_table(report), self._verdict(report))
        return report

    def _evaluate_origin(self) -> None:
        if "float" not in self._state.rows and not self._options.no_eval_origin:
            began = time.perf_counter()
            result = self._measurer.measure(self._teacher, "the float model")
            self._save(self._measurer.row("float", self._options.weights, result, time.perf_counter() - began))

    def _calibrated(self) -> nn.Module:
        """The student as of now: freshly calibrated and evaluated, or as an earlier process left it."""
        if self._state.checkpoint:
            return checkpoint.load(self._weights / self._state.checkpoint).model.to(self._inputs.device)
        began = time.perf_counter()
        student = self._calibrate()
        result = None if self._options.no_eval_ptq else self._measurer.measure(student, "PTQ")
        score = result.score if result else None
        name = checkpoint_name("ptq", self._options.stem, score)
        self._write_checkpoint(name, student, {"stage": "PTQ", **(score.to_dict() if score else {"ap": None})})
        if result is None:
            logger.info("PTQ is not evaluated (--no-eval-ptq), so its file has no score: %s", name)
        self._state.best = Best(score, None, name)
        self._save(self._measurer.row("PTQ", self._weights / name, result, time.perf_counter() - began))
        return student

    def _calibrate(self) -> nn.Module:
        """A copy of the teacher with quantizers, whose ranges come from training images as validation sees them."""
        seed_everything(self._options.seed)
        student, plan, device = self._inputs.network(), self._inputs.plan, self._inputs.device
        placement.apply(student, plan, self._options.quantizer)
        student.to(device)  # the quantizers are new
        if distributed.is_main():
            text, path = placement.describe(plan), self._folder / "placement.txt"
            write_text(path, text + "\n")
            logger.info("%s\nall of it: %s", text.partition(f"\n{placement.SCALES}")[0], path)
        if self._recipe.calibration.method == AUTO:
            found = calibrate.sweep(student, self._inputs, self._recipe, self._options)
            self._recipe = self._recipe.replace(calibration=found.chosen)
            self._state.recipe = self._recipe.to_dict()
            for line in found.lines():
                self._note(line)
            return student
        images = image_batches(self._inputs.calibration_loader(self._options))
        calibration.calibrate(student, (as_input(batch, device) for batch in images), self._recipe.calibration)
        return student

    def _finetune(self, student: nn.Module) -> None:
        """The epochs that are left, until the last or the guard ends them."""
        state, settings = self._state, self._recipe.finetune
        first = len(state.history)
        if self._has_stopped() or first >= settings.epochs:
            return
        teacher = self._inputs.teacher() if self._inputs.taught_by else self._teacher
        training = Training(student, teacher, self._inputs, self._options, settings, state.trainer)
        if state.best is not None and state.best.held_out is None:
            state.best.held_out = training.start()
        for epoch in range(first, settings.epochs):
            began = time.perf_counter()
            try:
                trained = training.epoch(epoch)
            except DivergedError as error:
                state.stopped = f"epoch {epoch}: {error}"
            else:
                self._evaluate_epoch(epoch, student, training, trained, began)
            if self._has_stopped():
                return

    def _has_stopped(self) -> bool:
        """Whether training ended before its last epoch; then there is a note that says why."""
        if self._state.stopped:
            self._note(f"{STOPPED} {self._state.stopped}; the best state is restored")
            self._state.save(self._folder)
        return bool(self._state.stopped)

    def _evaluate_epoch(
        self, epoch: int, student: nn.Module, training: Training, trained: dict[str, float], began: float
    ) -> None:
        """Evaluate, write the checkpoint, keep it if it is the best, and decide whether to go on."""
        state = self._state
        result = self._measurer.measure(student, f"QAT epoch {epoch}")
        seconds = time.perf_counter() - began
        masks = {} if result.masks is None else {"mask_ap": result.masks.ap, "mask_ap50": result.masks.ap50}
        measured = {"ap": result.ap, "ap50": result.ap50, **masks}
        state.history.append({"epoch": epoch, **measured, **trained, "seconds": seconds})
        score, collapse = result.score, self._recipe.finetune.collapse
        reference = Score.from_dict(state.rows.get("PTQ", {})) or (state.best.score if state.best else None)
        if reference and score.decides < collapse * reference.decides:
            fell = f"{score.what} fell to {score.decides:.4f}, below {collapse:g} of {reference.decides:.4f}"
            state.stopped = f"epoch {epoch}: {fell}"
            return
        name = checkpoint_name(f"qat_ep_{epoch}", self._options.stem, score)
        self._write_checkpoint(name, student, {"stage": "QAT", "epoch": epoch, **score.to_dict()})
        state.trainer = training.state_dict()
        better = state.offer(Best(score, epoch, name, trained["held_out"]))
        self._save(self._measurer.row("QAT", self._weights / name, result, seconds) if better else None)
        best = ", the best so far" if better else ""
        losses = trained["loss"], trained["held_out"]
        logger.info("epoch %d: %s, loss %.4g, held out %.4g%s", epoch, score, *losses, best)

    def _finish(self) -> None:
        """Name the best state, and write what the report shows about it."""
        state, best = self._state, self._state.best
        if best is None:  # a state without a calibrated network never gets here
            raise RuntimeError("the run ended without a checkpoint")
        final = self._weights / best.file
        if not self._options.ptq_only:
            final = self._weights / checkpoint_name("qat_best", self._options.stem)
            copy_file(self._weights / best.file, final)
            if not state.trained:
                self._note(f"no epoch of QAT was trained: {final.name} is the PTQ state")
            elif best.epoch is None:
                self._note(f"no epoch of QAT beat PTQ on the held-out images: {final.name} is the PTQ state")
            row = state.rows["PTQ" if best.epoch is None else "QAT"]
            seconds = sum(entry["seconds"] for entry in state.history)
            state.rows["QAT"] = {**row, "stage": "QAT", "file": str(final), "seconds": seconds}
        report, model = self._report(), checkpoint.load(final).model
        report.ranges = [Range(**entry) for entry in calibration.tensor_ranges(model)]
        if "val" in self._inputs.data.splits:
            stage = "PTQ" if self._options.ptq_only else "QAT"
            report.samples = self._measurer.samples({"float": self._teacher, stage: model})
        state.save(self._folder)
        report.save(self._folder / "report.json")
        if report.history:
            figures.save_figure(figures.ap_per_epoch(report), self._folder / "ap_per_epoch.png")
        figures.save_figure(figures.ranges_per_layer(report.ranges), self._folder / "ranges.png")
        state.finished = True  # after all else is written: what is not finished is done again
        state.save(self._folder)

    def _verdict(self, report: Report) -> str:
        """The last lines of the program: which file to use, and why."""
        best = self._state.best
        if best is None or self._options.ptq_only:
            return f"quantized: {self._weights / best.file if best else self._weights}"
        score = "" if best.score is None else f", {best.score}"
        ptq = "the PTQ state, which no epoch beat" if self._state.trained else "the PTQ state"
        origin = ptq if best.epoch is None else f"epoch {best.epoch}"
        lost = lost_by_qat(report.rows)
        file = self._weights / checkpoint_name("qat_best", self._options.stem)
        return f"best: {file} ({origin}{score})" + (f"\n{lost}" if lost else "")

    def _write_checkpoint(self, name: str, student: nn.Module, extra: dict[str, Any]) -> None:
        source = self._inputs.source
        origin = {"float_weights": self._options.weights, "float_sha256": self._state.weights_hash}
        if distributed.is_main():
            checkpoint.save(
                self._weights / name, student, recipe=self._recipe, names=source.names, nc=source.nc,
                stride=source.stride, yaml=source.yaml, extra={**extra, **origin, "imgsz": self._inputs.imgsz},
            )  # fmt: skip
        self._state.files.append(name)
        self._state.checkpoint = name

    def _save(self, row: Row | None) -> None:
        """A step is finished: write the state, then the report, which is made anew from the state."""
        if row is not None:
            self._state.rows[row.stage] = row.model_dump()
        self._state.save(self._folder)
        if distributed.is_main():
            self._report().save(self._folder / "report.json")

    def _report(self) -> Report:
        state = self._state
        rows = [Row(**state.rows[stage]) for stage in ("float", "PTQ", "QAT") if stage in state.rows]
        return Report(
            command=state.command, rows=rows, history=[Epoch(**entry) for entry in state.history],
            notes=list(state.notes), data=str(self._options.data), created=state.created,
        )  # fmt: skip

    def _note(self, text: str) -> None:
        """Say something in the log, and once in the report."""
        logger.info("%s", text)
        if text not in self._state.notes:
            self._state.notes.append(text)


class Training:
    """The epochs of a run: a student, its teacher, the training images, and those that are held out from training.

    Args:
        state: of the optimizer, as `state_dict` gave it after an epoch; None before the first.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, inputs: Inputs, options: QuantizeOptions, settings: Finetune,
        state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._seed = settings, options.seed
        self._tuner = Finetuner(student, teacher, settings, device=inputs.device)
        if state:
            self._tuner.load_state_dict(state)
        self._images = inputs.training_loader(options)
        self._held_out = inputs.held_out_loader(options)
        self._kind = "held out from QAT" if inputs.held_out else "too few to hold some of them out from QAT"
        self._steps = steps = min(settings.iters, len(self._images))
        self._highest = highest_rate(settings.lr, settings.epochs * steps)
        images = len(self._images.dataset)
        self._images_per_step = min(options.batch_size, images / steps)  # an epoch's last batch may be smaller
        short = "" if steps == settings.iters else f"; an epoch is one pass over {images} images, and no longer"
        logger.info(
            "QAT: %d epochs x %d steps = %d steps of %d images, learning rate up to %.2g%s",
            settings.epochs, steps, settings.epochs * steps, min(options.batch_size, images),
            self._highest, short,
        )  # fmt: skip

    def start(self) -> float:
        """The loss of the state that training begins with, on the held-out images."""
        loss = self._measure()
        logger.info("PTQ: loss %.4g on %d training images, %s", loss, len(self._held_out.dataset), self._kind)
        return loss

    def epoch(self, number: int) -> dict[str, float]:
        """Train an epoch on images whose order and augmentation depend on nothing but the seed and the epoch.

        Returns:
            The mean loss, the loss on the held-out images after it, and the mean learning rate, as history has them.

        Raises:
            DivergedError: the loss is not finite.
        """
        from tqdm import tqdm

        seed = self._seed + 1 + number
        seed_everything(seed)
        self._images.generator.manual_seed(seed)
        batches = itertools.islice(image_batches(self._images), self._settings.iters)
        total, before = self._settings.epochs * self._steps, number * self._steps
        rates = [learning_rate(before + step, total, self._highest) for step in range(self._steps)]
        name, quiet = f"QAT epoch {number}/{self._settings.epochs - 1}", not distributed.is_main()
        with tqdm(batches, name, self._steps, disable=quiet) as bar:
            trained = self._tuner.run_epoch(
                bar, rates.__getitem__, lambda loss: bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
            )
        speed = trained.iterations / trained.seconds
        logger.info(
            "epoch %d: %d steps in %.1f s: %.2f steps/s, %.1f images/s",
            number, trained.iterations, trained.seconds, speed, speed * self._images_per_step,
        )  # fmt: skip
        return {"loss": trained.loss, "held_out": self._measure(), "lr": sum(rates) / self._steps}

    def state_dict(self) -> dict[str, Any]:
        """What a killed run needs to train the next epoch, beside the network."""
        return self._tuner.state_dict()

    def _measure(self) -> float:
        return self._tuner.held_out_loss(image_batches(self._held_out))
