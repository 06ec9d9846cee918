"""The frame of every program: options, logging, and every error as one line and an exit code.

    sys.exit(run_program("val_trt.py", ValOptions, evaluate))
    sys.exit(run_program("qat.py", {"quantize": (QuantizeOptions, quantize), ...}))

Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted (Ctrl-C), 143 terminated, 141 the output was
closed (`| head`). `--debug` shows the traceback of an error. Nothing here imports torch, so that `-h` answers at once.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10) or sys.platform == "win32":  # what follows would be a traceback there
    sys.stderr.write("error: this needs Python 3.10 or newer on Linux, or on the Windows Subsystem for Linux (WSL)\n")
    sys.exit(2)

import argparse
import contextlib
import difflib
import errno
import gc
import logging
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

try:
    import pydantic  # noqa: F401
except ImportError:
    advice = "activate the environment (. .venv/bin/activate), or make it with install_dependencies.sh"
    sys.stderr.write(f"error: {sys.executable} has no pydantic; {advice}\n")
    sys.exit(2)

from utils.core import distributed
from utils.core.errors import QatError, removed
from utils.core.options import Options, add_options, refuse_empty
from utils.core.text import printable

_words: list[str] = []  # of the command line that was parsed last
Command = tuple[type[Options], Callable[[Any], "int | None"]]  # options, and what is done with them


class Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that closed."""


