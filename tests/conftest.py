"""What tests share lies in tests/support; its modules are imported by their names."""

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
    graphs rtx_builds export forms sensitive_program hostile_files demo bad_inputs qat_program resume
    segmentation_programs segmenters networks long_programs input_forms reparameterization setup_on_upstream upstream_ap
    files_of_1_0 evaluation programs rectangles
    tensorrt_bindings install_dependencies patch_yolov9 environment segmentation_loop finetune what_people_write
    dataset shares engines timing build report_rows refusals demo_data cli architecture engine_programs
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
