"""A value in a message: the one way in which errors name what they found; imports nothing that is slow."""

from __future__ import annotations

import re
import reprlib
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def printable(text: str) -> str:
    r"""A text for the terminal: what would steer it, as a name in somebody's file may, is shown as \x1b."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def shown(value: Any) -> str:
    """A value in a few words on one line, whatever it is: very long, nested, or holding itself.

    >>> shown([1, "a", {"b": None}])
    "[1, 'a', {'b': None}]"
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return " ".join(_SHORT.repr(value).split())


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:  # reprlib's name; Python refuses to write thousands of digits
        return repr(x) if abs(x) < 10**40 else "a number of more than 40 digits"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 2, 3, 4, 4
_SHORT.maxstring, _SHORT.maxother = 80, 80
