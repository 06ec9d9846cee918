"""A step: a program that is run when its result is not there, with a log of what it prints."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.errors import InputError, QatError
from utils.core.file_schema import check, listing, number, record, text
from utils.core.files import atomic_path, named_when_full

logger = logging.getLogger(__name__)

NOTES = "steps.json"
_NOTE = record({"step": text(), "command": listing(text()), "seconds": number(0)})
_NOTES = record({"steps": listing(_NOTE)})

CHECKOUT = Path(__file__).resolve().parents[3]


class StepError(QatError):
    """A program of a step failed; the message says where its log is."""


@dataclass(frozen=True)
class Steps:
    """The steps of one network, or of the whole comparison, and their folder.

    Attributes:
        folder: where results lie, logs below it, and `steps.json`, which says what was run to its end.
        name: what messages call it.
        environment: variables that differ from this process's.
        engine_python: the interpreter of steps that need TensorRT.
    """

    folder: Path
    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    engine_python: str = sys.executable

    @property
    def weights(self) -> Path:
        """The float checkpoint of the deployed network, which all later steps begin with."""
        return self.folder / "float.pt"

    def run(self, step: str, result: Path, command: Sequence[str | Path], *, tensorrt: bool = False) -> None:
        """Run a program of the checkout, unless it was run to its end and its result is there.

        Args:
            step: what it does, a few words; its log is named after it.
            result: a file that the program writes.
            command: a program of the checkout with its options, or options of Python itself.
            tensorrt: whether it needs TensorRT.

        Raises:
            StepError: the program failed, or left no result.
        """
        if result.exists() and any(note["step"] == step for note in self.notes()):
            logger.info("%s: %s is there", self.name, result.relative_to(self.folder))
            return
        self.call(step, command, tensorrt=tensorrt)
        if not result.exists():
            raise StepError(f"{self.name}: {step} left no {result}; {self._log(step)} says more")

    def call(self, step: str, command: Sequence[str | Path], *, tensorrt: bool = False) -> None:
        """Run a program of the checkout; what it prints goes to the step's log.

        Raises:
            StepError: the program failed.
        """
        log = self._log(step)
        log.parent.mkdir(parents=True, exist_ok=True)
        logger.info("%s: %s; %s says how far it is", self.name, step, log)
        words = [self.engine_python if tensorrt else sys.executable, *map(str, command)]
        started = time.monotonic()
        with log.open("a", encoding="utf-8") as output:
            with named_when_full(log):
                print(f"$ {shlex.join(words)}", file=output, flush=True)
            done = subprocess.run(
                words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=CHECKOUT, check=False,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        seconds = time.monotonic() - started
        if done.returncode != 0:
            raise StepError(f"{self.name}: {step} failed with exit code {done.returncode}: {_end(log)}; see {log}")
        self._note(step, words[1:], seconds)
        logger.info("%s: %s took %.0f s", self.name, step, seconds)

    def _log(self, step: str) -> Path:
        return self.folder / "logs" / f"{step.replace(' ', '-')}.log"

    def notes(self) -> list[dict[str, Any]]:
        """What was run to its end so far: the step, its command without the interpreter, and seconds.

        Raises:
            InputError: the file of notes is damaged.
        """
        file = self.folder / NOTES
        if not file.exists():
            return []
        try:
            notes = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}); remove it, and the steps run again") from None
        check({"steps": notes}, _NOTES, str(file), "remove it, and the steps run again", InputError)
        return list(notes)

    def _note(self, step: str, command: list[str], seconds: float) -> None:
        notes = [*self.notes(), {"step": step, "command": command, "seconds": round(seconds, 1)}]
        with atomic_path(self.folder / NOTES) as path:
            path.write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")


def _end(log: Path) -> str:
    """The last words of a log, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return " / ".join(line.strip() for line in lines if line.strip())[-300:] if lines else "it said nothing"
