"""The frame of the programs: exit codes, one line an error, files that appear whole and replace nothing read."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from utils import cli
from utils.core import device, files
from utils.core.errors import InputError, QatError
from utils.core.files import check_folder_name, distinct_names, refuse_overwrite
from utils.core.options import COMPATIBILITY, Options, option
from utils.jobs.options import ValOptions
from utils.onnx_graph import deepstream

ROOT = Path(__file__).resolve().parents[3]


class Few(Options):
    """Few options."""

    batch_size: int = option(10, "images a batch")
    form: Literal["float", "uint8"] = option("float", "of the file", "--input")


def run(error: BaseException | None, *arguments: str) -> int:
    def work(_options):
        if error is not None:
            raise error

    return cli.run_program("p", (Few, work), arguments)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (None, 0, ""),
        (InputError("a file\nis wrong"), 2, "error: a file is wrong\n"),
        (InputError("class \x1b]0;title\x07\x9b2J"), 2, "error: class \\x1b]0;title\\x07\\x9b2J\n"),
        (QatError("it failed"), 1, "error: it failed\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ZeroDivisionError("division"), 1, "error: ZeroDivisionError: division (--debug shows the traceback)\n"),
        (OSError(errno.ENOSPC, "No space left", "f.pt"), 1, "error: f.pt: No space left\n"),
        (OSError(errno.EROFS, "cannot be had", "f.pt"), 2, "error: f.pt: cannot be had\n"),
    ],
)  # fmt: skip
def test_errors_become_one_line_and_an_exit_code(error, code, line, capsys):
    assert run(error) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_a_signal_while_an_error_is_said_is_one_line_as_well(number, code, line, capsys):
    class Late(QatError):
        def __str__(self) -> str:
            signal.raise_signal(number)
            return "it failed"

    assert run(Late()) == code
    assert capsys.readouterr().err == line


def test_debug_raises_the_error_with_its_traceback():
    with pytest.raises(InputError, match="a file is wrong"):
        run(InputError("a file is wrong"), "--debug")


def test_a_command_says_nothing_of_where_the_checkout_lies(monkeypatch, tmp_path):
    root = Path(cli.__file__).parents[1]
    for program, shown in (("val_trt.py", "val_trt.py"), ("scripts/benchmark_trt.py", "scripts/benchmark_trt.py")):
        monkeypatch.setattr(sys, "argv", [str(root / program), "--name", "a b"])
        assert cli.command_line() == f"python {shown} --name 'a b'"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "other.py")])
    assert cli.command_line() == "python other.py"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["eval", "--batchsize", "4"], ["--batchsize 4", "did you mean --batch-size?", "p eval -h"]),
        (["eval", "--batch", "4"], ["--batch 4", "did you mean --batch-size?"]),
        (["eval", "--batch-size", "four"], ["--batch-size", "'four'"]),
        (["eval", "--batch-size=4", "more"], ["unrecognized arguments: more"]),
        (["eval", "--batch-size="], ["--batch-size", "''"]),
        (["eval", "--format", "engine"], ["--format does not exist: export_qat.py writes ONNX"]),
        (["eval", "--int8"], ["--int8 does not exist: qat.py quantize makes the INT8 checkpoint"]),
        (["eval", "model=best.pt"], ["model=best.pt; options are written as --name VALUE here"]),
        (["evaluate"], ["evaluate", "eval"]),
        ([], ["{eval}"]),
    ],
)
def test_a_wrong_command_line_gets_one_line(words, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.run_program("p", {"eval": (Few, lambda options: 0)}, words)
    error = capsys.readouterr().err
    assert (stopped.value.code, error.count("\n")) == (2, 1)
    assert all(part in error for part in named)


@pytest.mark.parametrize(("words", "program"), [("--task speed", "benchmark_trt.py"), ("--task study", "--imgsz")])
def test_a_task_of_upstreams_val_py_says_what_to_run(words, program, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_program("val_trt.py", (ValOptions, print), ["a.onnx", *words.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words} ")
    assert program in error


@pytest.mark.parametrize(
    "words",
    [["patch_yolov9.sh"], ["patch_yolov9.sh", "a", "b"], ["patch_yolov9.sh", "--frce", "x"], ["patch_yolov9.sh", ""],
     ["scripts/get_yolov9.sh"], ["scripts/test.sh", "--nothing"], ["install_dependencies.sh", "--nothing"],
     ["scripts/val_trt.sh"], ["scripts/val_trt.sh", "none.pt", "d.yaml", "64"],
     ["scripts/val_trt.sh", "d.yaml", "d.yaml", "64"], ["scripts/benchmark_trt.sh", "none.onnx", "64"],
     ["scripts/benchmark_trt.sh", "a", "b"], ["scripts/generate_trt_engine.sh"],
     ["scripts/generate_trt_engine.sh", "", "64"], ["data/demo/train_demo.sh", "--epochs"]],
)  # fmt: skip
def test_usage_errors_of_shell_scripts_are_one_line(words):
    command = ["bash", str(ROOT / words[0]), *words[1:]]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, sys.argv.pop(1))
from utils.cli import run_program
from utils.core.files import atomic_path
from utils.core.options import COMPATIBILITY, Options, option

class Few(Options):
    kind: str = option("", "", positional=True)

def work(options):
    if options.kind == "talk":
        while True:
            print("words " * 1000)
    with atomic_path("file") as temporary:
        temporary.write_text("half")
        if os.fork() == 0:
            time.sleep(0.3)
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, options.kind))
        time.sleep(30)

sys.exit(run_program("p", (Few, work)))
"""


