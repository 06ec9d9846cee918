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
import random
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))
from interrupting import left_behind, programs, strike  # noqa: E402


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
            problems += left_behind(Path(folder))
            failed += bool(problems)
            longest = max(longest, took)
            what = "; ".join(problems) or "ok"
            print(f"{index + 1}: {command[0]} {delay:.2f} s, {presses} presses: {took:.2f} s {what}", flush=True)
    print(f"{args.count - failed} of {args.count} ended as promised; the longest took {longest:.2f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
