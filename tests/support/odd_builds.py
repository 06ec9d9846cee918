"""Builds for `BuildProcess` that end in the way that the ONNX file's name says; run in a process of their own."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from utils.core.errors import InputError
from utils.trt.preflight import BuildConfig


def odd_build(onnx: Path, engine: Path, config: BuildConfig) -> None:
    """The engine holds the process's number."""
    way = onnx.stem
    if way == "endless":
        time.sleep(600)
    elif way == "refused":
        raise InputError("this file is refused")
    elif way == "full":
        raise OSError(errno.ENOSPC, "no space left")
    elif way == "no type":
        raise TypeError("incompatible function arguments.\n    1. (self: Builder)")
    elif way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    engine.write_text(str(os.getpid()))
