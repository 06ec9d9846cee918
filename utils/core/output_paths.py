"""Where a program may write: not over what it reads, and not outside the folder that was named.

Every program says before any work what it will write and what it reads (`refuse_overwrite`). Two paths are the same
when the file system says so, so that links and file systems that ignore case are seen through.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from utils.core.errors import InputError


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


def run_files(folder: str | Path, *patterns: str) -> Iterator[Path]:
    """The files of a run folder, as far as they exist, that a program writes under these names (globs)."""
    for pattern in patterns:
        yield from Path(folder).glob(pattern)


def refuse_overwrite_in(
    project: str | Path, name: str, exist_ok: bool, patterns: Iterable[str], inputs: Iterable[str | Path | None]
) -> None:
    """`refuse_overwrite` for what a program writes into the run folder PROJECT/NAME, by names (globs).

    Without `exist_ok` the folder is a new one, in which nothing lies that could be read.
    """
    if exist_ok:
        refuse_overwrite(
            dict.fromkeys(run_files(Path(project) / name, *patterns)), inputs, "choose another --name or --project"
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
