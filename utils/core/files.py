"""Files: read where a regular one is named, written whole or not at all, and never over what is read.

Of several processes (`distributed.py`) all call the functions that write a whole content (`write_bytes`, `write_text`,
`save_torch`); the main one writes, and the others go on when the file is there.

A pipe is refused before it is opened, which would wait for ever.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.core import distributed
from utils.core.errors import UNHIDE, DependencyError, InputError, QatError, no_file

if TYPE_CHECKING:
    from onnx import ModelProto

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXPECTED = {
    "weights": "a .pt file",
    "data": "a dataset's YAML",
    "recipe": "a recipe's YAML",
    "hyp": "a YAML such as data/hyps/hyp.scratch-high.yaml",
    "profile": "a JSON with an engine's layer times",
    "cfg": "a model YAML such as models/detect/gelan-c.yaml",
}
NOT_WEIGHTS = {".onnx": "an ONNX file", ".engine": "a TensorRT engine", ".plan": "a TensorRT engine"}


def check_file(path: str | Path, expected: str, error: type[InputError] = InputError) -> Path:
    """Return `path` if a regular file is there, or raise `error`; `expected` is the second half of its message."""
    if not os.path.isfile(path):
        raise error(no_file(path, expected))
    return Path(path)


def check_files(**files: str | Path | None) -> None:
    """Raise `InputError` for the first option (a key of `EXPECTED`) whose file, if one was given, is not there."""
    for option, path in files.items():
        if not path:
            continue
        if not os.path.isfile(path):
            raise InputError(f"--{option} {no_file(path, f'expected {EXPECTED[option]}')}")
        kind = NOT_WEIGHTS.get(Path(path).suffix.lower())
        if option == "weights" and kind:
            raise InputError(f"--{option} {path} is {kind}; expected the .pt file that it was made from")


def read_text(path: str | Path, expected: str, error: type[InputError] = InputError) -> str:
    """The text of a UTF-8 file; bytes that are not UTF-8 become U+FFFD. Raises as `check_file`."""
    return check_file(path, expected, error).read_text(encoding="utf-8", errors="replace")


def read_unicode(path: Path) -> str:
    """The text of a file in UTF-8 or UTF-16, with or without a byte order mark; other bytes become U+FFFD.

    Without a mark the first character must be in ASCII, as of a label or a path. Raises `OSError`.
    """
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif 0 not in data[:2]:
        encoding = "utf-8-sig"
    elif data[0] == 0:
        encoding = "utf-16-be"
    else:
        encoding = "utf-16-le"
    return data.decode(encoding, "replace")


def read_yaml(path: str | Path, expected: str, error: type[InputError] = InputError) -> Any:
    """The content of a YAML file, plain values only; raises `error` where it is not a regular file, or not YAML."""
    import yaml

    if not hasattr(yaml, "safe_load"):
        raise DependencyError(f"{yaml.__file__} hides the package PyYAML; {UNHIDE}")
    text = read_text(path, expected, error)
    try:
        return yaml.safe_load(text)
    except Exception as problem:  # its constructors raise what they like: month 13, `!!int ""`, `!!bool maybe`
        reason = " ".join(str(problem).split())[:300]
        raise error(f"{path} is not valid YAML: {reason or type(problem).__name__}") from problem


def read_json(path: str | Path, expected: str, error: type[InputError] = InputError) -> Any:
    """The content of a JSON file; raises `error` where it is not a regular file, or not JSON."""
    text = read_text(path, expected, error)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON ({str(problem)[:100]}); {expected}") from problem


def read_onnx(path: str | Path, *, check: bool = False) -> ModelProto:
    """Read an ONNX file; `InputError` for a missing or broken one, `DependencyError` without onnx.

    `check` also runs ONNX's checker, which does not know operators of TensorRT's own.
    """
    try:
        import onnx
    except ImportError as error:
        raise DependencyError("reading ONNX files needs onnx; install it with: pip install onnx") from error
    path = check_file(path, "expected an ONNX file, as export_qat.py writes it")
    try:
        model = onnx.load(path)
        if check:
            onnx.checker.check_model(model)
        if not model.graph.input or not model.graph.node:
            raise ValueError("it holds no model")
    except Exception as error:  # protobuf and the checker raise several unrelated types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is not an ONNX file, or it is truncated: {reason}") from error
    return model


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it is renamed to `path`, on any error it is removed.

    Raises `InputError` where nothing can be written there, `QatError` for a full disk.
    """
    path = Path(path)
    temporary = path.absolute().with_name(f".{path.stem}-{os.urandom(4).hex()}.part{path.suffix}")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # with the permissions that the user's files get
    except OSError as error:
        kind = QatError if error.errno in NO_ROOM else InputError
        raise kind(f"cannot write {path}: {error.strerror}") from error
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.errno in NO_ROOM:  # the system names no file for what is written into an open one
            raise QatError(f"cannot write {path}: {error.strerror}; earlier files are intact") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | Path, advice: str = "") -> None:
    """Raise `InputError`, before long work, if a file cannot be written there, or its missing folders not be made."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(f"cannot write {path}: {folder} is not a writable folder{advice}")


def write_bytes(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file, whole or not at all."""

    def write() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)

    distributed.from_main(write)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all; half a character, which a file name may hold, becomes a question mark."""
    write_bytes(path, text.encode("utf-8", "replace"))


def save_torch(content: Any, path: str | Path) -> None:
    """`torch.save` to `path`, whole or not at all; raises as `atomic_path`."""
    import torch

    def write() -> None:
        buffer = io.BytesIO()  # of a full disk, torch's writer raises a RuntimeError about file positions
        torch.save(content, buffer)
        write_bytes(path, buffer.getbuffer())

    distributed.from_main(write)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def check_folder_name(text: str) -> str:
    """Return `text` if it is the name of one folder, so that PROJECT/NAME lies in PROJECT, or raise `InputError`."""
    has_separator = "/" in text or "\\" in text
    if text in ("", ".", "..") or has_separator or not text.isprintable():
        raise InputError(f"--name {text!r} is not the name of a folder; --project takes the path to it")
    return text


def refuse_overwrite(
    outputs: Iterable[str | Path], inputs: Iterable[str | Path | None], advice: str = "choose another --output"
) -> None:
    """Raise `InputError` if an output is read, not a regular file, the same as another, or cannot be written."""
    sources = [source for source in inputs if source and os.path.exists(source)]
    planned: dict[str, Path] = {}
    for output in map(Path, outputs):
        other = planned.setdefault(os.path.realpath(output).casefold(), output)
        if other is not output:
            raise InputError(f"{output} and {other} would be written to one file; {advice}")
        check_writable(output, f"; {advice}")  # also of a file that is there: it is replaced, by a rename
        if not os.path.exists(output):
            continue
        if not os.path.isfile(output):
            raise InputError(no_file(output, f"a file is to be written there; {advice}"))
        for source in sources:
            if os.path.samefile(output, source):
                raise InputError(f"{output} is read (as {source}) and would be overwritten; {advice}")


def refuse_overwrite_in(
    project: str | Path,
    name: str,
    exist_ok: bool,
    patterns: Iterable[str],
    inputs: Iterable[str | Path | None],
) -> None:
    """`refuse_overwrite` for a program's files in PROJECT/NAME, by globs; without `exist_ok` the folder is new."""
    folder = Path(project) / name
    check_writable(folder / "report.json", "; choose another --project")
    if not exist_ok:
        return
    outputs: dict[Path, None] = {}  # each once, in order
    for pattern in patterns:
        outputs |= dict.fromkeys(folder.glob(pattern))
    refuse_overwrite(outputs, inputs, "choose another --name or --project")


def distinct_names(names: Iterable[str], *, are_files: bool = True) -> list[str]:
    """Names, numbered where one would be taken twice, also where the file system ignores case.

    The number of a file's name stands before its suffix.

    >>> distinct_names(["a.jpg", "A.jpg", "b.jpg"])
    ['a.jpg', 'A-2.jpg', 'b.jpg']
    >>> distinct_names(["PTQ 99.99", "PTQ 99.99"], are_files=False)
    ['PTQ 99.99', 'PTQ 99.99-2']
    """
    distinct: dict[str, str] = {}  # in lower case → as it is
    for name in names:
        stem, suffix = os.path.splitext(name) if are_files else (name, "")
        numbers = itertools.count(2)
        while name.casefold() in distinct:
            name = f"{stem}-{next(numbers)}{suffix}"
        distinct[name.casefold()] = name
    return [*distinct.values()]
