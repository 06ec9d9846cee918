"""Ctrl-C and SIGTERM end a program from its first line on: one line, exit code 130 or 143, within five seconds.

Every program calls `watch(__name__)` before it imports anything else. From then on:

- While the program starts there is nothing to clean up, and a signal ends the process at once. KeyboardInterrupt would
  not do: raised within an import it comes out as some other error, or the library that was imported swallows it.
- While its `job` runs the first signal raises KeyboardInterrupt, so that the job says how it is continued and closes
  what it opened. A second signal, one within an import, or `GRACE` seconds without an end (a library swallowed the
  exception, or is in a long call outside Python) end the process hard: files in `temporaries` are removed, and
  children are ended.

This module stands apart from utils/, whose __init__.py is upstream's, and imports only what the interpreter has loaded
before any program runs: each millisecond before `watch` is one in which Ctrl-C still leads to Python's own traceback.
"""

from __future__ import annotations

import _signal  # what the module signal wraps; signal itself imports a dozen others
import _thread
import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036  # what an older one trips over is imported after this
    sys.stderr.write(f"error: this is Python {sys.version_info[0]}.{sys.version_info[1]}; 3.10 or newer is needed\n")
    sys.exit(2)
if sys.platform == "win32":  # which has neither these signals nor locks on files
    sys.stderr.write("error: this needs Linux, and on Windows the Windows Subsystem for Linux (WSL)\n")
    sys.exit(2)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SIGINT, SIGTERM, SIGHUP = _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP
LINES = {SIGINT: "interrupted", SIGHUP: "the terminal has closed", SIGTERM: "terminated"}
GRACE = 3.0  # seconds from the first signal to the hard end; the rest of the five is for a machine under load
temporaries: set[str] = set()  # files and folders to remove when the process ends hard


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP asked the job to end."""


class _State:
    owner = 0  # the process that watches; 0 in its children, and where no program runs (tests)
    in_job = False
    signal = 0  # the first that came
    poked = False  # the guard has sent the signal again: one that comes when the first is handled is no second press
    held = False
    said = False


def watch(name: str) -> None:
    """Answer Ctrl-C and SIGTERM from here on.

    Programs call it with their `__name__`. It does nothing where that is not '__main__', so that importing a program
    changes nothing. A signal that is ignored (`nohup`, `&`) stays so.
    """
    if name != "__main__":
        return
    _State.owner = os.getpid()
    for number in LINES:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _on_signal)
    os.register_at_fork(after_in_child=_in_child)


def watching() -> bool:
    """Is this the process of a program that called `watch`?"""
    return _State.owner == os.getpid()


def job(work: Callable[[], int]) -> int:
    """Do the work of a program and return what it returns; a signal raises KeyboardInterrupt within it.

    When a signal came the process ends here, whatever the work made of the exception. Where nothing watches, this is
    `work()`.
    """
    if not watching():
        return work()
    _start_guard()
    _State.in_job = True
    try:
        return work()
    except KeyboardInterrupt:
        _State.signal = _State.signal or SIGINT
        raise
    finally:
        _State.in_job = False
        if _State.signal:
            leave()


def leave(code: int = 0) -> None:
    """End the process in order, with what was printed and what libraries registered for the end, but without unwinding.

    After a signal it says so, and the exit code is that signal's.
    """
    import atexit

    if _State.signal:
        _say()
    _flush()
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # torch's handler calls a worker that ends so an error
    for child in _children():  # which multiprocessing would wait for
        _try(os.kill, child, SIGTERM)
    atexit._run_exitfuncs()
    _flush()
    end(code)


def end(code: int) -> None:
    """End the process now, without unwinding; from any thread. After a signal the exit code is that signal's."""
    if watching():
        if _State.signal:
            _say()
            code = 128 + _State.signal
        for child in _children():
            _try(os.kill, child, SIGTERM)
        for path in list(temporaries):
            _remove(path)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed; nobody reads it
            continue


class blocked:
    """A block in which multiprocessing spawns processes that do not hear Ctrl-C, not even while they start."""

    def __enter__(self) -> None:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # which unblocks the signal where the tracker does not run yet
        self._before = _signal.pthread_sigmask(_signal.SIG_BLOCK, (SIGINT,))

    def __exit__(self, *_: object) -> None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._before)


class held:
    """A block of a job that is done to its end first, unless that takes longer than `GRACE`."""

    def __enter__(self) -> None:
        _State.held = True

    def __exit__(self, kind: object, error: object, where: object) -> None:
        _State.held = False
        if _State.signal and kind is None:
            raise _exception(_State.signal)


def pending() -> bool:
    """Whether a signal waits for the end of a block that is `held`."""
    return _State.held and bool(_State.signal)


def _exception(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == SIGINT else Terminated()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not watching():  # a child that was forked this moment
        os._exit(128 + number)
    if _State.poked and _State.signal:
        _State.poked = False
        return
    first = not _State.signal
    _State.signal = _State.signal or number
    if _State.held:
        return
    if not (_State.in_job and first) or _importing(frame):
        end(0)
    # What is torn down now may complain; the one line says enough.
    sys.unraisablehook = _ignore
    if "threading" in sys.modules:
        vars(sys.modules["threading"])["excepthook"] = _ignore
    raise _exception(number)


def _ignore(*_: object) -> None:
    pass


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _start_guard() -> None:
    """Start the thread that ends the process when Python's own handler is not reached, or its exception is lost."""
    receive, send = os.pipe()
    os.set_blocking(send, False)
    _signal.set_wakeup_fd(send, warn_on_full_buffer=False)  # written to at once, also while the main thread is in C
    _thread.start_new_thread(_guard, (receive, _thread.get_ident()))


def _guard(receive: int, main: int) -> None:
    import time

    number = 0
    while number not in LINES:  # other signals have handlers too: torch's loader hears of its workers' ends
        number = os.read(receive, 1)[0]
    # A signal just before the main thread begins to wait (`sleep`, `read`) does not wake it; the next one does.
    for _ in range(round(GRACE / 0.1)):
        time.sleep(0.1)
        if not _State.signal:
            _State.poked = True
            _signal.pthread_kill(main, number)
    _State.signal = _State.signal or number
    end(0)


def _in_child() -> None:
    """After a fork: the parent answers for Ctrl-C, which reaches both, and ends the child with SIGTERM."""
    if not _State.owner:
        return
    _State.owner = 0
    _signal.set_wakeup_fd(-1)
    _signal.signal(SIGINT, _signal.SIG_IGN)
    _signal.signal(SIGTERM, _signal.SIG_DFL)
    _signal.signal(SIGHUP, _signal.SIG_DFL)


def _say() -> None:
    if _State.said:
        return
    _State.said = True
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    start = "\n" if getattr(bars, "_instances", ()) else ""  # behind a progress bar
    _try(os.write, 2, f"{start}{LINES[_State.signal]}\n".encode())


def _children() -> list[int]:
    """Processes that this one has started, where the system lists them (Linux)."""
    found: list[int] = []
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", "rb") as file:  # a codec might have to be imported
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for folder, folders, files in os.walk(path, topdown=False):
            for name in files:
                _try(os.unlink, os.path.join(folder, name))
            for name in folders:
                _try(os.rmdir, os.path.join(folder, name))
        _try(os.rmdir, path)
    else:
        _try(os.unlink, path)


def _try(action: Callable[..., object], *arguments: object) -> None:
    try:
        action(*arguments)
    except OSError:
        pass
