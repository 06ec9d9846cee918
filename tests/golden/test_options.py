"""The options of every program that must stay: each is there with its default.

`UPDATE_GOLDEN=1` writes tests/golden/options.json anew, which then holds the options of the tree as it is;
a program that is not in it is put in by hand.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from golden import golden

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
def test_a_program_has_its_options(program, start, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    if program.endswith(".sh"):
        done = subprocess.run(["bash", ROOT / program, "-h"], capture_output=True, text=True, timeout=60)
    else:
        done = start(*program.split(), "-h")
    assert (done.returncode, done.stderr) == (0, "")
    options = options_in(done.stdout)
    expected = golden("options.json", program, options)
    assert set(expected) <= set(options)
    for flag, default in expected.items():
        assert options[flag] == default or not default, flag
