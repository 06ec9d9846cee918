"""What a page of documentation promises, held against the repository: its commands, flags, file names and links."""

import argparse
import contextlib
import functools
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from utils import cli

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # where docs/ lies; integration tests run in a checkout, whose utils/ comes first

from docs.programs import PYTHON_PROGRAMS, SHELL_PROGRAMS, named, recorded, shell_help  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
UPSTREAMS = "scripts/run_upstream.py"  # what follows is for a program of upstream's


OTHERS = {".", "cd", "git", "pip"}
OTHERS_FLAGS = {"--fp16", "--int8", "--stronglyTyped", "--infStreams", "--onnx", "--saveEngine", "--helpBuildRoute",
                "--tuneBuildRoutes", "--tuningSearch", "--tuningTimeOut", "--accuracyThreshold", "--nproc-per-node",
                "--nnodes", "--rdzv-endpoint", "--fast", "--no-overlap"}  # fmt: skip  # of trtexec, torchrun, upstream
OTHERS_FLAGS |= {"--against", "--list", "--shrink"}  # of tests/house.py
OTHERS_FLAGS |= {"--gpus", "--shm-size"}  # of Docker
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]  # in front of a program
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
FILE = re.compile(
    r"(?<![\w./-])(?:\./)?((?:docs|models/quantize|models/reparam|utils|scripts|benchmarks|tests|requirements|data/demo)/[\w./-]*"
    r"(?:\.(?:py|sh|md|txt|pt|png)|/))(?![\w*])"
)
BARE_FILE = re.compile(r"(?<![\w./-])(\w+\.(?:py|sh))(?![\w.])")


def problems(text: str, folder: Path = ROOT) -> list[str]:
    """What a page in `folder` says that is not so, one sentence each."""
    return [*_broken_links(text, folder), *_wrong_commands(text), *_wrong_names(text)]


def _broken_links(text: str, folder: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text)):
        name, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        if not (folder / name).exists():
            yield f"the link {target} leads to no file"
        elif anchor:  # as GitHub makes it of a heading
            page = (folder / name).read_text(encoding="utf-8") if name else text
            headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page), re.MULTILINE)
            if anchor not in {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}:
                yield f"the link {target} leads to no heading"


def commands(text: str) -> list[list[str]]:
    """The words of every command in the page's blocks of bash."""
    found = []
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), ";"]:
                if word not in ("&&", "|", ";"):
                    words.append(word)
                elif words:
                    found.append(words)
                    words = []
    return found


def _wrong_commands(text: str) -> Iterator[str]:
    for command in commands(text):
        words = command[len(TORCHRUN) :] if command[: len(TORCHRUN)] == TORCHRUN else command
        program, *arguments = words[words[0] == "python" :]
        program, shown = program.removeprefix("./"), " ".join(command)
        if "--" in arguments:  # what follows is for another program
            arguments = arguments[: arguments.index("--")]
        if program in SHELL_PROGRAMS:
            given = FLAG.findall(" ".join(arguments))
            yield from (f"{shown}: {program} has no {flag}" for flag in given if flag not in flags(program))
        elif program in PYTHON_PROGRAMS:
            if said := refusal(program, arguments):
                yield f"{shown}: {said}"
        elif program not in {*OTHERS, UPSTREAMS}:
            yield f"{shown}: {program} is no program of this repository"


def refusal(program: str, arguments: list[str]) -> str:
    """What the program's parser says against the arguments."""
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
        parser_of(program).parse_args(arguments)
    return said.getvalue().strip().rpartition("\n")[2]


@functools.cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser that `run_program` makes for a program."""
    call = recorded(program)
    return cli.parsers(call.name, call.commands, call.about)[0]


@functools.cache
def flags(program: str) -> set[str]:
    """The flags that a program's help names; of a script also those of the program that it passes others on to."""
    if program in PYTHON_PROGRAMS:
        parsers = [parser_of(program)]
        for action in parsers[0]._actions:
            parsers += action.choices.values() if isinstance(action, argparse._SubParsersAction) else []
        return {flag for parser in parsers for flag in parser._option_string_actions}
    text = shell_help(program)
    return {*FLAG.findall(text), "--help"}.union(*map(flags, re.findall(r"other arguments of ([\w/.]+\.py)", text)))


def _wrong_names(text: str) -> Iterator[str]:
    """Flags and files that are named as code and do not exist."""
    code = [block for language, block in FENCE.findall(text) if language == "bash"] + SPAN.findall(FENCE.sub("", text))
    known = OTHERS_FLAGS.union(*map(flags, [*PYTHON_PROGRAMS, *SHELL_PROGRAMS]))
    own = ("*", "models/**/*", "utils/**/*", "scripts/**/*", "data/**/*", "tests/**/*")
    files = {Path(name).name for name in named(*own)} | {"train.py", "train_dual.py", "val.py"}
    for piece in code:
        yield from (f"no program has {flag}" for flag in FLAG.findall(piece) if flag not in known)
        yield from (f"there is no {file}" for file in FILE.findall(piece) if not (ROOT / file).exists())
        yield from (f"there is no {file}" for file in BARE_FILE.findall(piece) if file not in files)
