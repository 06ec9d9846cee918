"""Typed errors. Each message is one line for the user: what was found, what was expected, what to do."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "activate the environment (. .venv/bin/activate), or make it with install_dependencies.sh"  # what to do
UNHIDE = "rename it, or take its folder out of PYTHONPATH"


def no_file(path: str | Path, expected: str) -> str:
    """The message for a path without a regular file; `expected` is its second half."""
    if not os.path.exists(path):
        problem = "does not exist"
    elif os.path.isdir(path):
        problem = "is a folder"
    else:
        problem = "is not a regular file"
    return f"{path} {problem}; {expected}"


class QatError(Exception):
    """Something went wrong that is not the fault of the input; programs exit with 1."""

    exit_code = 1


class InputError(QatError):
    """A file, an option or a value given by the user cannot be used; programs exit with 2."""

    exit_code = 2


class CheckpointError(InputError):
    """A weights file is missing, truncated, of the wrong kind, or names classes that are not upstream's."""


class RecipeError(InputError):
    """A recipe has an unknown key, a value outside its range, or a pattern that matches nothing."""


class DataError(InputError):
    """A dataset's YAML, images, labels or annotations cannot be used, or do not fit the model."""


class DependencyError(InputError):
    """A library that this command needs is not installed; the message says how to install it."""


# An option ('--flag', or one value of it, '--flag value') that users of other projects type -> how it is done here.
HABITS: dict[str, str] = {
    "--include engine": "is not written here: scripts/generate_trt_engine.sh builds an engine of the ONNX file",
    "--format": "does not exist: export_qat.py writes ONNX, and scripts/generate_trt_engine.sh builds the engine",
    "--int8": "does not exist: qat.py quantize makes the INT8 checkpoint, which export_qat.py exports",
    "--task speed": "does not exist: scripts/benchmark_trt.py measures speed",
    "--task study": "does not exist: run val_trt.py with each --imgsz, and compare by scripts/make_report.py",
}
KEY_VALUE = "options are written as --name VALUE here, and engines are built by scripts/generate_trt_engine.sh"
