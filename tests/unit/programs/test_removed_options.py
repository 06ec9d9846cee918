"""Options of 1.0 that 2.0 has not: each says what to use instead, and no program has one of them."""

from __future__ import annotations

from typing import Literal

import pytest

from utils.cli import run_program
from utils.core.errors import REMOVED
from utils.core.options import Options, option

FLAGS = [name for name in REMOVED if "--" in name and not name.partition("--")[2].count(" ")]


class No(Options):
    """No options."""


class Few(No):
    """Few options."""

    input: Literal["float", "uint8"] = option("float", "of the file")


def run(program: str, *words: str, options: type[Options] = Few) -> None:
    *name, command = program.split()
    work = (options, lambda _: 0)
    run_program(name[0], {command: work}, [command, *words]) if name else run_program(command, work, words)


@pytest.mark.parametrize("name", FLAGS)
def test_a_removed_option_says_what_to_use(name: str, capsys) -> None:
    program, _, flag = name.rpartition(" ")
    with pytest.raises(SystemExit) as ended:
        run(program or "program", flag, options=No)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} was removed in 2.0: {REMOVED[name]}")


def test_a_removed_choice_says_what_to_use(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        run("program", "--input", "int8")
    assert ended.value.code == 2
    assert "--input int8 was removed in 2.0: use --input uint8" in capsys.readouterr().err
