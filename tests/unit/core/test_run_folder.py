"""Two programs never share a run folder, whatever ended the one before; what was killed leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.run_folder import LOCK_FILE, InUseError, clear_leftovers, held, new_run

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from utils.core.run_folder import new_run
with new_run(sys.argv[2], "exp", exist_ok="exist_ok" in sys.argv) as folder:
    if "forking" in sys.argv and not os.fork():
        os.write(1, f"worker {os.getpid()}\\n".encode())  # whole: two processes write
        time.sleep(60)
        os._exit(0)
    os.write(1, f"held {folder}\\n".encode())
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that hold `tmp_path/exp` until they are told to end."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(ROOT), str(tmp_path), *words]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_a_folder_is_held_and_the_message_says_by_whom(holder, tmp_path):
    process = holder()
    answer(process)
    with pytest.raises(InUseError) as refused, held(tmp_path / "exp"):
        pass
    text = str(refused.value)
    assert re.match(rf"{re.escape(str(tmp_path / 'exp'))} is in use by process {process.pid} \(python", text)
    assert re.search(r"\) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}; wait for it to end$", text)
    assert "\n" not in text
    assert refused.value.exit_code == 2
    with pytest.raises(InUseError, match="choose another --name"), new_run(tmp_path, "exp", exist_ok=True):
        pass
    with new_run(tmp_path, "exp") as folder:
        assert folder == tmp_path / "exp2"
    process.communicate("\n")
    assert list((tmp_path / "exp").iterdir()) == []  # the lock's file is gone
    with held(tmp_path / "exp"):
        assert [path.name for path in (tmp_path / "exp").iterdir()] == [LOCK_FILE]


def test_a_dead_process_holds_nothing(holder, tmp_path):
    process = holder()
    answer(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert str(process.pid) in (tmp_path / "exp" / LOCK_FILE).read_text()
    with held(tmp_path / "exp"):
        assert str(os.getpid()) in (tmp_path / "exp" / LOCK_FILE).read_text()
    assert list((tmp_path / "exp").iterdir()) == []


def test_workers_that_outlive_a_killed_program_hold_nothing(holder, tmp_path):
    process = holder("forking")
    answers = dict([answer(process), answer(process)])
    worker = int(answers["worker"])
    with pytest.raises(InUseError), held(tmp_path / "exp"):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(worker, 0)  # it lives
    with held(tmp_path / "exp"):
        pass
    os.kill(worker, signal.SIGKILL)


def test_a_worker_that_ends_takes_no_lock_along(tmp_path):
    with new_run(tmp_path, "exp") as folder:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        worker.start()
        worker.join()
        with pytest.raises(InUseError), held(folder):
            pass


def test_starts_at_the_same_instant_get_folders_of_their_own(holder, tmp_path):
    processes = [holder() for _ in range(6)]
    folders = [answer(process)[1] for process in processes]
    assert sorted(folders) == sorted(str(tmp_path / f"exp{number}") for number in ("", *range(2, 7)))


def test_one_of_many_that_may_share_a_folder_gets_it(holder):
    processes = [holder("exist_ok") for _ in range(6)]
    first = [answer(process)[:1] for process in processes]
    assert sorted(first) == [[]] * 5 + [["held"]]


def test_locks_that_are_given_back_all_the_time_are_never_shared(tmp_path):
    """Taking a lock and removing its file race with each other; a counter without a lock would lose steps."""
    (tmp_path / "count").write_text("0")
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from utils.core.run_folder import InUseError, held
folder, done = Path(sys.argv[2]), 0
while done < 100:
    try:
        with held(folder):
            (folder / "count").write_text(str(int((folder / "count").read_text()) + 1))
            done += 1
    except InUseError:
        pass
"""
    command = [sys.executable, "-c", program, str(ROOT), str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "300"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_a_lock_file_without_sense_is_held_by_another_process(tmp_path):
    with new_run(tmp_path, "exp") as folder:
        (folder / LOCK_FILE).write_text("[1")
        with pytest.raises(InUseError, match="is in use by another process; wait"), held(folder):
            pass


def test_a_long_command_and_another_host_fit_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qat.py", *["--weights"] * 400, "a\nb"])
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with new_run(tmp_path, "exp") as folder:
        monkeypatch.setattr("socket.gethostname", lambda: "here")
        with pytest.raises(InUseError, match=rf"process {os.getpid()} on elsewhere \(") as refused, held(folder):
            pass
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/.report-abcdefgh.part.json").touch()  # perhaps of a program that lives
    with new_run(tmp_path, "exp", exist_ok=True) as folder:
        assert folder.is_dir()
    assert "has no locks" in caplog.text
    assert os.strerror(number) in caplog.text
    assert [path.name for path in folder.iterdir()] == [".report-abcdefgh.part.json"]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/dev/null")], ids=["folder", "link"])
def test_what_is_no_lock_file_is_refused_in_one_line(tmp_path, make):
    make(tmp_path / LOCK_FILE)
    with pytest.raises(InputError, match=rf"cannot write {re.escape(str(tmp_path / LOCK_FILE))}: "), held(tmp_path):
        pass


def test_another_programs_lock_file_is_left_alone(tmp_path):
    (tmp_path / LOCK_FILE).write_text("4711\n")
    with pytest.raises(InputError, match=r"\.lock is no lock of this project's; choose another folder"), held(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).read_text() == "4711\n"


def test_a_run_that_fails_leaves_no_empty_folder(tmp_path):
    with pytest.raises(RuntimeError), new_run(tmp_path, "exp"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError), new_run(tmp_path, "mine", exist_ok=True):
        raise RuntimeError

    def fail_late() -> None:
        with new_run(tmp_path, "exp") as folder:
            (folder / "report.json").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_late()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "exp", "exp/report.json", "mine",
    ]  # fmt: skip


