"""A run folder belongs to one program at a time, which locks the hidden file `.lock` in it (`flock`).

    with new_run(project, name, exist_ok) as folder:   # a run that begins
    with held(folder, State.load) as state:            # a run that continues

The operating system releases the lock when the program ends, however it ends. Where the file system has no locks, a
warning says so, and the run goes on without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from utils.core import distributed
from utils.core.errors import InputError
from utils.core.files import check_folder_name
from utils.core.logging import log_file, warn_once

logger = logging.getLogger(__name__)

LOCK_FILE, LOG_FILE = ".lock", "run.log"
DEFAULT_NAME = "exp"  # of a run; as users of YOLO know it, later runs are exp2, exp3, ...
HELD = (errno.EAGAIN, errno.EACCES)  # of `flock`: another program has the lock
TEMPORARY = ".*-" + "[a-f0-9]" * 8 + ".part.*"  # as `files.atomic_path` names a file until it is whole

_open_locks: set[int] = set()  # file descriptors


def _close_locks() -> None:
    """Close the locks in a forked process: a worker that outlives a killed program would hold them."""
    while _open_locks:
        os.close(_open_locks.pop())


os.register_at_fork(after_in_child=_close_locks)


@contextlib.contextmanager
def new_run(
    project: str | Path,
    name: str,
    exist_ok: bool = False,
    written: Sequence[str] = (),
    *,
    log: bool = True,
) -> Iterator[Path]:
    """Make the folder of a run, see `make_run_dir`, and lock it; with `log`, write the log to its `run.log`, too.

    An error removes a folder that holds no result yet.

    In the folder of an earlier run, files that match one of `written` (globs) are removed.
    Under torch.distributed the main process does this, and the others receive the path. `InputError` if the folder
    cannot be made or written to, or another program writes to it.
    """

    @contextlib.contextmanager
    def locked_new() -> Iterator[Path]:
        existed = exist_ok and (Path(project) / name).exists()
        folder = make_run_dir(project, name, exist_ok)
        if folder.name != name:
            level = logging.INFO if name == DEFAULT_NAME else logging.WARNING  # the user expects the given name
            logger.log(level, "%s exists: results go to %s", Path(project) / name, folder)
        is_run_folder = (folder / LOCK_FILE).exists()
        with _locked(folder):
            if is_run_folder:
                _remove(folder, written)
            try:
                with log_file(folder / LOG_FILE) if log else contextlib.nullcontext():
                    yield folder
            except BaseException:
                has_results = {path.name for path in folder.iterdir()} - {LOCK_FILE, LOG_FILE}
                if not existed and not has_results:
                    shutil.rmtree(folder)
                raise

    with contextlib.ExitStack() as stack:
        yield distributed.from_main(lambda: stack.enter_context(locked_new()))


@contextlib.contextmanager
def held(folder: Path, load: Callable[[Path], Any] = lambda _: None, *, log: bool = False) -> Iterator[Any]:
    """Lock an existing run folder, and give the content that `load` reads in it; the main process does both.

    With `log` the log is added to the folder's `run.log`.

    `InputError` if it does not exist, cannot be written to, or another program writes to it.
    """
    with contextlib.ExitStack() as stack:
        distributed.from_main(lambda: stack.enter_context(_locked(folder)))
        content = distributed.from_main(lambda: load(folder))
        if log:
            distributed.from_main(lambda: stack.enter_context(log_file(folder / LOG_FILE, append=True)))
        yield content


def _remove(folder: Path, patterns: Sequence[str]) -> None:
    """Remove the files of a folder that match one of several globs."""
    paths: set[Path] = set()
    for pattern in patterns:
        paths.update(folder.glob(pattern))
    for path in paths:
        path.unlink()


def make_run_dir(project: str | Path, name: str, exist_ok: bool = False) -> Path:
    """Make `project/name`; where it exists and `exist_ok` is false, `name2`, ...; of `x2` it is `x2-2`."""
    folder = Path(project) / check_folder_name(name)
    separator = "-" if name[-1].isdigit() else ""
    number = 1
    while folder.is_dir() and not exist_ok:
        number += 1
        folder = folder.with_name(f"{name}{separator}{number}")
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():  # another program was faster
            return make_run_dir(project, name)
        problem = f"cannot create the run folder {folder}: {error.strerror}"
        raise InputError(f"{problem}; choose another --project") from error
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder and remove files in it that a killed program left half written."""
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist; expected the folder of a run")
    file = folder / LOCK_FILE
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error
    _open_locks.add(lock)
    try:
        _lock(lock, folder)
        for path in [*folder.glob(TEMPORARY), *folder.glob(f"weights/{TEMPORARY}")]:
            logger.info("removing %s, which a killed run left", path)
            path.unlink(missing_ok=True)
        yield
    finally:
        if lock in _open_locks:  # not in a forked process
            _open_locks.remove(lock)
            os.close(lock)


def _lock(file: int, folder: Path) -> None:
    """Lock an open file; `InputError` if another program has locked it, a warning if that cannot be known."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            advice = "wait for it to end, or choose another --name"
            raise InputError(f"{folder} is in use by another program; {advice}") from error
        warn_once(
            logger,
            f"the file system of {folder} has no locks ({error.strerror}): nothing keeps a second program from writing "
            "there, so start no other with the same --name",
        )


def stem_of(weights: str | Path, folder: Path) -> str:
    """Return the part of file names that identifies the model: that of the weights.

    Upstream calls every model best.pt or last.pt (and `reparameterization.py` best-converted.pt): these take the name
    of the run.
    """
    stem = Path(weights).stem
    is_nameless = re.match(r"(best|last)(?![a-z0-9])", stem, re.IGNORECASE)
    return folder.name if is_nameless else stem
