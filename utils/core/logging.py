"""The log: plain lines on standard output, and how much a part of the program says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from utils.core.text import printable


class _Handler(logging.StreamHandler):  # Python 3.10 cannot subscript it
    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Raise what writing a line raised: a closed pipe ends the program, and is not described on standard error."""
        raise

    def format(self, record: logging.LogRecord) -> str:  # logging's name
        return printable(super().format(record))


def setup_logging(verbose: bool = False, rank: int = 0) -> None:
    """Send the log to standard output as plain lines; others than the main process only warn, with their number."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text; a locale may lack →
    handler = _Handler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s" if rank else "%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("models.quantize", "utils", "__main__"):
        logging.getLogger(name).setLevel(logging.WARNING if rank else logging.DEBUG if verbose else logging.INFO)


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
