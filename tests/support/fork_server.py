"""Programs that start in milliseconds: a process that has imported what they import forks one for each.

`program` takes the place of `subprocess.run([sys.executable, ...])`. What a start has of its own, a forked program has
as well: working directory, arguments, environment, `sys.path[0]`, `__main__`, streams, session, exit code, and coverage
where it is measured. An environment that differs in what a process reads while it starts gets a real start. Tests of
starting itself, of signals and of hostile files start programs for real.

As a program: `serve SOCKET ROOT WARM` is such a process (until its standard input ends), and `run SOCKET PROGRAM ...`
stands in the place of an interpreter in shell scripts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

LENGTH = 8  # bytes of a message's length, which its file descriptors come with
# A process that is started reads other variables while it imports, and one that is forked has done so before.
READ_LATER = {"PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "PYTHON", "BATCH", "EXPORT_ARGS", "VAL_ARGS",
              "STAND_IN_VERSION", "COLUMNS", "LINES"}  # fmt: skip


# The side of the tests. What a shell script starts imports no more than is imported above.


class ForkServer:
    """One of them, which ends with this process.

    Args:
        root: where `models` and `utils` are imported from.
        warm: statements that import what programs import.
    """

    def __init__(self, root: Path, warm: str) -> None:
        import subprocess
        import tempfile

        self._folder = tempfile.TemporaryDirectory(prefix="fork-")
        self.socket = os.path.join(self._folder.name, "socket")
        environment = {name: value for name, value in os.environ.items() if not _of_coverage(name)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", self.socket, root, warm], cwd=root, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stderr is not None  # a pipe as well, as programs' are: streams remember if they can seek
        assert self._process.stdout.readline(), self._process.stderr.read().decode()
        self.forked = 0  # programs, so far

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()

    def run(self, words: Sequence[object], cwd: Path, *, timeout: float | None = None,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """What `subprocess.run` gives for a program and its arguments, `words`; forked where that is the same."""
        import io
        import signal
        import subprocess
        import tempfile

        texts, environment = [str(word) for word in words], dict(os.environ if env is None else env)
        with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            streams = [file.fileno() for file in (nothing, out, err)]
            connection, pid = ask(self.socket, texts, cwd, environment, streams)
            with connection:
                if not pid:
                    command = [sys.executable, *texts]
                    return subprocess.run(
                        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
                    )
                self.forked += 1
                connection.settimeout(timeout)
                try:
                    code = int(_line(connection))
                except BaseException as error:  # also where pytest ends a test that takes too long
                    os.killpg(pid, signal.SIGKILL)
                    if isinstance(error, TimeoutError):
                        raise subprocess.TimeoutExpired(texts, timeout or 0) from error
                    raise
            for file in (out, err):
                file.seek(0)
            said = [io.TextIOWrapper(file).read() for file in (out, err)]
        return subprocess.CompletedProcess(texts, code, *said)


def interpreter(server: ForkServer, file: Path, *words: object) -> Path:
    """Write a program that shell scripts can take as Python, and return its path; `words` stand before its own."""
    import shlex

    command = [sys.executable, "-I", "-S", __file__, "run", server.socket, *words]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
    file.chmod(0o755)
    return file


def ask(address: str, words: Sequence[str], cwd: object, environment: Mapping[str, str],
        streams: Sequence[int]) -> tuple[socket.socket, int]:  # fmt: skip
    """Let the server run a program; the connection on which its exit code comes, and its process id.

    That is 0, and no program runs, where the environment asks for a real start.
    """
    job = json.dumps({"words": words, "cwd": str(cwd), "environment": dict(environment)}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(job).to_bytes(LENGTH, "big")], streams)
    connection.sendall(job)
    return connection, int(_line(connection))


def _settled(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a process reads while it starts. Each process that imports OpenCV adds its folder to LD_LIBRARY_PATH."""
    found: dict[str, Any] = {k: v for k, v in environment.items() if k not in READ_LATER and not _of_coverage(k)}
    return {**found, "LD_LIBRARY_PATH": {*found.get("LD_LIBRARY_PATH", "").split(os.pathsep)} - {""}}


def _of_coverage(name: str) -> bool:
    return name.startswith("COVERAGE")


def _line(connection: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            raise RuntimeError("the fork server has ended")
        found += piece
    return found.decode()


# The side of the server


def serve(address: str, root: str, warm: str) -> None:
    """Import, then fork a process for each job, one after the other."""
    import gc
    import select

    started_with = sys.path[1:]
    sys.path[0] = root
    gc.disable()
    before = dict(os.environ)
    exec(warm, {})
    added = {name: value for name, value in os.environ.items() if name not in before or name == "LC_CTYPE"}
    gc.collect()
    gc.freeze()  # collections in the children look at their own objects, and copy no pages
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            if 0 in select.select([0, listener], [], [])[0]:
                return
            connection, _ = listener.accept()
            with connection:
                size, streams, _, _ = socket.recv_fds(connection, LENGTH, 3)
                job = json.loads(_exactly(connection, int.from_bytes(size, "big")))
                same = _settled(added | job["environment"]) == _settled(os.environ)
                child = os.fork() if same else 0
                if same and not child:
                    listener.close()
                    connection.close()
                    _become(job, streams, started_with, added)
                for stream in streams:
                    os.close(stream)
                _answer(connection, child)
                if child:
                    _answer(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.sendall(f"{number}\n".encode())


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found))
    return found


def _become(job: dict[str, Any], streams: Sequence[int], path: list[str], added: dict[str, str]) -> None:
    """Be the process of a program, and end as it does.

    Args:
        path: what the interpreter has put into `sys.path` behind the program's folder.
        added: variables that the interpreter (LC_CTYPE) and imports have set.
    """
    import builtins
    import random
    import warnings
    from importlib.machinery import SourceFileLoader

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(added | job["environment"])
    os.chdir(job["cwd"])
    sys.argv = job["words"]
    file = os.path.realpath(sys.argv[0])
    sys.path[:] = [os.path.dirname(file), *path]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    vars(warnings)["_filters_mutated"]()  # a warning that came while the server imported comes again
    if any(name.startswith("COVERAGE_PROCESS") for name in os.environ):  # others only say where results go
        import coverage

        coverage.process_startup(force=True)
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __file__=os.path.abspath(sys.argv[0]), __builtins__=builtins, __doc__=None,
                __spec__=None, __package__=None, __cached__=None, __annotations__={},
                __loader__=SourceFileLoader("__main__", sys.argv[0]))  # fmt: skip
    try:
        with open(sys.argv[0], "rb") as source:
            code = compile(source.read(), sys.argv[0], "exec")
        exec(code, main)
        _end(0)
    except SystemExit as end:
        if not (end.code is None or isinstance(end.code, int)):
            sys.stderr.write(f"{end.code}\n")
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        _end(1)


def _end(code: int) -> None:
    import atexit
    import threading

    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# In the place of an interpreter


def stand_in(address: str, *words: str) -> int:
    """Run a program on this process's streams; returns its exit code, or ends by the signal that ended it."""
    connection, pid = ask(address, words, os.getcwd(), os.environ, (0, 1, 2))
    if not pid:
        os.execv(sys.executable, [sys.executable, *words])
    code = int(_line(connection))
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(stand_in(*sys.argv[2:]))
    import fork_server  # so that nothing stands in `__main__`, which programs take over

    fork_server.serve(*sys.argv[2:])
