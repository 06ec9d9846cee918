"""`--tune MINUTES`: engines of several optimization levels and auxiliary streams, timed interleaved; the fastest stays.

The requested options are built twice. The difference between the times of these two engines is the noise: another
engine replaces the first one if it is faster by more than that.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from utils.core.errors import InputError, QatError
from utils.core.files import write_bytes
from utils.core.logging import log_level
from utils.core.text import aligned, plural
from utils.trt import tensorrt_api
from utils.trt.build import build, cache_path
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_file import OnnxFile
from utils.trt.preflight import decide
from utils.trt.runner import Execution
from utils.trt.tensorrt_api import Api
from utils.trt.timing import TimingConfig, interleaved, time_interleaved

logger = logging.getLogger(__name__)

# In the order in which they are tried; None is TensorRT's own level, 3. The streams of a build by default come first.
# Builds with 5 streams did not end in minutes.
LEVELS: tuple[int | None, ...] = (None, 2, 4, 5)
STREAMS = (2, 3, 1, 0)
# Only where builds can be stopped: one of gelan-c (TensorRT 8.6.0, H200) had not ended after 7 minutes.
SLOW_STREAMS = (4,)
TITLES = ("built with", "built in", "ms", "")
ROUNDS = 5
ROUND = TimingConfig(warm_up=100, duration=0.2, rounds=1, cuda_graph=True, transfers=False, iterations=20)


def build_or_tune(onnx: Path, engine: Path, config: BuildConfig, api: Api | None = None) -> EngineNote:
    """Build an engine as it is asked for, or of the fastest options for `config.tune` minutes."""
    if config.tune is None:
        return build(onnx, engine, config, api)
    return tune(onnx, engine, config, api)


@dataclass(eq=False)
class _Candidate:
    """A build of these options: its seconds, why there are no times, and the milliseconds of each round of timing."""

    config: BuildConfig
    engine: Path
    seconds: float = 0.0
    error: str = ""
    rounds: tuple[float, ...] = ()

    @property
    def ms(self) -> float:
        """Median milliseconds; infinite without times."""
        return median(self.rounds) if self.rounds else float("inf")

    def __str__(self) -> str:
        """The options that vary between candidates, such as 'level 2, 3 streams'."""
        words = []
        if self.config.optimization_level is not None:
            words.append(f"level {self.config.optimization_level}")
        if self.config.max_aux_streams is not None:
            words.append(plural(self.config.max_aux_streams, "auxiliary stream"))
        return ", ".join(words) or "TensorRT's own"

    def row(self, remark: str) -> tuple[str, str, str, str]:
        """Texts for TITLES, with the error, if there is one, in place of the remark."""
        milliseconds = f"{self.ms:.3f}" if self.rounds else ""
        return str(self), f"{self.seconds:.0f} s", milliseconds, self.error or remark

    def to_dict(self) -> dict[str, Any]:
        """The candidate as the engine's note holds it."""
        return {
            "options": self.config.options,
            "seconds": self.seconds,
            "ms": list(self.rounds),
            "error": self.error,
        }


def _noise(first: _Candidate, control: _Candidate) -> tuple[float, float]:
    """Smallest and largest milliseconds of two engines of the same options."""
    rounds = first.rounds + control.rounds
    return min(rounds), max(rounds)


