"""What a page of documentation promises, held against the repository: its commands, flags, file names and links."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from benchmarks import steps
from utils import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PYTHON_PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "scripts/*.py", "benchmarks/*.py", "data/demo/*.py")
    for path in ROOT.glob(pattern)
    if 'if __name__ == "__main__"' in (text := path.read_text(encoding="utf-8"))
    and ("run_program" in text or "steps.main(" in text or path.name == "run_upstream.py")  # others serve our scripts
)
SHELL_PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"), *ROOT.glob("data/demo/*.sh")]
    if path.name != "lib.sh"  # functions that the others share
)
UPSTREAMS = {"train.py", "train_dual.py", "val.py"}
PASSES_ON = "scripts/run_upstream.py"  # what follows is for a program of upstream's
OTHERS = {".", "cd", "git", "pip"}
TRTEXECS_FLAGS = {"--fp16", "--int8", "--stronglyTyped", "--infStreams", "--onnx", "--saveEngine",
                  "--helpBuildRoute", "--tuneBuildRoutes", "--tuningSearch", "--tuningTimeOut",
                  "--accuracyThreshold"}  # fmt: skip
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]  # in front of a program
TORCHRUNS_FLAGS = {"--nproc-per-node", "--nnodes", "--rdzv-endpoint"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
FILE = re.compile(
    r"(?<![\w./-])(?:\./)?((?:docs|models/quantize|models/reparam|utils|scripts|benchmarks|tests|requirements|data/demo)/[\w./-]*"
    r"(?:\.(?:py|sh|md|txt|pt|png)|/))(?![\w*])"
)
AS_TRAINED = re.compile(r"((?<!_)qat\.py|benchmark_trt\.(?:py|sh)) [^\n]*?(?<![\w-])(yolov9-[tsmce](?:-dseg)?\.pt)")
BARE_FILE = re.compile(r"(?<![\w./-])(\w+\.(?:py|sh))(?![\w.])")


def problems(text: str, folder: Path = ROOT) -> list[str]:
    """What a page in `folder` says that is not so, one sentence each."""
    return [*_broken_links(text, folder), *_wrong_commands(text), *_wrong_names(text)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _broken_links(text: str, folder: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = folder / name if name else None
        if file is not None and not file.exists():
            yield f"the link {target} leads to no file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8") if file else text):
            yield f"the link {target} leads to no heading"


def _wrong_commands(text: str) -> Iterator[str]:
    for words in commands(text):
        yield from _wrong_command(words, whole=True)
    for _, block in FENCE.findall(text):
        for program, weights in AS_TRAINED.findall(block.replace("\\\n", " ")):
            yield f"{program} refuses {weights}, which has its auxiliary branch; name one that was converted"
    for span in SPAN.findall(FENCE.sub("", text)):
        with contextlib.suppress(ValueError):  # half a quotation is no command
            words = [word for word in shlex.split(span) if word != "python"]
            if words and _program(words[0]) in {*PYTHON_PROGRAMS, *SHELL_PROGRAMS}:
                yield from _wrong_command(words, whole=False)


def commands(text: str) -> list[list[str]]:
    """The words of every command in the page's blocks of bash."""
    found = []
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            while words:
                end = next((place for place, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
                found.append(words[:end])
                words = words[end + 1 :]
    return [words for words in found if words]


def _program(word: str) -> str:
    return word.removeprefix("./")


def _wrong_command(words: list[str], *, whole: bool) -> Iterator[str]:
    """`whole`: the command can be run as it stands, so its parser must take all of it, and not the flags only."""
    shown = " ".join(words)
    if words[:3] == TORCHRUN:
        words = words[3:]
    if words[0] == "python":
        words = words[1:]
    program, arguments = _program(words[0]), words[1:]
    if program in SHELL_PROGRAMS or program.startswith("benchmarks/"):  # what follows is for another program
        arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if program in SHELL_PROGRAMS:
        unknown = [word for word in arguments if word.startswith("--") and word not in shell_flags(program)]
    elif program == PASSES_ON:
        unknown = []
    elif program in PYTHON_PROGRAMS:
        if whole and (refusal := _refusal(program, arguments)):
            yield f"{shown}: {refusal}"
        names = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        unknown = [] if whole else [name for name in names if name not in python_flags(program, tuple(arguments))]
    else:
        if program not in OTHERS:
            yield f"{shown}: {program} is no program of this repository"
        return
    yield from (f"{shown}: {program} has no {word}" for word in unknown)


def _refusal(program: str, arguments: list[str]) -> str | None:
    """What the program's parser says against the arguments."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser_of(program).parse_args([word for word in arguments if word != "--debug"])
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    return None


@functools.cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser of a program: the one that `run_program` makes, or the frame of the benchmarks."""
    beside = str((ROOT / program).parent)
    if beside not in sys.path:  # a program finds what lies beside it
        sys.path.append(beside)
    made = []

    def only_the_parser(name: str, commands: object, argv: object = None, *, about: str = "", **_: object) -> int:
        made.append(cli.parsers(name, commands, about)[0])
        return 0

    def of_a_benchmark(kind: object, about: str, run: object) -> int:
        made.append(steps.parser_of(kind, about))
        return 0

    replaced = mock.patch.object(cli, "run_program", only_the_parser), mock.patch.object(steps, "main", of_a_benchmark)
    with replaced[0], replaced[1], contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / program), run_name="__main__")
    return made[0]


