"""Runs one of our programs with a stand-in for TensorRT and for the GPU: `run_on_stand_in.py PROGRAM ARGUMENTS`.

It takes the place of the interpreter in tests of shell scripts.
"""

import os
import runpy
import sys
from pathlib import Path

import pytest

program = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(program.parent.parent if program.parent.name == "scripts" else program.parent))

from tensorrt_stand_in import stand_in  # noqa: E402

import utils.jobs.open  # noqa: E402
from utils.trt.runner import TensorRTRunner  # noqa: E402

api = stand_in(pytest.MonkeyPatch(), os.environ.get("STAND_IN_VERSION", "8.6.0"))
utils.jobs.open.open_engine = lambda path, device: TensorRTRunner(path, "cpu", api=api)
sys.argv = [str(program), *sys.argv[2:]]
runpy.run_path(str(program), run_name="__main__")
