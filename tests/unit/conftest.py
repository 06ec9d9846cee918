"""Unit tests see the library as it lies in the repository, without a YOLOv9 checkout."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from unmeasured import unmeasured

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Coverage need not look at how others' modules are imported, which takes half as long again where it does.
if sys.gettrace() is not None:
    with unmeasured():
        for name in ("torch", "torchvision", "onnx", "onnxruntime", "cv2", "sklearn.datasets"):
            import_module(name)

# These start many programs, and what those execute of the library other tests execute as well. Coverage looks away:
# a process takes a quarter of a second longer to start where it is measured.
UNMEASURED = (
    *("test_architecture.py", "test_console.py", "test_engine_programs.py", "test_fork_server.py"),
    *("test_fused_cuda.py", "test_interrupts.py", "test_late_modules.py", "test_options_of_programs.py"),
    *("test_overwriting.py", "test_run_folder.py", "test_segmentation_loop.py", "test_shares.py"),
    *("test_shared_batch.py", "test_upstream_shims.py"),
)
MEASURED_CASES = 3  # of each parametrized test: those that follow execute the same lines, or nearly so


@pytest.fixture(autouse=True, scope="module")
def _unmeasured_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Coverage looks at no file of `UNMEASURED`, nor at what it starts."""
    if request.path.name not in UNMEASURED:
        yield
        return
    with unmeasured():
        yield


@pytest.fixture(autouse=True)
def _unmeasured_cases(request: pytest.FixtureRequest, _cases_so_far: Counter[str]) -> Iterator[None]:
    """Coverage looks at the first `MEASURED_CASES` cases of a test."""
    test = request.node.nodeid.partition("[")[0]
    _cases_so_far[test] += 1
    if _cases_so_far[test] <= MEASURED_CASES:
        yield
        return
    with unmeasured():
        yield


@pytest.fixture(scope="session")
def _cases_so_far() -> Counter[str]:
    return Counter()
