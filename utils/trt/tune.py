"""`--tune MINUTES`: engines of several build options, timed in turns on the GPU that they are for; the fastest stays.

The search starts from what was asked for and changes one option at a time: all values of the first option, the fastest
of them with all values of the next, and once more around while that finds something and time is left. What was asked
for is built and timed twice, and a candidate is kept if it is faster by more than these two engines' turns differ.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import interrupts
from utils.core.errors import InputError, QatError
from utils.core.files import copy_file
from utils.trt import candidates, onnx_summary, tensorrt_api
from utils.trt.build_apart import BuildProcess, limit_of_later
from utils.trt.build_config import BuildConfig
from utils.trt.builder import BuildResult, build, cache_path
from utils.trt.candidates import Candidate, Dimension
from utils.trt.decision import decide, profile_shapes
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_summary import OnnxFile
from utils.trt.tensorrt_api import Api

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm

logger = logging.getLogger(__name__)

FINALISTS = 3  # candidates that are timed once more at the end
LEVEL = "optimization_level"  # the option with which a build takes less time


def build_or_tune(
    onnx: Path, engine: Path, config: BuildConfig, api: Api | None = None, process: BuildProcess | None = None
) -> BuildResult:
    """`builder.build`, within its limit if `config` has one, or `tune` if it has minutes for that.

    Raises:
        InputError, QatError: see `builder.build` and `tune`; or a build took longer than its limit.
    """
    if config.tune is not None:
        return tune(onnx, engine, config, api, process)
    if config.build_limit is None:
        return build(onnx, engine, config, api)
    with nullcontext(process) if process is not None else BuildProcess(_device().index) as builds:
        outcome = builds.build(onnx, engine, config, config.build_limit * 60)
    if outcome.error:
        text = outcome.error if outcome.error.startswith(str(onnx)) else f"{onnx}: {outcome.error}"
        raise (InputError if outcome.exit_code == InputError.exit_code else QatError)(text)
    result = BuildResult(engine, engine.stat().st_size, EngineNote.load(engine))
    for text in result.note.warnings:
        logger.warning("TensorRT: %s", text)
    return result


def _device() -> torch.device:
    """The current GPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def tune(
    onnx: Path, engine: Path, config: BuildConfig, api: Api | None = None, process: BuildProcess | None = None
) -> BuildResult:
    """Build candidates for `config.tune` minutes on the current GPU, and keep the fastest; the table is logged.

    From the first engine on, the fastest so far lies at `engine`, so that an interruption leaves it, or nothing. The
    timing at the end, of some seconds, is not part of the minutes.

    Args:
        process: what builds, which goes on for the next engine; one of its own for the current GPU if None.

    Raises:
        InputError: see `builder.build`; or engines were asked for that cannot be timed here.
        QatError: what was asked for cannot be built, or not within the time.
    """
    from tqdm import tqdm

    file, api = onnx_summary.read(onnx), api or tensorrt_api.load()
    _check(file, api, config)
    device = _device()
    minutes = config.tune or 0.0
    shown = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{elapsed}} of {minutes:g} minutes{{postfix}}"
    with (
        nullcontext(process) if process is not None else BuildProcess(device.index) as builds,
        _work_folder(engine) as folder,
        tqdm(total=minutes * 60, desc=engine.name, bar_format=shown, mininterval=1, leave=False,
             disable=not config.progress) as bar,
    ):  # fmt: skip
        search = _Search(file, engine, config, api, device, folder, builds, bar)
        try:
            search.run()
        except KeyboardInterrupt:
            if search.kept is not None:
                logger.info("%s is the best so far: %s", engine, search.kept.words)
            raise
    kept = search.kept or search.default
    logger.info("%s", candidates.table(search.candidates, kept, asked=search.asked))
    logger.info("%s: %s", engine, candidates.verdict(search.candidates, kept, search.noise, asked=search.asked))
    return BuildResult(engine, engine.stat().st_size, EngineNote.load(engine))


