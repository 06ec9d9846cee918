#!/usr/bin/env python3
"""Evaluate a checkpoint as an engine: export, build, evaluate; scripts/val_trt.sh starts it.

    python scripts/evaluate_as_engine.py yolov9-c-converted.pt data/coco.yaml 640

BATCH, EXPORT_ARGS, BUILD_ARGS and VAL_ARGS are taken from the environment, as scripts/val_trt.sh -h has them. A second
call with the same options uses the files again that the first one made.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.jobs.pipeline import engine

main = partial(run_program, "evaluate_as_engine.py", (engine.EngineApOptions, engine.run), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
