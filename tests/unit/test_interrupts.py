"""How programs end on Ctrl-C and SIGTERM: small programs that do what libraries do to a KeyboardInterrupt."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from interrupting import group_members

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    path
    for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("data/demo/*.py")]
    if "__main__" in path.read_text(encoding="utf-8")
    and path.name not in ("interrupts.py", "train_masks.py")  # the second runs within run_upstream.py, which watches
]
START = "import interrupts\ninterrupts.watch(__name__)\nimport os, sys, time\ndef ready(): os.write(1, b'ready\\n')\n"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("version_info = (3, 9, 18)", "this is Python 3.9; 3.10 or newer is needed"),
        ("platform = 'win32'", "this needs Linux, and on Windows the Windows Subsystem for Linux (WSL)"),
    ],
)
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_python_that_cannot_do_it_is_refused_in_one_line(path, setting, message):
    code = f"import runpy, sys; sys.{setting}; runpy.run_path(sys.argv[1], run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, path, "-h"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


class Program:
    """A program of one test, started, and what it says."""

    def __init__(self, folder: Path, code: str, **options: object) -> None:
        file = folder / "program.py"
        file.write_text(START + textwrap.dedent(code), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        self.process = subprocess.Popen(
            [sys.executable, file], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", start_new_session=True, **options,
        )  # fmt: skip

    def wait_until_ready(self) -> Program:
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()
        return self

    def end(self, number: int = signal.SIGINT, presses: int = 1, group: bool = True) -> tuple[int, str, float]:
        """Send the signal; exit code, standard error and seconds."""
        began = time.monotonic()
        for _ in range(presses):
            (os.killpg if group else os.kill)(self.process.pid, number)
            time.sleep(0.02 * (presses > 1))
        said = self.process.communicate(timeout=30)[1]
        return self.process.returncode, said, time.monotonic() - began


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_program_watches_before_it_imports_anything_that_takes_time(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    watches = ["interrupts.watch(__name__)" in ast.unparse(node) for node in body]
    assert any(watches), "it does not watch at all"
    first = body[: watches.index(True)]
    imported = {
        name for node in first if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }  # fmt: skip
    assert imported <= {"__future__", "os", "sys", "interrupts"}


def test_watching_imports_nothing_that_python_has_not_loaded():
    code = "import sys; before = {*sys.modules}; import interrupts; print({*sys.modules} - before)"
    result = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
                            capture_output=True, text=True, encoding="utf-8", check=True)  # fmt: skip
    assert ast.literal_eval(result.stdout) <= {"interrupts", "__future__", "_signal", "_thread"}


SWALLOWING_LIBRARY = """
import os, time
os.write(1, b"ready\\n")
for _ in range(3000):
    try:
        time.sleep(0.01)
    except BaseException:
        pass
