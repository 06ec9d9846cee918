"""Options of 1.0 that 2.0 has not: each says what to use instead, and no program has one of them."""

from __future__ import annotations

import argparse

import pytest

from utils.cli import run_program
from utils.core import removed

FLAGS = [name for name in removed.REMOVED if "--" in name and not name.partition("--")[2].count(" ")]


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("program")
    parser.add_argument("--imgsz", "--input", choices=("float", "uint8"))
    return parser


@pytest.mark.parametrize("name", FLAGS)
def test_a_removed_option_says_what_to_use(name: str, parser, capsys) -> None:
    program, _, flag = name.rpartition(" ")
    parser.prog = program or "program"
    with pytest.raises(SystemExit) as ended:
        run_program(parser, lambda _: 0, [flag])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} was removed in 2.0: {removed.REMOVED[name]}")


def test_a_removed_choice_says_what_to_use(parser, capsys, monkeypatch) -> None:
    monkeypatch.setitem(removed.REMOVED, "--input int8", "use --input uint8")
    with pytest.raises(SystemExit) as ended:
        run_program(parser, lambda _: 0, ["--input", "int8"])
    assert ended.value.code == 2
    assert "--input int8 was removed in 2.0: use --input uint8" in capsys.readouterr().err
