"""Results of several networks as tables and as a plot; what was not measured is a dash."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from utils.jobs.accuracy.measure import BATCHES, KINDS
from utils.jobs.accuracy.results import FLOAT, STAGES, Results
from utils.reports.chart_page import Table
from utils.reports.schema import SIZES
from utils.reports.tables import DASH, fraction, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.reports.schema import Row

PLOTTED_BATCH = BATCHES[-1]
ERRORS = (
    "±: the standard error of the difference to float, from resampling the images; AP as upstream's val.py defines it."
)
BY_PYCOCOTOOLS = "AP of small (below 32² pixels), medium and large (from 96²) objects by pycocotools' definition."


def accuracy(networks: Sequence[Results]) -> Table:
    """AP of the float network, and the difference of each stage to it."""
    stages = [stage for stage in STAGES if any(stage in one.rows for one in networks)]
    rows = [(one.name, *(_ap(one, stage) for stage in stages)) for one in networks if one.rows]
    return Table("AP: float, and the difference to it", ("network", *stages), rows, remarks=[ERRORS])


def _ap(network: Results, stage: str) -> str:
    row = network.rows.get(stage)
    if row is None:
        return DASH
    difference = network.difference(stage)
    return f"{fraction(row.ap)}{'' if stage == FLOAT else ', not compared'}" if difference is None else str(difference)


def by_size(networks: Sequence[Results]) -> Table:
    """AP of small, medium and large objects: float in PyTorch, and both files."""
    rows = []
    for one in networks:
        for name, row in _sized(one).items():
            values = (row.ap_by_size.get(size) for size in SIZES)
            rows.append((one.name, name, *(fraction(value) for value in values)))
    return Table("AP by size of objects", ("network", "file", *SIZES), rows, remarks=[BY_PYCOCOTOOLS])


def _sized(network: Results) -> dict[str, Row]:
    """The rows with AP by size."""
    rows = [network.rows.get(FLOAT), *map(network.deployed, KINDS)]
    names = {id(row): stage for stage, row in network.rows.items()}
    return {names[id(row)]: row for row in rows if row is not None and row.ap_by_size}


def times(networks: Sequence[Results]) -> Table:
    """Latency and throughput of both files at each batch size."""
    rows = []
    for one, batch in product(networks, BATCHES):
        plain, int8 = (one.time(kind, batch) for kind in KINDS)
        if plain is None and int8 is None:
            continue
        faster = f"{int8.images_per_second / plain.images_per_second - 1:+.0%}" if plain and int8 else DASH
        cells = [milliseconds(getattr(found, name, None)) for found in (plain, int8) for name in ("latency", "p99")]
        rates = [f"{found.images_per_second:,.0f}" if found else DASH for found in (plain, int8)]
        rows.append((one.name, str(batch), *cells, *rates, faster))
    ran = {one.kind: one.ran_as for network in networks for one in network.times}
    first, second = ran.get("float", "FP16"), ran.get("int8", "INT8")
    heads = ("network", "batch", f"{first}, ms", "p99", f"{second}, ms", "p99", f"{first}, images/s",
             f"{second}, images/s", f"{second} against {first}")  # fmt: skip
    places = dict.fromkeys(one.timed_on for one in networks if one.timed_on)
    remarks = [f"Median latency of a batch, both files in turns; {'; '.join(places)}."] if places else []
    return Table("Time", heads, rows, remarks=remarks)


def outdone(networks: Sequence[Results]) -> list[str]:
    """A sentence for each float network that a larger one in INT8 beats in time, and in AP beyond its error."""
    found = []
    for small, large in product(networks, networks):
        ours, theirs = small.deployed("float"), large.deployed("int8")
        plain, int8 = small.time("float", PLOTTED_BATCH), large.time("int8", PLOTTED_BATCH)
        if small is large or ours is None or theirs is None or plain is None or int8 is None:
            continue
        gain = theirs.difference(ours)
        if gain and gain.value > 0 and gain.beyond_error and int8.latency < plain.latency:
            scores = f"AP {fraction(theirs.ap)} against {fraction(ours.ap)} ({gain})"
            latencies = f"{int8.latency:.2f} ms against {plain.latency:.2f} ms at batch size {PLOTTED_BATCH}"
            found.append(
                f"{large.name} in {int8.ran_as} beats {small.name} in {plain.ran_as}: {scores}, and {latencies}."
            )
    return found


def ap_against_latency(networks: Sequence[Results]) -> Figure | None:
    """A line for float files, one for INT8, a point for each network; None where nothing was timed and evaluated."""
    from utils.reports.figures import BLUE, VERMILLION, new_figure, title

    lines = {}
    for kind in KINDS:
        points = []
        for one in networks:
            row, time = one.deployed(kind), one.time(kind, PLOTTED_BATCH)
            if row is not None and row.ap is not None and time is not None:
                points.append((time.latency / PLOTTED_BATCH, row.ap, one.name, time.ran_as))
        if points:
            lines[kind] = sorted(points)
    if not lines:
        return None
    figure, (axes,) = new_figure(7.0, 4.4, 1)
    for kind, colour, marker, line in (("float", BLUE, "o", "--"), ("int8", VERMILLION, "s", "-")):
        points = lines.get(kind, [])
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, marker=marker, linestyle=line,
                  label=points[0][3] if points else kind)  # fmt: skip
        for latency, ap, name, _ in points:
            below = (6, -11) if kind == "float" else (-4, 7)
            axes.annotate(name, (latency, ap), textcoords="offset points", xytext=below, fontsize=8, color=colour)
    axes.set(xlabel=f"milliseconds an image, at batch size {PLOTTED_BATCH}", ylabel="AP")
    axes.margins(y=0.15)
    axes.set_xlim(0, 1.2 * max(point[0] for points in lines.values() for point in points))  # names need room
    title(axes, "AP against latency")
    figure.legend(loc="outside lower center", ncols=len(lines), frameon=False)
    return figure
