"""Which calibration method suits this network? All come from one pass of statistics.

`--calib-method auto` of `qat.py quantize` and `sensitive` compares the loss of three methods on training images that
are held out (`find_ranges`). `qat.py calibrate` measures AP and agreement of all methods on validation images, too, and
takes another method than `auto` only where it agrees measurably more with the FP32 model there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
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
from utils.reports.schema import Report
from utils.reports.tables import terminal_table

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

METHODS: dict[str, dict[str, Any]] = {  # name → what the recipe says about calibration
    "max": {"calibration_method": "max"},
    **{f"percentile {p}": {"calibration_method": "percentile", "calibration_percentile": p}
       for p in (99.9, 99.99, 99.999)},
    "mse": {"calibration_method": "mse"},
}  # fmt: skip
USUAL = "percentile 99.999"  # what `auto` takes unless another candidate is measurably better
CANDIDATES = (USUAL, "percentile 99.99", "mse")  # of `auto`


# What `auto` takes


def settings_of(recipe: Recipe) -> dict[str, Calibration]:
    """The recipe's calibration by each method."""
    return {name: recipe.replace(**changes).calibration for name, changes in METHODS.items()}


def auto_method(losses: Mapping[str, HeldOutLoss]) -> str:
    """The method that `auto` takes: the usual one, unless the loss of others is lower by two standard errors.

    Of these it is the one with the smallest loss. Without losses it is the usual one.
    """
    lower = [
        name
        for name, loss in losses.items()
        if (difference := loss.difference(losses[USUAL])).significant and difference.value < 0
    ]
    return min(lower, key=lambda name: losses[name].value, default=USUAL)


def auto_losses(
    model: nn.Module, teacher: nn.Module, inputs: Inputs[Any], statistics: calibration.Statistics
) -> dict[str, HeldOutLoss]:
    """The task loss of each candidate of `auto` on held-out training images; empty where none are held out.

    The model's ranges are those of the last candidate afterwards.
    """
    losses: dict[str, HeldOutLoss] = {}
    if not inputs.held_out:
        return losses
    settings = settings_of(inputs.recipe)
    for name in CANDIDATES:
        setting = settings[name]
        ranges = statistics.amax(setting.method, setting.percentile, setting.median_limit)
        calibration.set_ranges(model, ranges)
        losses[name] = held_out_loss(model, teacher, inputs.held_out_images, inputs.device)
    return losses


def why_auto(losses: Mapping[str, HeldOutLoss]) -> str:
    """Why `auto` takes its method, as a sentence."""
    if not losses:
        return f"calibration auto: {USUAL}; there are too few training images to hold some out and compare methods"
    method = auto_method(losses)
    usual = losses[USUAL]
    texts = [f"{USUAL} {usual.value:.4g}"]
    for name, loss in losses.items():
        if name != USUAL:
            difference = loss.difference(usual)
            texts.append(f"{name} {loss.value:.4g} ({difference.value:+.2g} ± {difference.error:.2g})")
    images = f"{plural(len(usual.terms), 'training image')} that are held out"
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
    """What a sweep over the methods has measured, on the same validation images.

    Attributes:
        results: of each method.
        auto: the method that `auto` takes, and why.
    """

    results: Mapping[str, EvalResult]
    auto: str
    why_auto: str

    def agreement_gained(self, method: str) -> Difference | None:
        """How much more a method agrees with the FP32 model than `auto`'s; None where it was not measured."""
        result, base = self.results[method], self.results[self.auto]
        if result.agreement is None or base.agreement is None:
            return None
        resamplings = result.agreement_resampled, base.agreement_resampled
        return Difference.between(result.agreement, base.agreement, *resamplings)

    def ap_gained(self, method: str) -> Difference:
        """How much AP (of boxes and masks together) a method has over that of `auto`."""
        result, base = self.results[method], self.results[self.auto]
        return Difference.between(result.score.decides, base.score.decides, _resampled(result), _resampled(base))

    @property
    def chosen(self) -> str:
        """The method of `auto`, unless others agree measurably more, and do not lose AP measurably: then the best."""
        better = []
        for method in self.results:
            gained, ap = self.agreement_gained(method), self.ap_gained(method)
            loses_ap = ap.significant and ap.value < 0
            if gained and gained.significant and gained.value > 0 and not loses_ap:
                better.append(method)
        return max(better, key=lambda method: self.results[method].agreement or 0.0, default=self.auto)

    @property
    def measure(self) -> str:
        """The score that methods are compared by, in words."""
        return self.results[self.auto].score.what

    def lines(self, unlabelled: bool) -> list[str]:
        """The methods by AP, best first, each with its difference to that of `auto`; `auto`'s reason; the choice."""
        images = plural(self.results[self.auto].images, "validation image")
        measure = "agreement" if unlabelled else self.measure
        ranked = sorted(self.results, key=lambda method: self.results[method].score.decides, reverse=True)
        texts = []
        for method in ranked:
            difference = "" if method == self.auto else f" ({self.ap_gained(method)})"
            texts.append(f"{method} {self.results[method].score.decides:.4f}{difference}")
        sweep = f"calibration sweep, {measure} on {images} (in brackets to {self.auto}): {', '.join(texts)}"
        if self.chosen == self.auto:
            why = f"the one that auto takes; no other agrees measurably more with the FP32 model on {images}"
        else:
            gained = self.agreement_gained(self.chosen)
            why = f"it agrees more with the FP32 model than {self.auto}, which auto takes, by {gained} on {images}"
        return [sweep, self.why_auto, f"chosen: {self.chosen}, {why}"]


