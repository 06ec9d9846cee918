"""What programs print: to an end that closes, to a full disk, in a locale that lacks the characters; and how files are
opened.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
START = """
import interrupts
interrupts.watch(__name__)
import argparse, logging, os, sys
from utils.cli import run_program
parser = argparse.ArgumentParser("program", description="an arrow → here")
"""
FOREVER = {
    "print": "while True: print('→ line')",
    "print and flush": "while True: print('line', flush=True)",
    "log": "while True: logging.getLogger('utils.x').info('line')",
    "the last flush": "print('line ' * 100); closed()",
    "a bar": "from tqdm import tqdm\n    for _ in tqdm(iter(int, 1), mininterval=0): pass",
    "a warning": "import warnings\n    while True: warnings.warn_explicit('line', UserWarning, 'file', 1, registry={})",
}
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def program(folder: Path, job: str) -> Path:
    file = folder / "program.py"
    closed = "def closed():\n    import select\n    select.poll().poll(0) or __import__('time').sleep(0.5)\n"
    text = f"{START}{closed}def main(args):\n    {job}\nsys.exit(run_program(parser, main))\n"
    file.write_text(text, encoding="utf-8")
    return file


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    return kept | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"} | variables


def run_and_close(command: list[object], both: bool, lines: int, **variables: str) -> tuple[int, str]:
    """Run a program whose output is closed after some lines; exit code, and what it said on standard error."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT if both else subprocess.PIPE,
        cwd=ROOT, env=environment(**variables),
    )  # fmt: skip
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    said = b"" if both else process.stderr.read()
    return process.wait(timeout=60), said.decode()


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("way", FOREVER)
def test_a_closed_output_ends_a_program_quietly(way, unbuffered, tmp_path):
    to_stderr = way in ("a bar", "a warning")
    options = ["-u"] if unbuffered else []
    lines = 0 if to_stderr or way == "the last flush" else 1
    command = [*options, program(tmp_path, FOREVER[way])]
    code, said = run_and_close(command, both=to_stderr, lines=lines)
    assert (code, said) == (141, "")


PROGRAMS = ["qat.py quantize", "export_qat.py", "val_trt.py", "scripts/build_engine.py",
            "scripts/run_upstream.py", "data/demo/make_digits.py"]  # fmt: skip


@pytest.mark.parametrize("words", PROGRAMS)
def test_help_into_a_closed_output(words):
    assert run_and_close([*words.split(), "-h"], both=False, lines=0) == (141, "")


def test_a_closed_output_leaves_no_temporary_file(tmp_path):
    job = """
    from utils.core.files import atomic_path
    with atomic_path("result") as temporary:
        while True: print("line")
    """
    file = program(tmp_path, textwrap.dedent(job).strip().replace("\n", "\n    "))
    shell = f"cd '{tmp_path}' && '{sys.executable}' '{file}' | head -1"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, env=environment(), check=True, timeout=60)
    assert (result.stdout, result.stderr) == (b"line\n", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_a_full_disk_behind_the_output_is_one_line(tmp_path):
    with open("/dev/full", "w", encoding="utf-8") as full:
        result = subprocess.run([sys.executable, program(tmp_path, "print('line')")], stdout=full,
                                stderr=subprocess.PIPE, env=environment(), check=False, timeout=60)  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == b"error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_program_whose_output_was_never_open_does_its_work(closed, tmp_path):
    job = "print('→'); print('x', file=sys.stderr); os.write(1, b'c'); open(os.path.join(sys.path[0], 'done'), 'w')"
    file = program(tmp_path, job)
    result = subprocess.run(["bash", "-c", f"'{sys.executable}' '{file}' {closed}"], env=environment(), check=False,
                            capture_output=True, timeout=60)  # fmt: skip
    assert result.returncode == 0, result
    assert (tmp_path / "done").read_bytes() == b""


@pytest.mark.parametrize("variables", [PLAIN, {"LC_ALL": "C.UTF-8"}, {"PYTHONIOENCODING": "ascii:strict"}], ids=str)
def test_characters_that_the_locale_lacks_are_escapes(variables, tmp_path):
    job = "print('a → b', chr(0xdcff)); logging.getLogger('utils.x').info('→'); raise ValueError('→')"
    result = subprocess.run([sys.executable, program(tmp_path, job)], capture_output=True, check=False, timeout=60,
                            env=environment(**variables))  # fmt: skip
    assert result.returncode == 1
    arrow = "→".encode() if variables == {"LC_ALL": "C.UTF-8"} else b"\\u2192"
    assert result.stdout == b"a " + arrow + b" b \\udcff\n" + arrow + b"\n"
    assert result.stderr == b"error: ValueError: " + arrow + b" (--debug shows the traceback)\n"


def test_help_in_a_locale_without_the_characters(tmp_path):
    result = subprocess.run([sys.executable, program(tmp_path, "pass"), "-h"], capture_output=True, check=False,
                            env=environment(**PLAIN), timeout=60)  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"an arrow \\u2192 here" in result.stdout


def test_a_file_name_that_the_locale_lacks_is_one_line(tmp_path):
    job = f"open({str(tmp_path)!r} + '/ü', 'wb')"
    result = subprocess.run([sys.executable, program(tmp_path, job)], capture_output=True, check=False, timeout=60,
                            env=environment(**PLAIN))  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: ")
    assert result.stderr.count(b"\n") == 1
    assert b"set PYTHONUTF8=1" in result.stderr


def test_the_streams_of_tests_stay():
    from utils.core import console

    before = sys.stdout, sys.stderr
    console.guard()
    assert (sys.stdout, sys.stderr) == before


SOURCES = [path for pattern in ("*.py", "models/**/*.py", "utils/**/*.py", "scripts/*.py", "data/**/*.py")
           for path in ROOT.glob(pattern)]  # fmt: skip


def without_encoding(source: str) -> list[str]:
    """Calls that read or write text in the locale's encoding."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        function = ast.unparse(node.func)
        name = function.rpartition(".")[2]
        words = {k.arg: ast.unparse(k.value) for k in node.keywords}
        texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        mode = words.get("mode", "".join(texts[-1:]) if name == "open" else "")
        if (name == "read_text" and isinstance(node.func, ast.Attribute)) or (
            name == "write_text" and len(node.args) < 2
        ):
            found.append(ast.unparse(node))
        elif name in ("open", "fdopen", "NamedTemporaryFile") and function not in ("os.open", "Image.open"):
            found += [ast.unparse(node)] if "b" not in mode else []
        elif name in ("run", "Popen", "check_output") and {"text", "universal_newlines"} & words.keys():
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_text_is_always_utf_8(path):
    assert without_encoding(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("call", ["p.read_text()", "p.write_text(t)", "open(p)", "p.open('w')", "open(p, mode='a')",
                                  "subprocess.run(c, text=True)"])  # fmt: skip
def test_the_walk_sees_a_call_without_encoding(call):
    assert without_encoding(call) == [call]
