"""What `qat.py sensitive --engine` reports: the curve of AP against milliseconds as a table, a chart, JSON, a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core.resampled import Difference
from utils.core.text_tables import aligned, columns
from utils.jobs.sensitivity import engine_points
from utils.reports import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.jobs.sensitivity.by_engine import Curve

CHART_FILE = "ap-against-time.png"
HEADERS = ("in float", "ms", "over INT8", "by layers", "AP", "over INT8's", "")
MEANING = (
    "ms: of a batch, median of rounds in which engines took turns, behind ± half of what rounds differ by; by layers: "
    "the same from layers that were measured one by one, without conversions; ~: such an estimate, no engine was built"
)


def to_dict(curve: Curve, drop: float) -> dict[str, Any]:
    """The curve as the summary's JSON holds it.

    Args:
        drop: AP that may be lost.
    """
    whole, fp16 = curve.points[:2]
    return {
        "measured_on": curve.measured_on,
        "int8_ms": curve.ms,
        "noise_ms": curve.noise,
        "no_control": curve.no_control,
        "target_ap": (fp16.ap or 0.0) - drop,
        "chosen": list(curve.chosen.units),
        "why": curve.why,
        "points": [
            {
                **asdict(one), "units": list(one.units), "name": one.name, "measured": one.measured,
                "ms": None if one.cost is None else curve.ms + one.cost,
                "differs_from_int8": engine_points.differs(one, whole, curve.noise) if one.measured else None,
                "chosen": one is curve.chosen,
            }
            for one in curve.points
        ],
        "notes": list(curve.notes),
    }  # fmt: skip


def lines(content: Mapping[str, Any], int8_ap: float) -> list[str]:
    """The table and what it means, for the terminal.

    Args:
        content: as `to_dict` gives it.
    """
    table = aligned(columns(HEADERS, left=("in float", "")), [cells(one, int8_ap) for one in content["points"]])
    noise = f"differs by {content['noise_ms']:.3f} ms"
    control = f"a second build of the INT8 engine {noise}; less means nothing"
    if content["no_control"]:
        control = f"none ({content['no_control']}): the INT8 engine timed twice {noise}, and two builds may by more"
    return [
        f"AP against milliseconds: {content['measured_on']}",
        *table,
        MEANING,
        f"control: {control}",
        f"chosen: {name_of(content)}, because {content['why']}",
    ]


def cells(point: Mapping[str, Any], int8_ap: float) -> tuple[str, ...]:
    """The texts of a row, one for each of HEADERS."""
    measured, mixed = point["measured"], point["kind"] == "mixed"
    sign = "" if measured else "~"
    over = "" if point["cost"] is None or point["kind"] == "INT8" else f"{sign}{point['cost']:+.3f}"
    if over and measured:
        over += f" ± {point['spread']:.3f}"
    gain = "" if point["ap"] is None else str(Difference(point["ap"] - int8_ap, point["ap_error"]))
    remarks = ["chosen"] * point["chosen"]
    if mixed:
        remarks += ["estimated"] * (not measured) + ["as fast as INT8"] * (point["differs_from_int8"] is False)
    return (
        point["name"],
        "" if point["ms"] is None else f"{sign}{point['ms']:.3f}",
        over,
        "" if point["estimate"] is None else f"{point['estimate']:+.3f}",
        "" if point["ap"] is None else f"{point['ap']:.4f}",
        "" if point["kind"] == "INT8" else gain,
        ", ".join(remarks),
    )


def name_of(content: Mapping[str, Any]) -> str:
    """What the chosen point leaves in float, in words."""
    return ", ".join(content["chosen"]) or "nothing more in float"


def chart(content: Mapping[str, Any]) -> Figure:
    """AP over milliseconds: engines that were measured, estimates as hollow points, and the AP that is asked for.

    A line leads over the engines that no faster one beats in AP; these, INT8, FP16 and the chosen one have names.
    """
    figure, (axes,) = figures.new_figure(9.0, 5.0, 1)
    shown = [one for one in content["points"] if one["ap"] is not None and one["ms"] is not None]
    looks = {"INT8": ("s", figures.VERMILLION), "FP16": ("D", figures.GREEN), "mixed": ("o", figures.BLUE)}
    for one in shown:
        marker, colour = looks[one["kind"]]
        axes.errorbar(
            one["ms"], one["ap"], xerr=one["spread"], yerr=one["ap_error"], fmt=marker, color=colour, markersize=7,
            markerfacecolor=colour if one["measured"] else "white", ecolor=figures.GREY, elinewidth=0.8, zorder=3,
        )  # fmt: skip
        if one["chosen"]:
            axes.plot(one["ms"], one["ap"], "o", color=figures.ORANGE, markersize=15, markerfacecolor="none",
                      markeredgewidth=2, label="chosen", zorder=4)  # fmt: skip
    front = _front(shown)
    axes.plot([one["ms"] for one in front], [one["ap"] for one in front], color=figures.BLUE, linewidth=1, zorder=2)
    for one in shown:
        if one in front or one["chosen"] or one["kind"] != "mixed":
            axes.annotate(_short(one), (one["ms"], one["ap"]), xytext=(7, -10), textcoords="offset points", fontsize=8)
    axes.axhline(content["target_ap"], color=figures.GREEN, linestyle="--", linewidth=1.4, label="AP asked for")
    axes.set(xlabel=f"milliseconds a batch ({content['measured_on']}; hollow: estimated)", ylabel="AP (IoU 0.50:0.95)")
    axes.margins(0.12)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figures.title(axes, "AP against time: what stays in float")
    return figure


def _front(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that were measured and have more AP than all that are faster, by their time."""
    found: list[Mapping[str, Any]] = []
    for one in sorted((one for one in points if one["measured"]), key=lambda one: (one["ms"], -one["ap"])):
        if not found or one["ap"] > found[-1]["ap"]:
            found.append(one)
    return found


def _short(point: Mapping[str, Any]) -> str:
    """A name for the chart."""
    if point["kind"] != "mixed":
        return str(point["kind"])
    names = [figures.short_name(name.replace("what reads model.", "readers of ")) for name in point["units"]]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def save(content: Mapping[str, Any], folder: Path) -> Path:
    """Write the chart."""
    return figures.save(chart(content), folder / CHART_FILE)
