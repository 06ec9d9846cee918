"""The frame of every program: options, logging, and every error as one line and an exit code.

    sys.exit(run_program("val_trt.py", (ValOptions, evaluate)))
    sys.exit(run_program("qat.py", {"quantize": (QuantizeOptions, quantize), ...}))

Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted (Ctrl-C), 143 terminated, 141 the output was
closed (`| head`). Nothing here imports torch, so that `-h` answers at once.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10) or sys.platform == "win32":  # what follows would be a traceback there
    sys.stderr.write("error: this needs Python 3.10 or newer on Linux, or on the Windows Subsystem for Linux (WSL)\n")
    sys.exit(2)

import argparse
import atexit
import contextlib
import difflib
import gc
import importlib.util
import os
import re
import shlex
import signal
import textwrap
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from utils.core.errors import ENVIRONMENT, HABITS, KEY_VALUE, UNHIDE, QatError

if missing := [name for name in ("pydantic", "numpy", "yaml") if importlib.util.find_spec(name) is None]:
    if {"-h", "--help"} & set(sys.argv[1:]):  # what can be said without: the options are pydantic's
        sys.stdout.write(f"{(sys.modules['__main__'].__doc__ or '').strip()}\n\n")
        sys.stdout.write(f"For its options {ENVIRONMENT}; docs/reference/cli.md of the overlay has them, too.\n")
        sys.exit(0)
    sys.stderr.write(f"error: {sys.executable} has no {missing[0]}; {ENVIRONMENT}\n")
    sys.exit(2)
if hiding := [
    spec
    for name in ("pydantic", "numpy", "yaml", "torch", "torchvision", "cv2", "PIL", "onnx", "onnxruntime", "tqdm")
    if (spec := importlib.util.find_spec(name)) and spec.submodule_search_locations is None  # a file, and no folder
]:
    sys.stderr.write(f"error: {hiding[0].origin} hides the package {hiding[0].name}; {UNHIDE}\n")
    sys.exit(2)

from utils.core import distributed
from utils.core.cpu import prepare_threads
from utils.core.files import NO_ROOM
from utils.core.logging import setup_logging
from utils.core.options import Options, add_options
from utils.core.text import printable

EXAMPLE = re.compile(
    r"^    python (?:.*\\\n)*.*\n", re.MULTILINE
)  # a command of a docstring, over several lines perhaps
Command = tuple[type[Options], Callable[[Any], "int | None"]]  # options, and what is done with them


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the command line, and what to use instead of an option of another project."""

    def __init__(self, *words: Any, **settings: Any) -> None:
        super().__init__(*words, **{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """End the program, as argparse does."""
        choice = re.match(r"argument (?:.*/)?(--[\w-]+): invalid choice: '([^']*)'", message)
        if choice:
            words = " ".join(choice.groups())
            hint = HABITS.get(words)
            message = f"{words} {hint}" if hint else message
        self.exit(2, f"error: {message} ({self.prog} -h lists the options)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End the program, saying which option may have been meant."""
        flag = unknown[0].split("=")[0]
        if flag in HABITS:
            self.error(f"{flag} {HABITS[flag]}")
        if re.match(r"\w+=", unknown[0]):
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {KEY_VALUE}")
        meant = difflib.get_close_matches(flag, self._option_string_actions, 1)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {meant[0]}?' if meant else ''}")


def run_program(
    name: str,
    commands: Command | Mapping[str, Command],
    argv: Sequence[str] | None = None,
    *,
    about: str = "",
    together: Collection[str] = (),
) -> int:
    """Parse the command line, do the work, and turn every error into one line and an exit code.

    Args:
        name: of the program, such as `qat.py`.
        commands: one, or several by their names as subcommands.
        argv: without the program's name; None: that of the process.
        about: the description in `-h`; that of a command is the first line of its options' docstring.
        together: the commands on which several processes, as torchrun starts them, may work. Others than the main one
            only say what is wrong, and who they are.
    """
    parser, leaves = parsers(name, commands, about)
    mixed = parser.parse_known_args if isinstance(commands, Mapping) else parser.parse_known_intermixed_args
    arguments, unknown = mixed(argv)  # a positional argument may stand behind options
    command = getattr(arguments, "command", "")
    leaf, (kind, work) = leaves[command]
    if unknown:
        leaf.refuse(unknown)
    try:
        world = distributed.launched()
    except QatError as error:
        leaf.exit(error.exit_code, f"error: {error}\n")
    if world.size > 1 and command not in together:
        leaf.exit(2, "" if world.rank else f"error: {leaf.prog} is one process; start it without torchrun\n")
    setup_logging(arguments.debug, world.rank)
    prepare_threads()
    gc.set_threshold(50_000, 5, 5)  # Python looks for cycles after 700 new objects; importing torch makes a million
    atexit.register(gc.freeze)  # of which it would look at all once more at the end, for seconds
    _answer_signals(_terminate)
    try:
        try:
            options = kind.parsed(arguments)
            with distributed.joined():
                code = work(options) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
            return 141
        except Exception as error:
            if arguments.debug:
                raise
            code, text = _described(error)
            print(f"{f'rank {world.rank}: ' if world.rank else ''}error: {printable(text)}", file=sys.stderr)
            return code
    except KeyboardInterrupt as end:  # also while the line of an error is printed
        word, code = ("terminated", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        print(word, file=sys.stderr)
        return code
    finally:
        _answer_signals(signal.SIG_DFL)  # an exception while the interpreter ends is a traceback


def command_line() -> str:
    """What was run, as one types it in the checkout: a page that is shared says nothing of where that lies."""
    program, root = os.path.realpath(sys.argv[0]), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    name = program.removeprefix(f"{root}/")
    return shlex.join(["python", os.path.basename(name) if name == program else name, *sys.argv[1:]])


def parsers(
    name: str, commands: Command | Mapping[str, Command], about: str
) -> tuple[Parser, dict[str, tuple[Parser, Command]]]:
    """The parser, and for each command its own; the command of a program without commands is ''.

    Indented commands in `about` are examples, and stand at the end of `-h`.
    """
    about = about or ("" if isinstance(commands, Mapping) else commands[0].__doc__ or "")
    examples = EXAMPLE.findall(about)
    description = re.sub(r"\n{3,}", "\n\n", EXAMPLE.sub("", about)).strip()
    settings: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": _epilog(examples)}
    leaves: dict[str, tuple[Parser, Command]] = {}
    if isinstance(commands, Mapping):
        parser = Parser(name, description=description, **settings)
        choices = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(commands)}}}")
        for word, command in commands.items():
            text = command[0].__doc__ or ""
            summary = text.partition("\n\n")[0].rstrip(".")
            settings["epilog"] = _epilog([line for line in examples if f"{name} {word} " in line])
            full = textwrap.fill(" ".join(text.split()), 100)
            leaf = choices.add_parser(word, help=summary, description=full, add_help=False, **settings)
            leaves[word] = leaf, command
    else:
        parser = Parser(name, description=description, add_help=False, **settings)
        leaves[""] = parser, commands
    for leaf, (kind, _) in leaves.values():
        leaf.usage = _usage(leaf.prog, kind)
        add_options(leaf, kind)
        general = leaf.add_argument_group("general")
        general.add_argument("-h", "--help", action="help", help="show this and exit")
        general.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser, leaves


def _epilog(examples: Sequence[str]) -> str:
    """Return the end of `-h`."""
    title = "example:" if len(examples) == 1 else "examples:"
    return "\n".join([title, *(example.rstrip() for example in examples)]) if examples else ""


def _usage(program: str, kind: type[Options]) -> str:
    """Return one line: the program, what it must be given, and that there are options."""
    words = [program]
    for name, field in kind.model_fields.items():
        argument = kind.argument(name)
        metavar = argument["keywords"].get("metavar", name.upper())
        if argument["flags"] is None:
            optional = argument["keywords"].get("nargs") in ("?", "*")
            words.append(f"[{metavar}]" if optional else metavar)
        elif field.is_required():
            words.append(f"{kind.flag(name)} {metavar}")
    return " ".join([*words, "[options]"]).replace("%", "%%")


def _terminate(*_: object) -> NoReturn:
    """Raise as Ctrl-C does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler raises if its workers are terminated, too
    raise Terminated


def _answer_signals(handler: Any) -> None:
    """Set what SIGTERM does; forked processes end quietly with the program."""

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.excepthook = lambda _: None  # that the program has ended is no news

    with contextlib.suppress(ValueError):  # not in the main thread, as in a test
        signal.signal(signal.SIGTERM, handler)
        if handler is _terminate:
            os.register_at_fork(after_in_child=in_child)


def _described(error: Exception) -> tuple[int, str]:
    """The exit code and the line for an error: 2 where it is the user's to change, as a path that cannot be opened."""
    text = " ".join(str(error).split())
    if isinstance(error, QatError):
        return error.exit_code, text
    if isinstance(error, OSError) and error.strerror:
        code = 2 if error.filename and error.errno not in NO_ROOM else 1
        return code, f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    return 1, f"{type(error).__name__}: {text[:500]} (--debug shows the traceback)"
