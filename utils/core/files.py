"""Files and folders that programs write: nothing is ever half written, and a full disk is called by its name."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from utils.core.errors import InputError, QatError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it is renamed to `path`, on any error it is removed.

    Raises:
        InputError: nothing can be written there.
        QatError: the disk is full.
    """
    path = Path(path)
    temporary = _writable(path)
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.errno in NO_ROOM:  # the system names no file for what is written into an open one
            raise QatError(f"cannot write {path}: {error.strerror}; earlier files are intact") from error
        raise
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
        kind = QatError if error.errno in NO_ROOM else InputError
        raise kind(f"cannot write {path}: {error.strerror}") from error


def _temporary(path: Path) -> Path:
    """Make an empty file beside `path`, with the permissions that the user's files get."""
    while True:
        temporary = path.absolute().with_name(f".{path.stem}-{os.urandom(4).hex()}.part{path.suffix}")
        with contextlib.suppress(FileExistsError):
            temporary.touch(exist_ok=False)
            return temporary


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_torch(content: Any, path: str | Path) -> None:
    """`torch.save` to `path`: a reader sees the old file or the whole new one.

    The bytes are made in memory first: torch's writer hides the system's error, such as a full disk, behind a
    RuntimeError about file positions. Equal content gives equal bytes.

    Raises:
        InputError, QatError: the file cannot be written, see `atomic_path`.
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


def refuse_overwrite(
    outputs: Iterable[str | Path], inputs: Iterable[str | Path | None], advice: str = "choose another --output"
) -> None:
    """Raise `InputError` if a file that is to be written is one that is read, or if two outputs are one file.

    Args:
        outputs: files to be written; those that do not exist yet can be no input.
        inputs: files that are read; None for what was not given.
        advice: what to do about it.
    """
    read = {identity: path for path in inputs if path and (identity := _identity(path))}
    planned: dict[str, Path] = {}
    for output in map(Path, outputs):
        other = planned.setdefault(os.path.realpath(output).casefold(), output)
        if other is not output:
            raise InputError(f"{output} and {other} would be written to one file; {advice}")
        _check_kind(output, advice)
        identity = _identity(output)
        if identity in read:
            source = read[identity]
            same = "" if str(source) == str(output) else f"is the same file as {source}, which "
            raise InputError(f"{output} {same}is read and would be overwritten; {advice}")


def refuse_overwrite_in(
    project: str | Path, name: str, exist_ok: bool, patterns: Iterable[str], inputs: Iterable[str | Path | None]
) -> None:
    """`refuse_overwrite` for what a program writes into the run folder PROJECT/NAME, by names (globs).

    Without `exist_ok` the folder is a new one, in which nothing lies that could be read.
    """
    if exist_ok:
        refuse_overwrite(
            dict.fromkeys(path for pattern in patterns for path in (Path(project) / name).glob(pattern)),
            inputs,
            "choose another --name or --project",
        )


def folder_name(text: str) -> str:
    """Return `text` if it is the name of one folder, so that PROJECT/NAME lies in PROJECT.

    Raises:
        InputError: it is empty, a path, or holds characters that cannot be shown.
    """
    separators = {os.sep, "/", "\\"}
    if text in ("", ".", "..") or separators & set(text) or not text.isprintable():
        raise InputError(f"--name {text!r} is not the name of a folder; --project says where it lies")
    return text


def distinct_names(names: Iterable[str]) -> list[str]:
    """The same names, numbered where one would be taken twice, also where the file system ignores case.

    >>> distinct_names(["a.jpg", "A.jpg", "a-2.jpg", "b.jpg"])
    ['a.jpg', 'A-3.jpg', 'a-2.jpg', 'b.jpg']
    """
    names = list(names)
    wished = {name.casefold() for name in names}
    taken: set[str] = set()
    found = []
    for name in names:
        stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
        number, chosen = 1, name
        while chosen.casefold() in taken or (number > 1 and chosen.casefold() in wished):
            number += 1
            chosen = f"{stem}-{number}{dot}{suffix}"
        taken.add(chosen.casefold())
        found.append(chosen)
    return found


def _identity(path: str | Path) -> tuple[int, int] | None:
    """What the file system knows a file by; None where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _check_kind(output: Path, advice: str) -> None:
    """A file replaces what lies at `output`, so that must be a file (or nothing)."""
    try:
        mode = os.stat(output).st_mode
    except (OSError, ValueError):
        return  # writing it will say what is wrong
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise InputError(f"{output} is {what}, and a file is to be written there; {advice}")
