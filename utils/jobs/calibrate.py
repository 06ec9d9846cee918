"""Which calibration method suits this network? All come from one pass of statistics.

`qat.py calibrate` measures AP of each on the same validation images; `--calib-method auto` of other commands compares
the loss of three on training images.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.quantize import calibration
from models.quantize.finetune import held_out_loss
from models.quantize.recipe import AUTO, Recipe
from utils import upstream
from utils.cli import command_line
from utils.core.files import write_text
from utils.core.run_folder import new_run
from utils.core.score import Difference, Resampled, difference_error
from utils.core.text import plural
from utils.evaluation.results import EvalResult
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, without_tables
from utils.jobs.inputs import HELD_OUT, Inputs
from utils.jobs.options import RECIPE_FILE, CalibrateOptions
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Report
from utils.reports.tables import WRONG, terminal_table, verdict

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

METHODS: dict[str, dict[str, Any]] = {  # name → what the recipe says about calibration
    "max": {"calibration_method": "max"},
    **{f"percentile {p}": {"calibration_method": "percentile", "calibration_percentile": p}
       for p in (99.9, 99.99, 99.999)},
    "mse": {"calibration_method": "mse"},
}  # fmt: skip
CANDIDATES = ("percentile 99.999", "percentile 99.99", "mse")  # of `auto`


def sweep_lines(found: Mapping[str, Any]) -> list[str]:
    """What a sweep found (`calibration.json`): the best method, the others by difference, and the choice."""
    ap, name, measure, agreement = (found[key] for key in ("methods", "name", "measure", "agreement"))
    best, *others = sorted(ap, key=ap.__getitem__, reverse=True)
    less = {one: Difference(ap[one] - ap[best], found["errors"].get(one)) for one in others}
    text = ", ".join([f"{best} {ap[best]:.4f}", *(f"{one} {ap[one]:.4f} ({less[one]})" for one in others)])
    chosen = f"chosen: {name}, {measure} {ap[name]:.4f}"
    if len(found["equal"]) > 1:
        by = f"agreement ({agreement[name]:.4f})" if agreement else measure
        chosen += (
            f", with the highest {by} of the methods that are not two standard errors below the float network or the "
            f"best method, whichever is less: {', '.join(found['equal'])}"
        )
    return [f"calibration sweep, {measure} on {plural(found['images'], 'image')}: {text}", chosen]


def no_measurable_loss(ap: Mapping[str, float], resampled: Mapping[str, Resampled | None]) -> list[str]:
    """The methods whose AP is not lower by two standard errors, best first; `float` is the float network.

    Their AP is compared with that of the best method, or of the float network where the best method is above that: on
    few images a bad method can gain AP by chance, and INT8 cannot be more right than what it stands for.
    """
    ranked = sorted((name for name in ap if name != "float"), key=ap.__getitem__, reverse=True)
    base = min(ranked[0], "float", key=ap.__getitem__)
    lost = {name: Difference(ap[name] - ap[base], difference_error(resampled.get(name), resampled.get(base)))
            for name in ranked}  # fmt: skip
    return [name for name in ranked if lost[name].value >= 0 or not lost[name].significant]


def run(options: CalibrateOptions) -> dict[str, Any]:
    """`qat.py calibrate`: sweep, and write calibration.json, which is returned, and recipe.yaml to a new run folder."""
    recipe = options.merged_recipe()
    inputs = Inputs.load(options, recipe)
    options = inputs.options
    with new_run(options.project, options.name, options.exist_ok, options.WRITTEN) as folder, without_tables():
        report = Report(command=command_line(), title="Calibration methods", data=str(options.data))
        measurer = Measurer.of(inputs, options.num_image)
        result = measurer.measure(upstream.call_fused(inputs.network()), FLOAT_MODEL, as_reference=True)
        report.rows.append(measurer.row("float", options.weights, result, result.seconds))
        model = inputs.placed()
        statistics = calibration.collect(model, inputs.calibration_images())
        settings = {name: recipe.replace(**changes).calibration for name, changes in METHODS.items()}
        results: dict[str, EvalResult] = {}
        for name, one in settings.items():
            calibration.set_ranges(model, statistics.amax(one.method, one.percentile, one.median_limit))
            results[name] = measurer.measure(model, f"calibration {name}")
        ap = {name: one.score.decides for name, one in results.items()}
        resampled = {
            name: one.statistics.score_resampled() if one.statistics else None
            for name, one in {**results, "float": result}.items()
        }
        best = max(METHODS, key=ap.__getitem__)
        equal = no_measurable_loss({**ap, "float": result.score.decides}, resampled)
        agreement = {name: one.agreement for name, one in results.items() if one.agreement is not None}
        chosen = max(equal, key=lambda name: (agreement.get(name, 0), ap[name]))
        found = {
            "schema_version": 1, "command": report.command, "options": options.model_dump(),
            "name": chosen, "chosen": settings[chosen].to_dict(), "chosen_ap": ap[chosen],
            "measure": "agreement AP" if options.unlabelled else results[chosen].score.what,
            "images": results[chosen].images,
            "methods": ap,  # AP of each; errors: standard errors of the differences to the best
            "errors": {name: difference_error(resampled[name], resampled[best]) for name in METHODS if name != best},
            "agreement": agreement, "equal": equal,  # the methods between which AP does not decide
        }  # fmt: skip
        report.notes, report.splits = sweep_lines(found), inputs.data.counts()
        recipe.replace(calibration=settings[chosen]).save(folder / RECIPE_FILE, report.notes[0])
        of_recipe = {"file": str(folder / RECIPE_FILE), "size_bytes": None}  # a recipe's size is no network's
        for name in sorted(results, key=lambda name: (name == chosen, ap[name])):  # what is chosen is last
            row = measurer.row(name, options.weights, results[name], results[name].seconds)
            report.rows.append(row.model_copy(update=of_recipe))
        write_all(report, folder)
        # last: where it lies, all is written
        write_text(folder / "calibration.json", json.dumps(found, indent=2) + "\n")
    table, (sentence, command) = terminal_table(report), verdict(report)
    notes, page = "\n".join(report.notes), folder / PAGE_NAME
    logger.info("\n%s\n\n%s\n\n%s\nreport: %s\nnext: %s", table, notes, sentence, page, command or WRONG)
    return found


def find_ranges(model: nn.Module, teacher: nn.Module, inputs: Inputs[Any]) -> tuple[Recipe, str]:
    """Set the activation ranges of a placed network; returns the recipe with the method that did, and why `auto` did.

    `auto` takes the candidate with the smallest task loss on held-out training images, and no validation image.
    """
    recipe = inputs.recipe
    if recipe.calibration.method != AUTO:
        calibration.calibrate(model, inputs.calibration_images(), recipe.calibration)
        return recipe, ""
    statistics = calibration.collect(model, inputs.calibration_images())
    settings = {name: recipe.replace(**METHODS[name]).calibration for name in CANDIDATES}
    held_out, losses = inputs.held_out_images, {}
    for name, one in settings.items():
        calibration.set_ranges(model, statistics.amax(one.method, one.percentile, one.median_limit))
        losses[name] = held_out_loss(model, teacher, held_out, inputs.device)
    best, *others = sorted(losses, key=lambda name: losses[name].value)
    calibration.apply_calibration(model, statistics, settings[best])
    more = (
        "{} {:.4g} ({:+.2g} ± {:.2g})".format(name, losses[name].value, *losses[name].difference(losses[best]))
        for name in others
    )
    images = f"{plural(len(losses[best].terms), 'training image')} ({HELD_OUT[bool(inputs.held_out)]})"
    return recipe.replace(calibration=settings[best]), (
        f"calibration auto chose {best}, by the task loss on {images}: "
        + ", ".join([f"{best} {losses[best].value:.4g}", *more])
    )
