"""Unit tests see the library as it lies in the repository, without a YOLOv9 checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from unmeasured import unmeasured

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# These start many programs, and what those execute of the library other tests execute as well. Coverage looks away:
# a process takes a quarter of a second longer to start where it is measured.
UNMEASURED = (
    *("test_architecture.py", "test_console.py", "test_fused_cuda.py", "test_interrupts.py"),
    *("test_late_modules.py", "test_options_of_programs.py", "test_overwriting.py", "test_run_folder.py"),
    *("test_upstream_shims.py",),
)


@pytest.fixture(autouse=True, scope="module")
def _unmeasured_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Coverage looks at no file of `UNMEASURED`, nor at what it starts."""
    if request.path.name not in UNMEASURED:
        yield
        return
    with unmeasured():
        yield
