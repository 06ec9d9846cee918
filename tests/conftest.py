"""What tests share lies in tests/support; its modules are imported by their names."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent / "support"))

# A shell starts background jobs with SIGINT ignored, and programs inherit that: tests could send no Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Programs send the log to their standard output; a test that runs one in this process leaves none behind."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