@pytest.mark.parametrize(("kind", "code", "line"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_a_program_in_one_line_and_leaves_nothing_half_written(tmp_path, kind, code, line):
    command = [sys.executable, "-c", PROGRAM, str(ROOT), kind]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{line}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_output_ends_a_program_quietly(tmp_path):
    command = f"{sys.executable} -c '{PROGRAM}' {ROOT} talk | head -c 10; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("words word141\n", "")


@pytest.mark.parametrize("program", ["qat.py eval", "scripts/run_upstream.py qat.py", "scripts/benchmark_trt.sh a 1"])
def test_without_an_environment_the_line_says_how_to_activate_it(program, tmp_path):
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without what is installed
    bare.chmod(0o755)
    script, *words = program.split()
    command = [*(["bash"] if script.endswith(".sh") else [str(bare)]), str(ROOT / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(bare)}, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert ". .venv/bin/activate" in done.stderr


def test_file_gets_the_users_usual_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        with files.atomic_path(tmp_path / "file") as temporary:
            temporary.write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_full_float32_switches_tf32_off_and_puts_it_back(monkeypatch):
    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = [setting.allow_tf32 for setting in settings]
    with contextlib.suppress(ZeroDivisionError), device.disable_tf32():
        assert [setting.allow_tf32 for setting in settings] == [False, False]
        _ = 1 / 0
    assert [setting.allow_tf32 for setting in settings] == before


# what is read is not written over: links, names that differ in case, records of our own


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_are_seen_through_in_both_directions(tmp_path, monkeypatch, link):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("content")
    link("a", "b")
    for output, source in (("b", "a"), ("a", "b")):
        with pytest.raises(InputError, match=rf"{output} is read \(as {source}\) and would be over"):
            refuse_overwrite([output], [source])
    refuse_overwrite(["c"], ["a", "b", None, "nowhere"])
    os.mkfifo("pipe")
    for path in (".", "pipe"):
        with pytest.raises(InputError, match=r"is (a folder|not a regular file); a file is to be written"):
            refuse_overwrite([path], [])


def test_a_file_system_that_ignores_case(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.onnx").write_text("")
    real = os.stat
    monkeypatch.setattr(files.os, "stat", lambda path, **more: real(str(path).lower(), **more))
    with pytest.raises(InputError, match=r"MINE\.ONNX is read \(as mine\.onnx"):
        refuse_overwrite(["MINE.ONNX"], ["mine.onnx"])


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", "/tmp/x", "a\\b", "a\nb", "\udcff"])
def test_names_that_are_no_folders(name):
    with pytest.raises(InputError, match="is not the name of a folder"):
        check_folder_name(name)


def test_names_are_told_apart():
    assert [check_folder_name(name) for name in ("exp", "a b", "ä.1", "...")] == ["exp", "a b", "ä.1", "..."]
    names = distinct_names(["a.jpg", "A.jpg", "a-2.jpg", "b.jpg", "a.jpg", "c", "C"])
    assert names == ["a.jpg", "A-2.jpg", "a-2-2.jpg", "b.jpg", "a-3.jpg", "c", "C-2"]


# what DeepStream reads beside the ONNX file


def test_what_others_wrote_is_kept_beside_and_no_name_adds_lines(tmp_path):
    onnx = tmp_path / "a.onnx"
    for path in deepstream.paths(onnx):
        path.write_text("mine\n")
    labels, config, server = deepstream.write(onnx, "mine\n", ["x=1\n", "y=1\n"])
    assert [path.read_text() for path in (labels, config, server)] == ["mine\n", "x=1\n", "y=1\n"]
    assert not labels.with_name("labels.txt.bak1").exists()  # it says what it would say anyway
    deepstream.write(onnx, "mine\n", ["x=2\n", "y=1\n"])
    assert all(path.with_name(f"{path.name}.bak1").read_text() == "mine\n" for path in (config, server))
    assert config.with_name(f"{config.name}.bak2").read_text() == "x=1\n"
    deepstream.write(onnx, "mine\n", ["x=2\n"])
    assert not server.exists(), "what this export does not write is another one's"
    for name in ("", "a\n", "a;b"):
        with pytest.raises(InputError, match="class 1 is named"):
            deepstream.label_lines({0: "a", 1: name})
    with pytest.raises(InputError, match="cannot be written on a line"):
        deepstream.check_name("a\ncustom-lib-path=x.onnx")


def test_help_without_an_environment_is_the_programs_summary_and_its_examples():
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "val_trt.py"), "-h"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "python val_trt.py gelan-c.onnx --data coco.yaml" in done.stdout
    assert "install_dependencies.sh" in done.stdout


class Ordered(Options):
    """Options in three groups."""

    OFTEN = ("second", "first")
    plain: int = option(1, "an option")
    ignored: bool = option(False, "does nothing", group=COMPATIBILITY)
    first: int = option(1, "an option")
    second: int = option(1, "an option")


def test_help_lists_what_is_often_used_first_and_compatibility_last():
    about = "Do it.\n\n    python p.py --first 2 \\\n        --second 3\n\nMore about it.\n"
    text = cli.parsers("p.py", (Ordered, lambda _: None), about)[0].format_help()
    places = [text.index(word) for word in ("often used", "--second", "--first", "--plain", "--ignored", "example:")]
    assert places == sorted(places)
    assert text.rstrip().endswith("python p.py --first 2 \\\n        --second 3")
    assert text.index("More about it.") < places[0]
