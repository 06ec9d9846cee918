"""Builds in a process of their own: what it says, when it is ended, and that it stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from odd_builds import odd_build

from utils.trt.build_config import BuildConfig
from utils.trt.tune import BuildProcess, Outcome

CONFIG = BuildConfig(progress=False)
LONG = 100.0


@pytest.fixture(scope="module")
def process():
    with BuildProcess(work=odd_build) as found:
        yield found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def built(process: BuildProcess, engine: Path) -> int:
    """The number of the process that built."""
    outcome = process.build(Path("fine.onnx"), engine, CONFIG, LONG)
    assert (outcome.error, outcome.exit_code) == ("", 0)
    return int(engine.read_text())


@pytest.mark.parametrize(
    ("way", "error", "exit_code"),
    [
        ("refused", "this file is refused", 2),
        ("full", "OSError: [Errno 28] no space left", 1),
        ("no type", "TypeError: incompatible function arguments. 1. (self: Builder)", 1),
    ],
)
def test_an_error_is_a_line_and_the_process_stays(process, tmp_path, way, error, exit_code):
    before = built(process, tmp_path / "a.engine")
    outcome = process.build(Path(f"{way}.onnx"), tmp_path / "b.engine", CONFIG, LONG)
    assert outcome == Outcome(outcome.seconds, error, exit_code)
    assert built(process, tmp_path / "a.engine") == before != os.getpid()


@pytest.mark.parametrize(("way", "error"), [("killed", "signal 9"), ("exits", "exit code 3")])
def test_a_process_that_ends_is_replaced(process, tmp_path, way, error):
    before = built(process, tmp_path / "a.engine")
    outcome = process.build(Path(f"{way}.onnx"), tmp_path / "b.engine", CONFIG, LONG)
    assert (outcome.error, outcome.exit_code) == (f"the build's process ended: {error}", 1)
    assert built(process, tmp_path / "a.engine") != before


def test_a_build_that_takes_too_long_is_ended(process, tmp_path):
    before, waits = built(process, tmp_path / "a.engine"), []
    began = time.monotonic()
    outcome = process.build(Path("endless.onnx"), tmp_path / "b.engine", CONFIG, 1.2, lambda: waits.append(1))
    assert 1.2 <= time.monotonic() - began < 10
    assert (outcome.error, outcome.exit_code, outcome.late) == ("not built within 1 s", 1, True)
    assert len(waits) >= 2
    assert not alive(before)
    assert built(process, tmp_path / "a.engine") != before


def test_files_that_are_being_written_are_finished(process, tmp_path):
    """Its plan is there in time; writing it takes longer than the limit."""
    built(process, tmp_path / "a.engine")
    outcome = process.build(Path("slow writer.onnx"), tmp_path / "b.engine", CONFIG, 1.0)
    assert outcome.error == ""
    assert outcome.seconds > 1.5
    assert (tmp_path / "b.engine").is_file()
