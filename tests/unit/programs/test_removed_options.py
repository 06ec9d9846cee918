"""Options of 1.0 that 2.0 has not: each says what to use instead, and no program has one of them."""

from typing import Literal

import pytest

from utils.cli import run_program
from utils.core.errors import REMOVED
from utils.core.options import Options, option

FLAGS = [name for name in REMOVED if "--" in name and not name.partition("--")[2].count(" ")]


class Few(Options):
    """Few options."""

    form: Literal["float", "uint8"] = option("float", "of the file", "--input")


@pytest.mark.parametrize("name", [*FLAGS, "program --input int8"])
def test_what_is_removed_says_what_to_use(name, capsys):
    before, _, flag = name.partition("--")
    program, *commands = before.split() or ["program"]
    work = (Options if name in FLAGS else Few, lambda _: 0)
    with pytest.raises(SystemExit) as ended:
        run_program(program, {commands[0]: work} if commands else work, [*commands, *f"--{flag}".split()])
    assert ended.value.code == 2
    hint = REMOVED.get(name, "use --input uint8")
    assert capsys.readouterr().err.startswith(f"error: --{flag} was removed in 2.0: {hint}")
