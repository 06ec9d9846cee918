"""The one renderer of tables: aligned text for terminals and logs, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column: its heading, whether its texts stand at its left side, and how wide it is at least."""

    title: str
    left: bool = False
    width: int = 0


def columns(titles: Iterable[str], left: Iterable[str] = ()) -> list[Column]:
    """Columns with these headings; those in `left` stand at the left side."""
    at_left = set(left)
    return [Column(title, title in at_left) for title in titles]


def aligned(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], *, gap: str = "  ", rule: bool = False
) -> list[str]:
    """Lines of text, the headings first; `rule` draws a line of hyphens below them."""
    table = [tuple(column.title for column in columns), *map(tuple, rows)]
    widths = [max(column.width, *(len(line[i]) for line in table)) for i, column in enumerate(columns)]
    if rule:
        table.insert(1, tuple("-" * width for width in widths))
    return [
        gap.join(
            text.ljust(width) if column.left else text.rjust(width)
            for column, text, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in table
    ]


def markdown(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; what Markdown would read as markup is escaped, but for texts in backquotes."""
    lines = [[column.title for column in columns], ["---" if column.left else "---:" for column in columns]]
    lines += [[_escaped(text) for text in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def code(text: str) -> str:
    """A text as Markdown shows code."""
    return "`" + text.replace("`", "'") + "`"


def _escaped(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == "`":
        return text.replace("|", "\\|")
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
