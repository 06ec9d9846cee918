"""What a program makes of a command line."""

from __future__ import annotations

import argparse
from typing import TypeVar

from utils.core.options import Options, add_options

Kind = TypeVar("Kind", bound=Options)


def parsed(kind: type[Kind], *words: object) -> Kind:
    """The options of a command line."""
    parser = argparse.ArgumentParser("program")
    add_options(parser, kind)
    return kind.parsed(parser.parse_args([str(word) for word in words]))
