"""`qat.py sensitive`: find the parts of a network that lose AP in INT8, and write a recipe that keeps them in FP16.

Screening: every unit (`units.py`) is scored by how much nearer the INT8 network with this unit in float comes to the
FP32 model's predictions. Confirming: AP for the units with the highest scores. Then units stay in float, greedily,
until the loss is small enough (`search.py`), and that recipe is placed, calibrated and evaluated again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from utils.jobs.advice import advise
from utils.jobs.calibrate import find_ranges
from utils.jobs.evaluate import without_tables
from utils.jobs.inputs import Inputs
from utils.jobs.judgement import allowed_drop
from utils.jobs.options import RECIPE_FILE, Kind, SensitiveOptions
from utils.jobs.run_state import AnalysisState, open_run
from utils.jobs.sensitivity.search import FLOAT, INT8, Passes, Search, Selection, ap_of, gain
from utils.jobs.sensitivity.units import Switches, Units, cost_shares, unit_kinds
from utils.reports import figures
from utils.reports.page import PAGE_NAME, write_all
from utils.reports.schema import Report, Row, hardware
from utils.reports.tables import warning_block

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
            status = "the run is finished" if (folder / SUMMARY_FILE).is_file() else "it goes on"
            logger.info("resuming %s: %s", folder, status)
        units = Units(inputs.source.model, inputs.plan, inputs.recipe, inputs.options.granularity)
        log_plan(units, inputs, folder)
        model = inputs.placed()
        inputs = calibrate_once(model, inputs, state, folder)
        images = torch.zeros(1, channels_of(model), *height_width(inputs.imgsz), device=inputs.device)
        passes = Passes(inputs, Switches(model), units.everything, state, folder)
        search = Search(inputs.options, units, passes, cost_shares(model, images, inputs.profile))
        note_kind_of_ap(search, inputs)
        result = place_again(search.run(), search, passes, inputs)
        result.recipe.save(folder / RECIPE_FILE, result.chosen.why)
        kinds = unit_kinds(upstream.call_fused(inputs.network()), [unit.name for unit in units.all], images)
        summary = summarize_search(state, search, result.chosen, result.recipe.float, result.row, kinds)
        write_results(summary, result.rows(search), inputs, folder)
    return summary


class Result(NamedTuple):
    """The result of a run: the units that stay in float, the recipe, and the row of the network that it makes, if any.

    There is no row where nothing more than before stays in float.
    """

    chosen: Selection
    recipe: Recipe
    row: Row | None

    def rows(self, search: Search) -> list[Row]:
        """Return the rows of the report: FP32, INT8, and the recipe's."""
        rows = [search.float_row, search.int8_row]
        if self.row is not None:
            rows.append(self.row)
        return rows


def log_plan(units: Units, inputs: Inputs[SensitiveOptions], folder: Path) -> None:
    """Log how many units are tried, and on how many images."""
    options = inputs.options
    images = plural(options.num_image, "validation image")
    text = "%s → %s: %d units (%s), on up to %s"
    logger.info(text, options.weights, folder, len(units.all), options.granularity, images)


def note_kind_of_ap(search: Search, inputs: Inputs[SensitiveOptions]) -> None:
    """Note which AP networks are compared by, where it is not that of boxes with labels."""
    if inputs.options.unlabelled:
        search.notes.append(f"every AP here is that of boxes with {AGREEMENT}")
    elif inputs.has_masks:
        search.notes.append("every AP here is the mean of box and mask AP")


def calibrate_once(model: nn.Module, inputs: Inputs[Kind], state: AnalysisState, folder: Path) -> Inputs[Kind]:
    """Find the ranges as `qat.py quantize` does, or take the state's; return inputs with the method that was chosen."""
    if state.amax:
        calibration.set_ranges(model, {name: torch.tensor(value) for name, value in state.amax.items()})
        return inputs
    recipe, why = find_ranges(model, upstream.call_fused(inputs.network()), inputs)
    if why:
        logger.info(why)
    scales: Any = model.activation_quantizers
    state.amax = {name: float(quantizer.amax) for name, quantizer in scales.items()}
    state.recipe = recipe.to_dict()
    state.save(folder)
    return replace(inputs, recipe=recipe)


