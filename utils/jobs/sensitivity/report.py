"""What a sensitivity run found: the summary as JSON, sentences for the terminal and the page, and the chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.score import Difference
from utils.jobs.options import RECIPE_FILE
from utils.jobs.sensitivity.search import FLOAT, INT8, Search, Selection, ap_of, gain
from utils.reports import figures
from utils.reports.schema import Report, Row, hardware

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.jobs.inputs import Inputs
    from utils.jobs.run_state import AnalysisState

SUMMARY_FILE = "summary-sensitive-analysis.json"
CHART_FILE = "sensitivity.png"
TOP = 10  # units on the terminal
BARS = 24  # units in the chart


def summarize_search(
    state: AnalysisState, search: Search, chosen: Selection, patterns: Sequence[str], recipe: Row | None
) -> dict[str, Any]:
    """The result of a run as JSON holds it: `rows` best first, those with an AP before the others.

    Args:
        patterns: what the recipe leaves in float.
        recipe: the row of the network with the recipe, placed and calibrated anew.
    """
    measured = {name: Row(**row) for name, row in state.rows.items()}
    base, int8 = measured[FLOAT], measured[INT8]
    rows: list[dict[str, Any]] = []
    for name in search.units:
        row, seen = measured.get(name), state.screened.get(name, {"score": 0.0, "images": 0})
        gained = row and gain(row, int8)
        rows.append({
            "unit": name, "score": seen["score"], "images": seen["images"], "ap": row and row.ap,
            "gain": gained and gained.value, "gain_error": gained and gained.error, "cost": search.cost((name,)),
        })  # fmt: skip
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
    """The run as a report: the rows of float, INT8 and, if there is one, the recipe; sentences; the chart in `folder`.

    The last row's file is the recipe's.
    """
    of_recipe = rows[-1].model_copy(update={"file": str(folder / RECIPE_FILE), "size_bytes": None})
    return Report(
        command=content["command"], title="Sensitivity of layers", data=inputs.options.data,
        rows=[*rows[:-1], of_recipe], notes=lines(content, rows), splits=inputs.data.counts(),
        charts={f"Sensitivity ({folder.name})": str(folder / CHART_FILE)},
    )  # fmt: skip


def lines(content: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The top ten in the form that users know, and what follows from them in sentences; `rows` as for `to_report`."""
    (base, int8, *recipe_row), recipe = rows, content["recipe"]
    measured = [row for row in content["rows"] if row["ap"] is not None]
    gains = {row["unit"]: Difference(row["gain"], row["gain_error"]) for row in measured}
    found = [f"float: ap = {ap_of(base):.5f}; INT8: ap = {ap_of(int8):.5f} ({gain(int8, base)})"]
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
    names = [f"{row['unit']} (in the recipe)" if row["unit"] in chosen else row["unit"] for row in rows]
    gains, errors = ([math.nan if row[key] is None else row[key] for row in rows] for key in ("gain", "gain_error"))
    figure, (left, right) = figures.new_figure(10.0, 1.6 + 0.24 * len(rows), 1, 2)
    left.barh(places, [row["score"] for row in rows], color=colours)
    left.set_yticks(places, names, fontsize=8)
    left.set(xlabel="distance to the float network that the unit in float removes")
    figures.title(left, "Screening: score")
    right.barh(places, gains, xerr=errors, color=colours, ecolor=figures.GREY, capsize=2)
    loss = content["ap"]["float"] - content["ap"]["INT8"]
    right.axvline(loss, color=figures.GREEN, linestyle="--", linewidth=1.6, label="all that INT8 lost")
    right.legend(frameon=False, fontsize=8, loc="lower center")
    right.set_yticks(places, [])
    right.set(xlabel=f"AP gained over INT8's {content['ap']['INT8']:.4f}; no bar: not measured", ylim=left.get_ylim())
    right.locator_params(axis="x", nbins=5)  # numbers such as -0.0025 beside each other
    figures.title(right, "AP with the unit in float")
    return figure
