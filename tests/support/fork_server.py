"""Programs that start in milliseconds: a process that has imported what they import forks one for each.

`ForkServer.run` takes the place of `subprocess.run([sys.executable, ...])`, and `interpreter` that of Python in shell
scripts. A small client hands its words, folder, environment and streams over, and ends as the forked program does.
Tests of starting itself, of signals and of hostile files start programs for real.

As a program: `serve SOCKET ROOT WARM` is the process, and `run SOCKET PROGRAM ...` a client.
"""

import gc
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ForkServer:
    """One of them, which ends with this process.

    Args:
        root: where `models` and `utils` are imported from.
        warm: statements that import what programs import.
    """

    def __init__(self, root: Path, warm: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-")
        address = os.path.join(self._folder.name, "socket")
        self.command = [sys.executable, __file__, "run", address]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", address, root, warm], cwd=root, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stderr is not None  # a pipe as well, as programs' are: streams remember if they can seek
        assert self._process.stdout.readline(), self._process.stderr.read().decode()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
        self._folder.cleanup()

    def run(self, words: Sequence[object], cwd: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` gives for a program and its arguments, `words`."""
        return subprocess.run(
            [*self.command, *map(str, words)], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip

    def interpreter(self, file: Path, *words: object) -> Path:
        """Write a program that shell scripts can take as Python; `words` stand before its own."""
        file.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, [*self.command, *words]))} "$@"\n')
        file.chmod(0o755)
        return file


def client(address: str, *words: str) -> int:
    """Let the server run a program on this process's streams; return its exit code, or end by its signal."""
    job = json.dumps({"words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\n"], (0, 1, 2))
        connection.sendall(job)
        code = int(connection.makefile().readline())
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def serve(address: str, root: str, warm: str) -> None:
    """Import, then fork a process for each job; a program may start others."""
    sys.path[0] = root
    before = set(os.environ)
    exec(warm, {})
    added = {name: value for name, value in os.environ.items() if name not in before or name == "LC_CTYPE"}
    gc.collect()
    gc.freeze()  # collections in the children look at their own objects, and copy no pages
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while 0 not in select.select([0, listener], [], [])[0]:
            with listener.accept()[0] as connection:
                if os.fork() == 0:
                    listener.close()
                    handle(connection, added)
            while waiting_for_children() and os.waitpid(-1, os.WNOHANG)[0]:
                pass


def waiting_for_children() -> bool:
    """Tell whether there are children that run or have ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def handle(connection: socket.socket, added: dict[str, str]) -> None:
    """Fork the process of a job, wait for it, hand over its exit code, and end."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    job = json.loads(connection.makefile().readline())
    child = os.fork()
    if not child:
        connection.close()
        become(job, streams, added)
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


def become(job: dict[str, Any], streams: Sequence[int], added: dict[str, str]) -> None:
    """Be the process of a program, and end as it does; `added`: variables that the interpreter and imports have set."""
    import atexit
    import builtins
    import threading
    import warnings

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(added | job["environment"])
    os.chdir(job["cwd"])
    sys.argv = job["words"]
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    vars(warnings)["_filters_mutated"]()  # a warning that came while the server imported comes again
    main = vars(sys.modules["__main__"])  # this very module, in which pickle looks for classes
    main.clear()
    main.update(__name__="__main__", __file__=os.path.abspath(sys.argv[0]), __builtins__=builtins, __spec__=None)
    code: object = 0
    try:
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(client(*sys.argv[2:]))
    import fork_server  # so that nothing stands in `__main__`, which programs take over

    fork_server.serve(*sys.argv[2:])
