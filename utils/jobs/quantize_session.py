"""The steps of a quantize run: float evaluation, calibration (PTQ), PTQ evaluation, epochs of QAT, the best of them.

Each step ends with the state being saved (`run_state.py`), and is skipped where the state says that it is done.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.quantize import calibration, checkpoint, placement
from models.quantize.finetune import DivergedError, as_input, seed_everything
from models.quantize.ranges import tensor_ranges
from models.quantize.recipe import AUTO, Recipe
from utils import upstream
from utils.core import distributed
from utils.core.files import atomic_path, copy_file
from utils.core.score import Score
from utils.evaluation.loop import EvalConfig
from utils.evaluation.results import EvalResult
from utils.jobs import calibrate
from utils.jobs.evaluate import Measurer
from utils.jobs.inputs import Inputs, image_batches
from utils.jobs.options import QuantizeOptions
from utils.jobs.report_rows import lost_by_qat
from utils.jobs.run_state import STOPPED, Best, RunState, best_name, epoch_name, ptq_name, weights_folder
from utils.jobs.training import TrainedEpoch, Training
from utils.reports.schema import Epoch, Range, Report, Row
from utils.reports.tables import terminal_table

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


class Session:
    """One quantize run: what it works on, where it stands, and the steps."""

    def __init__(
        self, folder: Path, state: RunState, options: QuantizeOptions, recipe: Recipe, inputs: Inputs, report: Report
    ) -> None:
        self.folder, self.state, self.options, self.recipe, self.report = folder, state, options, recipe, report
        self._inputs = inputs
        self._device = inputs.device
        self._teacher = upstream.call_fused(inputs.network())
        config = EvalConfig(imgsz=inputs.imgsz, batch_size=options.batch_size, workers=options.workers)
        self._measurer = Measurer(inputs.data, inputs.device, config)

    def run(self) -> Report:
        """Do what is left to do, and return the report, which also lies in the run folder."""
        import yaml

        logger.info("recipe:\n%s", yaml.safe_dump(self.state.recipe, sort_keys=False).rstrip())
        logger.info("%s → %s", self.options.weights, self.folder)
        if not self.state.finished:
            self._evaluate_origin()
            student = self._calibrated()
            if not self.options.ptq_only:
                self._finetune(student)
            if distributed.is_main():
                self._finish()
        logger.info("\n%s\n%s", terminal_table(self.report), self._verdict())
        return self.report

    def _evaluate_origin(self) -> None:
        if "float" in self.state.rows or self.options.no_eval_origin:
            return
        began = time.perf_counter()
        result = self._measurer.measure(self._teacher, "the float model")
        self._save(self._measurer.row("float", self.options.weights, result, time.perf_counter() - began))

    def _calibrated(self) -> nn.Module:
        """The student as of now: freshly calibrated and evaluated, or as an earlier process left it."""
        weights = weights_folder(self.folder)
        if self.state.checkpoint:
            return checkpoint.load(weights / self.state.checkpoint).model.to(self._device)
        began = time.perf_counter()
        student = self._calibrate()
        result = None if self.options.no_eval_ptq else self._measurer.measure(student, "PTQ")
        score = result.score if result else None
        name = ptq_name(self.options.stem, score)
        self._write_checkpoint(name, student, {"stage": "PTQ", **(score.to_dict() if score else {"ap": None})})
        if result is None:
            logger.info("PTQ is not evaluated (--no-eval-ptq), so its file has no score: %s", name)
        row = self._measurer.row("PTQ", weights / name, result, time.perf_counter() - began)
        self.state.best = Best(score, None, name)
        self._save(row)
        return student

    def _calibrate(self) -> nn.Module:
        """A copy of the teacher with quantizers, whose ranges come from training images as validation sees them."""
        seed_everything(self.options.seed)
        student = self._inputs.network()
        placement.apply(student, self._inputs.plan, self.options.quantizer)
        student.to(self._device)  # the quantizers are new
        self._explain(self._inputs.plan)
        if self.recipe.calibration.method == AUTO:
            found = calibrate.sweep(student, self._inputs, self.recipe, self.options)
            self.recipe = replace(self.recipe, calibration=found.chosen)
            self.state.recipe = self.recipe.to_dict()
            for line in found.lines():
                self._note(line)
            return student
        images = image_batches(self._inputs.calibration_loader(self.options))
        batches = (as_input(batch, self._device) for batch in images)
        calibration.calibrate(student, batches, self.recipe.calibration)
        return student

    def _explain(self, plan: placement.Plan) -> None:
        """The placement in words: all of it as a file, without the long list of scales in the log."""
        text = placement.describe(plan)
        path = self.folder / "placement.txt"
        if not distributed.is_main():
            return
        with atomic_path(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        logger.info("%s\nall of it: %s", text.partition(f"\n{placement.SCALES}")[0], path)

    def _finetune(self, student: nn.Module) -> None:
        """The epochs that are left, until the last, the guard or patience ends them."""
        settings = self.recipe.finetune
        first = len(self.state.history)
        if self._has_stopped() or first >= settings.epochs:
            return
        teacher = self._inputs.teacher() if self._inputs.taught_by else self._teacher
        training = Training(
            student, teacher, self._inputs, self.options, settings, legs=self.state.legs, state=self.state.trainer
        )
        if self.state.best is not None and self.state.best.held_out is None:
            self.state.best.held_out = training.start()
        for epoch in range(first, settings.epochs):
            began = time.perf_counter()
            try:
                trained = training.epoch(epoch)
            except DivergedError as error:
                self.state.stopped = f"epoch {epoch}: {error}"
            else:
                self._evaluate_epoch(epoch, student, training, trained, began)
            if self._has_stopped():
                return

    def _has_stopped(self) -> bool:
        """Whether training ended before its last epoch; then there is a note that says why."""
        if self.state.stopped:
            self._note(f"{STOPPED} {self.state.stopped}; the best state is restored")
            self.state.save(self.folder)
        return bool(self.state.stopped)

    def _evaluate_epoch(
        self, epoch: int, student: nn.Module, training: Training, trained: TrainedEpoch, began: float
    ) -> None:
        """Evaluate, write the checkpoint, keep it if it is the best, and decide whether to go on."""
        settings, state = self.recipe.finetune, self.state
        result = self._measurer.measure(student, f"QAT epoch {epoch}")
        seconds = time.perf_counter() - began
        state.history.append(
            {"epoch": epoch, **_measured(result), "loss": trained.loss, "held_out": trained.held_out,
             "lr": trained.rate, "seconds": seconds}
        )  # fmt: skip
        score = result.score
        reference = Score.from_dict(state.rows.get("PTQ", {})) or (state.best.score if state.best else None)
        if reference and score.decides < settings.collapse * reference.decides:
            state.stopped = (
                f"epoch {epoch}: {score.what} fell to {score.decides:.4f}, "
                f"below {settings.collapse:g} of {reference.decides:.4f}"
            )
            return
        name = epoch_name(self.options.stem, epoch, score)
        self._write_checkpoint(name, student, {"stage": "QAT", "epoch": epoch, **score.to_dict()})
        state.trainer = training.state_dict()
        row = None
        if state.offer(Best(score, epoch, name, trained.held_out)):
            row = self._measurer.row("QAT", weights_folder(self.folder) / name, result, seconds)
        if epoch + 1 < settings.epochs:
            state.check_patience(settings.patience)
        self._save(row)
        best = ", the best so far" if row else ""
        logger.info("epoch %d: %s, loss %.4g, held out %.4g%s", epoch, score, trained.loss, trained.held_out, best)

    def _finish(self) -> None:
        """Name the best state, and write what the report shows about it."""
        weights, state = weights_folder(self.folder), self.state
        best = state.best
        if best is None:  # a state without a calibrated network never gets here
            raise RuntimeError("the run ended without a checkpoint")
        final = weights / best.file
        if not self.options.ptq_only:
            final = weights / best_name(self.options.stem)
            copy_file(weights / best.file, final)
            self._note(f"no epoch of QAT was trained: {final.name} is the PTQ state", holds=not state.trained)
            self._note(
                f"no epoch of QAT beat PTQ on the held-out images: {final.name} is the PTQ state",
                holds=state.trained and best.epoch is None,
            )
            row = state.rows["PTQ" if best.epoch is None else "QAT"]
            seconds = sum(entry["seconds"] for entry in state.history)
            state.rows["QAT"] = {**row, "stage": "QAT", "file": str(final), "seconds": seconds}
        model = checkpoint.load(final).model
        self.report.ranges = [Range(**entry) for entry in tensor_ranges(model)]
        if "val" in self._inputs.data.splits:
            stage = "PTQ" if self.options.ptq_only else "QAT"
            self.report.samples = self._measurer.samples({"float": self._teacher, stage: model})
        self._save(None)
        self._draw()
        state.finished = True  # after all else is written: what is not finished is done again
        state.save(self.folder)

    def _draw(self) -> None:
        """Plots beside the report."""
        from utils.reports import figures

        if self.report.history:
            figures.save(figures.ap_per_epoch(self.report), self.folder / "ap_per_epoch.png")
        figures.save(figures.ranges_per_layer(self.report.ranges), self.folder / "ranges.png")

    def _verdict(self) -> str:
        """The last lines of the program: which file to use, and why."""
        best, weights = self.state.best, weights_folder(self.folder)
        if best is None or self.options.ptq_only:
            return f"quantized: {weights / best.file if best else weights}"
        score = "" if best.score is None else f", {best.score}"
        ptq = "the PTQ state, which no epoch beat" if self.state.trained else "the PTQ state"
        origin = ptq if best.epoch is None else f"epoch {best.epoch}"
        lost = lost_by_qat(self.report.rows)
        return f"best: {weights / best_name(self.options.stem)} ({origin}{score})" + (f"\n{lost}" if lost else "")

    def _write_checkpoint(self, name: str, student: nn.Module, extra: dict[str, Any]) -> None:
        source = self._inputs.source
        origin = {"float_weights": self.options.weights, "float_sha256": self.state.weights_hash}
        if distributed.is_main():
            checkpoint.save(
                weights_folder(self.folder) / name,
                student,
                recipe=self.recipe,
                names=source.names,
                nc=source.nc,
                stride=source.stride,
                yaml=source.yaml,
                extra={**extra, **origin, "imgsz": self._inputs.imgsz},
            )
        self.state.files.append(name)
        self.state.checkpoint = name

    def _save(self, row: Row | None) -> None:
        """A step is finished: write the state, then the report, which is made anew from the state."""
        if row is not None:
            self.state.rows[row.stage] = row.to_dict()
        self.state.save(self.folder)
        ours = [Row(**self.state.rows[stage]) for stage in ("float", "PTQ", "QAT") if stage in self.state.rows]
        others = [old for old in self.report.rows if old.stage not in self.state.rows]
        self.report.rows = ours + others
        self.report.history = [Epoch(**entry) for entry in self.state.history]
        if distributed.is_main():
            self.report.save(self.folder / "report.json")

    def _note(self, text: str, *, holds: bool = True) -> None:
        """Say something in the log and the report, or take it back: it may no longer hold after more epochs."""
        if holds:
            logger.info("%s", text)
        for notes in (self.state.notes, self.report.notes):
            if holds and text not in notes:
                notes.append(text)
            if not holds and text in notes:
                notes.remove(text)


def _measured(result: EvalResult) -> dict[str, float]:
    """The scores of an epoch, as the history holds them."""
    masks = {} if result.masks is None else {"mask_ap": result.masks.ap, "mask_ap50": result.masks.ap50}
    return {"ap": result.ap, "ap50": result.ap50, **masks}
