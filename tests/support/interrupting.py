"""Start a program, interrupt it, and judge how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WITHIN = 5.0  # seconds from the signal to the end
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def programs(weights: Path, data: Path, folder: Path) -> list[list[str]]:
    """Command lines that run for longer than anybody waits here: imports, loaders' processes, training."""
    common = ["--data", str(data), "--device", "cpu", "--project", str(folder)]
    quantize = [
        "qat.py",
        "quantize",
        "--weights",
        str(weights),
        "--imgsz",
        "320",
        "--batch-size",
        "8",
        "--epochs",
        "40",
    ]
    return [
        [*quantize, "--workers", "2", "--no-eval-origin", *common],
        ["qat.py", "sensitive", "--weights", str(weights), "--imgsz", "320", "--workers", "2", *common],
        ["qat.py", "eval", "--weights", str(weights), "--imgsz", "640", "--batch-size", "4", "--workers", "1", *common],
        ["val_trt.py", "--engine-file", str(weights), "--imgsz", "640", "--batch-size", "4", "--workers", "2", *common],
    ]


def left_behind(folder: Path) -> list[str]:
    """Hidden files that an ended program has left; they are removed, so that each counts once."""
    hidden = [path for path in folder.rglob(".*") if path.is_file() and path.name != ".lock"]
    for path in hidden:
        path.unlink()
    return [f"left behind: {path}" for path in hidden]


def first_line_ran(pid: int) -> bool:
    """Does the process catch SIGTERM? Python itself does not: the program's first line makes it so."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return True
    caught = int(re.search(r"^SigCgt:\s*(\w+)", text, re.MULTILINE)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def group_members(group: int) -> list[int]:
    """Processes of a group that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(member) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def strike(
    command: list[str], cwd: Path, delay: float, *, number: signal.Signals = signal.SIGINT, presses: int = 1
) -> tuple[list[str], float]:
    """Start a program, interrupt it, and say what was wrong with its end, and how long that took in seconds.

    The signal goes to all processes of the program, as a terminal's does, `delay` seconds after its first line ran.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen([sys.executable, *command], cwd=cwd, stdout=out, stderr=err, start_new_session=True)
        while not first_line_ran(process.pid):
            time.sleep(0.0005)
        time.sleep(delay)
        began = time.monotonic()
        for press in range(presses):
            if press:
                time.sleep(0.1 / presses)
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        problems = []
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return ["it did not end within a minute"], 60.0
        took = time.monotonic() - began
        time.sleep(0.3)
        for stream in (out, err):
            stream.seek(0)
        stdout, stderr = (stream.read().decode("utf-8", "replace") for stream in (out, err))
    if code != 128 + number:
        problems.append(f"exit code {code}")
    if took > WITHIN:
        problems.append(f"it took {took:.1f} s")
    if "Traceback" in stdout + stderr or "Error" in stdout + stderr:
        problems.append("a traceback or an error was printed")
    said = [line for line in re.split(r"[\r\n]+", stderr) if line.strip() and not re.search(r"\d+%\||it/s|\?,", line)]
    if said != [WORDS[number]]:
        problems.append(f"it said {said}")
    left = group_members(process.pid)
    if left:
        problems.append(f"{len(left)} processes are left")
        os.killpg(process.pid, signal.SIGKILL)
    if problems:
        problems += [stdout[-500:], stderr[-2000:]]
    return problems, took