"""
SITUATIONS = {
    "while it imports": "import swallowing",
    "while its job imports": "interrupts.job(lambda: __import__('swallowing') and 0)",
    "in a job": "interrupts.job(lambda: ready() or time.sleep(60))",
    "in a job that ignores it": """
        def work():
            ready()
            while True:
                try:
                    time.sleep(60)
                except KeyboardInterrupt:
                    pass
        interrupts.job(work)
        """,
    "in a job that makes another error of it": """
        def work():
            try:
                ready()
                time.sleep(60)
            except BaseException:
                raise ImportError("a library")
        interrupts.job(work)
        """,
    "in a long call outside Python": """
        import hashlib
        interrupts.job(lambda: ready() or hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9))
        """,
    "in a finalizer": """
        class Slow:
            def __del__(self):
                ready()
                time.sleep(60)
        def work():
            Slow()
            time.sleep(60)
        interrupts.job(work)
        """,
    "while threads work": """
        import threading
        def work():
            for _ in range(4):
                threading.Thread(target=time.sleep, args=(60,)).start()
            ready()
            time.sleep(60)
        interrupts.job(work)
        """,
    "after its job": """
        import atexit
        atexit.register(lambda: ready() or time.sleep(60))
        sys.exit(interrupts.job(lambda: 0))
        """,
}


@pytest.mark.parametrize("presses", [1, 5])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_ctrl_c_is_one_line_and_130_within_five_seconds(situation, presses, tmp_path):
    (tmp_path / "swallowing.py").write_text(SWALLOWING_LIBRARY, encoding="utf-8")
    code, said, seconds = Program(tmp_path, SITUATIONS[situation]).wait_until_ready().end(presses=presses)
    assert (code, said) == (130, "interrupted\n")
    assert seconds < 5


@pytest.mark.parametrize("situation", SITUATIONS)
def test_sigterm_is_one_line_and_143(situation, tmp_path):
    (tmp_path / "swallowing.py").write_text(SWALLOWING_LIBRARY, encoding="utf-8")
    code, said, seconds = Program(tmp_path, SITUATIONS[situation]).wait_until_ready().end(signal.SIGTERM, group=False)
    assert (code, said) == (143, "terminated\n")
    assert seconds < 5


def test_a_job_may_close_what_it_opened(tmp_path):
    program = Program(tmp_path, """
        def work():
            try:
                ready()
                time.sleep(60)
            finally:
                print("continue with --resume")
        interrupts.job(work)
        """).wait_until_ready()  # fmt: skip
    os.kill(program.process.pid, signal.SIGINT)
    assert program.process.communicate(timeout=30)[0] == "continue with --resume\n"


def test_a_library_that_hears_of_its_workers_ends_says_nothing(tmp_path):
    program = Program(tmp_path, """
        import signal, subprocess, weakref
        def handler(number, frame):
            raise RuntimeError("worker is killed by signal: Terminated")
        signal.signal(signal.SIGCHLD, handler)
        class Library: pass
        library = Library()
        weakref.finalize(library, time.sleep, 0.5)  # called at the exit, and says what it raises
        def work():
            subprocess.Popen(["sleep", "60"], start_new_session=True)
            ready()
            time.sleep(60)
        interrupts.job(work)
        """).wait_until_ready()  # fmt: skip
    assert program.end(group=False)[:2] == (130, "interrupted\n")


@pytest.mark.parametrize("presses", [1, 5])
def test_temporary_files_go_also_when_nothing_unwinds(tmp_path, presses):
    program = Program(tmp_path, """
        import hashlib
        from utils.core.files import atomic_path
        def work():
            os.mkdir("folder"); os.mkdir("folder/deep"); open("folder/deep/file", "w").close()
            interrupts.temporaries.add(os.path.abspath("folder"))
            with atomic_path("result.bin") as temporary:
                temporary.write_bytes(b"half")
                ready()
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        interrupts.job(work)
        """).wait_until_ready()  # fmt: skip
    assert program.end(presses=presses)[0] == 130
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".pyc"] == ["program.py"]


WORKERS = """
    import multiprocessing
    def sleep(_):
        time.sleep(60)
    def work():
        context = multiprocessing.get_context("{start}")
        with interrupts.blocked():
            workers = [context.Process(target=sleep, args=(0,)) for _ in range(3)]
            for worker in workers:
                worker.start()
        ready()
        time.sleep(60)
    if __name__ == "__main__":
        interrupts.job(work)
    """


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes_end_with_it_and_say_nothing(start, number, tmp_path):
    program = Program(tmp_path, WORKERS.format(start=start)).wait_until_ready()
    code, said, seconds = program.end(number, group=number == signal.SIGINT)
    assert (code, said) == (128 + number, {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n"}[number])
    assert seconds < 5
    time.sleep(0.2)
    assert group_members(program.process.pid) == []


def test_what_must_not_be_cut_in_two_is_done_first(tmp_path):
    program = Program(tmp_path, """
        def work():
            with interrupts.held():
                ready()
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    time.sleep(0.01)
                open("done", "w").close()
            time.sleep(60)
        interrupts.job(work)
        """).wait_until_ready()  # fmt: skip
    code, said, _ = program.end(presses=5)
    assert (code, said) == (130, "interrupted\n")
    assert (tmp_path / "done").exists()


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    program = Program(tmp_path, "interrupts.job(lambda: ready() or time.sleep(1) or 0)", **ignore).wait_until_ready()
    assert program.end()[:2] == (0, "")


def test_importing_a_program_leaves_signals_as_they_are():
    import interrupts
    import val_trt

    before = signal.getsignal(signal.SIGTERM)
    interrupts.watch(val_trt.__name__)
    assert not interrupts.watching()
    assert signal.getsignal(signal.SIGTERM) == before


SCRIPT = """
set -euo pipefail
. {root}/scripts/lib.sh
if ! {python} {program}; then say "and goes on"; fi
say "and on"
"""


def test_a_shell_script_does_not_go_on_after_a_program_that_answered_ctrl_c(tmp_path):
    (tmp_path / "program.py").write_text(START + "interrupts.job(lambda: ready() or time.sleep(60))", encoding="utf-8")
    script = SCRIPT.format(root=ROOT, python=sys.executable, program=tmp_path / "program.py")
    process = subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "interrupted\n")
    assert process.returncode == 130


UNWOUND = """
    import atexit
    class Late:
        def __del__(self, write=os.write):
            write(1, b"unwound\\n")
    late = Late()
    atexit.register(print, "at the end")
    atexit.register(lambda: os.write(1, b"registered\\n"))
    print("printed")  # into a buffer, since this is a pipe
    """


def test_a_program_may_end_in_order_without_unwinding(tmp_path):
    program = Program(tmp_path, UNWOUND + "interrupts.leave(3)")
    assert program.process.communicate(timeout=30) == ("printed\nregistered\nat the end\n", "")
    assert program.process.returncode == 3


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("work", "code"), [("lambda _: 1", 1), ("lambda _: 0", 0), ("lambda _: 1 / 0", 1)])
def test_programs_end_so(together, work, code, tmp_path, monkeypatch):
    """Unwinding takes torch a second, and threads of torch.distributed may abort a process that does."""
    if together:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1")
    run = f"""
    import argparse
    from utils.cli import run_program
    raise SystemExit(run_program(argparse.ArgumentParser(), {work}, [], together=True))
    """
    program = Program(tmp_path, UNWOUND + run)
    output, errors = program.process.communicate(timeout=60)
    assert program.process.returncode == code
    assert output == "printed\nregistered\nat the end\n"
    assert errors.count("\n") == ("/" in work)


def test_programs_look_for_cycles_seldom(tmp_path):
    """Python does so after each 700 new objects, and importing torch makes a million."""
    run = """
    import argparse, gc
    from utils.cli import run_program
    before = gc.get_threshold()[0]
    raise SystemExit(run_program(argparse.ArgumentParser(), lambda _: print(before, gc.get_threshold()[0]), []))
    """
    output, _ = Program(tmp_path, run).process.communicate(timeout=60)
    before, inside = map(int, output.split())
    assert inside > 50 * before


def test_children_are_found_where_nothing_can_be_imported_any_more():
    """As in a program that a signal met while it imported."""
    program = (
        "import subprocess, sys, interrupts\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "sys.modules.pop('encodings.ascii', None)\n"
        "sys.meta_path.clear()\n"
        "found = interrupts._children()\n"
        "child.kill()\n"
        "sys.exit(found != [child.pid])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
