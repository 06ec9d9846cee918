"""A program that `fork_server` forks is as one that is started: what it can ask about itself, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
# Modules that the server has imported are there, and nothing else of it is.
ASKED = """
import atexit, os, pickle, signal, sys, threading
print(sys.argv, sys.path[0], __file__, __name__, os.getcwd(), sorted(os.environ.items()), sys.stdin.read())
print(__spec__, __package__, __doc__)
print(threading.active_count(), signal.getsignal(signal.SIGINT), sys.stdout.encoding, sys.stdout.line_buffering)
class Kept: pass
print(type(pickle.loads(pickle.dumps(Kept()))).__module__)
atexit.register(print, "at the end")
sys.stderr.write("asked\\n")
"""
ENDS = {"": 0, "sys.exit(3)": 3, "sys.exit('said')": 1, "1 / 0": 1, "os.kill(os.getpid(), 9)": -9}


@pytest.fixture(scope="module")
def server():
    with ForkServer(ROOT, "import numpy, utils.cli") as found:
        yield found


@pytest.mark.parametrize("end", ENDS)
def test_what_it_knows_of_itself_and_how_it_ends(end, server, tmp_path):
    (tmp_path / "a program.py").write_text(ASKED + end)
    words = ["a program.py", "--words", "with spaces", ""]
    ours = server.run(words, tmp_path)
    theirs = subprocess.run([sys.executable, *words], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
                            text=True)  # fmt: skip
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.returncode == ENDS[end]
    assert (ours.stderr.splitlines()[0], ours.stderr.splitlines()[-1]) == (
        theirs.stderr.splitlines()[0], theirs.stderr.splitlines()[-1],
    )  # fmt: skip


def test_one_leaves_nothing_to_the_next(server, tmp_path):
    """Modules, variables, folders, random numbers."""
    code = "import os, random, sys, numpy\nprint(hasattr(numpy, 'left'), 'LEFT' in os.environ, 'wave' in sys.modules)\n"
    code += "print(random.random(), numpy.random.rand())\nnumpy.left = 1; os.environ['LEFT'] = '1'; import wave\n"
    (tmp_path / "a.py").write_text(code + "os.chdir('/')\n")
    first, second = (server.run([tmp_path / "a.py"], tmp_path).stdout.splitlines() for _ in range(2))
    assert first[0] == second[0] == "False False False"
    assert not {*first[1].split()} & {*second[1].split()}
