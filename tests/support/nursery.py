"""Runs of qat.py to be killed: a process that has imported everything forks one for each, which saves the imports.

As a program: reads a job from each line of standard input, forks, writes the child's process id, waits for it, and
writes how it ended (an exit code, or the signal's number below 0). `Nursery` is the other end.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Nursery:
    """Start runs and kill them."""

    def __init__(self, checkout: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def run(
        self,
        words: list[str],
        log: Path,
        *,
        kill_after: float | None = None,
        kill_at_write: tuple[int, bool] | None = None,
        writes: Path | None = None,
    ) -> int:
        """Run qat.py with `words`; returns its exit code, or -9 if it was killed before its end.

        Args:
            log: gets what it prints.
            kill_after: seconds after which it is killed.
            kill_at_write: the file whose renaming into place it is killed at (from 1), and whether that is done first.
            writes: gets the number of files that were renamed into place.
        """
        assert self._process.stdin is not None
        job = {"words": words, "log": str(log), "kill_at_write": kill_at_write, "writes": writes and str(writes)}
        self._process.stdin.write(json.dumps(job) + "\n")
        child = int(self._answer())
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)  # a zombie until `reap` is read, so that it is this process in any case
        self._process.stdin.write("reap\n")
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _serve() -> None:
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent)]
    import torch._dynamo  # noqa: F401  # by torch's optimizers

    import qat
    from models.quantize import backend
    from utils import upstream_import
    from utils.jobs import calibrate, quantize  # noqa: F401
    from utils.jobs.sensitivity import run  # noqa: F401
    from utils.reports import figures

    upstream_import.ensure()
    backend.create()
    figures.render(figures.new_figure(1.0, 1.0, 1)[0], "png")
    gc.collect()
    gc.freeze()  # collections in the children look at their own objects
    _say("ready")
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_child(job, qat.main))
        _say(child)
        sys.stdin.readline()
        _say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def _child(job: dict[str, Any], main: Any) -> int:
    with Path(job["log"]).open("a") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    count, original, kill_at = 0, Path.replace, job["kill_at_write"]

    def replace(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if kill_at and kill_at == [count, False]:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(self, target)
        if kill_at and kill_at == [count, True]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Path.replace = replace  # type: ignore[assignment, method-assign]
    sys.argv = ["qat.py", *job["words"]]
    code = main(job["words"])
    sys.stdout.flush()
    if job["writes"]:
        Path(job["writes"]).write_text(str(count))
    return int(code)


if __name__ == "__main__":
    _serve()
