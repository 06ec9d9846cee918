"""Keeping what FFmpeg and libpng print about damaged files off the terminal: we say in one line what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

STDERR = 2  # the decoders write to the descriptor, past Python's sys.stderr


@contextmanager
def quiet_decoders() -> Iterator[None]:
    """Let the process' standard error go nowhere within the block; keep the block to the decoding itself."""
    try:
        kept = os.dup(STDERR)
    except OSError:  # it is closed
        yield
        return
    try:
        os.dup2(_nowhere(), STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)
