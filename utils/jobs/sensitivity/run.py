"""What does each part of the network cost in INT8? (`qat.py sensitive`): screening → AP of what matters → recipe.

Screening: every unit (`units.py`) is scored by how much nearer a placed and calibrated network with this unit in float
comes to the float network's predictions (`prediction_distance.py`); units take turns (`search.py`).
Confirming: AP for the units with the highest scores, all on the same images. Then units stay in float, greedily,
until the loss is small enough (`search.py`), and that recipe is placed, calibrated and evaluated as `qat.py quantize`
does.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.quantize import calibration, placement
from models.quantize.recipe import Recipe
from utils.core.files import write_text
from utils.core.input_spec import channels_of
from utils.core.options import height_width
from utils.core.score import AGREEMENT
from utils.core.text import plural
from utils.jobs.evaluate import without_tables
from utils.jobs.inputs import Inputs
from utils.jobs.options import RECIPE_FILE, SensitiveOptions
from utils.jobs.run_state import AnalysisState, open_run
from utils.jobs.sensitivity import report
from utils.jobs.sensitivity.search import Passes, Search, Selection, ap_of, gain
from utils.jobs.sensitivity.units import Switches, Units, cost_shares
from utils.reports import figures
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Row
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
        images = torch.zeros(1, channels_of(model), *height_width(inputs.imgsz), device=inputs.device)
        passes = Passes(inputs, Switches(model), units.everything, state, folder)
        search = Search(options, units, passes, cost_shares(model, images, inputs.profile))
        if inputs.has_masks or options.unlabelled:
            what_ap = f"that of boxes with {AGREEMENT}" if options.unlabelled else "the mean of box and mask AP"
            search.notes.append(f"every AP here is {what_ap}")
        chosen, recipe, row = place_anew(search.run(), search, passes, inputs)
        recipe.save(folder / RECIPE_FILE, chosen.why)
        rows = [search.float_row, search.int8_row, *([row] if row else [])]
        summary = report.summarize_search(state, search, chosen, recipe.float, row)
        measured = report.to_report(summary, rows, inputs, folder)
        figures.save_figure(report.chart(summary), folder / report.CHART_FILE)
        write_all(measured, folder)
        # last: where it lies, all is written
        write_text(folder / report.SUMMARY_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
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


def place_anew(
    chosen: Selection, search: Search, passes: Passes, inputs: Inputs[SensitiveOptions]
) -> tuple[Selection, Recipe, Row | None]:
    """The choice, its recipe, and the row of the network that `qat.py quantize --recipe` makes of it.

    Nothing more than before is kept in float, and there is no row, where that network gains no measurable AP.
    """
    if not chosen.names:
        return chosen, inputs.recipe, None
    patterns = (pattern for name in chosen.names for pattern in search.units[name].patterns)
    recipe = inputs.recipe.replace(float=tuple(dict.fromkeys((*inputs.recipe.float, *patterns))))

    def calibrated() -> nn.Module:
        model = inputs.placed(placement.plan(inputs.source.model, recipe))
        calibration.calibrate(model, inputs.calibration_images(), recipe.calibration)
        return model

    row = passes.measure_network(f"recipe: {', '.join(sorted(recipe.float))}", calibrated)
    gained, lost = gain(row, search.int8_row), ap_of(search.float_row) - ap_of(row)
    if gained.value < 0 or not gained.significant:
        found = f"{', '.join(chosen.names)} in float ({chosen.cost:.1%} of the cost), calibrated anew,"
        search.notes.append(f"{found} gain {gained} AP over INT8, which these images cannot show")
        return Selection((), ap_of(search.int8_row), 0.0, "what was found gains no measurable AP"), inputs.recipe, None
    if lost > inputs.options.target_drop >= ap_of(search.float_row) - chosen.ap:
        search.notes.append(f"calibrated anew, the recipe loses {lost:.4f}, more than with the ranges before")
    return chosen, recipe, row.model_copy(update={"stage": "recipe"})
