"""The canary that other tests rely on sees each way out of a process."""

import pytest
from hostile_canary import watched


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
