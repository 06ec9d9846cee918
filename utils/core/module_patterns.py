"""Which convolutions a pattern of a recipe's `float` names: the one matcher, for placing and for verifying.

A pattern is a path, or a path with wildcards, over dotted module paths:

    model.4             a path without wildcards names the module and all that is below it
    model.4.cv?         wildcards (`*`, `?`, `[0-3]`; case matters) match a convolution's whole path: cv1 and cv4, but
                        not what is inside cv2; `*` also crosses dots: model.4.* is all that is below model.4
    model.4.cv1.conv    the path as placement.txt and the weights spell it

A convolution has two spellings: its own path, under which its weight is stored (`model.4.cv1.conv`), and, where that
ends with `.conv`, the path of upstream's Conv around it (`model.4.cv1`). A pattern that matches either names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def spellings(path: str) -> tuple[str, ...]:
    """The paths by which a convolution is called, its own first.

    >>> spellings("model.4.cv1.conv")
    ('model.4.cv1.conv', 'model.4.cv1')
    """
    around = path.removesuffix(".conv")
    return (path,) if around == path else (path, around)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern names the convolution whose weight lies at `path`.

    >>> matches("model.4.cv?", "model.4.cv1.conv"), matches("model.4.cv?", "model.4.cv2.0.cv1.conv")
    (True, False)
    """
    return path.startswith(f"{pattern}.") or any(fnmatchcase(name, pattern) for name in spellings(path))


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """The first of several patterns that names a convolution; None if none does."""
    return next((pattern for pattern in patterns if matches(pattern, path)), None)
