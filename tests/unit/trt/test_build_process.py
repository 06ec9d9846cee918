"""Builds in a process of their own: what it says, when it is ended, and that it stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from odd_builds import odd_build

from utils.core.errors import InputError, QatError
from utils.trt import tune
from utils.trt.preflight import BuildConfig
from utils.trt.tune import BuildProcess

CONFIG = BuildConfig(progress=False)
LONG = 100.0


@pytest.fixture(scope="module")
def process():
    with pytest.MonkeyPatch.context() as patch, BuildProcess() as process:
        patch.setattr(tune, "build", odd_build)
        yield process


def built(process: BuildProcess, engine: Path) -> int:
    """The number of the process that built."""
    process.build(Path("fine.onnx"), engine, CONFIG, LONG)
    return int(engine.read_text())


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [("refused", InputError, "this file is refused"), ("full", OSError, "no space left"), ("no type", TypeError, "1.")],
)
def test_an_error_is_raised_here_and_the_process_stays(process, tmp_path, way, kind, message):
    before = built(process, tmp_path / "a.engine")
    with pytest.raises(kind, match=message):
        process.build(Path(f"{way}.onnx"), tmp_path / "b.engine", CONFIG, LONG)
    assert built(process, tmp_path / "a.engine") == before != os.getpid()


def test_a_process_that_dies_is_replaced(process, tmp_path):
    before = built(process, tmp_path / "a.engine")
    with pytest.raises(QatError, match="process ended"):
        process.build(Path("killed.onnx"), tmp_path / "b.engine", CONFIG, LONG)
    assert built(process, tmp_path / "a.engine") != before
