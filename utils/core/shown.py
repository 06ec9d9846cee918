"""A value in a message: the one way in which errors name what they found.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import os
import re
import reprlib
from typing import Any

MOST_DIGITS = 40
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def printable(text: str) -> str:
    r"""A text for the terminal: what would steer it, as a name in somebody's file may, is shown as \x1b."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def shown(value: Any) -> str:
    """A value in a few words on one line, whatever it is: very long, nested, or holding itself.

    Of types that are not Python's own, only the name is told: their `__repr__` may take long, or fail.

    >>> shown([1, "a", {"b": None}])
    "[1, 'a', {'b': None}]"
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return " ".join(_SHORT.repr(value).split())


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 2, 3, 4, 4
        self.maxstring, self.maxother = 80, 80

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**MOST_DIGITS else f"a number of more than {MOST_DIGITS} digits"

    def repr_instance(self, x: Any, level: int) -> str:
        if x is None or type(x) in (bool, float, complex, bytes) or isinstance(x, os.PathLike):
            return super().repr_instance(x, level)
        return "missing" if x is MISSING else f"a {type(x).__name__}"


class _Missing:
    """What a field is that is not there."""


MISSING = _Missing()
_SHORT = _Short()
