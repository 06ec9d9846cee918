"""Choose the calibration method of a network: one pass of statistics gives the ranges of all methods.

`--calib-method auto` of `qat.py quantize` and `sensitive` compares the loss of three methods on training images that
are held out (`find_ranges`). `qat.py calibrate` measures AP and agreement of all methods on validation images, too, and
takes another method than `auto` only where it agrees measurably more with the FP32 model there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.quantize import calibration
from models.quantize.finetune import HeldOutLoss, held_out_loss
from models.quantize.recipe import AUTO, Calibration, Recipe
from utils import upstream
from utils.cli import command_line
from utils.core.files import write_text
from utils.core.logging import warnings_until_now
from utils.core.run_folder import new_run
from utils.core.score import Difference, Resampled
from utils.core.text import plural
from utils.evaluation.results import EvalResult
from utils.jobs.advice import advise
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, check_float_ap, without_tables
from utils.jobs.inputs import Inputs
from utils.jobs.options import RECIPE_FILE, CalibrateOptions
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Report, Row
from utils.reports.tables import terminal_table

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

METHODS: dict[str, dict[str, Any]] = {  # name → entries of the recipe
    "max": {"calibration_method": "max"},
    "percentile 99.9": {"calibration_method": "percentile", "calibration_percentile": 99.9},
    "percentile 99.99": {"calibration_method": "percentile", "calibration_percentile": 99.99},
    "percentile 99.999": {"calibration_method": "percentile", "calibration_percentile": 99.999},
    "mse": {"calibration_method": "mse"},
}
USUAL = "percentile 99.999"  # what `auto` takes unless another candidate is measurably better
CANDIDATES = (USUAL, "percentile 99.99", "mse")  # of `auto`


# The method that `auto` takes


def settings_of(recipe: Recipe) -> dict[str, Calibration]:
    """Return the recipe's calibration with each method."""
    return {name: recipe.replace(**changes).calibration for name, changes in METHODS.items()}


def auto_method(losses: Mapping[str, HeldOutLoss]) -> str:
    """Return the method that `auto` takes: the usual one, unless the loss of others is lower by two standard errors.

    Among several such methods it is the one with the smallest loss. Without losses it is the usual one.
    """
    lower = []
    for name, loss in losses.items():
        difference = loss.difference(losses[USUAL])
        if difference.significant and difference.value < 0:
            lower.append(name)
    return min(lower, key=lambda name: losses[name].value, default=USUAL)


def auto_losses(
    model: nn.Module, teacher: nn.Module, inputs: Inputs[Any], statistics: calibration.Statistics
) -> dict[str, HeldOutLoss]:
    """Return the task loss of each candidate of `auto` on held-out training images; empty where none are held out.

    The model's ranges are those of the last candidate afterwards.
    """
    losses: dict[str, HeldOutLoss] = {}
    if not inputs.held_out:
        return losses
    settings = settings_of(inputs.recipe)
    for name in CANDIDATES:
        _set_ranges(model, statistics, settings[name])
        losses[name] = held_out_loss(model, teacher, inputs.held_out_images, inputs.device)
    return losses


def _set_ranges(model: nn.Module, statistics: calibration.Statistics, setting: Calibration) -> None:
    """Set the ranges of a model by one method."""
    ranges = statistics.amax(setting.method, setting.percentile, setting.median_limit)
    calibration.set_ranges(model, ranges)


def why_auto(losses: Mapping[str, HeldOutLoss]) -> str:
    """Return why `auto` takes its method, as a sentence."""
    if not losses:
        return f"calibration auto: {USUAL}; there are too few training images to hold some out and compare methods"
    method = auto_method(losses)
    usual = losses[USUAL]
    texts = [f"{USUAL} {usual.value:.4g}"]
    for name, loss in losses.items():
        if name != USUAL:
            difference = loss.difference(usual)
            texts.append(f"{name} {loss.value:.4g} ({difference.value:+.2g} ± {difference.error:.2g})")
    images = plural(len(usual.terms), "held-out training image")
    reason = "no other is lower by two standard errors" if method == USUAL else "lower by two standard errors"
    return f"calibration auto: {method}, by the task loss on {images}: {', '.join(texts)}; {reason}"