def run_program(
    name: str,
    commands: Command | Mapping[str, Command],
    argv: Sequence[str] | None = None,
    *,
    about: str = "",
    together: bool = False,
) -> int:
    """Parse the command line, do the work, and turn every error into one line and an exit code.

    Args:
        name: of the program, such as `qat.py`.
        commands: one, or several by their names as subcommands.
        argv: without the program's name; None: that of the process.
        about: the description in `-h`; that of a command is the first line of its options' docstring.
        together: several processes, as torchrun starts them, may work on one job. Others than the main one only say
            what is wrong, and who they are.
    """
    parser, leaves = parsers(name, commands, about)
    words = sys.argv[1:] if argv is None else list(argv)
    kind, leaf, arguments = _parse(parser, leaves, words)
    _words[:] = words
    world = _launched(parser, together)
    who, debug = f"rank {world.rank}: " if world.rank else "", arguments.debug
    setup_logging(debug, world.rank)
    gc.set_threshold(50_000, 5, 5)  # Python looks for cycles after 700 new objects; importing torch makes a million
    answered = _answer_signals()
    try:
        code = leaf(kind.parsed(arguments)) or 0
        sys.stdout.flush()
        return code
    except Terminated:
        print("terminated", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 141
    except Exception as error:
        if debug:
            raise
        print(f"{who}error: {printable(_one_line(error))}", file=sys.stderr)
        return error.exit_code if isinstance(error, QatError) else 2 if _is_a_paths(error) else 1
    finally:
        for number in answered:
            signal.signal(number, signal.SIG_DFL)  # an exception while the interpreter ends would be a traceback


def setup_logging(verbose: bool = False, rank: int = 0) -> None:
    """Send the library's log to standard output as plain lines, the way upstream's programs look.

    Of several processes, others than the main one say their number, and nothing below a warning.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text; a locale may lack →
    handler = _Handler(sys.stdout)
    handler.setFormatter(_Plain(f"rank {rank}: %(message)s" if rank else "%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("models.quantize", "utils", "__main__"):
        logging.getLogger(name).setLevel(logging.WARNING if rank else logging.DEBUG if verbose else logging.INFO)


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Raise what writing a line raised: a closed pipe ends the program, and is not described on standard error."""
        raise


class _Plain(logging.Formatter):
    """Lines whose names, which come from files, do not steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def command_line() -> str:
    """What was run, as one types it in the checkout: a page that is shared says nothing of where that lies."""
    program, root = os.path.realpath(sys.argv[0]), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    inside = os.path.commonpath([program, root]) == root
    shown = os.path.relpath(program, root) if inside else os.path.basename(program)
    return shlex.join(["python", shown, *_words])


def _answer_signals() -> list[signal.Signals]:
    """Let SIGTERM and SIGHUP raise as Ctrl-C does, but not in forked processes; returns those that do from now on."""
    answered = []

    def terminate(*_: object) -> NoReturn:
        raise Terminated

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # not in the main thread, as in a test
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, terminate)
                answered.append(number)
        os.register_at_fork(after_in_child=in_child)
    return answered


def parsers(
    name: str, commands: Command | Mapping[str, Command], about: str
) -> tuple[argparse.ArgumentParser, dict[str, tuple[argparse.ArgumentParser, Command]]]:
    """The parser, and for each command its own; the command of a program without commands is ''."""
    layout = argparse.RawDescriptionHelpFormatter if "\n" in about else argparse.HelpFormatter
    if not isinstance(commands, Mapping):
        text = (commands[0].__doc__ or "").partition("\n\n")[0]
        parser = argparse.ArgumentParser(name, description=about or text, formatter_class=layout)
        leaves = {"": (parser, commands)}
    else:
        parser = argparse.ArgumentParser(name, description=about, formatter_class=layout)
        choices = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(commands)}}}")
        leaves = {}
        for word, command in commands.items():
            text = command[0].__doc__ or ""
            summary = text.partition("\n\n")[0].rstrip(".")
            leaves[word] = choices.add_parser(word, help=summary, description=" ".join(text.split())), command
    for leaf, (kind, _) in leaves.values():
        add_options(leaf, kind)
        leaf.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser, leaves


def _parse(
    parser: argparse.ArgumentParser,
    leaves: Mapping[str, tuple[argparse.ArgumentParser, Command]],
    words: Sequence[str],
) -> tuple[type[Options], Callable[[Any], int | None], argparse.Namespace]:
    """As `parser.parse_args`, but a wrong command line gets one line, which names the option that was meant."""
    for target in (parser, *(leaf for leaf, _ in leaves.values())):
        target.error = lambda message, target=target: _refuse(target, message)  # type: ignore[method-assign, misc]
    refuse_empty(parser.error, words)
    arguments, unknown = parser.parse_known_args(words)
    leaf, (kind, work) = leaves[getattr(arguments, "command", "")]
    if unknown:
        flag = unknown[0].split("=")[0]
        if hint := removed(flag, leaf.prog):
            leaf.error(f"{flag} {hint}")
        flags = [flag for action in leaf._actions for flag in action.option_strings]
        meant = difflib.get_close_matches(flag, flags, 1)
        leaf.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {meant[0]}?' if meant else ''}")
    return kind, work, arguments


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    choice = re.match(r"argument (?:.*/)?(--[\w-]+): invalid choice: '([^']*)'", message)
    if choice and (hint := removed(" ".join(choice.groups()), parser.prog)):
        message = f"{' '.join(choice.groups())} {hint}"
    parser.exit(2, f"error: {message} ({parser.prog} -h lists the options)\n")


def _launched(parser: argparse.ArgumentParser, together: bool) -> distributed.World:
    """Which this is of the processes that torchrun has started; the program ends where it cannot be one of them."""
    try:
        found = distributed.launched()
    except QatError as error:
        parser.exit(2, f"error: {error}\n")
    if found.size > 1 and not together:
        parser.exit(2, "" if found.rank else f"error: {parser.prog} is one process; start it without torchrun\n")
    return found


def _is_a_paths(error: BaseException) -> bool:
    """Whether an error is that a path cannot be opened, which the user can change."""
    kinds = (PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError)
    named = errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS
    return (
        isinstance(error, OSError) and error.filename is not None and (isinstance(error, kinds) or error.errno in named)
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, QatError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, RuntimeError) and "Bus error" in f"{error} {error.__cause__}":
        return (
            "a loading process ended, since shared memory (/dev/shm) was full; give the container more "
            "(docker run --shm-size=8g), or take fewer --workers"
        )
    return f"{type(error).__name__}: {text[:500]} (--debug shows the traceback)"
