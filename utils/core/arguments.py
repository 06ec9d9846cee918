"""Checks of the command line itself: texts that are empty or are no folder's name, options that can do nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

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


def given_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, str]:
    """The options on a command line that was parsed: their names in the namespace → their flags, not abbreviated."""
    actions = {flag: action.dest for action in parser._actions for flag in action.option_strings}
    found: dict[str, str] = {}
    for word in words[: words.index("--")] if "--" in words else words:
        typed = word.partition("=")[0]
        meant = [typed] if typed in actions else [flag for flag in actions if len(typed) > 2 and flag.startswith(typed)]
        found |= {actions[flag]: flag for flag in meant[:1]}
    return found


def idle(args: argparse.Namespace, *names: str) -> list[str]:
    """The flags of those options, by their names in `args`, that were given; `run_program` notes which were."""
    return [args.given[name] for name in names if name in args.given]


def refuse_idle(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options, by their names in `args`, that were given and can have no effect.

    Args:
        why: how the sentence '--flag does nothing ...' goes on.

    Raises:
        InputError: one of them was given.
    """
    for flag in idle(args, *names):
        raise InputError(f"{flag} does nothing {why}; leave it out")


def refuse_others(args: argparse.Namespace, kept: Iterable[str], why: str) -> None:
    """`refuse_idle` for all options but those that are kept, and `--debug`."""
    refuse_idle(args, [name for name in args.given if name not in {*kept, "debug"}], why)
