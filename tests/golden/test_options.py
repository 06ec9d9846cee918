"""The options of every program: each of 1.0 is there with its default, or says what to use instead.

`UPDATE_GOLDEN=1` writes tests/golden/options.json anew, which then holds the options of the tree as it is.
"""

import re
import subprocess
from pathlib import Path

import pytest
from golden import golden

from utils.core.errors import removed

PROGRAMS = (
    *("qat.py quantize", "qat.py sensitive", "qat.py calibrate", "qat.py eval"),
    *("export_qat.py", "export_yoloV9.py", "reparameterization.py", "val_trt.py"),
    *("scripts/build_engine.py", "scripts/benchmark_trt.py", "scripts/inspect_engine.py", "scripts/make_report.py"),
    *("scripts/make_triton.py", "scripts/triton_client.py", "scripts/to_yolo.py"),
)
SHELL = (
    *("scripts/generate_trt_engine.sh", "scripts/val_trt.sh", "scripts/benchmark_trt.sh"),
    *("scripts/quickstart.sh", "patch_yolov9.sh", "install_dependencies.sh"),
)
ROOT = Path(__file__).resolve().parents[2]


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


def check(program: str, text: str) -> None:
    found = options_in(text)
    known = golden("options.json", program, found)
    name = program.rpartition("/")[2]
    left = {flag: default for flag, default in known.items() if not removed(flag, name)}
    assert set(left) <= set(found)
    assert {flag: found[flag] for flag, default in left.items() if default} == {k: v for k, v in left.items() if v}
    assert not [flag for flag in found if removed(flag, name)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_options_of_1_0(program, start, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    done = start(*program.split(), "-h")
    assert (done.returncode, done.stderr) == (0, "")
    check(program, done.stdout)


@pytest.mark.parametrize("script", SHELL)
def test_a_shell_script_has_the_options_of_1_0(script):
    done = subprocess.run(["bash", str(ROOT / script), "-h"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    check(script, done.stdout)
