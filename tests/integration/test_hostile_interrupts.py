"""Ctrl-C and SIGTERM at moments between a program's first line and its work; tests/stress has more of them."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from interrupting import left_behind, programs, strike

CHANCE = random.Random(14)
# The first moments are those in which upstream and torch are imported.
MOMENTS = [
    0.0,
    0.1,
    *(round(CHANCE.uniform(0.2, 2), 2) for _ in range(4)),
    *(round(CHANCE.uniform(2, 6), 2) for _ in range(2)),
]


@pytest.mark.parametrize(("index", "delay"), list(enumerate(MOMENTS)))
def test_a_signal_ends_a_program_at_once_and_in_one_line(index, delay, checkout, demo_data, demo_weights, tmp_path):
    commands = programs(demo_weights, demo_data, tmp_path)
    number = signal.SIGTERM if index % 4 == 1 else signal.SIGINT
    presses = 5 if index % 3 == 2 else 1
    problems, _ = strike(commands[index % len(commands)], checkout, delay, number=number, presses=presses)
    problems += left_behind(tmp_path)
    assert not problems, "\n".join(problems)
