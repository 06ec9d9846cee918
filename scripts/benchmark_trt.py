#!/usr/bin/env python3
"""Time engines over batch sizes, INT8 against FP16, in one run and interleaved.

    python scripts/benchmark_trt.py yolov9-c-int8.onnx --baseline yolov9-c.onnx --batch-size 1 4 8 12 --useCudaGraph
    python scripts/benchmark_trt.py yolov9-c-int8.onnx --sweep 64

FILE is an ONNX file, of which an engine is built for each batch size (FILE-bN.engine beside it, used again while it is
newer), or an engine. All are timed at one image size: that of the files, or --imgsz. --baseline is the FP32 model's
ONNX; its engine is FP16. Files with NMS inside are compared with a baseline that has it inside too, and files with
masks with one that has masks: a segmentation network beside a detector shows what masks cost.

With --runtime openvino, OpenVINO runs ONNX files on the CPU, INT8 beside FP32 (and BF16, where the processor has it);
with --device cpu, ONNX Runtime runs them in FP32. There are no engines then. With OpenVINO, --builds 2 opens each file
twice.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.jobs import time_files

main = partial(run_program, "benchmark_trt.py", (time_files.BenchmarkOptions, time_files.run), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
