"""A program that `fork_server` forks is as one that is started: what it can ask about itself, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
# What a process can know of how it began. Modules that the server has imported are there, and nothing else of it is.
ASKED = """
import os, sys
sys.stderr.write("asked\\n")
import gc, json, locale, pickle, signal, threading
if "leave" in sys.argv:
    import atexit
    atexit.register(print, "at the end")
facts = {
    "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__, "main": sys.modules["__main__"].__file__,
    "globals": sorted(globals()), "loader": type(__loader__).__name__,
    "cwd": os.getcwd(), "environment": dict(os.environ), "threads": threading.active_count(),
    "streams": [(s.fileno(), s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "read": sys.stdin.read(), "leads": os.getpid() == os.getsid(0), "gc": gc.get_threshold(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "flags": str(sys.flags),
    "locale": locale.getlocale(), "mask": list(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "open": sorted(int(one) for one in os.listdir("/dev/fd"))[:3],
}
class Kept: pass
facts["pickled"] = type(pickle.loads(pickle.dumps(Kept()))).__module__
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def server():
    with ForkServer(ROOT, "import numpy, utils.cli") as found:
        yield found


def written(folder: Path, code: str) -> Path:
    file = folder / "a program.py"
    file.write_text(code)
    return file


def ours_and_theirs(server: ForkServer, words: list[object], cwd: Path):
    """What is forked, and what is started."""
    started = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": dict(os.environ)}
    command = [sys.executable, *map(str, words)]
    return server.run(words, cwd), subprocess.run(command, cwd=cwd, capture_output=True, text=True, **started)


@pytest.mark.parametrize("where", ["its folder", "elsewhere"])
def test_what_it_knows_of_itself(where, server, tmp_path):
    file = written(tmp_path, ASKED)
    words = ["a program.py" if where == "its folder" else file, "--words", "with spaces", ""]
    ours, theirs = ours_and_theirs(server, words, tmp_path if where == "its folder" else ROOT)
    facts, expected = (json.loads(one.stdout) for one in (ours, theirs))
    assert facts == expected
    assert facts["environment"]["PYTEST_CURRENT_TEST"].startswith("tests/unit/test_fork_server.py::test_what_it_knows")
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr) == (0, "asked\n")


def test_one_leaves_nothing_to_the_next(server, tmp_path):
    """Modules, variables, folders, random numbers."""
    code = "import os, random, sys, numpy\nprint(hasattr(numpy, 'left'), 'LEFT' in os.environ, 'wave' in sys.modules)\n"
    code += "print(random.random(), numpy.random.rand())\nnumpy.left = 1; os.environ['LEFT'] = '1'; import wave\n"
    file = written(tmp_path, code + "os.chdir('/')\n")
    first, second = (server.run([file], tmp_path).stdout.splitlines() for _ in range(2))
    assert first[0] == second[0] == "False False False"
    assert not {*first[1].split()} & {*second[1].split()}
