"""A block that coverage does not look at, nor at what is started in it: under coverage Python is half as fast."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def unmeasured() -> Iterator[None]:
    """Stop tracing here and in processes that are started, until the block ends."""
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("COVERAGE_PROCESS")]:
            patch.delenv(name)
        sys.settrace(None)
        threading.settrace(None)
        yield
    sys.settrace(tracer)
    threading.settrace(tracer_of_threads)
