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
    ending = "es" if re.search("(s|x|[^o]ch|sh)$", noun) else "s"  # epochs, but batches
    return f"{count} {noun if count == 1 else re.sub('(?<=[^aeiou])y$', 'ie', noun) + ending}"


def short_repr(value: Any) -> str:
    """A value in a few words on one line, whatever it is: very long, nested, or holding itself.

    >>> short_repr(list(range(100)))
    '[0, 1, 2, 3, ...]'
    >>> short_repr(memoryview(b"a b"))[:8]
    '<memory '
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return " ".join(_SHORT.repr(value).split())


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxstring, _SHORT.maxother = 2, 3, 4, 4, 80, 80


def aligned(
    titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = (), *,
    gap: str = "  ", rule: bool = False,
) -> list[str]:  # fmt: skip
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
    return [
        gap.join(
            text.ljust(width) if title in left else text.rjust(width)
            for title, text, width in zip(titles, line, widths, strict=True)
        ).rstrip()
        for line in table
    ]


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> list[str]:
    r"""Lines of a Markdown table; characters of markup are escaped, but for texts in backquotes.

    >>> print(*markdown_table(["file", "AP"], [["`a_b.onnx`", "0.5*"]], ["file"]), sep="\n")
    | file | AP |
    | --- | ---: |
    | `a_b.onnx` | 0.5\* |
    """

    def escaped(text: str) -> str:
        if len(text) > 1 and text[0] == text[-1] == "`":
            return text.replace("|", "\\|")
        return " ".join(re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text).split())

    lines = [[*titles], ["---" if title in left else "---:" for title in titles]]
    lines += [[escaped(text) for text in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]
