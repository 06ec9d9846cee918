"""Items that are made before they are asked for, so that what they start goes on meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def made_ahead(items: Iterable[T], ahead: int = 1) -> Iterator[T]:
    """The same items, each given once so many more have been made, or all."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting
