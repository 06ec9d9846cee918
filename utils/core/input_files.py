"""Reading the files that a user names: regular ones only.

A pipe or a device is refused before it is opened: opening a pipe that nobody writes to waits for ever, and /dev/zero
has no end. What is wrong inside a YAML or a JSON file is said in one line, whatever the parser raised.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from utils.core.errors import InputError, no_file

EXPECTED = {
    "weights": "a .pt file",
    "teacher": "a .pt file",
    "data": "a dataset's YAML",
    "recipe": "a recipe's YAML",
    "hyp": "a YAML such as data/hyps/hyp.scratch-high.yaml",
    "profile": "a JSON with an engine's layer times",
    "cfg": "a model YAML such as models/detect/gelan-c.yaml",
}


def is_regular(path: str | Path) -> bool:
    """Whether there is a regular file that can be looked at; anything that goes wrong means no."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False


def check_file(path: str | Path, expected: str, error: type[InputError] = InputError) -> Path:
    """Return `path` if a regular file is there.

    Args:
        expected: the second half of the message, such as "expected an ONNX file".
        error: what is raised otherwise, with what is there instead.
    """
    if not is_regular(path):
        raise error(no_file(path, expected))
    return Path(path)


def check_text(path: str | Path) -> None:
    """Raise `InputError` if a path is not text: ONNX Runtime and ONNX take none that holds other bytes."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"the name {os.fspath(path)!r} is not UTF-8, which ONNX files need; rename it") from None


def check_files(**files: str | Path | None) -> None:
    """Raise `InputError` for the first option's file that is no regular file; None and '' are options not given.

    Args:
        files: option, as `EXPECTED` names it, → the file that the user gave.
    """
    for option, path in files.items():
        if path and not is_regular(path):
            raise InputError(f"--{option} {no_file(path, f'expected {EXPECTED[option]}')}")


def read_text(path: str | Path, expected: str, error: type[InputError] = InputError, *, errors: str = "ignore") -> str:
    """The text of a UTF-8 file.

    Args:
        errors: what is done with bytes that are no UTF-8, as `open` takes it.

    Raises:
        InputError: of the kind `error`: no regular file, or it cannot be read.
    """
    path = check_file(path, expected, error)
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror}; {expected}") from problem


def read_yaml(path: str | Path, expected: str, error: type[InputError] = InputError) -> Any:
    """The content of a YAML file, plain values only; a key that stands twice is refused, where PyYAML takes the last.

    Raises:
        InputError: of the kind `error`: it cannot be read, or is no valid YAML.
    """
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if (key.tag, str(key.value)) in seen:
                    where = f"line {key.start_mark.line + 1}"
                    raise yaml.YAMLError(f"{where}: the key {str(key.value)[:80]} stands twice; leave one out")
                seen.add((key.tag, str(key.value)))
            return dict(super().construct_mapping(node, deep))

    text = read_text(path, expected, error)
    try:
        return yaml.load(text, UniqueKeys)
    except RecursionError:
        raise error(f"{path} is not valid YAML for us: it is nested too deeply") from None
    except yaml.YAMLError as problem:
        raise error(f"{path} is not valid YAML: {' '.join(str(problem).split())}") from problem
    except Exception as problem:  # its constructors raise what they like: month 13, `!!int ""`, `!!bool maybe`
        raise error(f"{path} is not valid YAML: it holds a value that cannot be read ({_short(problem)})") from problem


def read_json(path: str | Path, expected: str, error: type[InputError] = InputError) -> Any:
    """The content of a JSON file.

    Raises:
        InputError: of the kind `error`: it cannot be read, or is no JSON.
    """
    text = read_text(path, expected, error, errors="replace")
    try:
        return json.loads(text)
    except RecursionError:
        raise error(f"{path} is nested too deeply; {expected}") from None
    except ValueError as problem:
        raise error(f"{path} is not valid JSON ({_short(problem)}); {expected}") from problem


def _short(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:100]}"
