"""The stand-in for TensorRT as an installed module, with a GPU: `PYTHONPATH=tests/support/installed python PROGRAM`.

It is there in processes that a program starts as well. An engine takes `100 - streams` ticks; a build with as many
streams as the environment's ENDLESS says does not end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tensorrt_stand_in import stand_in

from utils.trt import timing
from utils.trt.timing import TimingConfig


def ticks(config) -> int:
    """Of a run; asked while an engine is built."""
    if str(config.max_aux_streams) == os.environ.get("ENDLESS"):
        time.sleep(600)
    return 100 - config.max_aux_streams


timing.TUNING_ROUND = TimingConfig(1, 0, 1, cuda_graph=True, transfers=False, iterations=2)
api = stand_in(pytest.MonkeyPatch())
api.module.ticks = ticks
sys.modules[__name__] = api.module
