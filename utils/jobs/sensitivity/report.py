"""The files of a sensitivity run: the state from which a killed run continues, and the results.

{project}/{name}/state.json                          the state; rewritten after every batch of screening
{project}/{name}/summary-sensitive-analysis.json     the result; with sensitivity.png and recipe.yaml
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from utils.core.device import device_name
from utils.core.errors import CheckpointError
from utils.core.files import write_text
from utils.core.options import height_width
from utils.core.score import AGREEMENT, Difference, Resampled, difference_error
from utils.core.text import plural
from utils.jobs.options import RECIPE_FILE
from utils.jobs.run_state import START_AGAIN, marked, unmarked
from utils.reports import figures
from utils.reports.schema import Report, Row, hardware

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.jobs.inputs import Inputs
    from utils.jobs.sensitivity.search import Search, Selection

STATE_FILE = "state.json"
STATE_VERSION = 4
SCHEMA_VERSION = 1
SUMMARY_FILE = "summary-sensitive-analysis.json"
CHART_FILE = "sensitivity.png"
TOP = 10  # units on the terminal
BARS = 24  # units in the chart


@dataclass
class AnalysisState:
    """Where a run stands; plain values only.

    Attributes:
        options, recipe, weights_hash: what was asked for, as in `run_state.RunState`.
        dataset: what the run reads, as `utils.evaluation.dataset` says it.
        command: the command line that started the run.
        amax: activation scale → amax, once calibrated.
        screened: stage → batch → unit → sums over images: their number, their weight, and the distances of the INT8
            network, and of that with the unit in float.
        ap: stage → network → AP of all images; stage `recipe` has recipes by what they leave in float.
        ap_resampled: stage → network → that AP on resampled images, as `Resampled.to_text` gives it.
    """

    FILE: ClassVar[str] = STATE_FILE

    options: dict[str, Any]
    recipe: dict[str, Any]
    weights_hash: str
    dataset: str = ""
    command: str = ""
    amax: dict[str, float] = field(default_factory=dict)
    screened: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    ap: dict[str, dict[str, float]] = field(default_factory=dict)
    ap_resampled: dict[str, dict[str, str]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the state; a reader sees the old one or the new one."""
        write_text(folder / STATE_FILE, json.dumps(marked(asdict(self), STATE_VERSION)))

    @classmethod
    def load(cls, folder: Path) -> AnalysisState:
        """Read the state of the run in `folder`.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        path = folder / STATE_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}); {START_AGAIN}") from error
        return cls(**unmarked(content, STATE_VERSION, path))

    def resampled(self, stage: str) -> dict[str, Resampled]:
        """Network → its AP on resampled images, where that is known."""
        return {name: Resampled.from_text(text) for name, text in self.ap_resampled.get(stage, {}).items()}

    def keep_ap(self, stage: str, ap: Mapping[str, float], resampled: Mapping[str, Resampled | None]) -> None:
        """Remember AP of networks, and where it is known, AP on resampled images."""
        self.ap.setdefault(stage, {}).update(ap)
        texts = {name: one.to_text() for name, one in resampled.items() if one is not None}
        self.ap_resampled.setdefault(stage, {}).update(texts)


def summarize_search(
    state: AnalysisState, search: Search, chosen: Selection, patterns: Sequence[str], recipe_ap: float | None,
    recipe_resampled: Resampled | None, notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """The result of a run as JSON holds it: `rows` best first, those with an AP before the others.

    Args:
        patterns: what the recipe leaves in float.
        recipe_ap, recipe_resampled: with the recipe, placed and calibrated anew.
    """
    from scipy.stats import spearmanr

    ap, resampled = search.ap, {"float": None, "INT8": None} | search.resampled
    rows: list[dict[str, Any]] = []
    for name, cost in search.costs.items():
        seen = search.screened.get(name)
        rows.append({
            "unit": name,
            "score": seen and seen.score, "images": seen.images if seen else 0,
            "ap": ap.get(name),
            "gain": ap[name] - ap["INT8"] if name in ap else None,
            "gain_error": difference_error(resampled.get(name), resampled["INT8"]) if name in ap else None,
            "cost": dict(cost),
        })  # fmt: skip
    rows.sort(key=lambda row: (row["gain"] is None, -(row["gain"] or 0.0), -(row["score"] or 0.0)))
    both = [row for row in rows if row["gain"] is not None and row["score"] is not None]
    scores, gains = ([row[name] for row in both] for name in ("score", "gain"))
    ranked = len(set(scores)) > 1 and len(set(gains)) > 1  # otherwise there is nothing to rank
    return {
        "schema_version": SCHEMA_VERSION,
        "command": state.command,
        "options": dict(state.options),
        "ap": {"float": ap["float"], "INT8": ap["INT8"], "recipe": recipe_ap},
        "ap_resampled": {
            name: one.to_text() for name, one in (resampled | {"recipe": recipe_resampled}).items()
            if one and name in ("float", "INT8", "recipe")
        },
        "ap_difference_error": {
            "INT8 to float": difference_error(resampled["INT8"], resampled["float"]),
            "recipe to float": difference_error(recipe_resampled, resampled["float"]),
            "recipe to INT8": difference_error(recipe_resampled, resampled["INT8"]),
        },
        "rows": rows,
        "rank_correlation": {
            "spearman": round(float(spearmanr(scores, gains).statistic), 12) if ranked else None,
            "units": len(both),
        },
        "recipe": {
            "units": list(chosen.names), "float": list(patterns), "ap": chosen.ap, "cost": chosen.cost,
            "why": chosen.why,
        },
        "notes": list(notes),
        "hardware": hardware(),
    }  # fmt: skip


def save_summary(content: Mapping[str, Any], folder: Path) -> None:
    """Write the chart and the JSON; where the JSON lies, all is written."""
    figures.save_figure(chart(content), folder / CHART_FILE)
    write_text(folder / SUMMARY_FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")


def to_report(content: Mapping[str, Any], inputs: Inputs[Any], folder: Path) -> Report:
    """The run as a report: AP of float, INT8 and the recipe, `lines` as notes, and the chart that lies in `folder`."""
    options, ap, part = inputs.options, content["ap"], inputs.data.read("val", inputs.options.num_image)
    count = plural(len(part.images), "image")
    marks = ", ".join([count] * (part.name != "val") + [AGREEMENT] * options.unlabelled)
    stages = [stage for stage in ("float", "INT8", "recipe") if ap[stage] is not None]
    rows = [
        Row(
            stage=stage, file=str(folder / RECIPE_FILE) if stage == stages[-1] else options.weights, ap=ap[stage],
            ap_resampled=content["ap_resampled"].get(stage, ""), ap50=None, precision=None, recall=None, seconds=None,
            device=device_name(inputs.device), size_bytes=None, ms_per_image=None,
            measured_on=f"PyTorch, {device_name(inputs.device)}; {marks or count}", ap_with=marks,
            input_size="{}x{}".format(*height_width(inputs.imgsz)),
        )
        for stage in stages
    ]  # fmt: skip
    return Report(
        command=content["command"], title="Sensitivity of layers", data=options.data, rows=rows, notes=lines(content),
        splits=inputs.data.counts(), charts={f"Sensitivity ({folder.name})": str(folder / CHART_FILE)},
    )  # fmt: skip


def lines(content: Mapping[str, Any]) -> list[str]:
    """The top ten in the form that users know, and what follows from them in sentences."""
    ap, recipe, errors = content["ap"], content["recipe"], content["ap_difference_error"]
    top, correlation = content["rows"][:TOP], content["rank_correlation"]
    measured = (row for row in content["rows"] if row["gain"] is not None)
    gains = {row["unit"]: Difference(row["gain"], row["gain_error"]) for row in measured}
    lost = Difference(ap["INT8"] - ap["float"], errors["INT8 to float"])
    found = [f"float: ap = {ap['float']:.5f}; INT8: ap = {ap['INT8']:.5f} ({lost})"]
    for place, row in enumerate(top):
        if row["ap"] is not None:
            result = f"ap = {row['ap']:.5f} ({gains[row['unit']]})"
        else:
            result = "not screened" if row["score"] is None else f"not confirmed, score {row['score']:.4f}"
        shares = (("of MACs", row["cost"]["macs"]), ("of engine time", row["cost"]["engine_time"]))
        cost = ", ".join(f"{share:.1%} {name}" for name, share in shares if share is not None)
        found.append(f"Top{place}: Using fp16 {row['unit']}, {result}, {cost}")
    if any(row["gain_error"] is not None for row in top):
        found.append("In brackets is the AP gained over INT8 ± its standard error, from resampling the images.")
    if correlation["spearman"] is not None and correlation["units"] > 2:
        spearman = f"{correlation['spearman']:.2f} (Spearman, {plural(correlation['units'], 'unit')})"
        found.append(f"The rank correlation of score and AP is {spearman}.")
    found += [f"note: {note}" for note in content["notes"]]
    share = f" (this run added {recipe['cost']:.1%} of the cost)" if recipe["units"] else ""
    found.append(f"The recipe keeps {', '.join(recipe['float']) or 'nothing'} in float{share}: {recipe['why']}.")
    if ap["recipe"] is not None:
        gain = Difference(ap["recipe"] - ap["INT8"], errors["recipe to INT8"])
        found.append(f"Placed and calibrated anew, its AP is {ap['recipe']:.5f} ({gain} against INT8).")
    if unsure := [name for name, one in gains.items() if name in recipe["units"] and not one.significant]:
        found.append(f"By themselves, these units gain no measurable AP: {', '.join(unsure)}.")
    return found


def chart(content: Mapping[str, Any]) -> Figure:
    """Bars of the units that matter most: the proxy's score, and AP with the unit in float where it was measured."""
    rows = content["rows"][:BARS][::-1]
    chosen = set(content["recipe"]["units"])
    colours = [figures.ORANGE if row["unit"] in chosen else figures.BLUE for row in rows]
    names = [f"{row['unit']} (in the recipe)" if row["unit"] in chosen else row["unit"] for row in rows]
    figure, (left, right) = figures.new_figure(10.0, 1.6 + 0.24 * len(rows), 1, 2)
    left.barh(range(len(rows)), [row["score"] or 0.0 for row in rows], color=colours)
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.set(xlabel="distance to the float network that the unit in float removes")
    figures.title(left, "Screening: score")
    measured = [place for place, row in enumerate(rows) if row["gain"] is not None]
    gains = [rows[place]["gain"] for place in measured]
    errors = [rows[place]["gain_error"] or 0.0 for place in measured]
    right.barh(measured, gains, color=[colours[place] for place in measured])
    if any(errors):
        right.errorbar(gains, measured, xerr=errors, fmt="none", ecolor=figures.GREY, elinewidth=1, capsize=2)
    loss = content["ap"]["float"] - content["ap"]["INT8"]
    right.axvline(loss, color=figures.GREEN, linestyle="--", linewidth=1.6)
    right.annotate(
        "all that INT8 lost", (loss, 0), xycoords=("data", "axes fraction"), xytext=(-3, 4),
        textcoords="offset points", ha="right", fontsize=8, color=figures.GREEN,
    )  # fmt: skip
    right.axvline(0, color=figures.GREY, linewidth=0.8)
    right.set_yticks(range(len(rows)), [])
    right.set_ylim(left.get_ylim())
    right.set(xlabel=f"AP gained over INT8's {content['ap']['INT8']:.4f}; no bar: not measured")
    right.locator_params(axis="x", nbins=5)  # numbers such as -0.0025 beside each other
    figures.title(right, "AP with the unit in float")
    return figure
