"""The page that can be shared: versions, GPU, driver, commands, tables and a plot; it names nothing private.

Folders outside of the checkout are named by their last part, results by their place below the output folder. Nobody's
name, no host and no home folder stands on it.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from utils.core.files import atomic_path
from utils.core.text_tables import columns, markdown
from utils.jobs.accuracy import tables
from utils.jobs.accuracy.results import Results
from utils.jobs.accuracy.steps import CHECKOUT
from utils.reports import chart_page, figures
from utils.reports.chart_page import Table
from utils.reports.machine import gpus, hardware, versions

logger = logging.getLogger(__name__)

TITLE = "What INT8 costs, and what it gains"
NAMES = {kind: f"accuracy.{kind}" for kind in ("html", "md", "json", "png")}


def write(networks: Sequence[Results], output: Path, about: dict[str, str]) -> list[Path]:
    """Write the page, the same as Markdown and as JSON, and the plot where there is one.

    Args:
        about: what the networks were measured on, in words: the dataset, the image size, why there are no engines.
    """
    figure = tables.ap_against_latency(networks)
    shown = [tables.accuracy(networks), tables.by_size(networks), tables.times(networks),
             Table("Measured on", ("what", ""), _measured_on(networks))]  # fmt: skip
    remarks = [*tables.outdone(networks), *(f"{one.name}, {note}" for one in networks for note in one.notes)]
    shown[0] = Table(shown[0].heading, shown[0].headers, shown[0].rows, remarks=[*shown[0].remarks, *remarks])
    subtitle = "; ".join([*about.values(), datetime.now(timezone.utc).strftime("%d %B %Y")])
    commands = [line for one in networks for line in _commands(one, output)]
    page = chart_page.ChartPage(
        TITLE, subtitle, {"AP against latency of every network": figure} if figure else {}, shown, "\n".join(commands)
    )
    written = [chart_page.write(page, output / NAMES["html"])]
    if figure:
        written.append(figures.save(figure, output / NAMES["png"]))
    texts = {
        "md": _markdown(page, bool(figure)),
        "json": json.dumps(_content(networks, about, output), indent=2, allow_nan=False) + "\n",
    }
    for kind, body in texts.items():
        written.append(output / NAMES[kind])
        with atomic_path(written[-1]) as path:
            path.write_text(body, encoding="utf-8")
    return written


def public(word: str, output: Path) -> str:
    """A word of a command line without what is private: the folders that absolute paths lie in."""
    path = Path(word)
    if not path.is_absolute():
        return word
    for folder, name in ((output, "OUTPUT"), (CHECKOUT, "")):
        if path.is_relative_to(folder):
            return str(Path(name) / path.relative_to(folder))
    return path.name


def _commands(network: Results, output: Path) -> list[str]:
    lines = []
    for step in network.steps:
        words = ["python", *(public(word, output) for word in step["command"])]
        lines.append(f"# {network.name}: {step['step']}, {step['seconds']:,.0f} s\n{shlex.join(words)}")
    return lines


def _measured_on(networks: Sequence[Results]) -> list[tuple[str, str]]:
    """The GPU, its driver, and versions of what ran the networks: of the latest evaluation that names a library."""
    found = hardware()
    for one in networks:
        found |= {key: value for key, value in one.device.items() if not key.startswith("Selected")}
        found |= {"device": one.device["Selected Device"]} if one.device else {}
    for (driver,) in gpus("driver_version")[:1]:  # one driver serves all GPUs
        found["NVIDIA driver"] = driver
    libraries = versions()
    for one in networks:
        for row in one.rows.values():
            libraries |= row.versions
    return [*found.items(), *libraries.items()]


def _markdown(page: chart_page.ChartPage, drawn: bool) -> str:
    lines = [f"# {page.title}", "", page.subtitle, ""]
    lines += ["![AP against latency](" + NAMES["png"] + ")", ""] if drawn else []
    for table in page.tables:
        if table.rows:
            heads = columns(table.headers, table.headers[:1])
            lines += [f"## {table.heading}", "", *markdown(heads, table.rows), ""]
            lines += [line for remark in table.remarks for line in (remark, "")]
    return "\n".join([*lines, "## What was run", "", "```bash", page.command, "```", ""])


def _content(networks: Sequence[Results], about: dict[str, str], output: Path) -> dict[str, Any]:
    """The results as JSON holds them; rows without the files' places."""
    found = []
    for one in networks:
        rows = {stage: {**row.to_dict(), "file": Path(row.file).name} for stage, row in one.rows.items()}
        for stage in rows:
            difference = one.difference(stage)
            rows[stage]["ap_difference"] = difference.value if difference else None
            rows[stage]["ap_difference_error"] = difference.error if difference else None
        found.append(
            {"name": one.name, "rows": rows, "times": [vars(time) for time in one.times], "timed_on": one.timed_on,
             "notes": list(one.notes), "commands": _commands(one, output)}
        )  # fmt: skip
    machine = dict(_measured_on(networks))
    return {"schema_version": 1, "about": about, "machine": machine, "networks": found}
