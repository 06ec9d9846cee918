"""A page of charts and a table: parsed again, it holds what was put in, and asks for nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from utils.reports import figures
from utils.reports.chart_page import ChartPage, Table, write


class Cells(HTMLParser):
    """The texts of table cells by row, and the classes of rows."""

    def __init__(self):
        super().__init__()
        self.rows, self.classes, self.inside = [], [], False

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
            self.classes.append(dict(attributes).get("class"))
        self.inside = tag in ("td", "th")
        if self.inside:
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        self.inside = False


def test_a_page(tmp_path):
    figure, (axes,) = figures.new_figure(4, 3, 1)
    axes.plot([1, 2], [3, 4])
    hostile = "<script>alert(1)</script>"
    tables = [
        Table("Engines", ("in float", "ms"), [("nothing", "1.5"), (hostile, "2.5")], [1], ["it is the fastest"]),
        Table("Versions", ("library",), [("torch",)]),
    ]
    page = ChartPage("A title", "TensorRT & a GPU", {"a line that rises": figure}, tables,
                     f"python qat.py --name '{hostile}'")  # fmt: skip
    text = write(page, tmp_path / "page.html").read_text()
    cells = Cells()
    cells.feed(text)
    assert cells.rows == [["in float", "ms"], ["nothing", "1.5"], [hostile, "2.5"], ["library"], ["torch"]]
    assert cells.classes == [None, None, "marked", None, None]
    assert hostile not in text
    assert "TensorRT &amp; a GPU" in text
    assert 'alt="a line that rises"' in text
    assert set(re.findall(r'(?:src|href)="([a-z]+:[a-z/+]+)', text)) == {"data:image/svg+xml"}
    assert "it is the fastest" in text


def test_without_rows_there_is_no_table(tmp_path):
    page = ChartPage("A title", "", {}, [Table("Engines", (), [])])
    assert "<table>" not in write(page, tmp_path / "page.html").read_text()
