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

sys.path.append(str(Path(__file__).resolve().parent / "support"))

# A shell starts background jobs with SIGINT ignored, and programs inherit that: tests could send no Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take longest, as `--durations=0` tells: each is done by one process, and none of them should be the last.
LONGEST = (
    *("test_sensitive_program.py", "test_rtx_builds.py", "test_export.py", "test_gelan_c.py", "test_hostile_kills.py"),
    *("test_evaluation.py", "test_input_forms.py", "test_distributed.py", "test_resume.py", "test_networks.py"),
    *("test_qat_program.py", "test_accuracy.py", "test_segmentation_evaluation.py", "test_reparameterization.py"),
    *("test_mask_forms.py", "test_export_networks.py", "test_demo_masks.py", "test_forms.py", "test_segmenters.py"),
    *(
        "test_quickstart.py",
        "test_hostile_resume.py",
        "test_hostile_upstream.py",
        "test_setup_on_upstream.py",
        "test_hostile_recipes.py",
    ),
    *("test_hostile_allowed_names.py", "test_check_masks.py", "test_segmentation_networks.py", "test_start_up.py"),
    *("test_val_trt.py", "test_time_qat_step.py", "test_hostile_fuzz.py", "test_hostile_interrupts.py"),
    *("test_hostile_output.py", "test_compare_placement.py", "test_hostile_weights.py", "test_fork_server.py"),
    *("test_install_dependencies.py", "test_engine_programs.py", "test_patch_killed.py", "test_interrupts.py"),
    *("test_benchmark.py", "test_calibration.py", "test_segmentation_loop.py", "test_patch_yolov9.py"),
    *("test_page.py", "test_pages_in_a_browser.py", "test_finetune.py", "test_fused_cuda.py", "test_loop.py"),
    *("test_recipe_fields.py", "test_upstream_shims.py", "test_overwriting.py", "test_build_apart.py", "test_tune.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Programs send the log to their standard output; a test that runs one in this process leaves none behind."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