def tune(onnx: Path, engine: Path, config: BuildConfig, api: Api | None = None) -> EngineNote:
    """Build for `config.tune` minutes on the current GPU, and keep the fastest engine; the table is logged.

    No build begins that would end too late if it took as long as the longest build but the first, which measures
    kernels that the timing cache then has. An interruption leaves at `engine` the fastest so far, or nothing.

    Raises:
        InputError, QatError: see `build.build`; or there is nothing to try, or the requested engine cannot be timed.
    """
    levels = LEVELS if config.optimization_level is None else (config.optimization_level,)
    if len(levels) == 1 and config.max_aux_streams is not None:
        raise InputError("--tune has nothing to try; leave out --optimization-level or --max-aux-streams")
    api = api or tensorrt_api.load_tensorrt()
    decide(OnnxFile.read(onnx), api, tensorrt_api.gpu(), config)  # refuses what a build would refuse
    cache = cache_path(engine, config, api.name, tensorrt_api.gpu())
    fixed = {"tune": None, "progress": False, "timing_cache": str(cache or "")}
    base = config.with_streams(api).model_copy(update=fixed)
    streams: tuple[int | None, ...] = (base.max_aux_streams,)
    if config.max_aux_streams is None:
        slow = SLOW_STREAMS if api.can_stop_builds else ()
        streams = tuple(dict.fromkeys((*streams, *STREAMS, *slow)))
    deadline = time.monotonic() + 60 * (config.tune or 0.0)
    engine.parent.mkdir(parents=True, exist_ok=True)
    candidates: list[_Candidate] = []
    total = len(levels) * len(streams) + 1
    with (
        TemporaryDirectory(dir=engine.parent, prefix=f".{engine.stem}-", suffix=".tune") as folder,
        tqdm(total=total, desc=engine.name, unit="engine", disable=not config.progress) as bar,
    ):

        def attempt(options: BuildConfig, until: float = float("inf")) -> _Candidate:
            candidate = _Candidate(options, Path(folder, f"{len(candidates)}.engine"))
            _build(onnx, candidate, api, until, is_requested=not candidates)
            candidates.append(candidate)
            bar.update()
            return candidate

        first = best = attempt(base)
        _keep(engine, best, candidates, config, complete=False)
        control = attempt(base)
        for level in levels:
            group = []
            for number in streams:
                options = base.model_copy(update={"optimization_level": level, "max_aux_streams": number})
                longest = max(candidate.seconds for candidate in candidates[1:])
                if options != base and time.monotonic() + longest < deadline:
                    group.append(attempt(options, deadline))
            if group:
                best = _fastest([first, control, best, *group], api)
                _keep(engine, best, candidates, config, complete=False)
        best = _fastest([first, control, best], api)  # by times that did not choose it
        _keep(engine, best, candidates, config, complete=True)
    remarks = {control: "as requested, again", first: "as requested", best: "kept"}
    rows = [candidate.row(remarks.get(candidate, "")) for candidate in candidates]
    logger.info("%s", "\n".join(aligned(TITLES, rows, ("built with", ""))))
    gain = 1 - best.ms / first.ms
    least, most = _noise(first, control)
    logger.info(
        "%s: %s: %.1f%% less time than with the requested options; the noise is %.1f%%",
        engine,
        best,
        100 * gain,
        100 * (most / least - 1),
    )
    return EngineNote.load(engine)


def _build(onnx: Path, candidate: _Candidate, api: Api, until: float, *, is_requested: bool) -> None:
    """Build a candidate and take the time; an error becomes its text, unless its options are the requested ones."""
    began = time.monotonic()
    try:
        with log_level("utils.trt", logging.ERROR):  # warnings are in the note beside the engine
            build(onnx, candidate.engine, candidate.config, api, until)
    except Exception as error:  # of any kind
        if is_requested:
            raise
        candidate.error = " ".join(str(error).split())
    candidate.seconds = time.monotonic() - began


def _fastest(candidates: list[_Candidate], api: Api) -> _Candidate:
    """Time engines interleaved; returns the first, the requested one, unless another is faster by more than the noise.

    Each runs at its profile's opt shape, in `ROUNDS` rounds.
    """
    executions: dict[_Candidate, Execution] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        for candidate in dict.fromkeys(candidates):
            if not candidate.engine.is_file():
                continue
            candidate.rounds = ()
            candidate.error = ""
            try:
                execution = stack.enter_context(closing(Execution(candidate.engine, api, device)))
                execution.set_shapes({name: shapes[1] for name, shapes in execution.profiles.items()})
                execution.graph()
                executions[candidate] = execution
            except (QatError, RuntimeError) as error:  # torch's, when memory is short or nothing can be captured
                candidate.error = " ".join(str(error).split())[:200]
        for candidate in interleaved(executions, ROUNDS):
            figures = time_interleaved({"": executions[candidate]}, ROUND)[""]
            candidate.rounds += (figures.parts["compute"].median,)
        executions.clear()
    torch.cuda.empty_cache()  # the next build wants the memory
    first, control, *others = candidates
    if first.error:
        raise QatError(f"the engine with the requested options cannot be timed: {first.error}")
    least, most = _noise(first, control)
    fastest = min(others, key=lambda candidate: candidate.ms)
    if fastest.ms < first.ms - (most - least):
        return fastest
    return first


def _keep(engine: Path, best: _Candidate, candidates: list[_Candidate], config: BuildConfig, *, complete: bool) -> None:
    """Put the fastest so far at `engine`, with a note of all candidates, which `is_current` reads."""
    tuning = {
        "minutes": config.tune,
        "complete": complete,
        "given": config.options,
        "candidates": [candidate.to_dict() for candidate in candidates],
    }
    write_bytes(engine, best.engine.read_bytes())
    replace(EngineNote.load(best.engine), tuning=tuning).save(engine)
