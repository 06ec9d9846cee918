#!/usr/bin/env python3
"""Time INT8 beside FP32 in OpenVINO on this machine, on an upstream network with random weights.

    python scripts/cpu_speed.py                       # gelan-s at 416 pixels, with all cores
    python scripts/cpu_speed.py gelan-c --imgsz 640 --threads 1

It needs no weights and no data. For a trained network there is benchmark_trt.py --runtime openvino.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial
from typing import Annotated, Literal

from utils.cli import run_program
from utils.core.options import Field, ImageSize, Options, option
from utils.jobs.open import need

DEFAULT_NETWORK = "gelan-s"


class SpeedOptions(Options):
    """INT8 beside FP32 on this machine's CPU."""

    network: Literal["gelan-t", "gelan-s", "gelan-m", "gelan-c", "gelan-e"] | None = option(
        None, f"upstream's network (default: {DEFAULT_NETWORK})", positional=True, nargs="?"
    )
    imgsz: ImageSize = option(416, "side of the images in pixels, a multiple of 32", metavar="PX")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = option(None, "default: one for each core", metavar="N")


def time_both(options: SpeedOptions) -> int:
    """Time FP32 and INT8; return exit code 1 if one of them did not run."""
    need("torch", "onnx", "openvino")
    from utils.jobs import cpu_speed

    rows = cpu_speed.run(options.network or DEFAULT_NETWORK, options.imgsz, options.threads)
    return 1 if any(row.error for row in rows) else 0


main = partial(run_program, "cpu_speed.py", (SpeedOptions, time_both), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