def place_again(chosen: Selection, search: Search, passes: Passes, inputs: Inputs[SensitiveOptions]) -> Result:
    """Place, calibrate and evaluate the network that `qat.py quantize --recipe` makes of a choice of units.

    Nothing more than before stays in float where that network gains no measurable AP.
    """
    nothing = Selection((), ap_of(search.int8_row), 0.0, "no unit gains measurable AP")
    if not chosen.names:
        return Result(chosen, inputs.recipe, None)
    recipe = recipe_with(chosen, search, inputs.recipe)

    def calibrated() -> nn.Module:
        model = inputs.placed(placement.plan(inputs.source.model, recipe))
        calibration.calibrate(model, inputs.calibration_images(), recipe.calibration)
        return model

    row = passes.measure_network(f"recipe: {', '.join(sorted(recipe.float))}", calibrated)
    gained = gain(row, search.int8_row)
    if gained.value < 0 or not gained.significant:
        search.notes.append(
            f"calibrated again, the network with {', '.join(chosen.names)} in FP16 ({chosen.cost:.1%} of the cost) "
            f"gains {gained} AP over INT8, too little for these images to show"
        )
        return Result(nothing, inputs.recipe, None)
    allowed = allowed_drop(inputs.options.target_drop, inputs.options.unlabelled)
    lost = ap_of(search.float_row) - ap_of(row)
    lost_before = ap_of(search.float_row) - chosen.ap
    if lost_before <= allowed < lost:
        search.notes.append(f"calibrated again, the recipe loses {lost:.4f}, more than with the ranges before")
    return Result(chosen, recipe, row.model_copy(update={"stage": "recipe"}))


def recipe_with(chosen: Selection, search: Search, recipe: Recipe) -> Recipe:
    """Return the recipe that keeps these units in float, too."""
    patterns = list(recipe.float)
    for name in chosen.names:
        patterns += search.units[name].patterns
    return recipe.replace(float=tuple(dict.fromkeys(patterns)))


def summarize_search(
    state: AnalysisState,
    search: Search,
    chosen: Selection,
    patterns: Sequence[str],
    recipe: Row | None,
    kinds: Mapping[str, str],
) -> dict[str, Any]:
    """Return the result of a run as JSON holds it: `rows` best first, those with an AP before the others.

    Args:
        patterns: the modules that the recipe leaves in float.
        recipe: the row of the network with the recipe, placed and calibrated again; None where there is none.
        kinds: the units' classes and strides, see `unit_kinds`.
    """
    measured = {name: Row(**row) for name, row in state.rows.items()}
    rows = [_summary_row(name, state, search, measured, kinds) for name in search.units]
    rows.sort(key=lambda row: (row["gain"] is None, -(row["gain"] or 0.0), -row["score"]))
    ap = {"float": measured[FLOAT].ap, "INT8": measured[INT8].ap, "recipe": None}
    if recipe is not None:
        ap["recipe"] = recipe.ap
    return {
        "schema_version": 2,
        "command": state.command,
        "options": state.options,
        "ap": ap,
        "rows": rows,
        "cost_is": "engine time" if state.options.get("profile") else "MACs",
        "recipe": _summary_of_choice(chosen, patterns),
        "notes": search.notes,
        "hardware": hardware(),
    }


def _summary_row(
    name: str, state: AnalysisState, search: Search, measured: Mapping[str, Row], kinds: Mapping[str, str]
) -> dict[str, Any]:
    """Return the entry of a unit in the summary; AP and gain are None where they were not measured."""
    screened = state.screened.get(name, {"score": 0.0, "images": 0})
    entry: dict[str, Any] = {"unit": name, "kind": kinds.get(name, "")}
    entry["score"] = screened["score"]
    entry["images"] = screened["images"]
    entry |= dict.fromkeys(("ap", "gain", "gain_error"))
    if name in measured:
        row = measured[name]
        gained = gain(row, measured[INT8])
        entry |= {"ap": row.ap, "gain": gained.value, "gain_error": gained.error}
    entry["cost"] = search.cost((name,))
    return entry


def _summary_of_choice(chosen: Selection, patterns: Sequence[str]) -> dict[str, Any]:
    """Return the entry of the recipe in the summary."""
    return {
        "units": list(chosen.names),
        "float": list(patterns),
        "ap": chosen.ap,
        "cost": chosen.cost,
        "why": chosen.why,
    }


