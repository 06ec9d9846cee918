"""Checks of the command line itself: texts that are empty or are no folder's name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from utils.core.errors import InputError
from utils.core.output_paths import folder_name

MAY_BE_EMPTY = ("--device", "--title", "--note", "--resume")


def refuse_empty(refuse: Callable[[str], object], words: Sequence[str]) -> None:
    """Call `refuse` with a message if an argument is empty: as a path it would mean the working folder."""
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        if word and not (flag.startswith("--") and equals and not value):
            continue
        name = flag if word else before if before.startswith("-") else ""
        if name not in MAY_BE_EMPTY:
            refuse(f"argument {name}: it is empty; give a value, or leave it out" if name else "an argument is empty")


def folder_name_argument(text: str) -> str:
    """`output_paths.folder_name` as the type of an argument."""
    try:
        return folder_name(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--name ")) from error