def test_half_written_files_are_cleared_everywhere_in_the_folder_and_nothing_else(tmp_path):
    names = ["a.png", "weights/last.pt", "parts/0.pt", "report.json", "placement.txt", "report.html", "recipe.yaml",
             "engines/a.onnx", "engines/a.engine", "benchmark.md"]  # fmt: skip
    for name in names:
        with atomic_path(tmp_path / name) as temporary:
            pass
        (tmp_path / name).rename(temporary)  # as if it had been killed just before
    assert len([path for path in tmp_path.rglob(".*") if path.is_file()]) == len(names)
    (tmp_path / "int8").mkdir()  # a run of its own
    kept = [".hidden.json", ".config-settings.json", "a-abcdefgh.part.json", ".x-abcdefgh.part.doc", "int8/.lock"]
    kept += ["int8/.report-abcdefgh.part.json"]
    for name in kept:
        (tmp_path / name).touch()
    with held(tmp_path):
        pass
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        kept
    )
    (tmp_path / "int8/.lock").unlink()
    clear_leftovers(tmp_path)
    assert not (tmp_path / "int8/.report-abcdefgh.part.json").exists()


@pytest.fixture
def quickstart(tmp_path) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Run quickstart's look at the folder `tmp_path/exp`."""
    text = (ROOT / "scripts/quickstart.sh").read_text()
    functions = [re.search(rf"^{name}\(\) {{\n.*?^}}\n", text, re.M | re.S) for name in ("in_use", "make_run_folder")]
    words = [f". {shlex.quote(str(ROOT / 'scripts/lib.sh'))}", *(found.group() for found in functions if found)]
    words += [f"run={shlex.quote(str(tmp_path / 'exp'))} resume=no weights=a.pt data=a.yaml MARK=.quickstart"]
    words += ["make_run_folder"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-euc", "\n".join(words)], capture_output=True, text=True, check=False)

    return run


def test_quickstart_removes_no_folder_that_a_program_lives_in(holder, quickstart, tmp_path):
    process = holder()
    answer(process)
    (tmp_path / "exp/weights").mkdir()
    (tmp_path / "exp/weights/last.pt").touch()
    (tmp_path / "exp/.quickstart").touch()
    done = quickstart()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is in use by another program" in done.stderr
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert quickstart().returncode == 0
    assert [path.name for path in (tmp_path / "exp").iterdir()] == [".quickstart"]


def test_quickstart_starts_over_in_a_folder_where_a_run_was_killed_at_its_start(quickstart, tmp_path):
    (tmp_path / "exp/weights").mkdir(parents=True)
    (tmp_path / "exp" / LOCK_FILE).touch()
    assert quickstart().returncode == 0
    (tmp_path / "exp/weights/.last-abcdefgh.part.pt").touch()
    assert quickstart().returncode == 0
    assert [path.name for path in (tmp_path / "exp").iterdir()] == [".quickstart"]
    (tmp_path / "exp/.quickstart").rename(tmp_path / "exp/thesis.txt")
    assert quickstart().returncode == 2