def write_results(
    summary: Mapping[str, Any], rows: Sequence[Row], inputs: Inputs[SensitiveOptions], folder: Path
) -> None:
    """Write the chart, the report, its page and the summary, and log the last lines of the program."""
    report = to_report(summary, rows, inputs, folder)
    figures.save_figure(chart(summary), folder / CHART_FILE)
    advice = advise(report)
    write_all(report, folder, advice)
    # written last: its presence marks a complete run
    write_text(folder / SUMMARY_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    text = [*warning_block(report), *report.notes, "", advice.text, f"report: {folder / PAGE_NAME}"]
    logger.info("\n%s\nnext: %s", "\n".join(text), advice.next_line)


def to_report(
    content: Mapping[str, Any], rows: Sequence[Row], inputs: Inputs[SensitiveOptions], folder: Path
) -> Report:
    """Return the run as a report: the rows of FP32, INT8 and perhaps the recipe, whose file the last one names."""
    changes = {"file": str(folder / RECIPE_FILE), "size_bytes": None, "weights_bytes": None}
    last = rows[-1].model_copy(update=changes)
    report = Report(command=content["command"], title="Sensitivity of layers", rows=[*rows[:-1], last])
    report.data = str(inputs.options.data)
    report.notes = lines(content, rows)
    report.splits = inputs.data.counts()
    report.target_drop = inputs.options.target_drop
    report.warnings = warnings_until_now()
    report.doubts = inputs.doubts
    report.charts = {f"Sensitivity ({folder.name})": str(folder / CHART_FILE)}
    return report


def lines(content: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the top ten in the form that users know, and what follows from them in sentences.

    Args:
        content: the summary.
        rows: those of FP32, INT8 and perhaps the recipe.
    """
    base, int8, *recipe_row = rows
    gains: dict[str, Difference] = {}
    for row in content["rows"]:
        if row["ap"] is not None:
            gains[row["unit"]] = Difference(row["gain"], row["gain_error"])
    texts = [f"FP32: ap = {ap_of(base):.5f}; INT8: ap = {ap_of(int8):.5f} ({gain(int8, base)})"]
    for place, row in enumerate(content["rows"][:TOP]):
        result = f"not confirmed, score {row['score']:.4f}"
        if row["unit"] in gains:
            result = f"ap = {row['ap']:.5f} ({gains[row['unit']]})"
        texts.append(f"Top{place}: Using fp16 {row['unit']}, {result}, {row['cost']:.1%} of {content['cost_is']}")
    texts.append("In brackets is the AP gained over INT8 ± its standard error, from resampling the images.")
    for note in content["notes"]:
        texts.append(f"note: {note}")
    texts.append(_recipe_line(content["recipe"]))
    for row in recipe_row:
        texts.append(f"Placed and calibrated again, its AP is {row.ap:.5f} ({gain(row, int8)} against INT8).")
    unsure = [unit for unit in gains if unit in content["recipe"]["units"] and not gains[unit].significant]
    if unsure:
        texts.append(f"By themselves, these units gain no measurable AP: {', '.join(unsure)}.")
    return texts


def _recipe_line(recipe: Mapping[str, Any]) -> str:
    """Return a sentence with the modules that the recipe keeps in FP16, and why the search ended there."""
    modules = ", ".join(recipe["float"]) or "nothing"
    share = f" (this run added {recipe['cost']:.1%} of the cost)" if recipe["units"] else ""
    return f"The recipe keeps {modules} in FP16{share}: {recipe['why']}."


def chart(content: Mapping[str, Any]) -> Figure:
    """Draw bars of the units that matter most: the score, and the AP gained with the unit in float, if measured."""
    rows = content["rows"][:BARS][::-1]
    chosen = content["recipe"]["units"]
    names = []
    colours = []
    for row in rows:
        name = f"{row['unit']} {row['kind']}".strip()
        if row["unit"] in chosen:
            name += " (in the recipe)"
        names.append(name)
        colours.append(figures.ORANGE if row["unit"] in chosen else figures.BLUE)
    figure, (left, right) = figures.new_figure(10.0, 1.6 + 0.24 * len(rows), 1, 2)
    _draw_scores(left, rows, names, colours)
    _draw_gains(right, rows, colours, content["ap"])
    right.set(ylim=left.get_ylim())
    return figure


def _draw_scores(axes: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str], colours: Sequence[str]) -> None:
    """Draw a bar for the score of each unit."""
    places = range(len(rows))
    axes.barh(places, [row["score"] for row in rows], color=colours)
    axes.set_yticks(places, names, fontsize=8)
    axes.set(xlabel="closer to FP32 when this layer is FP16")
    figures.title(axes, "Screening: score")


def _draw_gains(axes: Axes, rows: Sequence[Mapping[str, Any]], colours: Sequence[str], ap: Mapping[str, float]) -> None:
    """Draw a bar with its error for the AP gained by each unit, and a line for all that INT8 lost."""
    places = range(len(rows))
    gains = [_or_nan(row["gain"]) for row in rows]
    errors = [_or_nan(row["gain_error"]) for row in rows]
    axes.barh(places, gains, xerr=errors, color=colours, ecolor=figures.GREY, capsize=2)
    for place, gained in zip(places, gains, strict=True):
        if math.isnan(gained):
            axes.text(0, place, " not measured", va="center", fontsize=7, color=figures.GREY)
    lost = ap["float"] - ap["INT8"]
    axes.axvline(lost, color=figures.GREEN, linestyle="--", linewidth=1.6, label="all that INT8 lost")
    axes.legend(frameon=False, fontsize=8, loc="lower center")
    axes.set_yticks(places, [])
    axes.set(xlabel=f"AP gained over INT8's {ap['INT8']:.4f}")
    axes.locator_params(axis="x", nbins=5)  # numbers such as -0.0025 beside each other
    figures.title(axes, "AP with this layer in FP16")


def _or_nan(value: float | None) -> float:
    """Return a value that matplotlib can draw."""
    return math.nan if value is None else value
