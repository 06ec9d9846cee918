"""The options of every program: each of 1.0 is there with its default, or says what to use instead.

`UPDATE_GOLDEN=1` writes tests/golden/options.json anew, which then holds the options of the tree as it is;
a program that is not in it is put in by hand.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from golden import golden

from utils.core.errors import removed

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = json.loads((ROOT / "tests/golden/options.json").read_text())


def options_in(text: str) -> dict[str, str]:
    """Each long flag of a help text, with the first words of its default; '' where it names none."""
    blocks = re.findall(r"^ {2}(-.*(?:\n {4,}.*)*)", text, re.MULTILINE)
    found = {}
    for block in blocks:
        flags, _, about = block.partition("  ")
        default = re.search(r"\(default:?\s+([^;,)]*)", " ".join(about.split()))
        for flag in re.findall(r"--[\w-]+", flags):
            found[flag] = default.group(1).strip() if default else ""
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_options_of_1_0(program, start, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    if program.endswith(".sh"):
        done = subprocess.run(["bash", ROOT / program, "-h"], capture_output=True, text=True, timeout=60)
    else:
        done = start(*program.split(), "-h")
    assert (done.returncode, done.stderr) == (0, "")
    found = options_in(done.stdout)
    known = golden("options.json", program, found)
    name = program.rpartition("/")[2]
    left = {flag: default for flag, default in known.items() if not removed(flag, name)}
    assert set(left) <= set(found)
    assert {flag: found[flag] for flag, default in left.items() if default} == {k: v for k, v in left.items() if v}
    assert not [flag for flag in found if removed(flag, name)]
