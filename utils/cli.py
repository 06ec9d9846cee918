"""What the command-line programs share: argument groups, and errors → one line and an exit code.

Nothing here imports torch at module level, so that `-h` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import interrupts
from utils.core import console, distributed, shared_memory
from utils.core.arguments import folder_name_argument, given_flags, refuse_empty, refuse_idle
from utils.core.bounds import bounded
from utils.core.errors import QatError
from utils.core.files import no_room
from utils.core.removed import removed
from utils.core.shown import printable
from utils.core.thresholds import EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU

logger = logging.getLogger(__name__)

IMAGE_SIZE_FLAGS = ("--imgsz", "--img", "--img-size")
NMS_FLAGS = {"kind": "--nms", "topk": "--topk-all", "iou_thres": "--iou-thres", "conf_thres": "--conf-thres"}


def add_data(parser: argparse.ArgumentParser) -> None:
    """`--data FILE`: a dataset's YAML in upstream's form."""
    default = "data/coco.yaml"
    parser.add_argument("--data", default=default, metavar="FILE", help=f"dataset's YAML (default: {default})")


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`: as upstream takes it."""
    text = "'cpu', or a CUDA device such as 0 (default: 0 if there is one)"
    parser.add_argument("--device", default="", metavar="D", help=text)


def add_run_dir(parser: argparse.ArgumentParser, project: str, name: str = "exp") -> None:
    """`--project --name --exist-ok`: where results go."""
    parser.add_argument(
        "--project", default=project, metavar="DIR", help=f"results go to PROJECT/NAME (default: {project})"
    )
    parser.add_argument(
        "--name",
        default=name,
        type=folder_name_argument,
        help=f"name of the run folder (default: {name}, {name}2, ...)",
    )
    parser.add_argument("--exist-ok", action="store_true", help="write into an existing PROJECT/NAME")


