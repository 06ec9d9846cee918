"""A program that `fork_server` forks is as one that is started, and `hostile_canary` sees each way out of a process."""

import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer
from hostile_canary import watched

# Modules that the server has imported are there, and nothing else of it is.
ASKED = """
import atexit, os, pickle, signal, sys, threading
print(sys.argv, sys.path[0], __file__, __name__, __spec__, os.getcwd(), sorted(os.environ.items()), sys.stdin.read())
print(threading.active_count(), signal.getsignal(signal.SIGINT), sys.stdout.encoding, sys.stdout.line_buffering)
print('LEFT' in os.environ, 'wave' in sys.modules)
os.environ['LEFT'] = '1'; import wave
class Kept: pass
print(type(pickle.loads(pickle.dumps(Kept()))).__module__)
atexit.register(print, "at the end")
sys.stderr.write("asked\\n")
"""
ENDS = {"": 0, "sys.exit(3)": 3, "sys.exit('said')": 1, "1 / 0": 1, "os.kill(os.getpid(), 9)": -9}


@pytest.fixture(scope="module")
def server():
    with ForkServer(Path(__file__).resolve().parents[2], "import numpy, utils.cli") as found:
        yield found


@pytest.mark.parametrize("end", ENDS)
def test_what_it_knows_of_itself_and_how_it_ends(end, server, tmp_path):
    (tmp_path / "a program.py").write_text(ASKED + end)
    words = ["a program.py", "--words", "with spaces", ""]
    forked = server.run(words, tmp_path)
    started = subprocess.run([sys.executable, *words], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
                             text=True)  # fmt: skip
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.returncode == ENDS[end]
    forked_lines, started_lines = forked.stderr.splitlines(), started.stderr.splitlines()
    assert (forked_lines[0], forked_lines[-1]) == (started_lines[0], started_lines[-1])


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("import os; os.system('true')", "os.system"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "os.posix_spawn"),
        ("import socket; socket.socket().connect_ex(('127.0.0.1', 9))", "socket.connect"),
        ("open('mark', 'w')", "open"),
        ("import os; os.open('mark', os.O_CREAT | os.O_WRONLY)", "open"),
        ("import os; os.kill(os.getpid(), 0)", "os.kill"),
        ("import os; os.abort()", "os.abort"),
    ],
)
def test_each_way_out_is_seen(code, event, tmp_path):
    found = watched(code, tmp_path / "report", cwd=tmp_path)
    assert any(line.startswith(event) for line in found.events), (found.events, found.err)


def test_reading_and_the_allowed_folder_are_silent(tmp_path):
    (tmp_path / "allowed").mkdir()
    code = "open('report.py').read(); open('allowed/a', 'w').close()"
    code += "; import os; os.remove('allowed/a'); open('/dev/null', 'w')"
    found = watched(code, tmp_path / "report", cwd=tmp_path, allowed=[tmp_path / "allowed"])
    assert (found.returncode, found.events, found.err) == (0, [], "")
