"""A process that reports what it does to the world: commands, sockets, files written or removed.

`watched` runs code in a process of its own and returns what it did; what it does before `install` (imports) is not
reported. The hook sees every call, also from C and through names that were imported earlier, and cannot be taken off.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMANDS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "os.kill",
            "subprocess.Popen", "pty.spawn", "signal.pthread_kill", "webbrowser.open", "os.putenv")  # fmt: skip
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
           "socket.gethostbyname", "urllib.Request", "http.client.connect", "ftplib.connect",
           "smtplib.connect")  # fmt: skip
FILES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
         "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile", "tempfile.mkstemp",
         "tempfile.mkdtemp")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Outcome:
    """What a watched process printed and did."""

    returncode: int
    out: str
    err: str
    events: list[str]  # such as "os.system ('touch x',)"


def watched(code: str, report: Path, *, before="", allowed: Sequence[Path] = (), cwd=None, fork=None) -> Outcome:
    """Run `before`, then `code` under the canary.

    Args:
        report: a file that the events are written to.
        allowed: folders in which files may be written.
        fork: a `ForkServer`, which has imported already; None: the process starts for real.
    """
    folders = [str(Path(folder).resolve()) for folder in allowed]
    file = report.with_suffix(".py")
    file.write_text(
        f"import sys\nsys.path[:0] = [{str(cwd or Path.cwd())!r}]\nsys.path.append({str(HERE)!r})\n"
        f"import hostile_canary\n{before}\nhostile_canary.install({str(report)!r}, {folders!r})\n{code}\n"
    )
    if fork is not None:
        result = fork.run([file], cwd, 120)
    else:  # without measuring coverage, whose files are not what is watched for
        own = {name: text for name, text in os.environ.items() if not name.startswith("COVERAGE")}
        result = subprocess.run(
            [sys.executable, file], cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
            env={**own, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert report.exists(), result.stderr  # it was watched
    events = [json.loads(line) for line in report.read_text().splitlines()]
    return Outcome(result.returncode, result.stdout, result.stderr, events)


def program(words: Sequence[str | Path]) -> str:
    """The code that runs one of the programs, for `watched`."""
    texts = [str(word) for word in words]
    return f"import runpy, sys\nsys.argv = {texts!r}\nrunpy.run_path({texts[0]!r}, run_name='__main__')"


def install(report: str, allowed: Sequence[str] = ()) -> None:
    """Write each event of this process into `report` from now on."""
    descriptor = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    folders = (*allowed, "/dev/null", "/dev/tty")

    def is_allowed(path: Any) -> bool:
        if isinstance(path, int):
            return True
        text = os.path.realpath(os.fsdecode(path))
        return any(text == folder or text.startswith(folder + os.sep) for folder in folders)

    def tell(event: str, arguments: Any) -> None:
        os.write(descriptor, (json.dumps(f"{event} {arguments!r:.300}") + "\n").encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(sign in mode for sign in "wax+") if isinstance(mode, str) else (flags or 0) & WRITING
            if writes and not is_allowed(path):
                tell(event, (path, mode))
        elif event in FILES:
            paths = [one for one in arguments if isinstance(one, (str, bytes, os.PathLike))]
            if not paths or not all(is_allowed(one) for one in paths):
                tell(event, arguments)
        elif event in COMMANDS or event in NETWORK:
            tell(event, arguments)

    def aborted() -> None:  # no event tells of it
        tell("os.abort", ())

    os.abort = aborted  # type: ignore[assignment]
    sys.addaudithook(hook)
