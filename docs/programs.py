"""The programs of this repository, and what they declare: recorded by starting each with its work left out."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]

from utils import cli
from utils.core.options import Options


class Program(NamedTuple):
    """A Python program: what it hands to `utils.cli.run_program`."""

    name: str
    commands: cli.Command | Mapping[str, cli.Command]
    about: str

    def options(self) -> dict[str, type[Options]]:
        """Return the options class of each command; the command of a program without commands is ''."""
        if isinstance(self.commands, Mapping):
            return {word: kind for word, (kind, _) in self.commands.items()}
        return {"": self.commands[0]}


def named(*patterns: str) -> list[str]:
    """Return the repository's files by their paths."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def is_program(path: str) -> bool:
    """Tell whether a Python file starts by `run_program` or `run_benchmark`."""
    text = (ROOT / path).read_text(encoding="utf-8")
    starts = re.search("^if __name__ == .__main__.:", text, re.MULTILINE)
    return starts is not None and re.search(r"\brun_(program|benchmark)\b", text) is not None


PYTHON_FILES = [path for pattern in ("*.py", "scripts/*.py", "data/demo/*.py", "benchmarks/*.py", "docs/*.py")
                for path in named(pattern)]  # fmt: skip
PYTHON_PROGRAMS = [path for path in PYTHON_FILES if is_program(path)]
SHELL_PROGRAMS = [path for path in named("*.sh", "scripts/*.sh", "data/demo/*.sh") if path != "scripts/lib.sh"]


@functools.cache
def recorded(path: str) -> Program:
    """Run a program up to `run_program`, and return what it was called with."""
    programs: list[Program] = []

    def record(name: str, commands: cli.Command, argv: object = None, *, about: str = "", **_: object) -> int:
        programs.append(Program(name, commands, about))
        return 0

    beside = [str((ROOT / path).parent), *sys.path]  # a program finds what lies beside it
    with (
        mock.patch.object(cli, "run_program", record),
        mock.patch.object(sys, "path", beside),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(ROOT / path), run_name="__main__")
    return programs[0]


@functools.cache
def shell_help(path: str) -> str:
    """Return what a shell script answers to `-h`."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(ROOT / path), "-h"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60).stdout
