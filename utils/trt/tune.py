"""`--tune MINUTES`: engines with several optimization levels and auxiliary streams, timed in turns; the fastest stays.

What was asked for is built twice. How far the turns of these two engines differ is the noise: another engine takes the
place of the first one if it is faster by more than that.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tqdm import tqdm

from utils.core.errors import InputError, QatError
from utils.core.files import check_writable, copy_file
from utils.core.text_tables import aligned, columns
from utils.trt import onnx_summary, tensorrt_api, timing
from utils.trt.build_apart import BuildProcess, Outcome, build_within, limit_of_later
from utils.trt.build_config import BuildConfig, describe_options
from utils.trt.builder import BuildResult, build, cache_path
from utils.trt.decision import decide
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
    """`tune`, `build_apart.build_within` or `builder.build`, as `config` has minutes for one of them."""
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
        longest = max(limit_of_later(control.outcome.seconds), 3 * first.outcome.seconds)
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
