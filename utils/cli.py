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

NEEDED = ("pydantic", "numpy", "yaml")  # by the options of every program
PACKAGES = (*NEEDED, "torch", "torchvision", "cv2", "PIL", "onnx", "onnxruntime", "tqdm")


def check_packages() -> None:
    """End the program where a package is missing, or hidden by a file of its name."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            end_without(name)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations is None:  # a single file, and not a folder
            sys.stderr.write(f"error: {spec.origin} hides the package {name}; {UNHIDE}\n")
            sys.exit(2)


def end_without(package: str) -> NoReturn:
    """End the program without a package of NEEDED; `-h` then shows the program's docstring, without options."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(f"{(sys.modules['__main__'].__doc__ or '').strip()}\n\n")
        sys.stdout.write(f"For its options {ENVIRONMENT}; docs/reference/cli.md of the overlay has them, too.\n")
        sys.exit(0)
    sys.stderr.write(f"error: {sys.executable} has no {package}; {ENVIRONMENT}\n")
    sys.exit(2)


check_packages()

from utils.core import distributed
from utils.core.cpu import prepare_threads
from utils.core.files import NO_ROOM
from utils.core.logging import setup_logging
from utils.core.options import Options, add_options
from utils.core.text import printable

# a command of a docstring, over several lines perhaps
EXAMPLE = re.compile(r"^    python (?:.*\\\n)*.*\n", re.MULTILINE)
Command = tuple[type[Options], Callable[[Any], "int | None"]]  # options, and the work that takes them


INTERRUPTED, TERMINATED, CLOSED_OUTPUT = 130, 143, 141  # exit codes, as shells know them


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


class Parser(argparse.ArgumentParser):
    """Ends with one line for a wrong command line, and with advice for an option of another project."""

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
        """End the program, and suggest the option that may have been meant."""
        flag = unknown[0].split("=")[0]
        if flag in HABITS:
            self.error(f"{flag} {HABITS[flag]}")
        message = f"unrecognized arguments: {' '.join(unknown)}"
        if re.match(r"\w+=", unknown[0]):
            self.error(f"{message}; {KEY_VALUE}")
        similar = difflib.get_close_matches(flag, self._option_string_actions, 1)
        if similar:
            message += f"; did you mean {similar[0]}?"
        self.error(message)


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
        together: the commands on which several processes, as torchrun starts them, may work. Processes other than the
            main one print only errors, with their number.
    """
    parser, leaves = parsers(name, commands, about)
    if isinstance(commands, Mapping):
        arguments, unknown = parser.parse_known_args(argv)
    else:
        arguments, unknown = parser.parse_known_intermixed_args(argv)  # a positional argument may follow options
    command = getattr(arguments, "command", "")
    leaf, (kind, work) = leaves[command]
    if unknown:
        leaf.refuse(unknown)
    world = _launched(leaf, command in together)
    setup_logging(arguments.debug, world.rank)
    prepare_threads()
    gc.set_threshold(50_000, 5, 5)  # Python looks for cycles after 700 new objects; importing torch makes a million
    atexit.register(gc.freeze)  # otherwise the final collection scans all objects, for seconds
    _set_sigterm_handler(_terminate)
    try:
        try:
            options = kind.parsed(arguments)
            with distributed.joined():
                code = work(options) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
            return CLOSED_OUTPUT
        except Exception as error:
            if arguments.debug:
                raise
            code, text = _described(error)
            rank = f"rank {world.rank}: " if world.rank else ""
            print(f"{rank}error: {printable(text)}", file=sys.stderr)
            return code
    except Terminated:  # also while the line of an error is printed
        print("terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        _set_sigterm_handler(signal.SIG_DFL)  # an exception while the interpreter ends is a traceback


def _launched(leaf: Parser, allows_several: bool) -> distributed.World:
    """This process among those that torchrun started; end the program where a command is for one process only."""
    try:
        world = distributed.launched()
    except QatError as error:
        leaf.exit(error.exit_code, f"error: {error}\n")
    if world.size > 1 and not allows_several:
        message = f"error: {leaf.prog} is one process; start it without torchrun\n"
        leaf.exit(2, "" if world.rank else message)
    return world


def command_line() -> str:
    """The command of this process, with the program's path in the checkout, so that shared reports do not show more."""
    program = os.path.realpath(sys.argv[0])
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    name = program.removeprefix(f"{root}/")
    if name == program:  # elsewhere
        name = os.path.basename(program)
    return shlex.join(["python", name, *sys.argv[1:]])