def find_ranges(model: nn.Module, teacher: nn.Module, inputs: Inputs[Any]) -> tuple[Recipe, str]:
    """Set the activation ranges of a placed network.

    Returns:
        The recipe with the method that was used, and why `auto` took it; '' where the recipe names the method.
    """
    recipe = inputs.recipe
    if recipe.calibration.method != AUTO:
        calibration.calibrate(model, inputs.calibration_images(), recipe.calibration)
        return recipe, ""
    statistics = calibration.collect(model, inputs.calibration_images())
    losses = auto_losses(model, teacher, inputs, statistics)
    setting = settings_of(recipe)[auto_method(losses)]
    calibration.apply_calibration(model, statistics, setting)
    return recipe.replace(calibration=setting), why_auto(losses)


# qat.py calibrate


@dataclass(frozen=True)
class Sweep:
    """Results of a sweep over the methods, on the same validation images.

    Attributes:
        results: the evaluation of each method.
        auto: the method that `auto` takes.
        why_auto: why `auto` takes it, as a sentence.
    """

    results: Mapping[str, EvalResult]
    auto: str
    why_auto: str

    def agreement_gained(self, method: str) -> Difference | None:
        """Return how much more a method agrees with the FP32 model than `auto`'s; None if it was not measured."""
        result = self.results[method]
        base = self.results[self.auto]
        if result.agreement is None or base.agreement is None:
            return None
        return Difference.between(
            result.agreement, base.agreement, result.agreement_resampled, base.agreement_resampled
        )

    def ap_gained(self, method: str) -> Difference:
        """Return how much AP (of boxes and masks together) a method has over that of `auto`."""
        result = self.results[method]
        base = self.results[self.auto]
        return Difference.between(result.score.decides, base.score.decides, _resampled(result), _resampled(base))

    @property
    def chosen(self) -> str:
        """The method of `auto`, unless others agree measurably more, and do not lose AP measurably: then the best."""
        better = [method for method in self.results if self._is_better(method)]
        return max(better, key=lambda method: self.results[method].agreement or 0.0, default=self.auto)

    def _is_better(self, method: str) -> bool:
        """True if a method agrees measurably more than that of `auto`, and does not lose AP measurably."""
        agreement = self.agreement_gained(method)
        ap = self.ap_gained(method)
        if agreement is None or (ap.significant and ap.value < 0):
            return False
        return agreement.significant and agreement.value > 0

    @property
    def measure(self) -> str:
        """The score that methods are compared by, in words."""
        return self.results[self.auto].score.what

    def lines(self, unlabelled: bool) -> list[str]:
        """Return the methods by AP, each with its difference to that of `auto`; why `auto` takes it; the choice."""
        images = plural(self.results[self.auto].images, "validation image")
        measure = "agreement" if unlabelled else self.measure
        scores = {method: result.score.decides for method, result in self.results.items()}
        texts = []
        for method in sorted(scores, key=scores.__getitem__, reverse=True):
            difference = "" if method == self.auto else f" ({self.ap_gained(method)})"
            texts.append(f"{method} {scores[method]:.4f}{difference}")
        sweep = f"calibration sweep, {measure} on {images} (in brackets to {self.auto}): {', '.join(texts)}"
        if self.chosen == self.auto:
            why = f"the one that auto takes; no other agrees measurably more with the FP32 model on {images}"
        else:
            gained = self.agreement_gained(self.chosen)
            why = f"it agrees more with the FP32 model than {self.auto}, which auto takes, by {gained} on {images}"
        return [sweep, self.why_auto, f"chosen: {self.chosen}, {why}"]


def _resampled(result: EvalResult) -> Resampled | None:
    """Score that networks are compared by, on resamplings of the images; None in other than the main process."""
    return result.statistics.score_resampled() if result.statistics else None