def add_image_size(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`--imgsz PX`: one side, 640 if it is left out."""
    group.add_argument(
        *IMAGE_SIZE_FLAGS, dest="imgsz", type=bounded("imgsz"), default=640, metavar="PX",
        help="input size (default: 640)",
    )  # fmt: skip


def add_build_options(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Options of builds that change how fast an engine is, which `BuildConfig.given` reads."""
    group.add_argument(
        "--tactic-sources-off", nargs="+", default=[], metavar="NAME", help="such as CUBLAS CUBLAS_LT CUDNN"
    )
    add_kernel_options(group)
    group.add_argument(
        "--timing-iterations", type=bounded("timing_iterations"), metavar="N",
        help="runs of a measured kernel, see TensorRT",
    )  # fmt: skip
    group.add_argument(
        "--build-limit", type=bounded("build_limit"), metavar="MINUTES", help="end a build that takes longer"
    )
    group.add_argument(
        "--tune", type=bounded("tune"), metavar="MINUTES",
        help="of each engine: for so long try options that are not given here, and keep the fastest",
    )  # fmt: skip


def add_kernel_options(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`--optimization-level` and `--max-aux-streams`."""
    group.add_argument(
        "--optimization-level", type=bounded("optimization_level"), metavar="N", help="0 to 5 (default: TensorRT's)"
    )
    group.add_argument(
        "--max-aux-streams", type=bounded("max_aux_streams"), metavar="N",
        help="streams beside the main one that layers may be spread over (default: TensorRT's choice)",
    )  # fmt: skip


def add_input(parser: argparse.ArgumentParser) -> None:
    """`--input`: the form in which a file takes images."""
    parser.add_argument(
        "--input", choices=("float", "uint8"), default="float",
        help="what the file takes. float: FP32 in 0..1 (default); uint8: the bytes of images, which the graph scales",
    )  # fmt: skip


def add_nms(parser: argparse.ArgumentParser, title: str, about: str) -> argparse._ArgumentGroup:
    """`--nms --topk-all --iou-thres --conf-thres`, which `given_nms` reads."""
    group = parser.add_argument_group(title, about)
    group.add_argument(
        "--nms", choices=("efficient", "onnx", "none"),
        help="efficient: TensorRT's plugin (default); onnx: the standard operator; none: top-k without suppression",
    )  # fmt: skip
    group.add_argument("--topk-all", type=int, metavar="N", help="detections an image (default: 100)")
    group.add_argument(
        "--iou-thres", type=bounded("iou_thres"), metavar="P", help=f"overlap (default: {EVERYDAY_NMS_IOU})"
    )
    group.add_argument(
        "--conf-thres", type=bounded("conf_thres"), metavar="P",
        help=f"confidence threshold (default: {EVERYDAY_CONFIDENCE})",
    )  # fmt: skip
    return group


def given_nms(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of `add_nms`, as fields of `NmsSettings`.

    Raises:
        InputError: an overlap was given, and nothing is suppressed.
    """
    if args.nms == "none":
        refuse_idle(args, ["iou_thres"], "with --nms none, which suppresses no boxes")
    entries = {name: getattr(args, flag[2:].replace("-", "_")) for name, flag in NMS_FLAGS.items()}
    return {name: value for name, value in entries.items() if value is not None}


def setup_logging(verbose: bool = False, rank: int = 0) -> None:
    """Send the library's log to standard output as plain lines, the way upstream's programs look.

    Of several processes, others than the main one say their number, and nothing below a warning.
    """
    if getattr(sys.stdout, "errors", "") == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Plain(f"rank {rank}: %(message)s" if rank else "%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("models.quantize", "utils", "__main__"):
        logging.getLogger(name).setLevel(logging.WARNING if rank else logging.DEBUG if verbose else logging.INFO)


class _Plain(logging.Formatter):
    """Lines whose names, which come from files, do not steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def command_line() -> str:
    """What was run, as one types it in the checkout: a page that is shared says nothing of where that lies."""
    program, root = os.path.realpath(sys.argv[0]), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    inside = os.path.commonpath([program, root]) == root
    shown = os.path.relpath(program, root) if inside else os.path.basename(program)
    return shlex.join(["python", shown, *sys.argv[1:]])


def run_program(
    parser: argparse.ArgumentParser,
    handler: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    *,
    together: bool = False,
) -> int:
    """Parse, run, and turn every error into one line and an exit code.

    Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted, 143 terminated, 141 the output was
    closed. `--debug` shows the traceback instead.

    Args:
        together: several processes, as torchrun starts them, may work on one job. Others than the main one say only
            what is wrong, and who they are.
    """
    console.guard()
    leaves = _leaf_parsers(parser)
    for target in leaves:
        target.add_argument("--debug", action="store_true", help="show a traceback on errors")
    args = _parse(parser, leaves, argv)
    world = _launched(parser, together)
    setup_logging(args.debug, world.rank)
    if interrupts.watching():
        gc.set_threshold(50_000, 5, 5)  # Python looks for cycles after 700 new objects; importing torch makes a million
    code = _finished(args, handler, f"rank {world.rank}: " if world.rank else "")
    if interrupts.watching():
        # Unwinding takes torch a second, and Gloo's threads may abort a process that does.
        interrupts.leave(code)
    return code


def _finished(args: argparse.Namespace, handler: Callable[[argparse.Namespace], int | None], who: str) -> int:
    """Let the handler do its work; the exit code, after a line for an error."""

    def work() -> int:
        code = handler(args) or 0
        sys.stdout.flush()
        return code

    try:
        return interrupts.job(work)
    except KeyboardInterrupt:  # only where no program runs; otherwise the process has ended
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        print(f"{who}error: {printable(_one_line(error))}", file=sys.stderr)
        return error.exit_code if isinstance(error, QatError) else 2 if _is_a_paths(error) else 1


def _launched(parser: argparse.ArgumentParser, together: bool) -> distributed.World:
    """Which this is of the processes that torchrun has started; the program ends where it cannot be one of them."""
    try:
        found = distributed.launched()
    except QatError as error:
        parser.exit(2, f"error: {error}\n")
    if found.size > 1 and not together:
        if found.rank:
            parser.exit(2)
        parser.exit(2, f"error: {parser.prog} is one process; start it without torchrun\n")
    return found


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    choice = re.match(r"argument (?:.*/)?(--[\w-]+): invalid choice: '([^']*)'", message)
    if choice and (hint := removed(" ".join(choice.groups()))):
        message = f"{' '.join(choice.groups())} {hint}"
    parser.exit(2, f"error: {message} ({parser.prog} -h lists the options)\n")


def _parse(
    parser: argparse.ArgumentParser, leaves: Sequence[argparse.ArgumentParser], argv: Sequence[str] | None
) -> argparse.Namespace:
    """As `parser.parse_args`, but a wrong command line gets one line, which names the option that was meant.

    `given` in the namespace says which options are on the command line, see `given_flags`.
    """
    for target in (parser, *leaves):
        target.error = partial(_refuse, target)  # type: ignore[method-assign]
    words = sys.argv[1:] if argv is None else argv
    refuse_empty(parser.error, words)
    args, unknown = parser.parse_known_args(words)
    leaf = next((leaf for leaf in leaves if leaf.prog.split()[-1] == getattr(args, "command", None)), parser)
    if unknown:
        if hint := removed(unknown[0].split("=")[0]):
            leaf.error(f"{unknown[0].split('=')[0]} {hint}")
        flags = [flag for action in leaf._actions for flag in action.option_strings]
        meant = difflib.get_close_matches(unknown[0].split("=")[0], flags, 1)
        leaf.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {meant[0]}?' if meant else ''}")
    args.given = given_flags(leaf, words)
    return args


def _leaf_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [child for action in subparsers for child in dict.fromkeys(action.choices.values())] or [parser]


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
    if isinstance(error, UnicodeEncodeError):
        found = error.object[error.start : error.end]
        return f"{found!r} cannot be written in this locale's encoding, {error.encoding}; set PYTHONUTF8=1"
    if full := no_room(error) or shared_memory.explained(error):
        return full
    if isinstance(error, OSError) and _is_a_paths(error):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"{type(error).__name__}: {text[:500]} (--debug shows the traceback)"