def parsers(
    name: str, commands: Command | Mapping[str, Command], about: str
) -> tuple[Parser, dict[str, tuple[Parser, Command]]]:
    """The parser, and for each command its own; the command of a program without commands is ''.

    Indented commands in `about` are examples, and stand at the end of `-h`.
    """
    if not about and not isinstance(commands, Mapping):
        about = commands[0].__doc__ or ""
    examples = EXAMPLE.findall(about)
    description = re.sub(r"\n{3,}", "\n\n", EXAMPLE.sub("", about)).strip()
    settings: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    leaves: dict[str, tuple[Parser, Command]] = {}
    if isinstance(commands, Mapping):
        parser = Parser(name, description=description, epilog=_epilog(examples), **settings)
        choices = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(commands)}}}")
        for word, command in commands.items():
            text = command[0].__doc__ or ""
            own_examples = [line for line in examples if f"{name} {word} " in line]
            leaf = choices.add_parser(
                word,
                help=text.partition("\n\n")[0].rstrip("."),
                description=textwrap.fill(" ".join(text.split()), 100),
                epilog=_epilog(own_examples),
                add_help=False,
                **settings,
            )
            leaves[word] = leaf, command
    else:
        parser = Parser(name, description=description, epilog=_epilog(examples), add_help=False, **settings)
        leaves[""] = parser, commands
    for leaf, (kind, _) in leaves.values():
        _add_arguments(leaf, kind)
    return parser, leaves


def _add_arguments(leaf: Parser, kind: type[Options]) -> None:
    """Give a parser its usage, the arguments of its options class, -h and --debug."""
    leaf.usage = _usage(leaf.prog, kind)
    add_options(leaf, kind)
    general = leaf.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="show this and exit")
    general.add_argument("--debug", action="store_true", help="show a traceback on errors")


def _epilog(examples: Sequence[str]) -> str:
    """Return the end of `-h`."""
    if not examples:
        return ""
    title = "example:" if len(examples) == 1 else "examples:"
    return "\n".join([title, *(example.rstrip() for example in examples)])


def _usage(program: str, kind: type[Options]) -> str:
    """Return one line: the program, its required arguments, and `[options]`."""
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
    """Raise `Terminated`, which is a KeyboardInterrupt."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler raises if its workers are terminated, too
    raise Terminated


def _set_sigterm_handler(handler: Any) -> None:
    """Set the handler of SIGTERM. Forked processes ignore Ctrl-C, end by SIGTERM, and print no error of a thread."""

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.excepthook = lambda _: None  # silence threads that end with the program

    with contextlib.suppress(ValueError):  # not in the main thread, as in a test
        signal.signal(signal.SIGTERM, handler)
        if handler is _terminate:
            os.register_at_fork(after_in_child=in_child)


def _described(error: Exception) -> tuple[int, str]:
    """The exit code and the line for an error: 2 for one that the user can mend, as a path that cannot be opened."""
    text = " ".join(str(error).split())
    if isinstance(error, QatError):
        return error.exit_code, text
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return 1, error.strerror
        code = 1 if error.errno in NO_ROOM else 2
        return code, f"{os.fsdecode(error.filename)}: {error.strerror}"
    return 1, f"{type(error).__name__}: {text[:500]} (--debug shows the traceback)"
