"""How much a part of the program, or a library, says in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Within it the logger `name` says nothing below `level`."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
