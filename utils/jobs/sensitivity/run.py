"""What does each part of the network cost in INT8? (`qat.py sensitive`): screening → AP of what matters → recipe.

Screening: every unit (`units.py`) is scored by how much nearer the INT8 network with this unit in float comes to the
float network's predictions. Confirming: AP for the units with the highest scores. Then units stay in float, greedily,
until the loss is small enough (`search.py`), and that recipe is placed, calibrated and evaluated anew.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from models.quantize import calibration, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.files import write_text
from utils.core.input_spec import channels_of
from utils.core.logging import warnings_until_now
from utils.core.options import height_width
from utils.core.score import AGREEMENT, Difference
from utils.core.text import plural
from utils.jobs.advice import advise, allowed_drop
from utils.jobs.calibrate import find_ranges
from utils.jobs.evaluate import without_tables
from utils.jobs.inputs import Inputs
from utils.jobs.options import RECIPE_FILE, Kind, SensitiveOptions
from utils.jobs.run_state import AnalysisState, open_run
from utils.jobs.sensitivity.search import FLOAT, INT8, Passes, Search, Selection, ap_of, gain
from utils.jobs.sensitivity.units import Switches, Units, cost_shares, unit_kinds
from utils.reports import figures
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Report, Row, hardware
from utils.reports.tables import warning_block

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

SUMMARY_FILE = "summary-sensitive-analysis.json"
CHART_FILE = "sensitivity.png"
TOP = 10  # units on the terminal
BARS = 24  # units in the chart


def run(options: SensitiveOptions) -> dict[str, Any]:
    """`qat.py sensitive`: begin a run in a new folder, or resume one; returns the summary in its folder."""
    with open_run(options, AnalysisState) as (folder, state, inputs), without_tables():
        if options.resume is not None:
            finished = "the run is finished" if (folder / SUMMARY_FILE).is_file() else "it goes on"
            logger.info("resuming %s: %s", folder, finished)
        options = inputs.options
        units = Units(inputs.source.model, inputs.plan, inputs.recipe, options.granularity)
        what = len(units.all), options.granularity, plural(options.num_image, "validation image")
        logger.info("%s → %s: %d units (%s), on up to %s", options.weights, folder, *what)
        model = inputs.placed()
        inputs = calibrate_once(model, inputs, state, folder)
        images = torch.zeros(1, channels_of(model), *height_width(inputs.imgsz), device=inputs.device)
        float_model = upstream.call_fused(inputs.network())
        kinds = unit_kinds(float_model, [unit.name for unit in units.all], images)
        passes = Passes(inputs, Switches(model), units.everything, state, folder)
        search = Search(options, units, passes, cost_shares(model, images, inputs.profile))
        if inputs.has_masks or options.unlabelled:
            what_ap = f"that of boxes with {AGREEMENT}" if options.unlabelled else "the mean of box and mask AP"
            search.notes.append(f"every AP here is {what_ap}")
        chosen = search.run()
        chosen, recipe, row = place_anew(chosen, search, passes, inputs)
        recipe.save(folder / RECIPE_FILE, chosen.why)
        rows = [search.float_row, search.int8_row, *([row] if row else [])]
        summary = summarize_search(state, search, chosen, recipe.float, row, kinds)
        measured = to_report(summary, rows, inputs, folder)
        figures.save_figure(chart(summary), folder / CHART_FILE)
        advice = advise(measured)
        write_all(measured, folder, advice)
        # written last: its presence marks a complete run
        write_text(folder / SUMMARY_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        text = [*warning_block(measured), *measured.notes, "", advice.text, f"report: {folder / PAGE_NAME}"]
        logger.info("\n%s\nnext: %s", "\n".join(text), advice.next_line)
    return summary


def calibrate_once(model: nn.Module, inputs: Inputs[Kind], state: AnalysisState, folder: Path) -> Inputs[Kind]:
    """Find the ranges as `qat.py quantize` does, or take the state's; the inputs with the method that was chosen."""
    if state.amax:
        calibration.set_ranges(model, {name: torch.tensor(value) for name, value in state.amax.items()})
        return inputs
    recipe, why = find_ranges(model, upstream.call_fused(inputs.network()), inputs)
    if why:
        logger.info(why)
    scales: Any = model.activation_quantizers
    state.amax, state.recipe = {name: float(quantizer.amax) for name, quantizer in scales.items()}, recipe.to_dict()
    state.save(folder)
    return replace(inputs, recipe=recipe)


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
    allowed = allowed_drop(inputs.options.target_drop, inputs.options.unlabelled)
    if lost > allowed >= ap_of(search.float_row) - chosen.ap:
        search.notes.append(f"calibrated anew, the recipe loses {lost:.4f}, more than with the ranges before")
    return chosen, recipe, row.model_copy(update={"stage": "recipe"})


def summarize_search(
    state: AnalysisState,
    search: Search,
    chosen: Selection,
    patterns: Sequence[str],
    recipe: Row | None,
    kinds: Mapping[str, str],
) -> dict[str, Any]:
    """The result of a run as JSON holds it: `rows` best first, those with an AP before the others.

    `patterns` are left in float; `recipe` is the row of the network with the recipe, placed and calibrated anew.
    `kinds` are the units' classes and strides, see `unit_kinds`.
    """
    measured = {name: Row(**row) for name, row in state.rows.items()}
    base, int8 = measured[FLOAT], measured[INT8]
    rows: list[dict[str, Any]] = []
    for name in search.units:
        row, seen = measured.get(name), state.screened.get(name, {"score": 0.0, "images": 0})
        gained = row and gain(row, int8)
        entry = {"unit": name, "kind": kinds.get(name, ""), "score": seen["score"], "images": seen["images"]}
        entry |= {"ap": row and row.ap, "gain": gained and gained.value, "gain_error": gained and gained.error}
        rows.append({**entry, "cost": search.cost((name,))})
    rows.sort(key=lambda row: (row["gain"] is None, -(row["gain"] or 0.0), -row["score"]))
    return {
        "schema_version": 2,
        "command": state.command,
        "options": state.options,
        "ap": {"float": base.ap, "INT8": int8.ap, "recipe": recipe and recipe.ap},
        "rows": rows,
        "cost_is": "engine time" if state.options.get("profile") else "MACs",
        "recipe": {"units": list(chosen.names), "float": list(patterns), "ap": chosen.ap, "cost": chosen.cost,
                   "why": chosen.why},
        "notes": search.notes,
        "hardware": hardware(),
    }  # fmt: skip


def to_report(content: Mapping[str, Any], rows: Sequence[Row], inputs: Inputs[Any], folder: Path) -> Report:
    """The run as a report: the `rows` of float, INT8 and perhaps the recipe, whose file the last one names."""
    changes = {"file": str(folder / RECIPE_FILE), "size_bytes": None, "weights_bytes": None}
    of_recipe = rows[-1].model_copy(update=changes)
    return Report(
        command=content["command"], title="Sensitivity of layers", data=inputs.options.data,
        rows=[*rows[:-1], of_recipe], notes=lines(content, rows), splits=inputs.data.counts(),
        target_drop=inputs.options.target_drop, warnings=warnings_until_now(), doubts=inputs.doubts,
        charts={f"Sensitivity ({folder.name})": str(folder / CHART_FILE)},
    )  # fmt: skip


def lines(content: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The top ten in the form that users know, and what follows from them in sentences; `rows` as for `to_report`."""
    (base, int8, *recipe_row), recipe = rows, content["recipe"]
    measured = [row for row in content["rows"] if row["ap"] is not None]
    gains = {row["unit"]: Difference(row["gain"], row["gain_error"]) for row in measured}
    found = [f"FP32: ap = {ap_of(base):.5f}; INT8: ap = {ap_of(int8):.5f} ({gain(int8, base)})"]
    for place, row in enumerate(content["rows"][:TOP]):
        result = f"not confirmed, score {row['score']:.4f}"
        if row["unit"] in gains:
            result = f"ap = {row['ap']:.5f} ({gains[row['unit']]})"
        found.append(f"Top{place}: Using fp16 {row['unit']}, {result}, {row['cost']:.1%} of {content['cost_is']}")
    found.append("In brackets is the AP gained over INT8 ± its standard error, from resampling the images.")
    found += [f"note: {note}" for note in content["notes"]]
    share = f" (this run added {recipe['cost']:.1%} of the cost)" if recipe["units"] else ""
    found.append(f"The recipe keeps {', '.join(recipe['float']) or 'nothing'} in float{share}: {recipe['why']}.")
    for row in recipe_row:
        found.append(f"Placed and calibrated anew, its AP is {row.ap:.5f} ({gain(row, int8)} against INT8).")
    if unsure := [name for name, one in gains.items() if name in recipe["units"] and not one.significant]:
        found.append(f"By themselves, these units gain no measurable AP: {', '.join(unsure)}.")
    return found


def chart(content: Mapping[str, Any]) -> Figure:
    """Bars of the units that matter most: the score, and AP gained with the unit in float where it was measured."""
    rows, chosen = content["rows"][:BARS][::-1], content["recipe"]["units"]
    places, colours = range(len(rows)), [figures.ORANGE if row["unit"] in chosen else figures.BLUE for row in rows]
    names = []
    for row in rows:
        name = f"{row['unit']} {row['kind']}".strip()
        names.append(f"{name} (in the recipe)" if row["unit"] in chosen else name)
    gains, errors = ([math.nan if row[key] is None else row[key] for row in rows] for key in ("gain", "gain_error"))
    figure, (left, right) = figures.new_figure(10.0, 1.6 + 0.24 * len(rows), 1, 2)
    left.barh(places, [row["score"] for row in rows], color=colours)
    left.set_yticks(places, names, fontsize=8)
    left.set(xlabel="closer to FP32 when this layer is FP16")
    figures.title(left, "Screening: score")
    right.barh(places, gains, xerr=errors, color=colours, ecolor=figures.GREY, capsize=2)
    for place, gained in zip(places, gains, strict=True):
        if math.isnan(gained):
            right.text(0, place, " not measured", va="center", fontsize=7, color=figures.GREY)
    loss = content["ap"]["float"] - content["ap"]["INT8"]
    right.axvline(loss, color=figures.GREEN, linestyle="--", linewidth=1.6, label="all that INT8 lost")
    right.legend(frameon=False, fontsize=8, loc="lower center")
    right.set_yticks(places, [])
    right.set(xlabel=f"AP gained over INT8's {content['ap']['INT8']:.4f}", ylim=left.get_ylim())
    right.locator_params(axis="x", nbins=5)  # numbers such as -0.0025 beside each other
    figures.title(right, "AP with this layer in FP16")
    return figure
