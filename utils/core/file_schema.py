"""What a file that a program wrote must hold: a schema of small rules, and one line for what does not fit.

A rule is called with a value and the field's name, and raises `Mismatch` where the value is something else:

    STATE = record({"version": integer(1, 1), "scores": listing(number(0, 1)), "note": maybe(text())})
    check(content, STATE, path, "start a new run")

says "last.pt is damaged or from another version: scores[3] is 'x', expected a number from 0 to 1; start a new run".

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from utils.core.errors import CheckpointError, InputError
from utils.core.shown import MISSING, shown

Rule = Callable[[Any, str], None]


class Mismatch(ValueError):
    """A field holds something else than its rule says."""

    def __init__(self, field: str, value: Any, expected: str) -> None:
        super().__init__(f"{field or 'its content'} is {shown(value)}, expected {expected}")

    @classmethod
    def said(cls, text: str) -> Mismatch:
        """Make a mismatch whose words somebody else has found; they are kept to one short line."""
        mismatch = cls("", MISSING, "")
        mismatch.args = (" ".join(text.split())[:300],)
        return mismatch


def check(content: Any, rule: Rule, path: str | Path, remedy: str, error: type[InputError] = CheckpointError) -> None:
    """Apply a schema to what `path` holds.

    Args:
        remedy: what to do, such as "start a new run".

    Raises:
        CheckpointError: or the given `error`, naming the first field that does not fit.
    """
    try:
        rule(content, "")
    except Mismatch as mismatch:
        raise error(damaged(path, mismatch, remedy)) from mismatch


def damaged(path: str | Path, what: object, remedy: str) -> str:
    """The line for a file of ours that does not hold what it should."""
    return f"{path} is damaged or from another version: {what}; {remedy}"


def text(pattern: str = "", expected: str = "a text") -> Rule:
    """A text, which `pattern` (a regular expression) describes whole."""

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, str) or (pattern and not re.fullmatch(pattern, value, re.DOTALL)):
            raise Mismatch(field, value, expected)
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):  # halves of characters, which cannot be written
            raise Mismatch(field, value, expected)

    return rule


def choice(*values: str) -> Rule:
    """One of some texts."""

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise Mismatch(field, value, " or ".join(values))

    return rule


def boolean(value: Any, field: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise Mismatch(field, value, "true or false")


def integer(least: int, most: int) -> Rule:
    """An integer within bounds; True and 1.0 are none."""

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            expected = f"an integer from {least} to {most}" if least != most else str(least)
            raise Mismatch(field, value, expected)

    return rule


def number(least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> Rule:
    """A finite number within bounds; `above`: not the lower bound itself."""

    def rule(value: Any, field: str) -> None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        # an integer may have thousands of digits, and no float of that size
        if not good or not least <= value <= most or abs(value) > sys.float_info.max or (above and value == least):
            raise Mismatch(field, value, f"a finite number{_bounds(least, most, above)}")

    return rule


def _bounds(least: float, most: float, above: bool) -> str:
    if math.isinf(least):
        return ""
    if math.isinf(most):
        return f" above {least:g}" if above else f", {least:g} or more"
    return f" above {least:g}, at most {most:g}" if above else f" from {least:g} to {most:g}"


def maybe(rule: Rule) -> Rule:
    """None, or what `rule` says."""

    def either(value: Any, field: str) -> None:
        if value is not None:
            rule(value, field)

    return either


def listing(item: Rule, least: int = 0, most: float = math.inf) -> Rule:
    """A list of so many items."""

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Mismatch(field, value, "a list")
        if not least <= len(value) <= most:
            wanted = f"{least} items" if least == most else f"a list of {least} items or more"
            raise Mismatch(field, value, wanted if len(value) < least or least == most else f"at most {most} items")
        for index, one in enumerate(value):
            item(one, f"{field}[{index}]")

    return rule


def mapping(key: Rule, item: Rule) -> Rule:
    """A mapping whose keys and values each have a rule."""

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, Mapping):
            raise Mismatch(field, value, "a mapping")
        for name, one in value.items():
            key(name, f"a key of {field or 'its content'}")
            item(one, _joined(field, name))

    return rule


def record(
    rules: Mapping[str, Rule], optional: Collection[str] = (), also: Collection[str] = (), *, others: bool = False
) -> Rule:
    """A mapping with these fields, each with its rule.

    Args:
        optional: fields that may be missing.
        also: fields that may be there without a rule.
        others: any further field may be there.
    """

    def rule(value: Any, field: str) -> None:
        if not isinstance(value, Mapping):
            raise Mismatch(field, value, f"a mapping with {', '.join(rules)}")
        for name, inner in rules.items():
            if name in value:
                inner(value[name], _joined(field, name))
            elif name not in optional:
                raise Mismatch(_joined(field, name), MISSING, "this field")
        unknown = [name for name in value if name not in rules and name not in also]
        if unknown and not others:
            raise Mismatch(_joined(field, unknown[0]), value[unknown[0]], "no such field")

    return rule


def plain(value: Any, field: str) -> None:
    """Texts, numbers, true, false, None, and lists and mappings of them, not nested without end."""
    _plain(value, field, 0)


def _plain(value: Any, field: str, depth: int) -> None:
    if depth > 20:
        raise Mismatch(field, value, "values that are nested less deeply")
    if isinstance(value, Mapping):
        for name, one in value.items():
            _plain(name, f"a key of {field}", depth + 1)
            _plain(one, _joined(field, name), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _plain(one, f"{field}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise Mismatch(field, value, "a text, a number, true, false or null")


def _joined(field: str, name: Any) -> str:
    word = name if isinstance(name, str) and re.fullmatch(r"[\w./:%+ -]{1,80}", name) else shown(name)
    return f"{field}.{word}" if field else word
