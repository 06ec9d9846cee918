"""Decoding images without what FFmpeg and libpng print about damaged files: we say in one line what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

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


def decode(path: str) -> np.ndarray | None:
    """The image as BGR uint8 `[H, W, 3]`, turned as its EXIF orientation says; None when it cannot be decoded."""
    import cv2
    import numpy as np

    try:
        data = np.fromfile(path, np.uint8)  # cv2.imread does not open every path on every system
        with quiet_decoders():
            return cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
    except (OSError, cv2.error):
        return None


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)
