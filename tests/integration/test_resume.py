"""A quantize run that is killed at any moment continues to what it would have been."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from qat_runs import SMALL_RUN, checkpoints, quantize, report_of, write_small_set

import qat
from utils.core.errors import InputError
from utils.jobs.run_state import RunState
from utils.upstream import load_float

pytestmark = pytest.mark.usefixtures("blank_plots")
LONGER = ("--epochs", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, demo_data: Path) -> Path:
    return write_small_set(tmp_path_factory.mktemp("set"), demo_data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path, small_weights: Path) -> Path:
    """A run that was never interrupted."""
    project = tmp_path_factory.mktemp("whole")
    assert quantize(small_weights, data, project, *LONGER) == 0
    report = report_of(project / "exp")
    found = [*(row["ap"] for row in report["rows"][:2]), *(entry["held_out"] for entry in report["history"])]
    assert len({*found, 0.0}) == 5  # so that a comparison with it can fail
    return project / "exp"


def resume(run: Path, *words: str) -> int:
    return qat.main(["quantize", "--resume", str(run), *words])


def test_the_state_of_a_run_is_no_checkpoint(whole: Path):
    with pytest.raises(InputError, match="what --resume continues from; give qat_best"):
        load_float(whole / "weights/last.pt")


def assert_equal_runs(run: Path, whole: Path) -> None:
    """Same files with the same content, same results; only times differ."""
    assert checkpoints(run) == checkpoints(whole)
    for name in checkpoints(run):
        if name != "last.pt":
            ours, theirs = (torch.load(folder / "weights" / name, weights_only=True) for folder in (run, whole))
            assert ours["quantized_state"].keys() == theirs["quantized_state"].keys()
            for key, value in ours["quantized_state"].items():
                assert torch.equal(value, theirs["quantized_state"][key]), (name, key)
    ours, theirs = report_of(run), report_of(whole)
    for entry, other in zip(ours["history"], theirs["history"], strict=True):
        assert entry | {"seconds": 0} == other | {"seconds": 0}
    for row, other in zip(ours["rows"], theirs["rows"], strict=True):
        for key in ("stage", "ap", "ap50", "precision", "recall", "measured_on"):
            assert row[key] == other[key], (row["stage"], key)


class Killed(BaseException):
    """Ends the program as abruptly as this process allows."""


def test_a_run_that_dies_between_a_checkpoint_and_its_state_continues_to_the_same_end(
    whole, data, small_weights, tmp_path, monkeypatch
):
    """Steps save in this order: the start; float row; PTQ's checkpoint, state, report; each epoch's in the same way."""
    save, calls = RunState.save, []

    def dying(*words: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        save(*words)

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "save", dying)
        with pytest.raises(Killed):
            quantize(small_weights, data, tmp_path, *LONGER)
    assert resume(tmp_path / "exp") == 0
    assert_equal_runs(tmp_path / "exp", whole)


def started(data: Path, weights: Path, tmp_path: Path, checkout: Path, *words: str) -> subprocess.Popen:
    """The program in a process group of its own, which writes tmp_path/log."""
    common = ["quantize", "--weights", weights, "--data", data, "--project", tmp_path, *SMALL_RUN, *words]
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "qat.py", *map(str, common)], cwd=checkout, stdout=log, stderr=log, start_new_session=True
        )


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while not condition() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)


def test_sigkill_during_an_epoch(whole, data, small_weights, tmp_path, checkout):
    process = started(data, small_weights, tmp_path, checkout, *LONGER)
    weights = tmp_path / "exp/weights"
    wait_for(lambda: list(weights.glob("qat_ep_0*")), process)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert not list(weights.glob("qat_best*"))
    assert resume(tmp_path / "exp") == 0
    assert_equal_runs(tmp_path / "exp", whole)


def test_ctrl_c_says_how_to_resume(data, small_weights, tmp_path, checkout):
    log = tmp_path / "log"  # a worker process, since the signal reaches those too
    process = started(data, small_weights, tmp_path, checkout, "--workers", "1", "--epochs", "1000")
    wait_for(lambda: "QAT epoch 0" in log.read_text(), process)
    for _ in range(10):  # Python drops one that arrives while it forks a worker, so a user would press it again
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
            break
        if "interrupted" in log.read_text():  # it heard, and is still on its way out
            break
    assert process.wait(30) == 130, log.read_text()
    text = log.read_text()
    assert f"--resume {tmp_path / 'exp'}" in text
    ignored = "Exception ignored in" in text  # Python's own words when Ctrl-C hits one of its fork handlers
    assert ignored or "Traceback" not in text
    assert not [name for name in checkpoints(tmp_path / "exp") if name.startswith((".", "qat_best"))]


def test_a_finished_run_is_only_shown_again(whole, capsys):
    before = {name: (whole / "weights" / name).stat().st_mtime_ns for name in checkpoints(whole)}
    assert resume(whole) == 0
    out = capsys.readouterr().out
    assert "the run is finished" in out
    assert "best: " in out
    assert qat.main(["quantize", "--resume", "--project", str(whole.parent)]) == 0  # the last one there
    assert str(whole) in capsys.readouterr().out
    assert {name: (whole / "weights" / name).stat().st_mtime_ns for name in checkpoints(whole)} == before


def test_what_would_make_it_another_run_is_refused(whole, capsys, small_weights):
    for words in (["--batch-size", "3"], ["--epochs", "3"], ["--lr", "1e-4"]):
        assert resume(whole, *words) == 2
        assert f"error: {words[0]} is " in capsys.readouterr().err
    assert resume(whole, "--weights", str(small_weights), "--batch-size", "2", *LONGER) == 0


def test_files_that_are_gone_or_have_changed_are_named(data, small_weights, tmp_path, capsys):
    weights, quantized = tmp_path / "gelan-digits.pt", tmp_path / "exp/weights/ptq_gelan-digits.pt"
    weights.write_bytes(small_weights.read_bytes())
    assert quantize(weights, data, tmp_path, "--ptq-only", "--no-eval-origin", "--no-eval-ptq") == 0
    content = quantized.rename(tmp_path / "aside.pt")
    assert resume(tmp_path / "exp") == 2
    assert str(quantized) in capsys.readouterr().err
    content.rename(quantized)
    torch.save({**torch.load(weights, weights_only=False), "epoch": 12345}, weights)
    assert resume(tmp_path / "exp") == 2
    assert str(weights) in capsys.readouterr().err