def _check(file: OnnxFile, api: Api, config: BuildConfig) -> None:
    """What a build would refuse in its process, engines that cannot be timed here, and options that leave no choice."""
    if config.targets:
        raise InputError("--tune times engines, and those of --target are for GPUs elsewhere; leave one of them out")
    decide(file, api, tensorrt_api.gpu(), config)
    if not candidates.left_to_try(file, api, config):
        fields = [one.field for one in candidates.DIMENSIONS]
        given = [f"--{name.replace('_', '-')}" for name in fields if getattr(config, name) is not None]
        why = f"leave out {' or '.join(given)}" if given else f"{api.name} has none of the options that it tries"
        raise InputError(f"--tune has nothing left to try; {why}")


@dataclass
class _Search:
    """Candidates in the order of their builds: what was asked for, the same again, and what differs from it."""

    file: OnnxFile
    engine: Path
    config: BuildConfig
    api: Api
    device: torch.device
    folder: Path
    builds: BuildProcess
    bar: tqdm
    candidates: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None  # of the last timing
    kept: Candidate | None = None  # what lies at `engine`
    noise: float = 0.0  # milliseconds

    def __post_init__(self) -> None:
        self.began = self.shown = time.monotonic()
        cache = cache_path(self.engine, self.config, self.api.name, tensorrt_api.gpu())
        shared = "" if cache is None else str(cache)
        self.base = replace(self.config, tune=None, progress=False, timing_cache=shared)

    @property
    def asked(self) -> bool:
        """Whether the first candidate is what was asked for."""
        return self.base.optimization_level == self.config.optimization_level

    @property
    def default(self) -> Candidate:
        """What was asked for, with TensorRT's own choice of everything else, or of a lower level in its place."""
        return self.candidates[0]

    def left(self) -> float:
        """Seconds."""
        return self.began + (self.config.tune or 0.0) * 60 - time.monotonic()

    def run(self) -> None:
        """Build and time; in the end the fastest is at `engine`."""
        self._first()
        self._time([])
        while self._around() and self.left() > 0:
            pass
        timed = [one for one in self.candidates[2:] if one.against is not None]
        self._time(sorted(timed, key=lambda one: one.against or 0.0)[:FINALISTS])
        self._keep(complete=True)

    def _first(self) -> None:
        """What was asked for, and that once more; what takes more than half of the time is built at a lower level.

        No other level is tried then: the higher ones take longer still.
        """
        levels = [one for one in candidates.left_to_try(self.file, self.api, self.config) if one.field == LEVEL]
        first, exit_code = self._build(self.base, self.left() / 2 if levels else float("inf"))
        if first.late and levels:
            self.base = replace(self.base, optimization_level=min(levels[0].values))
            self.candidates.clear()
            first, exit_code = self._build(self.base)
        if first.error:
            kind = InputError if exit_code == InputError.exit_code else QatError
            lower = ", or a lower --optimization-level" if self.asked else ""
            in_time = f"; give --tune more minutes{lower}" if self.left() <= 0 else ""
            words = "as asked for" if self.asked else f"as asked for or with {first.words}"
            raise kind(f"{self.file.path}, {words}: {first.error}{in_time}")
        for text in EngineNote.load(first.engine).warnings:
            logger.warning("TensorRT: %s", text)
        self._keep()
        self._build(self.base)

    def _around(self) -> bool:
        """Try the values of each dimension; whether that changed what is kept."""
        before = self.kept
        for dimension in candidates.left_to_try(self.file, self.api, self.base):
            built = self._along(dimension, (*dimension.values, getattr(BuildConfig, dimension.field)))
            if built:
                self._time(built)
                self._keep()
        return self.kept is not before

    def _along(self, dimension: Dimension, values: Sequence[Any]) -> list[Candidate]:
        """Engines that differ from what is kept in one option, as far as they fit the time."""
        center, built = (self.kept or self.default).config, []
        again = self.candidates[1].seconds  # with what the timing cache knows by then
        limit = max(limit_of_later(again), dimension.patience * self.default.seconds)
        for value in values:
            config = replace(center, **{dimension.field: value})
            if any(one.config == config for one in self.candidates) or self.left() < again:
                continue
            if self._longer_than_a_late_one(config, dimension):
                continue
            candidate, _ = self._build(config, limit)
            if not candidate.error:
                built.append(candidate)
        return built

    def _longer_than_a_late_one(self, config: BuildConfig, dimension: Dimension) -> bool:
        """Whether a build was ended at its limit that had fewer streams, or a lower level, and no other difference."""
        changed: dict[str, Any] = {dimension.field: getattr(config, dimension.field)}
        value = changed[dimension.field]
        late = [one.config for one in self.candidates if one.late and replace(one.config, **changed) == config]
        others = [getattr(one, dimension.field) for one in late]
        return any(isinstance(value, int) and isinstance(other, int) and value > other for other in others)

    def _build(self, config: BuildConfig, limit: float = float("inf")) -> tuple[Candidate, int]:
        """A candidate, and the exit code of its error; `--build-limit` takes the place of `limit`, in seconds."""
        candidate = Candidate(config, self.folder / f"{len(self.candidates)}.engine", 0.0)
        self.bar.set_postfix_str(candidate.words)
        if self.config.build_limit is not None:
            limit = self.config.build_limit * 60
        limit = max(min(limit, self.left()), 0.0)
        outcome = self.builds.build(self.file.path, candidate.engine, config, limit, self._show)
        candidate.seconds, candidate.error, candidate.late = outcome.seconds, outcome.error, outcome.late
        self.candidates.append(candidate)
        logger.info("%s: %s", candidate.words, outcome.error or f"built in {outcome.seconds:.0f} s")
        return candidate, outcome.exit_code

    def _show(self) -> None:
        now = time.monotonic()
        self.bar.update(min(now - self.shown, self.bar.total - self.bar.n))
        self.shown = now

    def _time(self, others: Sequence[Candidate]) -> None:
        """Time candidates in turns with what was asked for, the control and what is kept, and choose."""
        from utils.trt.turns import Turns, time_in_turns

        several = (*self.candidates[:2], *([] if self.kept is None else [self.kept]), *others)
        running = {str(one.engine): one for one in several if not one.error}
        self.bar.set_postfix_str(f"timing {len(running)} engines")
        found = time_in_turns({name: one.engine for name, one in running.items()}, self.api, self.device, self._show)
        for name, one in running.items():
            times = found[name]
            one.turns, one.error = (times, "") if isinstance(times, Turns) else (None, times)
        if self.default.turns is None:
            raise QatError(f"{self.engine}, as asked for, cannot be timed: {self.default.error}")
        for one in running.values():
            one.against = None if one.turns is None else one.ms / self.default.ms - 1
        both = [ms for one in self.candidates[:2] if one.turns is not None for ms in one.turns.medians]
        self.noise = max(both) - min(both)
        fastest = min((one for one in running.values() if one is not self.candidates[1]), key=lambda one: one.ms)
        self.best = fastest if fastest.ms < self.default.ms - self.noise else self.default

    def _keep(self, complete: bool = False) -> None:
        """Put the best so far at `engine`, with its note."""
        best = self.best or self.default
        note = EngineNote.load(best.engine)
        with interrupts.held():
            if best is not self.kept:
                copy_file(best.engine, self.engine)
                self.kept = best
            replace(note, tuning=self.to_dict(best, complete)).save(self.engine)

    def to_dict(self, kept: Candidate, complete: bool) -> dict[str, Any]:
        """What the engine's note says: who won, by how much, and what else was tried."""
        shapes = {name: list(triple[1]) for name, triple in profile_shapes(self.file, self.config).items()}
        return {
            "minutes": self.config.tune,
            "complete": complete,
            "given": self.config.options,
            "kept": kept.config.options,
            "ms": None if kept.turns is None else kept.ms,
            "default_ms": None if self.default.turns is None else self.default.ms,
            "against_default": kept.against,
            "noise_ms": self.noise,
            "shapes": shapes or {name: list(shape) for name, shape in self.file.inputs.items()},
            "candidates": [one.to_dict() for one in self.candidates],
        }


@contextmanager
def _work_folder(engine: Path) -> Iterator[Path]:
    """A folder beside the engine that is gone afterwards, also when the process ends hard."""
    folder = engine.absolute().with_name(f".{engine.stem}-{os.urandom(4).hex()}.tune")
    interrupts.temporaries.add(str(folder))
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot write beside {engine}: {error.strerror}") from error
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)
        interrupts.temporaries.discard(str(folder))
