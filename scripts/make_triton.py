#!/usr/bin/env python3
"""Write a model repository for NVIDIA Triton Inference Server from an ONNX file or a TensorRT engine, or check one.

    python scripts/make_triton.py yolov9-c-int8.engine --output model_repository
    python scripts/make_triton.py yolov9-c-int8.onnx --output model_repository
    python scripts/make_triton.py yolov9-c-int8.onnx --platform tensorrt_plan --batch-size 1 8 16    # built later
    python scripts/make_triton.py --check model_repository

A file of raw predictions gets an ensemble with NMS behind it. docs/triton.md lists the files.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial

from utils.cli import run_program
from utils.core.errors import InputError
from utils.jobs.open import need
from utils.serving.options import ServingOptions


def write_or_check(options: ServingOptions) -> None:
    """Write a model repository, or check one."""
    if (options.file is None) == (options.check is None):
        raise InputError("give an ONNX file or an engine to serve, or --check a model repository")
    if options.check is not None:
        options.reject_others(["check", "file"], "with --check, which writes nothing")
    need("tritonclient", "grpc")
    from utils.jobs import model_repository

    if options.check is not None:
        model_repository.check_repository(options.check)
    else:
        model_repository.make(options)


main = partial(run_program, "make_triton.py", (ServingOptions, write_or_check), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
