"""Builds in a process of their own, which can be ended: TensorRT's build call hears nothing while it runs.

The process stays for the next build, because Python, torch and TensorRT's kernels take seconds to load.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from utils.core.errors import InputError, QatError
from utils.trt import tensorrt_api
from utils.trt.build_config import BuildConfig
from utils.trt.builder import BuildResult, build
from utils.trt.engine_file import EngineNote

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds between two looks at a build that runs
PLAN_IS_THERE = "plan"
Work = Callable[[Path, Path, BuildConfig, Callable[[], None]], object]
LEAST_LIMIT = 120.0  # seconds that any build may take: one of GELAN-C with a timing cache takes 20 to 50


def limit_of_later(seconds: float) -> float:
    """Seconds that a build may take after one that took so many, and that left its kernels in the timing cache."""
    return max(LEAST_LIMIT, 4 * seconds)


@dataclass(frozen=True)
class Outcome:
    """How a build ended.

    Attributes:
        seconds: that it took.
        error: why there is no engine, as one line; '' if there is one.
        exit_code: of the error.
        late: whether it was ended at its limit.
    """

    seconds: float
    error: str = ""
    exit_code: int = 0
    late: bool = False

    def as_error(self, text: str) -> QatError:
        """An error with this text and the exit code of its kind."""
        return (InputError if self.exit_code == InputError.exit_code else QatError)(text)


def build_engine(onnx: Path, engine: Path, config: BuildConfig, on_plan: Callable[[], None]) -> None:
    """What the process does: `builder.build`."""
    build(onnx, engine, config, on_plan=on_plan)


class BuildProcess:
    """Builds one engine after the other, each within a limit of time; a context manager."""

    def __init__(self, device: int | None = None, work: Work = build_engine) -> None:
        """Nothing is started yet.

        Args:
            device: index of the GPU; None for torch's current one.
            work: builds an engine, and calls its last argument once only files are left to write.
        """
        self._device = tensorrt_api.current_device().index if device is None else device
        self._work = work
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> BuildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def build(
        self, onnx: Path, engine: Path, config: BuildConfig, limit: float, on_wait: Callable[[], object] = lambda: None
    ) -> Outcome:
        """Build an engine, and end the build if it takes longer than `limit` seconds.

        A build that has its plan in time is not ended any more, so that no file is half written.

        Args:
            on_wait: called every `TICK` seconds, for a progress bar.
        """
        began, writing = time.monotonic(), False
        try:
            connection = self._started()
            connection.send((onnx, engine, config))
            while True:
                left = began + limit - time.monotonic()
                if left <= 0 and not writing:
                    self.close()
                    return Outcome(time.monotonic() - began, f"not built within {limit:.0f} s", 1, late=True)
                if connection.poll(TICK if writing else min(left, TICK)):
                    message = connection.recv()
                    if message != PLAN_IS_THERE:
                        return Outcome(time.monotonic() - began, *message)
                    writing = True
                on_wait()
        except (EOFError, OSError) as error:
            why = f"did not start: {error}" if self._process is None else f"ended: {self._end()}"
            return Outcome(time.monotonic() - began, f"the build's process {why}", QatError.exit_code)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        context = get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._device, self._work), daemon=True)
        with theirs:
            process.start()
            self._process, self._connection = process, ours
        return ours

    def _end(self) -> str:
        """Why the process is gone, in words; the next build starts another."""
        assert self._process is not None
        self._process.join(TICK)
        code = self._process.exitcode
        self.close()
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def build_within(onnx: Path, engine: Path, config: BuildConfig, process: BuildProcess | None = None) -> BuildResult:
    """`builder.build` in a process, which is ended after `config.build_limit` minutes.

    Raises:
        InputError, QatError: see `builder.build`; or the build took longer than its limit.
    """
    with nullcontext(process) if process is not None else BuildProcess() as builds:
        outcome = builds.build(onnx, engine, config, 60 * (config.build_limit or 0))
    if outcome.error:
        raise outcome.as_error(outcome.error if outcome.error.startswith(str(onnx)) else f"{onnx}: {outcome.error}")
    result = BuildResult(engine, engine.stat().st_size, EngineNote.load(engine))
    for text in result.note.warnings:
        logger.warning("TensorRT: %s", text)
    return result


def _serve(connection: Connection, device: int | None, work: Work) -> None:
    """Answer each request with the error's line and exit code, which are '' and 0 if there is none."""
    from tqdm import tqdm

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program answers Ctrl-C, which reaches both
    logging.disable(logging.ERROR)  # the builder's warnings are in the note beside the engine
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a process that is killed leaves
    chosen = device is None
    while True:
        try:
            onnx, engine, config = connection.recv()
        except EOFError:  # the program is gone
            return
        try:
            if not chosen:
                import torch

                torch.cuda.set_device(device)  # may fail: a GPU that takes one process, or without memory for another
                chosen = True
            work(onnx, engine, config, lambda: connection.send(PLAN_IS_THERE))
            answer = "", 0
        except QatError as error:
            answer = str(error), error.exit_code
        except Exception as error:  # noqa: BLE001 - here is where errors of any kind become lines
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            answer = line, QatError.exit_code
        connection.send(answer)
