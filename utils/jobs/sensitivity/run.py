"""What does each part of the network cost in INT8? (`qat.py sensitive`): screening → AP of what matters → recipe.

Screening: every unit (`units.py`) is scored by how much nearer a placed and calibrated network with this unit in float
comes to the float network's predictions (`prediction_distance.py`); units take turns (`search.py`).
Confirming: AP for the units with the highest scores, all on the same images. Then units stay in float, greedily,
until the loss is small enough (`search.py`), and that recipe is placed, calibrated and evaluated as `qat.py quantize`
does.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.quantize import calibration, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.device import disable_tf32
from utils.core.input_spec import channels_of
from utils.core.options import height_width
from utils.core.score import AGREEMENT, Difference, difference_error
from utils.core.text import plural
from utils.jobs.evaluate import FLOAT_MODEL, Measurer, without_tables
from utils.jobs.evaluate_file import warn_of_low_ap
from utils.jobs.inputs import Inputs
from utils.jobs.options import RECIPE_FILE, SensitiveOptions
from utils.jobs.run_state import open_run
from utils.jobs.sensitivity import report
from utils.jobs.sensitivity.report import AnalysisState
from utils.jobs.sensitivity.search import FLOAT, INT8, Passes, Search, Selection
from utils.jobs.sensitivity.units import Costs, Switches, Units
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.tables import WRONG, verdict

logger = logging.getLogger(__name__)


def run(options: SensitiveOptions) -> dict[str, Any]:
    """`qat.py sensitive`: begin a run in a new folder, or resume one; the summary is returned, and lies in the folder.

    Raises:
        InputError: something given cannot be used, for which nothing was written; or the run cannot be resumed so.
    """
    with open_run(options, AnalysisState) as (folder, state, inputs), without_tables():
        if options.resume is not None:
            finished = "the run is finished" if (folder / report.SUMMARY_FILE).is_file() else "it goes on"
            logger.info("resuming %s: %s", folder, finished)
        options = inputs.options
        units = Units(inputs.source.model, inputs.plan, inputs.recipe, options.granularity)
        what = len(units.all), options.granularity, plural(options.num_image, "validation image")
        logger.info("%s → %s: %d units (%s), on up to %s", options.weights, folder, *what)
        model = inputs.placed()
        calibrate_once(model, inputs, state, folder)
        shape = (1, channels_of(model), *height_width(inputs.imgsz))
        costs = Costs(model, torch.zeros(shape, device=inputs.device), inputs.profile)
        loader = inputs.validation_loader(options.num_image)
        passes = Passes(Switches(model), units.everything, loader, inputs.device, folder, state,
                        unlabelled=options.unlabelled)  # fmt: skip
        search = Search(options, units, passes, costs)
        with disable_tf32(), torch.inference_mode():
            chosen = search.run()
        warn_of_low_ap(search.ap[FLOAT])
        patterns = (pattern for name in chosen.names for pattern in search.units[name].patterns)
        recipe = inputs.recipe.replace(float=tuple(dict.fromkeys((*inputs.recipe.float, *patterns))))
        name, known = ", ".join(sorted(recipe.float)), state.ap.setdefault("recipe", {})
        if chosen.names and name not in known:
            measure_recipe(recipe, name, inputs, state)
            state.save(folder)
        recipe_ap = known.get(name) if chosen.names else None
        resampled = None if recipe_ap is None else state.resampled("recipe").get(name)
        if recipe_ap is not None:
            gain = Difference(recipe_ap - search.ap[INT8], difference_error(resampled, search.resampled.get(INT8)))
            if gain.value < 0 or not gain.significant:
                found = f"{', '.join(chosen.names)} in float ({chosen.cost:.1%} of the cost), calibrated anew,"
                search.notes.append(f"{found} gain {gain} AP over INT8, which these images cannot show")
                chosen = Selection((), search.ap[INT8], 0.0, "what was found gains no measurable AP")
                recipe, recipe_ap, resampled = inputs.recipe, None, None
            elif chosen.ap >= search.ap[FLOAT] - options.target_drop > recipe_ap:
                lost = search.ap[FLOAT] - recipe_ap
                search.notes.append(f"calibrated anew, the recipe loses {lost:.4f}, more than with the ranges before")
        notes = ["every AP here is the mean of box and mask AP"] if inputs.has_masks else []
        if options.unlabelled:
            notes = [f"every AP here is that of boxes with {AGREEMENT}"]
        notes += search.notes
        recipe.save(folder / RECIPE_FILE, chosen.why)
        summary = report.summarize_search(state, search, chosen, recipe.float, recipe_ap, resampled, notes)
        report.save_summary(summary, folder)
        measured = report.to_report(summary, inputs, folder)
        write_all(measured, folder)
    text, (sentence, command) = "\n".join(measured.notes), verdict(measured)
    logger.info("\n%s\n\n%s\nreport: %s\nnext: %s", text, sentence, folder / PAGE_NAME, command or WRONG)
    return summary


def calibrate_once(model: nn.Module, inputs: Inputs[SensitiveOptions], state: AnalysisState, folder: Path) -> None:
    """Find the ranges as `qat.py quantize` does, or take those that the state has."""
    if state.amax:
        calibration.set_ranges(model, {name: torch.tensor(value) for name, value in state.amax.items()})
        return
    calibration.calibrate(model, inputs.calibration_images(), inputs.recipe.calibration)
    scales: Any = model.activation_quantizers
    state.amax = {name: float(quantizer.amax) for name, quantizer in scales.items()}
    state.save(folder)


def measure_recipe(recipe: Recipe, name: str, inputs: Inputs[SensitiveOptions], state: AnalysisState) -> None:
    """Measure AP of the network that `qat.py quantize --recipe` makes; `name` says what is in float."""
    model = inputs.placed(placement.plan(inputs.source.model, recipe))
    calibration.calibrate(model, inputs.calibration_images(), inputs.recipe.calibration)
    measurer = Measurer.of(inputs, inputs.options.num_image)
    if inputs.options.unlabelled:
        measurer.measure(upstream.call_fused(inputs.network()), FLOAT_MODEL, as_reference=True)
    result = measurer.measure(model, "the recipe")
    resampled = result.statistics.score_resampled() if result.statistics else None
    state.keep_ap("recipe", {name: result.score.decides}, {name: resampled})
