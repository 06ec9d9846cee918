"""Text for terminals, logs and Markdown: values in messages, and tables. Nothing here is slow to import."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def printable(text: str) -> str:
    r"""A text for the terminal: what would steer it, as a name in somebody's file may, is shown as \x1b."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def plural(count: int, noun: str) -> str:
    """A count and its noun: '1 image', '2 images', '0 classes'.

    >>> plural(1, "batch"), plural(2, "batch"), plural(2, "copy"), plural(1500, "step")
    ('1 batch', '2 batches', '2 copies', '1500 steps')
    """
    ending = "es" if re.search("(s|x|[^o]ch|sh)$", noun) else "s"  # epochs, but batches
    return f"{count} {noun if count == 1 else re.sub('(?<=[^aeiou])y$', 'ie', noun) + ending}"


def short_repr(value: Any) -> str:
    """A value in a few words on one line, whatever it is: very long, nested, or holding itself.

    >>> short_repr([1, "a", {"b": None}])
    "[1, 'a', {'b': None}]"
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return " ".join(_SHORT.repr(value).split())


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 2, 3, 4, 4
_SHORT.maxstring, _SHORT.maxother = 80, 80


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


def markdown_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; what Markdown would read as markup is escaped, but for texts in backquotes."""

    def escaped(text: str) -> str:
        if len(text) > 1 and text[0] == text[-1] == "`":
            return text.replace("|", "\\|")
        return " ".join(re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text).split())

    lines = [[column.title for column in columns], ["---" if column.left else "---:" for column in columns]]
    lines += [[escaped(text) for text in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def code(text: str) -> str:
    """A text as Markdown shows code."""
    return "`" + text.replace("`", "'") + "`"
