"""Typed errors. Each message is one line for the user: what was found, what was expected, what to do."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def no_file(path: str | Path, expected: str) -> str:
    """The message for a path at which there is no regular file, and what was expected there."""
    return f"{path} {_what_is_there(path)}; {expected}"


def _what_is_there(path: str | Path) -> str:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is a link to a file that does not exist" if os.path.islink(path) else "does not exist"
    except OSError as error:  # a link to itself, a name that is too long, a folder that is closed to us
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "is no name of a file"
    if stat.S_ISDIR(mode):
        return "is a folder"
    return "cannot be read" if stat.S_ISREG(mode) else "is not a regular file"


class QatError(Exception):
    """Something went wrong that is not the fault of the input; programs exit with 1."""

    exit_code = 1


class InputError(QatError):
    """A file, an option or a value given by the user cannot be used; programs exit with 2."""

    exit_code = 2


class CheckpointError(InputError):
    """A weights file is missing, truncated, of the wrong kind, or names classes that are not upstream's."""


class RecipeError(InputError):
    """A recipe has an unknown key, a value outside its range, or a pattern that matches nothing."""


class DataError(InputError):
    """A dataset's YAML, images, labels or annotations cannot be used, or do not fit the model."""


class DependencyError(InputError):
    """A library that this command needs is not installed; the message says how to install it."""
