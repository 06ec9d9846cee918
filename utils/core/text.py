"""Text for terminals, logs and Markdown: values in messages, and tables. Nothing here is slow to import."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def printable(text: str) -> str:
    r"""A text for the terminal: characters that would steer it, as in a name of somebody's file, are shown as \x1b.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "image"), plural(0, "class"), plural(2, "batch"), plural(3, "epoch"), plural(2, "copy")
    ('1 image', '0 classes', '2 batches', '3 epochs', '2 copies')
    """
    if count == 1:
        return f"{count} {noun}"
    ending = "es" if re.search("(s|x|[^o]ch|sh)$", noun) else "s"  # epochs, but batches
    stem = re.sub("(?<=[^aeiou])y$", "ie", noun)
    return f"{count} {stem}{ending}"


def short_repr(value: Any) -> str:
    """A value in a few words on one line, whatever it is: very long, nested, or holding itself.

    >>> short_repr(list(range(100)))
    '[0, 1, 2, 3, ...]'
    >>> short_repr(memoryview(b"a b"))[:8]
    '<memory '
    """
    is_tensor = hasattr(value, "dtype") and hasattr(value, "shape")
    if is_tensor:
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{type(value).__name__} {dtype} {list(value.shape)}"
    return " ".join(_SHORT.repr(value).split())


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxdict = 3
_SHORT.maxlist = 4
_SHORT.maxtuple = 4
_SHORT.maxstring = 80
_SHORT.maxother = 80


def aligned(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[str] = (),
    *,
    gap: str = "  ",
    rule: bool = False,
) -> list[str]:
    r"""Lines of text, the titles first; texts of columns in `left` stand at the left, and `rule` underlines titles.

    >>> print(*aligned(["model", "ms"], [["FP16", "1.07"], ["INT8", "0.8"]], ["model"], rule=True), sep="\n")
    model    ms
    -----  ----
    FP16   1.07
    INT8    0.8
    """
    table = [tuple(titles), *map(tuple, rows)]
    widths = [max(map(len, texts)) for texts in zip(*table, strict=True)]
    if rule:
        table.insert(1, tuple("-" * width for width in widths))
    lines = []
    for row in table:
        cells = []
        for title, text, width in zip(titles, row, widths, strict=True):
            cells.append(text.ljust(width) if title in left else text.rjust(width))
        lines.append(gap.join(cells).rstrip())
    return lines


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> list[str]:
    r"""Lines of a Markdown table; characters of markup are escaped, but for texts in backquotes.

    >>> print(*markdown_table(["file", "AP"], [["`a_b.onnx`", "0.5*"]], ["file"]), sep="\n")
    | file | AP |
    | --- | ---: |
    | `a_b.onnx` | 0.5\* |
    """
    rule = ["---" if title in left else "---:" for title in titles]
    lines = [[*titles], rule]
    for row in rows:
        lines.append([_escaped(text) for text in row])
    return [f"| {' | '.join(line)} |" for line in lines]


def _escaped(text: str) -> str:
    """A text as a cell of a Markdown table, see `markdown_table`."""
    is_code = len(text) > 1 and text[0] == text[-1] == "`"
    if is_code:
        return text.replace("|", "\\|")
    escaped = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)
    return " ".join(escaped.split())
