"""Steps: programs that are not run again once they have ended, unless something they depend on has changed.

    pipeline = Pipeline(folder, cwd=checkout, software=software_of(checkout))
    pipeline.run(RunStep("export", ["export_qat.py", "--weights", weights, "--output", file], output=file))

The pipeline's folder has three files for a step, by its name: `begun/NAME` is what a running or interrupted step
depends on, `done/NAME` the same of a step that has ended, with its output's digest, and `logs/NAME.log` is what its
program printed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import IO, Any

from utils.cli import Terminated
from utils.core.errors import InputError, QatError
from utils.core.files import file_hash, write_text
from utils.reports.schema import hardware

logger = logging.getLogger(__name__)

Words = list[str | Path]

GRACE = 2.0  # seconds that a program has to end by the Ctrl-C that the terminal has sent to it, too
CHUNK = 1 << 16  # bytes
INTERRUPTED = 130  # the exit code of a program that heard Ctrl-C
LIBRARIES = ("torch", "numpy", "opencv", "onnx", "openvino", "tensorrt")  # how the names of packages begin
PROGRAMS = ("*.py", "scripts/*.py", "models/**/*.py", "utils/**/*.py")  # of a checkout


class StepError(QatError):
    """The program of a step failed; the message names the step, its command and its log."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RunStep:
    """A program to run.

    Attributes:
        name: unique in the pipeline's folder.
        command: a Python program, or an option of Python itself such as -m, then its options.
        output: the file that the program leaves; None: there is none, and the step runs each time without a record.
        resume: a file, and options that are added to the command if an interrupted run has left that file.
        title: the step in words, for the terminal; by default its name.
        needs_output: whether it is an error if the program leaves no output.
        interpreter: the Python that runs the program.
    """

    name: str
    command: Sequence[str | Path]
    output: Path | None = None
    resume: tuple[Path, Words] | None = None
    title: str = ""
    needs_output: bool = True
    interpreter: str = sys.executable

    @property
    def text(self) -> str:
        """The command as in a shell, without the interpreter."""
        return shlex.join(map(str, self.command))

    @property
    def heading(self) -> str:
        """The step in words."""
        return self.title or self.name


