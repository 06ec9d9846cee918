"""`--tune MINUTES`: engines with several optimization levels and auxiliary streams, timed in turns; the fastest stays.

What was asked for is built twice. How far the turns of these two engines differ is the noise: another engine takes the
place of the first one if it is faster by more than that.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import TracebackType

from tqdm import tqdm

from utils.core.errors import InputError, QatError
from utils.core.files import check_writable, copy_file
from utils.core.text import aligned, columns
from utils.trt import onnx_summary, tensorrt_api, timing
from utils.trt.build_config import BuildConfig, describe_options
from utils.trt.build_preflight import decide
from utils.trt.builder import BuildResult, build, cache_path
from utils.trt.engine_file import EngineNote
from utils.trt.tensorrt_api import Api

logger = logging.getLogger(__name__)

# In the order in which they are tried; None is TensorRT's own, level 3. Builds with 5 streams did not end in minutes.
LEVELS, STREAMS = (None, 2, 4, 5), (None, 2, 3, 1, 4)
COLUMNS = columns(("built with", "built in", "ms", "spread", ""), left=("built with", ""))


@dataclass(eq=False)
class _Candidate:
    """An engine that was built, or not: `error` says why. `turns` are its milliseconds when it was timed last."""

    config: BuildConfig
    engine: Path
    outcome: Outcome
    error: str
    turns: tuple[float, ...] = ()

    @property
    def ms(self) -> float:
        return median(self.turns) if self.turns else float("inf")

    def row(self, remark: str) -> tuple[str, ...]:
        times = (f"{self.ms:.3f}", f"{max(self.turns) - min(self.turns):.3f}") if self.turns else ("", "")
        return describe_options(self.config.options), f"{self.outcome.seconds:.0f} s", *times, self.error or remark


def build_or_tune(
    onnx: Path, engine: Path, config: BuildConfig, api: Api | None = None, process: BuildProcess | None = None
) -> BuildResult:
    """`tune`, `build_within` or `builder.build`, as `config` has minutes for one of them."""
    if config.tune is not None:
        return tune(onnx, engine, config, api or tensorrt_api.load(), process)
    if config.build_limit is not None:
        return build_within(onnx, engine, config, process)
    return build(onnx, engine, config, api)


def tune(onnx: Path, engine: Path, config: BuildConfig, api: Api, process: BuildProcess | None = None) -> BuildResult:
    """Build for `config.tune` minutes on the current GPU, and keep the fastest engine; the table is logged.

    From the first build on `engine` is the fastest so far, so that an interruption leaves that, or nothing. `process`
    builds and goes on for the next engine; None: one of its own for the current GPU.

    Raises:
        InputError: see `builder.build`; or there is nothing to try.
        QatError: what was asked for cannot be built, or not within the time.
    """
    levels = LEVELS if config.optimization_level is None else (config.optimization_level,)
    streams = STREAMS if config.max_aux_streams is None else (config.max_aux_streams,)
    if len(levels) == len(streams) == 1:
        raise InputError("--tune has nothing to try; leave out --optimization-level or --max-aux-streams")
    decide(onnx_summary.read(onnx), api, tensorrt_api.gpu(), config)  # refuses what a build would refuse
    cache = cache_path(engine, config, api.name, tensorrt_api.gpu())
    base = replace(config, tune=None, progress=False, timing_cache="" if cache is None else str(cache))
    deadline = time.monotonic() + 60 * (config.tune or 0.0)
    check_writable(engine)
    candidates: list[_Candidate] = []
    with (
        TemporaryDirectory(dir=engine.parent, prefix=f".{engine.stem}-", suffix=".tune") as folder,
        nullcontext(process) if process is not None else BuildProcess() as builds,
        tqdm(total=len(levels) * len(streams) + 1, desc=engine.name, unit="engine", disable=not config.progress) as bar,
    ):

        def attempt(settings: BuildConfig, limit: float = float("inf")) -> _Candidate:
            limit = min(limit if config.build_limit is None else 60 * config.build_limit, deadline - time.monotonic())
            path = Path(folder, f"{len(candidates)}.engine")
            outcome = builds.build(onnx, path, settings, max(limit, 0.0))
            candidates.append(_Candidate(settings, path, outcome, outcome.error))
            bar.update()
            return candidates[-1]

        first = best = attempt(base)
        if first.error:
            more = "; give --tune more minutes, or --optimization-level 2" if first.outcome.late else ""
            raise first.outcome.as_error(f"{onnx}, as asked for: {first.error}{more}")
        _keep(engine, best, candidates, config, complete=False)
        control = attempt(base)
        longest = max(LEAST_LIMIT, 4 * control.outcome.seconds, 3 * first.outcome.seconds)
        for level in levels:
            group = []
            for number in streams:
                settings = replace(base, optimization_level=level, max_aux_streams=number)
                if settings != base and deadline - time.monotonic() > control.outcome.seconds:
                    group.append(attempt(settings, longest))
                    if group[-1].outcome.late:  # the next one may take as long
                        break
            if group:
                best = _fastest([first, control, best, *group], api)
                _keep(engine, best, candidates, config, complete=False)
        best = _fastest([first, control, best], api)  # by turns that did not choose it
        _keep(engine, best, candidates, config, complete=True)
    remarks = {control: "as asked for, again", first: "as asked for", best: "kept"}
    logger.info("%s", "\n".join(aligned(COLUMNS, [one.row(remarks.get(one, "")) for one in candidates])))
    noise = max(first.turns + control.turns) / min(first.turns + control.turns) - 1
    logger.info("%s: %s: %.1f%% less time than as asked for; the noise is %.1f%%",
                engine, describe_options(best.config.options), 100 * (1 - best.ms / first.ms), 100 * noise)  # fmt: skip
    return BuildResult(engine, engine.stat().st_size, EngineNote.load(engine))


def _fastest(several: list[_Candidate], api: Api) -> _Candidate:
    """Time engines in turns; the first, what was asked for, unless another one is faster by more than the noise."""
    first, control, *others = several
    files = {str(one.engine): one.engine for one in several if not one.outcome.error}
    found = timing.time_in_turns(files, api, tensorrt_api.current_device())
    for one in several:
        result = found.get(str(one.engine), one.error)
        one.turns, one.error = ((), result) if isinstance(result, str) else (result, "")
    if first.error:
        raise QatError(f"what was asked for cannot be timed: {first.error}")
    both = first.turns + control.turns
    fastest = min(others, key=lambda one: one.ms)
    return fastest if fastest.ms < first.ms - (max(both) - min(both)) else first


def _keep(engine: Path, best: _Candidate, tried: list[_Candidate], config: BuildConfig, *, complete: bool) -> None:
    """Put the fastest so far at `engine`, with a note of what was tried, which `is_current` reads."""
    rows = [{"options": one.config.options, "seconds": one.outcome.seconds, "ms": list(one.turns), "error": one.error}
            for one in tried]  # fmt: skip
    tuning = {"minutes": config.tune, "complete": complete, "given": config.options, "candidates": rows}
    copy_file(best.engine, engine)
    replace(EngineNote.load(best.engine), tuning=tuning).save(engine)


TICK = 0.5  # seconds between two looks at a build that runs
PLAN_IS_THERE = "plan"
Work = Callable[[Path, Path, BuildConfig, Callable[[], None]], object]
LEAST_LIMIT = 120.0  # seconds that any build may take: one of GELAN-C with a timing cache takes 20 to 50


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
