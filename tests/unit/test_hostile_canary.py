"""The canary that other tests rely on sees each way out of a process."""

import pytest
from fork_server import ForkServer
from hostile_canary import watched


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    with ForkServer(tmp_path_factory.mktemp("root"), "") as found:
        yield found


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
def test_each_way_out_is_seen(code, event, tmp_path, fork):
    for name, server in (("started", None), ("forked", fork)):
        found = watched(code, tmp_path / name, cwd=tmp_path, fork=server)
        assert any(line.startswith(event) for line in found.events), (found.events, found.err)


def test_reading_and_the_allowed_folder_are_silent(tmp_path):
    (tmp_path / "allowed").mkdir()
    (tmp_path / "text").write_text("x")
    code = (
        "open('text').read(); open('allowed/a', 'w').close(); import os; os.remove('allowed/a'); open('/dev/null', 'w')"
    )
    found = watched(code, tmp_path / "report", cwd=tmp_path, allowed=[tmp_path / "allowed"])
    assert (found.returncode, found.events, found.err) == (0, [], "")