@dataclass(frozen=True)
class Pipeline:
    """Steps that share a folder for their records and logs.

    Attributes:
        folder: of records and logs; None: neither is written, and each step runs.
        cwd: the folder that programs run in.
        software: what results depend on besides commands and files: name → version.
        only_commands: a step is known by its command alone, and one that is done with another command is refused, so
            that results of days are not replaced; one that was begun with another command begins anew. Programs print
            into their logs only.
    """

    folder: Path | None
    cwd: Path
    software: Mapping[str, str] = field(default_factory=dict)
    only_commands: bool = False
    _datasets: dict[Path, str] = field(default_factory=dict, init=False)  # YAML → its dataset's state

    def run(self, step: RunStep, *, resume: bool = False) -> None:
        """Run a step, unless it has ended with the same options and files.

        An interrupted step is continued if nothing has changed since it began, or, with `resume`, in any case.

        Raises:
            InputError: the step has ended with another command (`only_commands`).
            StepError: the program failed, or left no output.
            KeyboardInterrupt: the program was interrupted.
        """
        if step.output is None:
            self._start(step, [])
            return
        now = self._origin(step)
        if self._is_done(step, now):
            if not self.only_commands:
                say(f"{step.heading}: reused, since options and files are the same{_place(step)}")
            return
        if self.only_commands:
            self._refuse_other_command(step)
        else:
            self._tell_changes(step, now)
        more: Words = []
        if step.resume and step.resume[0].exists():
            begun = self._read("begun", step)
            if resume or begun == now or (self.only_commands and begun is None):
                more = step.resume[1]
        self._note_begin(step, now)
        self._start(step, more)
        self._note_end(step, now)

    def is_done(self, step: RunStep) -> bool:
        """Tell whether a step has ended, with the options and files of now, and its output is as it was left."""
        return self._is_done(step, self._origin(step))

    def _is_done(self, step: RunStep, now: Mapping[str, str]) -> bool:
        """`is_done`, with what the step depends on now."""
        record = self._read("done", step)
        if record is None or step.output is None:
            return False
        if self.only_commands:
            return step.output.exists() and record["command"] == step.text
        return record == {**now, "output": _content(step.output)}

    def forget(self, step: RunStep) -> None:
        """Let a step run again."""
        if self.folder is not None:
            (self.folder / "done" / step.name).unlink(missing_ok=True)

    def log(self, step: RunStep) -> Path | None:
        """Return the file that holds what a step's program printed."""
        return self.folder and self.folder / "logs" / f"{step.name}.log"

    def _origin(self, step: RunStep) -> dict[str, str]:
        """Return what a step's result depends on: its command, the content of its files, the software."""
        origin = {"command": step.text}
        if self.only_commands:
            return origin
        for word in map(str, step.command):
            path = self.cwd / word
            is_output = step.output is not None and path == self.cwd / step.output
            if path.is_file() and not is_output:
                origin[word] = _content(path)
                if path.suffix in (".yaml", ".yml"):
                    origin[word] += self._dataset_state(path)
        return origin | dict(self.software)

    def _dataset_state(self, path: Path) -> str:
        """Return the state of a dataset when its YAML first stood in a command; '' for another YAML.

        It is looked at once: a large dataset takes seconds, and most steps name it.
        """
        from utils.evaluation.data_yaml import load_data
        from utils.evaluation.disk_state import dataset_hash

        if path not in self._datasets:
            try:
                self._datasets[path] = dataset_hash(load_data(str(path)), ("train", "val"), {})
            except InputError:  # another YAML, or one that the program refuses with a reason
                self._datasets[path] = ""
        return self._datasets[path]

    def _refuse_other_command(self, step: RunStep) -> None:
        """Raise `InputError` if a result is there that another command has made."""
        record = self._read("done", step)
        has_output = step.output is not None and step.output.exists()
        if record is not None and record["command"] != step.text and has_output:
            raise InputError(f"{step.name} in {self.folder} was made by {record['command']}; choose another --output")

    def _tell_changes(self, step: RunStep, now: Mapping[str, str]) -> None:
        """Say what has changed since a step ended."""
        before = self._read("done", step)
        if before is None:
            return
        names = [name for name in {**before, **now} if name != "output"]
        changed = [name for name in names if before.get(name) != now.get(name)]
        reason = f"{', '.join(changed)} changed" if changed else f"{step.output} changed, or is gone"
        say(f"{step.heading}: runs again, since {reason}")

    def _read(self, state: str, step: RunStep) -> dict[str, str] | None:
        """Return the record of a step that has begun, or is done; None if there is none."""
        if self.folder is None:
            return None
        try:
            text = (self.folder / state / step.name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            content: dict[str, str] = json.loads(text)
        except ValueError:  # the command alone, as records of benchmarks were
            content = {"command": text.strip()}
        return content

    def _note_begin(self, step: RunStep, now: Mapping[str, str]) -> None:
        """Record what a step begins with; from here on it is not done."""
        if self.folder is not None:
            write_text(self.folder / "begun" / step.name, json.dumps(now, indent=1) + "\n")
            (self.folder / "done" / step.name).unlink(missing_ok=True)

    def _note_end(self, step: RunStep, now: Mapping[str, str]) -> None:
        """Record that a step has ended, and what it left."""
        if self.folder is not None:
            record = dict(now)
            if step.output is not None and not self.only_commands:
                record["output"] = _content(step.output)
            write_text(self.folder / "done" / step.name, json.dumps(record, indent=1) + "\n")
            (self.folder / "begun" / step.name).unlink()

    def _start(self, step: RunStep, more: Sequence[str | Path]) -> None:
        """Run the program of a step, and say how it ended; raises as `run`."""
        began, log = time.monotonic(), self.log(step)
        within = f"{self.folder.name}: " if self.only_commands and self.folder else ""
        if self.only_commands:
            logger.info("%s%s; its output goes to %s", within, step.name, log)
        else:
            say(step.heading)
        words = [str(word) for word in (step.interpreter, *step.command, *more)]
        code = self._exit_code(words, log, append=bool(more))
        seconds = round(time.monotonic() - began)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        problem = ""
        if code:
            problem = f"failed after {seconds} s with exit code {code}"
        elif step.output is not None and step.needs_output and not step.output.exists():
            problem = f"left no {step.output.name}"
        if problem:
            place = f"; see {log}" if log else ""
            command = f"cd {shlex.quote(str(self.cwd))} && {shlex.join(words)}"
            raise StepError(f"{within}{step.heading}: {problem}{place}; its command was: {command}", code or 1)
        if not self.only_commands:
            say(f"{step.heading}: done in {seconds} s")

    def _exit_code(self, words: Sequence[str], log: Path | None, append: bool) -> int:
        """Run a program to its end; return its exit code as a shell has it. `append`: add to the log that is there."""
        if log is None:
            return self._waited_for(words)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab" if append else "wb") as file:  # buffered, so that it has a lock: two threads write to it
            if self.only_commands:
                return self._waited_for(words, stdout=file, stderr=file)
            unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # into a pipe, Python would print at the end only
            return self._waited_for(words, file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=unbuffered)

    def _waited_for(self, words: Sequence[str], log: IO[bytes] | None = None, **streams: Any) -> int:
        """Run a program to its end, and copy its streams, if there is a `log`, to ours and to the log."""
        with subprocess.Popen(words, cwd=self.cwd, stdin=subprocess.DEVNULL, **streams) as process:
            copies = []
            if log is not None:
                for source, shown in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    copies.append(Thread(target=_copy, args=(source, shown.buffer, log, process), daemon=True))
            for copy in copies:
                copy.start()
            try:
                with _ending(process):
                    code = process.wait()
            finally:
                for copy in copies:
                    copy.join()
        return 128 - code if code < 0 else code


def say(text: str) -> None:
    """Log a line about the pipeline, in the form of the shell scripts."""
    logger.info("== %s", text)


def engine_typing(interpreter: str, checkout: Path, cwd: Path, *words: str) -> tuple[str, str]:
    """Ask whether engines can be built here.

    Args:
        interpreter: the Python with TensorRT.
        checkout: the patched checkout.
        cwd: the folder that paths in `words` are relative to.
        words: the dataset's YAML, and options of `check_engine_setup.py`.

    Returns:
        the typing (weak or strong) that TensorRT here needs, or '' and one line on why there can be no engine.
    """
    command = [interpreter, str(checkout / "scripts/check_engine_setup.py"), *words]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=cwd, check=False)
    if answer.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if answer.returncode == 0:
        return answer.stdout.split()[-1], ""
    lines = answer.stderr.strip().splitlines() or ["check_engine_setup.py failed"]
    return "", lines[-1]


