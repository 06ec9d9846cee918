"""Interrupt programs at random moments, and judge how they end.

    python tests/stress/interrupts_at_random.py --count 200

Run it in a patched checkout (or give --checkout), with the demo set drawn. Each round starts a program in a process
group of its own, waits for its first line (from there on SIGTERM is caught, which /proc shows), waits for a random
time, and sends the signal to the whole group, as a terminal does. Every third round presses five times within 0.1 s.
A round fails when the exit code is not 130 (143 for SIGTERM), when it took more than five seconds, when anything but
the one line was said (on standard error, bars aside), when a traceback was printed, or when a process or a hidden
file is left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WITHIN = 5.0  # seconds from the signal to the end
ROOT = Path(__file__).resolve().parents[2]
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
    command: list[str],
    cwd: Path,
    delay: float,
    *,
    number: signal.Signals = signal.SIGINT,
    presses: int = 1,
    environment: dict[str, str] | None = None,
) -> tuple[list[str], float]:
    """Start a program, interrupt it, and say what was wrong with its end, and how long that took in seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=cwd, stdout=out, stderr=err, start_new_session=True, env=environment
        )
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0, help="moments lie between 0 and this (default: 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkout", type=lambda text: Path(text).resolve(), default=ROOT / "build/yolov9")
    parser.add_argument("--data", type=lambda text: Path(text).resolve(), default=ROOT / "build/digits/data.yaml")
    parser.add_argument("--signal", choices=("INT", "TERM"), default="INT")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # behind `&` it is ignored, also by what is started here
    number = signal.Signals[f"SIG{args.signal}"]
    weights, chance = args.checkout / "data/demo/gelan-digits.pt", random.Random(args.seed)
    failed, longest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        commands = programs(weights, args.data, Path(folder))
        for index in range(args.count):
            command = commands[index % len(commands)]
            # A quarter of the moments in the first second, where programs import
            delay = chance.uniform(0, 1.0 if index % 4 == 3 - index // 4 % 4 else args.seconds)
            presses = 5 if index % 3 == 2 else 1
            problems, took = strike(command, args.checkout, delay, number=number, presses=presses)
            hidden = [path for path in Path(folder).rglob(".*") if path.name != ".lock"]
            problems += [f"left behind: {path}" for path in hidden]
            for path in hidden:
                path.unlink()
            failed += bool(problems)
            longest = max(longest, took)
            what = "; ".join(problems) or "ok"
            print(f"{index + 1}: {command[0]} {delay:.2f} s, {presses} presses: {took:.2f} s {what}", flush=True)
    print(f"{args.count - failed} of {args.count} ended as promised; the longest took {longest:.2f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
