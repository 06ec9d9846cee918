"""Charts and tables as one HTML file that needs nothing else; the layout is `chart_page.html.j2`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from utils.core.files import atomic_path
from utils.reports.html import as_data_uri

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("chart_page.html.j2")


@dataclass(frozen=True)
class Table:
    """A table of the page; one without rows is left out.

    Attributes:
        heading, headers, rows: what it shows.
        marked: indices of rows that stand out.
        remarks: sentences below it.
    """

    heading: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Collection[int] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class ChartPage:
    """What the page shows.

    Attributes:
        charts: what a chart shows, in words → the chart.
        tables: below the charts.
        command: what was run.
    """

    title: str
    subtitle: str
    charts: Mapping[str, Figure]
    tables: Sequence[Table]
    command: str = ""


def write(page: ChartPage, path: Path) -> Path:
    """Write the page; a crash leaves no half file. Every value is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    charts = [{"image": as_data_uri(figure, "svg"), "alt": alt} for alt, figure in page.charts.items()]
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render({**vars(page), "charts": charts})
    with atomic_path(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8", errors="backslashreplace")
    return path
