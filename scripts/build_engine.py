#!/usr/bin/env python3
"""Build a TensorRT engine from an ONNX file. It takes minutes, and runs on the GPU that the engine is for.

    python scripts/build_engine.py yolov9-c-int8.onnx --imgsz 640 --batch-size 1 8 16
    python scripts/build_engine.py yolov9-c-int8.onnx --tune 20          # the fastest of what 20 minutes can build
    python scripts/build_engine.py yolov9-c-int8-strong.onnx --target SM89    # TensorRT-RTX, on a machine without a GPU

Writes the engine (default: beside the ONNX file) and ENGINE.json, which says what it was built from and for what.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.jobs import build_engine

main = partial(run_program, "build_engine.py", (build_engine.EngineOptions, build_engine.run), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
