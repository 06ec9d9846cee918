"""Unit tests see the library as it lies in the repository, without a YOLOv9 checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from unmeasured import unmeasured

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Coverage need not look at how others' modules are imported, which takes half as long again where it does. The process
# that hands tests out to others runs none.
if sys.gettrace() is not None and "PYTEST_XDIST_WORKER" in os.environ:
    with unmeasured():
        for name in ("torch", "torchvision", "onnx", "onnxruntime", "cv2", "sklearn.datasets"):
            import_module(name)

# These start many programs or evaluate many images, and what they execute of the library other tests execute as well.
# Coverage looks away: a process takes a quarter of a second longer to start where it is measured.
UNMEASURED = (
    "test_architecture.py", "test_benchmarks.py", "test_engine_programs.py", "test_environment.py",
    "test_fork_server.py", "test_fused_cuda.py", "test_hostile_canary.py", "test_overwriting.py",
    "test_segmentation_loop.py", "test_shares.py", "test_shared_batch.py", "test_to_yolo.py",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _unmeasured_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Coverage looks at no file of `UNMEASURED`, nor at what it starts."""
    if request.path.name not in UNMEASURED:
        yield
        return
    with unmeasured():
        yield
