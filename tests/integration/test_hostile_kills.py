"""Runs that are killed by SIGKILL at any moment, and resumed, leave the files of a run that was never interrupted.

HOSTILE_KILLS says how many kills at random moments each command gets, and how many at the moments when a file is
renamed into place; 20 takes some minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from nursery import Nursery
from qat_runs import SMALL_RUN, half_of_layers, write_small_set

KILLS = int(os.environ.get("HOSTILE_KILLS", "2"))
STATE = {"quantize": "weights/last.pt", "sensitive": "state.json"}
HARSH = ("--calib-method", "percentile", "--percentile", "99", "--float-budget", "0.1")  # there is something to mend
WORDS = {"quantize": ("--epochs", "1"), "sensitive": ("--num-image", "2", *HARSH)}
TIMES = {"seconds", "ms_per_image", "created", "screening"}  # measured: the only values in which two runs differ


@pytest.fixture(scope="module")
def nursery(checkout: Path) -> Iterator[Nursery]:
    with Nursery(checkout) as found:
        yield found


@dataclass(frozen=True)
class Whole:
    """A run that was never interrupted: how to start it, where its files are, its length, and how many it wrote."""

    command: str
    start: list[str]
    files: Path
    seconds: float
    writes: int

    @property
    def folder(self) -> Path:
        """Where every run of this kind lies while it is made: paths are written to reports."""
        return self.files.with_name("exp")


@pytest.fixture(scope="module", params=sorted(STATE))
def whole(request, tmp_path_factory, nursery, demo_data, demo_weights, small_weights) -> Whole:
    folder = tmp_path_factory.mktemp(request.param)
    data = write_small_set(folder / "set", demo_data, train=4, val=4)
    small = SMALL_RUN if request.param == "quantize" else SMALL_RUN[:-2]  # without --iters
    few_layers = request.param == "quantize"  # and the other looks at half of them
    weights, words = (small_weights, ()) if few_layers else (demo_weights, half_of_layers(folder))
    start = [request.param, "--weights", weights, "--data", data, "--project", folder, *small]
    start = [*map(str, start), *WORDS[request.param], *words]
    began = time.monotonic()
    assert nursery.run(start, folder / "log", writes=folder / "writes") == 0, (folder / "log").read_text()
    seconds = time.monotonic() - began
    (folder / "exp").rename(folder / "whole")
    return Whole(request.param, start, folder / "whole", seconds, int((folder / "writes").read_text()))


def go_on(nursery: Nursery, whole: Whole, log: Path, **kill: Any) -> int:
    """Start the run, or continue it where there is something to continue."""
    if (whole.folder / STATE[whole.command]).is_file():
        return nursery.run([whole.command, "--resume", str(whole.folder)], log, **kill)
    shutil.rmtree(whole.folder, ignore_errors=True)
    return nursery.run(whole.start, log, **kill)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def without_times(value: Any, timed: bool = False) -> Any:
    """`value` with 0 for every number that was measured, and tensors as bytes."""
    if isinstance(value, dict):
        return {key: without_times(item, timed or key in TIMES) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_times(item, timed) for item in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), tuple(value.shape), value.numpy().tobytes()]
    return 0 if timed and value is not None else value


READERS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: without_times(json.loads(path.read_text())),
    ".pt": lambda path: without_times(torch.load(path, weights_only=True)),
}


def assert_same_files(folder: Path, whole: Path) -> None:
    """The same files with the same content, plots byte for byte; only measured times differ."""
    assert files_of(folder) == files_of(whole)
    for name in files_of(whole):
        ours, theirs = folder / name, whole / name
        if theirs.is_file():
            reader = READERS.get(theirs.suffix, Path.read_bytes)
            assert reader(ours) == reader(theirs), name


@pytest.mark.timeout(1800)
def test_kills_at_random_moments(whole, nursery, tmp_path):
    """Two kills a run: one after its start, one after it was resumed."""
    chance = random.Random(14)
    killed = 0
    while killed < KILLS:
        for _ in range(2):
            status = go_on(nursery, whole, tmp_path / "log", kill_after=chance.uniform(0, whole.seconds))
            assert status in (-signal.SIGKILL, 0), (tmp_path / "log").read_text()
            killed += status != 0
        assert go_on(nursery, whole, tmp_path / "log") == 0, (tmp_path / "log").read_text()
        assert_same_files(whole.folder, whole.files)
        shutil.rmtree(whole.folder)


@pytest.mark.timeout(1800)
def test_kills_while_files_are_written(whole, nursery, tmp_path):
    """Just before a file gets its name, and just after; always at the last ones: a result and the state."""
    moments = [(number, after) for number in range(1, whole.writes + 1) for after in (False, True)]
    last = [moment for moment in moments if moment[0] > whole.writes - 3]
    others = random.Random(14).sample(moments[: -len(last)], min(KILLS // 2, len(moments) - len(last)))
    for moment in [*others, *(last if KILLS > 2 else last[2::2])]:
        status = go_on(nursery, whole, tmp_path / "log", kill_at_write=moment)
        assert status == -signal.SIGKILL, (moment, (tmp_path / "log").read_text())
        assert go_on(nursery, whole, tmp_path / "log") == 0, (moment, (tmp_path / "log").read_text())
        assert_same_files(whole.folder, whole.files)
        shutil.rmtree(whole.folder)