def software_of(checkout: Path) -> dict[str, str]:
    """Return what a result depends on besides commands and files: the programs, their libraries, the machine."""
    programs = hashlib.sha256()
    for path in sorted({path for pattern in PROGRAMS for path in checkout.glob(pattern)}):
        programs.update(f"{path.relative_to(checkout)} {_content(path)}\n".encode())
    versions = {}
    for package in metadata.distributions():
        name = (package.metadata["Name"] or "").lower()
        if name.startswith(LIBRARIES):
            versions[name] = package.version
    gpus: dict[str, str] = {}
    for variable in ("CUDA_VISIBLE_DEVICES", "TRT_TACTIC_SOURCES_OFF"):
        if variable in os.environ:
            gpus[variable] = os.environ[variable]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, encoding="utf-8", check=False)
        gpus["GPUs"] = listed.stdout
    except OSError:  # nvidia-smi is not installed
        pass
    return {"the programs": programs.hexdigest(), **dict(sorted(versions.items())), **hardware(), **gpus}


def _content(path: Path) -> str:
    """Return a digest of a file; '' for none."""
    return file_hash(path) if path.is_file() else ""


def _place(step: RunStep) -> str:
    """Return the output of a step in brackets, if it left one."""
    return f" ({step.output})" if step.output and step.output.exists() else ""


def _copy(source: IO[bytes], shown: IO[bytes], log: IO[bytes], process: subprocess.Popen[bytes]) -> None:
    """Copy what a program prints to one of our streams, at once, and to its log, by whole lines.

    A program's two streams share the log. If our stream is closed, the program is terminated.
    """
    line = b""
    for chunk in iter(partial(os.read, source.fileno(), CHUNK), b""):
        whole, newline, rest = (line + chunk).rpartition(b"\n")
        log.write(whole + newline)
        log.flush()
        line = rest
        try:
            shown.write(chunk)
            shown.flush()
        except BrokenPipeError:
            process.terminate()
    log.write(line)
    log.flush()


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """On an error or a signal, wait `GRACE` seconds for the program, then send SIGINT after Ctrl-C, else SIGTERM."""
    try:
        yield
    except BaseException as error:
        number = signal.SIGINT
        if isinstance(error, Terminated) or not isinstance(error, KeyboardInterrupt):
            number = signal.SIGTERM
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            process.wait()
        raise
