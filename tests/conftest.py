"""What tests share lies in tests/support; its modules are imported by their names."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread, here and in the programs that tests start: sums depend on how many threads share them, and tests compare
# runs bit for bit. Several processes with several threads each would also wait for one another. Set before torch is
# imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Python looks for cycles after each 700 new objects, and networks and graphs are made of millions.
gc.set_threshold(50_000, 20, 20)

sys.path += [str(Path(__file__).resolve().parent / "support"), str(Path(__file__).resolve().parent)]

# A shell starts background jobs with SIGINT ignored, and programs inherit that: tests could send no Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take longest, as `--durations=0` tells: each is done by one process, and none of them should be the last.
LONGEST = """
    demo graphs files_of_1_0
    sensitive_program rtx_builds export gelan_c evaluation input_forms distributed resume networks
    qat_program segmentation_evaluation reparameterization mask_forms export_networks demo_masks forms
    segmenters quickstart hostile_resume hostile_files setup_on_upstream
    check_masks val_trt fused_network hostile_output
    benchmark_programs fork_server install_dependencies engine_programs
    benchmark calibration segmentation_loop patch_yolov9 page finetune fused_cuda loop
    shims overwriting tune
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: rank.get(item.path.stem.removeprefix("test_"), len(rank)))


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Programs send the log to their standard output; a test that runs one in this process leaves none behind."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
