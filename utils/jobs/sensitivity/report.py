"""What a sensitivity run reports: summary-sensitive-analysis.json, the top ten, a bar chart, and the recipe's file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.files import atomic_path
from utils.core.resampled import Difference, Resampled, difference_error
from utils.jobs.sensitivity.selection import Selection, rank_correlation
from utils.reports import figures
from utils.reports.machine import hardware, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
SUMMARY_FILE = "summary-sensitive-analysis.json"
CHART_FILE = "sensitivity.png"
RECIPE_FILE = "recipe.yaml"
TOP = 10
BARS = 24


def summary(
    *,
    command: str,
    options: Mapping[str, Any],
    screened: Mapping[str, Any],
    ap: Mapping[str, float],
    costs: Mapping[str, Mapping[str, float | None]],
    selection: Selection,
    patterns: Sequence[str],
    recipe_ap: float | None,
    seconds: Mapping[str, float],
    notes: Sequence[str],
    resampled: Mapping[str, Resampled] | None = None,
    recipe_resampled: Resampled | None = None,
) -> dict[str, Any]:
    """The result of a run as JSON holds it: `rows` best first, those with an AP before the others.

    Args:
        screened: unit → `utils.jobs.sensitivity.screening.Screened`.
        ap: unit → AP with it in float; and 'float' and 'INT8'.
        costs: unit → its shares of multiply-adds (`macs`) and of engine time (`engine_time`), 0..1.
        recipe_ap: AP with the recipe, placed and calibrated anew.
        seconds: stage → wall time.
        resampled, recipe_resampled: AP of `ap` and `recipe_ap` on resampled images, as far as they are known.
    """
    known = resampled or {}
    whole = known.get("INT8")
    rows: list[dict[str, Any]] = [
        {
            "unit": name,
            "score": seen.score if (seen := screened.get(name)) else None,
            "alone": seen.alone if seen else None,
            "images": seen.images if seen else 0,
            "ap": ap.get(name),
            "gain": ap[name] - ap["INT8"] if name in ap else None,
            "gain_error": difference_error(known.get(name), whole) if name in ap else None,
            "cost": dict(costs[name]),
        }
        for name in costs
    ]
    rows.sort(key=lambda row: (row["gain"] is None, -(row["gain"] or 0.0), -(row["score"] or 0.0)))
    both = [row for row in rows if row["gain"] is not None and row["score"] is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "options": dict(options),
        "ap": {"float": ap["float"], "INT8": ap["INT8"], "recipe": recipe_ap},
        "ap_difference_error": {
            "INT8 to float": difference_error(whole, known.get("float")),
            "recipe to float": difference_error(recipe_resampled, known.get("float")),
            "recipe to INT8": difference_error(recipe_resampled, whole),
        },
        "rows": rows,
        "rank_correlation": {
            "spearman": rank_correlation([row["score"] for row in both], [row["gain"] for row in both]),
            "units": len(both),
        },
        "recipe": {
            "units": list(selection.names), "float": list(patterns), "ap": selection.ap, "cost": selection.cost,
            "why": selection.why,
        },
        "screening": _speed(screened, seconds),
        "seconds": dict(seconds),
        "notes": list(notes),
        "versions": versions(),
        "hardware": hardware(),
    }  # fmt: skip


def _speed(screened: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, float] | None:
    """Cost of screening in passes of the whole network over the images (the mean of a float and an INT8 pass)."""
    spent = sum(value for stage, value in seconds.items() if stage.startswith("screening"))
    one = seconds.get("whole networks", 0.0) / 2
    if not screened or not one or not spent:
        return None
    return {
        "passes": spent / one,
        "passes_per_10_units": 10 * spent / one / len(screened),
        "times_faster_than_a_pass_for_each": len(screened) * one / spent,
    }


def save(content: Mapping[str, Any], folder: Path) -> None:
    """Write the chart and the JSON; where the JSON lies, all is written."""
    figures.save(chart(content), folder / CHART_FILE)
    with atomic_path(folder / SUMMARY_FILE) as temporary:
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_recipe(recipe: Mapping[str, Any], why: str, path: Path) -> None:
    """A recipe's YAML, with a comment that says why it is what it is."""
    import yaml

    text = f"# {why}\n" + yaml.safe_dump(dict(recipe), sort_keys=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def lines(content: Mapping[str, Any], folder: Path) -> list[str]:
    """The top ten in the form that users know, and what follows from them."""
    ap, recipe, errors = content["ap"], content["recipe"], content["ap_difference_error"]
    lost = Difference(ap["INT8"] - ap["float"], errors["INT8 to float"])
    found = [f"float: ap = {ap['float']:.5f}; INT8: ap = {ap['INT8']:.5f} ({lost})"]
    for place, row in enumerate(content["rows"][:TOP]):
        if row["ap"] is not None:
            result = f"ap = {row['ap']:.5f} ({_gain(row)})"
        elif row["score"] is not None:
            result = f"not confirmed, score {row['score']:.4f}"
        else:
            result = "not screened"
        found.append(f"Top{place}: Using fp16 {row['unit']}, {result}, {_shares(row['cost'])}")
    if any(row["gain_error"] is not None for row in content["rows"][:TOP]):
        found.append("in brackets: AP gained over INT8 ± its standard error, from resampling the images")
    correlation = content["rank_correlation"]
    if correlation["spearman"] is not None and correlation["units"] > 2:
        spearman = f"{correlation['spearman']:.2f} (Spearman, {correlation['units']} units)"
        found.append(f"rank correlation of score and AP: {spearman}")
    if content["screening"]:
        found.append(
            f"screening cost {content['screening']['passes']:.1f} passes over its images; "
            f"a pass for each unit costs {content['screening']['times_faster_than_a_pass_for_each']:.1f} times as much"
        )
    found += [f"note: {note}" for note in content["notes"]]
    if recipe["units"]:
        found += _choice(content)
    else:
        found.append("in float: nothing more")
    file = shlex.quote(str(folder / RECIPE_FILE))
    found.append(f"because {recipe['why']}; python qat.py quantize --recipe {file} applies it")
    return found


def _gain(row: Mapping[str, Any]) -> Difference:
    return Difference(row["gain"], row["gain_error"])


def _choice(content: Mapping[str, Any]) -> list[str]:
    """What the recipe leaves in float, what that gains, and what of it cannot be told from chance."""
    ap, recipe = content["ap"], content["recipe"]
    chosen = f"in float: {', '.join(recipe['units'])} ({recipe['cost']:.1%} of the cost)"
    found = []
    if ap["recipe"] is not None:
        gain = Difference(ap["recipe"] - ap["INT8"], content["ap_difference_error"]["recipe to INT8"])
        chosen += f", ap = {ap['recipe']:.5f} ({gain}) when placed and calibrated anew"
        if not gain.beyond_error:
            found.append("that is no gain over INT8: the difference is within its standard error")
    rows = [row for row in content["rows"] if row["unit"] in recipe["units"] and row["gain"] is not None]
    if unsure := [row["unit"] for row in rows if not _gain(row).beyond_error]:
        found.append(f"by themselves these gain no AP beyond its standard error: {', '.join(unsure)}")
    return [chosen, *found]


def _shares(cost: Mapping[str, float | None]) -> str:
    parts = [("of MACs", cost["macs"]), ("of engine time", cost["engine_time"])]
    return ", ".join(f"{value:.1%} {name}" for name, value in parts if value is not None)


def chart(content: Mapping[str, Any]) -> Figure:
    """Bars of the units that matter most: the proxy's score, and AP with the unit in float where it was measured."""
    rows = content["rows"][:BARS][::-1]
    chosen = set(content["recipe"]["units"])
    figure, (left, right) = figures.new_figure(10.0, 1.6 + 0.24 * len(rows), 1, 2)
    colours = [figures.ORANGE if row["unit"] in chosen else figures.BLUE for row in rows]
    names = [f"{row['unit']} (in the recipe)" if row["unit"] in chosen else row["unit"] for row in rows]
    left.barh(range(len(rows)), [row["score"] or 0.0 for row in rows], color=colours)
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.set(xlabel="distance to the float network that the unit in float removes")
    figures.title(left, "Screening: score")
    measured = [(place, row["gain"], colour) for place, (row, colour) in enumerate(zip(rows, colours, strict=True))
                if row["gain"] is not None]  # fmt: skip
    if measured:
        places, gains, shades = zip(*measured, strict=True)
        right.barh(places, gains, color=shades)
        errors = [rows[place]["gain_error"] or 0.0 for place in places]
        if any(errors):
            right.errorbar(gains, places, xerr=errors, fmt="none", ecolor=figures.GREY, elinewidth=1, capsize=2)
    loss = content["ap"]["float"] - content["ap"]["INT8"]
    right.axvline(loss, color=figures.GREEN, linestyle="--", linewidth=1.6)
    right.annotate(
        "all that INT8 lost", (loss, 1), xycoords=("data", "axes fraction"), xytext=(-3, 2),
        textcoords="offset points", ha="right", fontsize=8, color=figures.GREEN,
    )  # fmt: skip
    right.axvline(0, color=figures.GREY, linewidth=0.8)
    right.set_yticks(range(len(rows)), [])
    right.set_ylim(left.get_ylim())
    right.set(xlabel=f"AP gained over INT8's {content['ap']['INT8']:.4f}; no bar: not measured")
    right.locator_params(axis="x", nbins=5)  # numbers such as -0.0025 beside each other
    figures.title(right, "AP with the unit in float")
    return figure