def run(options: CalibrateOptions) -> dict[str, Any]:
    """`qat.py calibrate`: sweep, and write calibration.json, which is returned, and recipe.yaml to a new run folder."""
    recipe = options.merged_recipe()
    inputs = Inputs.load(options, recipe)
    options = inputs.options
    with new_run(options.project, options.name, options.exist_ok, options.WRITTEN) as folder, without_tables():
        report = Report(command=command_line(), title="Calibration methods", data=str(options.data))
        report.target_drop = options.target_drop
        measurer = Measurer.of(inputs, options.num_image)
        float_model = upstream.call_fused(inputs.network())
        measure_float(float_model, measurer, options, report)
        sweep = run_sweep(inputs, measurer, float_model)
        chosen = settings_of(recipe)[sweep.chosen]
        report.notes = sweep.lines(options.unlabelled)
        recipe.replace(calibration=chosen).save(folder / RECIPE_FILE, report.notes[-1])
        report.rows += sweep_rows(sweep, measurer, options, folder / RECIPE_FILE)
        report.splits = inputs.data.counts()
        report.warnings = warnings_until_now()
        report.doubts = inputs.doubts
        advice = advise(report)
        write_all(report, folder, advice)
        summary = summarize_sweep(sweep, chosen, options, report.command)
        # written last: its presence marks a complete run
        write_text(folder / "calibration.json", json.dumps(summary, indent=2) + "\n")
        lines = [terminal_table(report), "", *report.notes, "", advice.text, f"report: {folder / PAGE_NAME}"]
        logger.info("\n%s\nnext: %s", "\n".join(lines), advice.next_line)
    return summary


def measure_float(model: nn.Module, measurer: Measurer, options: CalibrateOptions, report: Report) -> None:
    """Evaluate the FP32 model, and add its row to the report; `DataError` where it finds nothing."""
    result = measurer.measure(model, FLOAT_MODEL, as_reference=True)
    report.rows.append(measurer.row("float", options.weights, result, result.seconds))
    check_float_ap(result.ap, options.force)


def run_sweep(inputs: Inputs[CalibrateOptions], measurer: Measurer, float_model: nn.Module) -> Sweep:
    """Calibrate by every method from one pass of statistics, and measure each network."""
    model = inputs.placed()
    statistics = calibration.collect(model, inputs.calibration_images())
    losses = auto_losses(model, float_model, inputs, statistics)
    results: dict[str, EvalResult] = {}
    for name, setting in settings_of(inputs.recipe).items():
        _set_ranges(model, statistics, setting)
        results[name] = measurer.measure(model, f"calibration {name}")
    return Sweep(results, auto_method(losses), why_auto(losses))


def sweep_rows(sweep: Sweep, measurer: Measurer, options: CalibrateOptions, recipe_file: Path) -> list[Row]:
    """Return a report row for each method, the chosen one last; they are results of the recipe's file."""
    rows = []
    names = [name for name in sweep.results if name != sweep.chosen]
    for name in (*names, sweep.chosen):
        stage = f"chosen: {name}" if name == sweep.chosen else name
        result = sweep.results[name]
        row = measurer.row(stage, options.weights, result, result.seconds)
        rows.append(row.model_copy(update={"file": str(recipe_file), "size_bytes": None, "weights_bytes": None}))
    return rows


def summarize_sweep(sweep: Sweep, chosen: Calibration, options: CalibrateOptions, command: str) -> dict[str, Any]:
    """Return the content of calibration.json."""
    summary: dict[str, Any] = {"schema_version": 2, "command": command, "options": options.model_dump()}
    best = sweep.results[sweep.chosen]
    summary["name"] = sweep.chosen
    summary["auto"] = sweep.auto
    summary["chosen"] = chosen.to_dict()
    summary["chosen_ap"] = best.score.decides
    summary["measure"] = "agreement" if options.unlabelled else sweep.measure
    summary["images"] = best.images
    summary["methods"] = {name: result.score.decides for name, result in sweep.results.items()}  # AP
    summary["errors"] = {name: sweep.ap_gained(name).error for name in sweep.results if name != sweep.auto}
    summary["agreement"] = {}
    for name, result in sweep.results.items():
        if result.agreement is not None:
            summary["agreement"][name] = result.agreement
    return summary
