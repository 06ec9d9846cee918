"""Files and folders that programs write: nothing is ever half written, and a full disk is called by its name."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.output_paths import folder_name

# What the system says when there is no room, and the words for it.
NO_ROOM = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk's quota is used up",
    errno.EFBIG: "the file is larger than it may be here",
}


@contextlib.contextmanager
def named_when_full(path: str | Path, temporary: str | Path = "") -> Iterator[None]:
    """Let an error of a full disk name `path`: the system names no file for what is written into an open one.

    Args:
        temporary: what stands in for `path` until it is whole; its name says nothing to a user.
    """
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename  # of two, a copy's target
        if error.errno in NO_ROOM and (named is None or (temporary and str(named).startswith(str(temporary)))):
            error.filename, error.filename2 = os.fspath(path), None
        raise


def no_room(error: BaseException) -> str:
    """What there is to say about a disk that is full; '' for any other error."""
    if not isinstance(error, OSError) or error.errno not in NO_ROOM:
        return ""
    file = error.filename2 or error.filename
    return f"{NO_ROOM[error.errno]}{f' while writing {os.fsdecode(file)}' if file else ''}; earlier files are intact"


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it is renamed to `path`, on any error it is removed.

    Raises:
        InputError: nothing can be written there.
    """
    path = Path(path)
    temporary = _writable(path)
    try:
        with named_when_full(path, temporary):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Check, before long work, that a file can be written there; its folder is made.

    Raises:
        InputError: it cannot.
    """
    temporary = _writable(Path(path))
    temporary.unlink(missing_ok=True)


def _writable(path: Path) -> Path:
    """An empty file beside `path`.

    Raises:
        InputError: nothing can be written there.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _temporary(path)
    except OSError as error:
        if error.errno in NO_ROOM:
            error.filename = os.fspath(path)
            raise
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _temporary(path: Path) -> Path:
    """Make an empty file beside `path`, with the permissions that the user's files get."""
    while True:
        temporary = path.absolute().with_name(f".{path.stem}-{os.urandom(4).hex()}.part{path.suffix}")
        with contextlib.suppress(FileExistsError):
            temporary.touch(exist_ok=False)
            return temporary


def save_torch(content: Any, path: str | Path) -> None:
    """`torch.save` to `path`: a reader sees the old file or the whole new one.

    The bytes are made in memory first: torch's writer hides the system's error, such as a full disk, behind a
    RuntimeError about file positions. Equal content gives equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(_with_shared_texts(content), buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def _with_shared_texts(value: Any) -> Any:
    """`value` with one object for each text: pickle writes a second object of the same text in full."""
    if isinstance(value, str):
        return sys.intern(str(value))
    if type(value) is dict:
        return {_with_shared_texts(key): _with_shared_texts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_shared_texts(item) for item in value)
    return value


def copy_file(source: Path, target: Path) -> None:
    """Copy a file so that `target` is the old content or the whole new one."""
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    import hashlib

    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def make_run_dir(project: str | Path, name: str, exist_ok: bool = False) -> Path:
    """Create and return `project/name`, or `project/name2`, `name3`, ... when it exists and `exist_ok` is false.

    Raises:
        InputError: the folder cannot be created, or `name` is not the name of a folder.
    """
    base = Path(project) / folder_name(name)
    try:
        for number in range(1, 10_000):
            folder = base if number == 1 else base.with_name(f"{name}{number}")
            try:
                folder.mkdir(parents=True, exist_ok=exist_ok)
            except FileExistsError:
                if folder.is_dir():
                    continue
                raise
            return folder
    except OSError as error:
        raise InputError(f"cannot create the run folder {base}: {error.strerror}; choose another --project") from error
    raise InputError(f"{base} and 9,998 numbered folders beside it exist; choose another --name")