@functools.cache
def python_flags(program: str, arguments: tuple[str, ...] = ()) -> frozenset[str]:
    """The flags of a program, or of the subcommand that stands first in `arguments`; without arguments, all of them."""
    if program == PASSES_ON:
        return frozenset(re.findall(r'^[A-Z]+ = "(--[a-z-]+)"$', (ROOT / program).read_text("utf-8"), re.MULTILINE))
    parsers = [parser_of(program)]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = [action.choices[word] for word in arguments[:1] if word in action.choices]
            parsers += chosen or action.choices.values()
    return frozenset(flag for parser in parsers for action in parser._actions for flag in action.option_strings) | {
        "--debug"
    }


@functools.cache
def shell_flags(program: str) -> frozenset[str]:
    """The flags that a script's help names, and those of the program that it passes other arguments on to."""
    words = ["bash", str(ROOT / program), "-h"]
    environment = {**os.environ, "PYTHON": sys.executable}
    text = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, timeout=60).stdout
    found = {*FLAG.findall(text), "--help"}
    for other in re.findall(r"other arguments of ([\w/.]+\.py)", text):
        found |= python_flags(other)
    return frozenset(found)


@functools.cache
def all_flags() -> frozenset[str]:
    """The flags of all programs."""
    found = TRTEXECS_FLAGS | TORCHRUNS_FLAGS
    for program in SHELL_PROGRAMS:
        found |= shell_flags(program)
    for program in PYTHON_PROGRAMS:
        found |= python_flags(program)
    return frozenset(found)


def _wrong_names(text: str) -> Iterator[str]:
    """Flags and files that are named as code and do not exist."""
    code = [block for language, block in FENCE.findall(text) if language == "bash"]
    code += SPAN.findall(FENCE.sub("", text))
    files = {path.name for pattern in ("*.py", "*.sh") for path in _own_files(pattern)} | UPSTREAMS
    stages = {path.stem: path for path in ROOT.glob("utils/onnx_graph/**/*.py")}
    for piece in code:
        yield from (f"no program has {flag}" for flag in FLAG.findall(piece) if flag not in all_flags())
        yield from (f"there is no {file}" for file in FILE.findall(piece) if not (ROOT / file).exists())
        yield from (f"there is no {file}" for file in BARE_FILE.findall(piece) if file not in files)
        module, _, name = piece.partition(".")
        if module in stages and name.isidentifier() and name not in ("py", "md"):
            source = stages[module].read_text(encoding="utf-8")
            yield from () if re.search(rf"^def {name}\(", source, re.MULTILINE) else (f"{module}.py has no {name}",)


def _own_files(pattern: str) -> Iterator[Path]:
    yield from ROOT.glob(pattern)
    for folder in ("models", "utils", "scripts", "data", "tests"):
        yield from (ROOT / folder).rglob(pattern)
