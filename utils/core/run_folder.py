"""A run folder belongs to one program while that lives: a lock in the folder, and what killed programs left is cleared.

    with new_run(project, name, exist_ok) as folder:   # a run that begins
    with held(folder):                                 # a run that continues

The lock is `flock` on the hidden file `.lock`, so that the kernel gives it back when the program ends in whatever way.
The file says whose it is, and goes when the program ends by itself; one that a killed program left is taken over.
Processes that the program forks give the lock up at once, since workers may outlive a program that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import interrupts
from utils.core import distributed
from utils.core.errors import InputError
from utils.core.files import make_run_dir, named_when_full

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
WAIT = "wait for it to end"
# what `files.atomic_path` calls a file until it is whole, of the kinds that a run folder holds
_TEMPORARY = re.compile(
    r"\..+-[a-z0-9_]{8}\.part\.(bmp|csv|engine|html|jpe?g|json|md|mp4|onnx|png|pt|svg|tiff?|txt|webp|ya?ml)"
)
_ATTEMPTS = 100  # to take a folder while others make and remove folders of the same name
_COMMAND_SHOWN = 200  # characters
_descriptors: set[int] = set()


class InUseError(InputError):
    """Another program lives in the run folder; programs exit with 2."""


@contextlib.contextmanager
def new_run(project: str | Path, name: str, exist_ok: bool = False) -> Iterator[Path]:
    """Make the folder of a run, as `files.make_run_dir` does, and hold it; one that stays empty on an error is removed.

    Of several processes the main one does so, and the others get to know the folder.

    Raises:
        InUseError: `exist_ok`, and another program lives in `project/name`.
        InputError: the folder cannot be made, or not be written.
    """
    with contextlib.ExitStack() as stack:
        yield distributed.from_main(lambda: stack.enter_context(_new_run(project, name, exist_ok)))


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder that is there already; of several processes the main one does.

    Raises:
        InUseError: another program lives in it.
        InputError: it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(_held_folder(folder)))
        yield


@contextlib.contextmanager
def _new_run(project: str | Path, name: str, exist_ok: bool = False) -> Iterator[Path]:
    base = Path(project) / name
    for _ in range(_ATTEMPTS):
        existed = exist_ok and base.exists()
        folder = make_run_dir(project, name, exist_ok)
        try:
            descriptor = _lock(folder, f"{WAIT}, or choose another --name")
            break
        except FileNotFoundError:
            continue  # whoever had made it too has removed it
        except InUseError:
            if exist_ok:
                raise
            continue  # somebody with --exist-ok was faster; the next number is free
    else:
        raise InputError(f"cannot hold the run folder {base}: others make and remove it; choose another --name")
    try:
        with _held(folder, descriptor):
            yield folder
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):  # only an empty folder can be removed
                folder.rmdir()
        raise


@contextlib.contextmanager
def _held_folder(folder: Path) -> Iterator[None]:
    try:
        descriptor = _lock(folder, WAIT)
    except FileNotFoundError as error:
        raise InputError(f"{folder} does not exist; expected the folder of a run") from error
    with _held(folder, descriptor):
        yield


def clear_leftovers(folder: Path) -> None:
    """Remove the half-written files of programs that were killed; not in folders that have a lock of their own."""
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not Path(where, name, LOCK_FILE).exists()]
        for path in (Path(where, name) for name in files if _TEMPORARY.fullmatch(name)):
            logger.info("removing %s, left by a run that was killed", path)
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _held(folder: Path, descriptor: int) -> Iterator[None]:
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            _unlock(folder / LOCK_FILE, descriptor)


def _lock(folder: Path, advice: str) -> int:
    """The descriptor of the lock file, locked, in a folder without leftovers.

    Raises:
        FileNotFoundError: the folder is gone.
        InUseError, InputError: as `held`.
    """
    path = folder / LOCK_FILE
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(path, flags, 0o666)  # Python's descriptors are closed where a program is executed
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        _descriptors.add(descriptor)
        try:
            locked = _flock(descriptor, folder)
            if not _is_at(descriptor, path):  # its owner ended just now, and took the file along
                _close(descriptor)
                continue
            if os.fstat(descriptor).st_size and _signature(descriptor) is None:
                raise InputError(f"{path} is no lock of this project's; choose another folder, or remove it")
            interrupts.temporaries.add(str(path.absolute()))  # goes with a program that ends without unwinding
            with named_when_full(path):
                _sign(descriptor)
            if locked:
                clear_leftovers(folder)
            return descriptor
        except BlockingIOError as error:
            text = _owner(descriptor)
            _close(descriptor)
            raise InUseError(f"{folder} is in use by {text}; {advice}") from error
        except BaseException:
            _close(descriptor)
            raise


def _flock(descriptor: int, folder: Path) -> bool:
    """Lock, or warn and return False where the file system knows no locks. Raises BlockingIOError if it is locked."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError from error
        why = getattr(error, "strerror", None) or error
        logger.warning(
            "the file system of %s has no locks (%s): nothing keeps a second run out; give each run its own --name",
            folder,
            why,
        )
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one that lies at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    content = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "since": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(content).encode(), 0)


def _owner(descriptor: int) -> str:
    """Who holds the lock, in words, as far as the file says."""
    signature = _signature(descriptor)
    if signature is None:
        return "another process"
    pid, host, command, since = signature
    where = "" if host == socket.gethostname() else f" on {host}"
    short = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]}..."
    return f"process {pid}{where} ({short}) since {since}"


def _signature(descriptor: int) -> list[str] | None:
    """Process, host, command and time that `_sign` wrote; None where that is not what the file holds."""
    try:
        content = json.loads(os.pread(descriptor, 1 << 16, 0))
        return [str(content[key]) for key in ("pid", "host", "command", "since")]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _unlock(path: Path, descriptor: int) -> None:
    """Remove the file while it is locked, then let go: who waits for it finds that it is gone, and makes a new one."""
    interrupts.temporaries.discard(str(path.absolute()))
    with contextlib.suppress(OSError):
        if _is_at(descriptor, path):
            path.unlink()
    _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _forget() -> None:
    """In a forked process: close what was inherited. The lock stays with the process that took it."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
