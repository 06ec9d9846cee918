"""`--tune MINUTES`: engines of several optimization levels and auxiliary streams, timed interleaved; the fastest stays.

What was asked for is built twice. How far the times of these two engines differ is the noise: another engine takes the
place of the first one if it is faster by more than that.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tqdm import tqdm

from utils.core.errors import InputError, QatError
from utils.core.files import copy_file
from utils.core.text import aligned, columns
from utils.trt import tensorrt_api, timing
from utils.trt.build import BuildResult, build, cache_path
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, decide, describe_options
from utils.trt.tensorrt_api import Api

logger = logging.getLogger(__name__)

# In the order in which they are tried; None is TensorRT's own, level 3. Builds with 5 streams did not end in minutes.
LEVELS, STREAMS = (None, 2, 4, 5), (None, 2, 3, 1, 4)
LEAST_LIMIT = 120.0  # seconds that any build may take: one of GELAN-C with a timing cache takes 20 to 50
COLUMNS = columns(("built with", "built in", "ms", "spread", ""), left=("built with", ""))


class BuildTimeout(QatError):
    """A build that was ended at its limit."""


class BuildProcess:
    """Builds one engine after the other in a process, which loads TensorRT once; a context manager that ends it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0

    def __enter__(self) -> BuildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def build(self, onnx: Path, engine: Path, config: BuildConfig, limit: float) -> BuildResult:
        """Build an engine; end the process if that takes longer than `limit` seconds, and start another for the next.

        Raises:
            BuildTimeout: it took longer.
            QatError: the process died, or see `build.build`, whose errors are raised here.
        """
        try:
            if self._pool is None:
                device = tensorrt_api.current_device().index
                spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
                self._pool = ProcessPoolExecutor(1, spawn, _start_worker, (device,))
                self._pid = self._pool.submit(os.getpid).result()
            return self._pool.submit(build, onnx, engine, config).result(limit)
        except FutureTimeoutError as error:
            self.close()
            raise BuildTimeout(f"not built within {limit:.0f} s") from error
        except BrokenProcessPool as error:
            self.close()
            raise QatError("the build's process ended without an answer: a crash, or no memory") from error

    def close(self) -> None:
        """End the process, whatever it does."""
        for process in multiprocessing.active_children():
            if process.pid == self._pid:
                process.kill()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def _start_worker(device: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program answers Ctrl-C, which reaches both
    logging.disable(logging.ERROR)  # the builder's warnings are in the note beside the engine
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a process that is killed leaves
    if device is not None:
        import torch

        torch.cuda.set_device(device)


def build_or_tune(
    onnx: Path, engine: Path, config: BuildConfig, api: Api | None = None, process: BuildProcess | None = None
) -> BuildResult:
    """Build an engine: of the fastest options for `config.tune` minutes, within `config.build_limit`, or as it is.

    Args:
        process: builds, and goes on for the next engine; None: one of its own for the current GPU.

    Raises:
        InputError, QatError: see `build.build` and `tune`; or the build took longer than its limit.
    """
    if config.tune is not None:
        return tune(onnx, engine, config, api or tensorrt_api.load_tensorrt(), process)
    if config.build_limit is None:
        return build(onnx, engine, config, api)
    with nullcontext(process) if process is not None else BuildProcess() as builds:
        try:
            result = builds.build(onnx, engine, config, 60 * config.build_limit)
        except BuildTimeout as error:
            raise QatError(f"{onnx}: {error}") from error
    for text in result.note.warnings:
        logger.warning("TensorRT: %s", text)
    return result


@dataclass(eq=False)
class _Candidate:
    """A build of these options: its seconds, why there is no engine, and the milliseconds of each round of timing."""

    config: BuildConfig
    engine: Path
    seconds: float = 0.0
    failure: Exception | None = None
    rounds: tuple[float, ...] = ()
    error: str = ""

    @property
    def ms(self) -> float:
        return median(self.rounds) if self.rounds else float("inf")


def tune(onnx: Path, engine: Path, config: BuildConfig, api: Api, process: BuildProcess | None = None) -> BuildResult:
    """Build for `config.tune` minutes on the current GPU, and keep the fastest engine; the table is logged.

    From the first build on `engine` is the fastest so far, so that an interruption leaves that, or nothing.

    Raises:
        InputError: see `build.build`; or there is nothing to try.
        QatError: what was asked for cannot be built, or not within the time.
    """
    levels = LEVELS if config.optimization_level is None else (config.optimization_level,)
    streams = STREAMS if config.max_aux_streams is None else (config.max_aux_streams,)
    if len(levels) == len(streams) == 1:
        raise InputError("--tune has nothing to try; leave out --optimization-level or --max-aux-streams")
    decide(OnnxFile.read(onnx), api, tensorrt_api.gpu(), config)  # refuses what a build would refuse
    cache = cache_path(engine, config, api.name, tensorrt_api.gpu())
    base = replace(config, tune=None, progress=False, timing_cache="" if cache is None else str(cache))
    deadline = time.monotonic() + 60 * (config.tune or 0.0)
    engine.parent.mkdir(parents=True, exist_ok=True)
    candidates: list[_Candidate] = []
    with (
        TemporaryDirectory(dir=engine.parent, prefix=f".{engine.stem}-", suffix=".tune") as folder,
        nullcontext(process) if process is not None else BuildProcess() as builds,
        tqdm(total=len(levels) * len(streams) + 1, desc=engine.name, unit="engine", disable=not config.progress) as bar,
    ):

        def attempt(options: BuildConfig, limit: float = float("inf")) -> _Candidate:
            limit = min(limit if config.build_limit is None else 60 * config.build_limit, deadline - time.monotonic())
            candidate, began = _Candidate(options, Path(folder, f"{len(candidates)}.engine")), time.monotonic()
            candidates.append(candidate)
            try:
                builds.build(onnx, candidate.engine, options, max(limit, 0.0))
            except Exception as error:  # noqa: BLE001 - errors of any kind become rows of the table
                candidate.failure, candidate.error = error, " ".join(str(error).split())
            candidate.seconds = time.monotonic() - began
            bar.update()
            return candidate

        first = best = attempt(base)
        if first.failure is not None:
            late = isinstance(first.failure, BuildTimeout)
            kind = InputError if isinstance(first.failure, InputError) else QatError
            more = "; give --tune more minutes, or --optimization-level 2" if late else ""
            raise kind(f"{onnx}, as asked for: {first.error}{more}") from first.failure
        _keep(engine, best, candidates, config, complete=False)
        control = attempt(base)
        longest = max(LEAST_LIMIT, 4 * control.seconds, 3 * first.seconds)
        for level in levels:
            group = []
            for number in streams:
                options = replace(base, optimization_level=level, max_aux_streams=number)
                if options != base and deadline - time.monotonic() > control.seconds:
                    group.append(attempt(options, longest))
                    if isinstance(group[-1].failure, BuildTimeout):  # the next one may take as long
                        break
            if group:
                best = _fastest([first, control, best, *group], api)
                _keep(engine, best, candidates, config, complete=False)
        best = _fastest([first, control, best], api)  # by times that did not choose it
        _keep(engine, best, candidates, config, complete=True)
    remarks, rows = {control: "as asked for, again", first: "as asked for", best: "kept"}, []
    for tried in candidates:
        times = (f"{tried.ms:.3f}", f"{max(tried.rounds) - min(tried.rounds):.3f}") if tried.rounds else ("", "")
        words = describe_options(tried.config.options)
        rows.append((words, f"{tried.seconds:.0f} s", *times, tried.error or remarks.get(tried, "")))
    logger.info("%s", "\n".join(aligned(COLUMNS, rows)))
    both = first.rounds + control.rounds
    logger.info("%s: %s: %.1f%% less time than as asked for; the noise is %.1f%%",
                engine, describe_options(best.config.options), 100 * (1 - best.ms / first.ms),
                100 * (max(both) / min(both) - 1))  # fmt: skip
    return BuildResult(engine, engine.stat().st_size, EngineNote.load(engine))


def _fastest(candidates: list[_Candidate], api: Api) -> _Candidate:
    """Time engines interleaved; the first, what was asked for, unless another one is faster by more than the noise."""
    first, control, *others = candidates
    engines = {str(candidate.engine): candidate.engine for candidate in candidates if candidate.failure is None}
    times = timing.time_engines(engines, api, tensorrt_api.current_device())
    for candidate in candidates:
        result = times.get(str(candidate.engine), candidate.error)
        candidate.rounds, candidate.error = ((), result) if isinstance(result, str) else (result, "")
    if first.error:
        raise QatError(f"what was asked for cannot be timed: {first.error}")
    both = first.rounds + control.rounds
    fastest = min(others, key=lambda candidate: candidate.ms)
    return fastest if fastest.ms < first.ms - (max(both) - min(both)) else first


def _keep(engine: Path, best: _Candidate, candidates: list[_Candidate], config: BuildConfig, *, complete: bool) -> None:
    """Put the fastest so far at `engine`, with a note of what was tried, which `is_current` reads."""
    rows = [{"options": tried.config.options, "seconds": tried.seconds, "ms": list(tried.rounds), "error": tried.error}
            for tried in candidates]  # fmt: skip
    tuning = {"minutes": config.tune, "complete": complete, "given": config.options, "candidates": rows}
    copy_file(best.engine, engine)
    replace(EngineNote.load(best.engine), tuning=tuning).save(engine)