def _resampled(result: EvalResult) -> Resampled | None:
    """The score that networks are compared by, on resamplings of the images; None in other than the main process."""
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
        result = measurer.measure(float_model, FLOAT_MODEL, as_reference=True)
        report.rows.append(measurer.row("float", options.weights, result, result.seconds))
        check_float_ap(result.ap, options.force)
        sweep = _sweep(inputs, measurer, float_model)
        chosen = settings_of(recipe)[sweep.chosen]
        summary = {
            "schema_version": 2, "command": report.command, "options": options.model_dump(),
            "name": sweep.chosen, "auto": sweep.auto, "chosen": chosen.to_dict(),
            "chosen_ap": sweep.results[sweep.chosen].score.decides,
            "measure": "agreement" if options.unlabelled else sweep.measure,
            "images": sweep.results[sweep.chosen].images,
            "methods": {name: one.score.decides for name, one in sweep.results.items()},  # AP
            "errors": {name: sweep.ap_gained(name).error for name in sweep.results if name != sweep.auto},
            "agreement": {name: one.agreement for name, one in sweep.results.items() if one.agreement is not None},
        }  # fmt: skip
        report.notes, report.splits = sweep.lines(options.unlabelled), inputs.data.counts()
        report.warnings, report.doubts = warnings_until_now(), inputs.doubts
        recipe.replace(calibration=chosen).save(folder / RECIPE_FILE, report.notes[-1])
        of_recipe = {"file": str(folder / RECIPE_FILE), "size_bytes": None, "weights_bytes": None}
        others = [name for name in sweep.results if name != sweep.chosen]
        for name in (*others, sweep.chosen):
            stage = f"chosen: {name}" if name == sweep.chosen else name
            row = measurer.row(stage, options.weights, sweep.results[name], sweep.results[name].seconds)
            report.rows.append(row.model_copy(update=of_recipe))
        advice = advise(report)
        write_all(report, folder, advice)
        # written last: its presence marks a complete run
        write_text(folder / "calibration.json", json.dumps(summary, indent=2) + "\n")
        lines = [terminal_table(report), "", *report.notes, "", advice.text, f"report: {folder / PAGE_NAME}"]
        logger.info("\n%s\nnext: %s", "\n".join(lines), advice.next_line)
    return summary


def _sweep(inputs: Inputs[CalibrateOptions], measurer: Measurer, float_model: nn.Module) -> Sweep:
    """Calibrate by every method from one pass of statistics, and measure each network."""
    model = inputs.placed()
    statistics = calibration.collect(model, inputs.calibration_images())
    losses = auto_losses(model, float_model, inputs, statistics)
    results: dict[str, EvalResult] = {}
    for name, setting in settings_of(inputs.recipe).items():
        ranges = statistics.amax(setting.method, setting.percentile, setting.median_limit)
        calibration.set_ranges(model, ranges)
        results[name] = measurer.measure(model, f"calibration {name}")
    return Sweep(results, auto_method(losses), why_auto(losses))
