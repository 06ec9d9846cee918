"""Engines of a network with parts of it in float: built, and timed in turns with the all-INT8 engine."""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from models.quantize.recipe import Recipe
from utils.core import distributed
from utils.core.errors import InputError, QatError
from utils.core.output_paths import refuse_overwrite
from utils.jobs.dependencies import need
from utils.jobs.options import ENGINE_MINUTES, SensitiveOptions
from utils.jobs.sensitivity import selection
from utils.jobs.sensitivity.engine_points import Profile, Times
from utils.jobs.sensitivity.exporting import Exporter
from utils.jobs.sensitivity.state import AnalysisState
from utils.trt.build_apart import BuildProcess, Outcome, limit_of_later
from utils.trt.build_config import BuildConfig, describe_options
from utils.trt.engine_file import EngineNote, note_path

if TYPE_CHECKING:
    from utils.trt.tensorrt_api import Api

logger = logging.getLogger(__name__)

FOLDER = "engines"
INT8, AGAIN, FP16 = "INT8", "INT8 again", "FP16"  # the engines that all others are compared with
LONGEST_BASE = 1800.0  # seconds that the INT8 and the FP16 engine may take, which find no kernels in a cache


def check(options: SensitiveOptions) -> None:
    """Check what engines need, before anything is computed.

    Raises:
        InputError: no GPU or no TensorRT, several processes, or a timing cache that is one of the run's inputs.
    """
    from utils.trt import tensorrt_api

    if distributed.world().size > 1:
        raise InputError("--engine times engines on one GPU, in one process; start it without torchrun")
    read = [options.weights, options.data, options.recipe, options.hyp, options.profile]
    refuse_overwrite(filter(None, [options.timing_cache]), read, "choose another --timing-cache")
    need("onnx")
    tensorrt_api.load()
    device = tensorrt_api.engine_device(options.device)
    if tensorrt_api.gpu(device.index) is None:
        raise InputError(
            "--engine builds and times engines, and torch sees no NVIDIA GPU here; leave it out, or run this on a GPU "
            "host; --profile takes layer times that were measured elsewhere"
        )


class Bench:
    """Times of engines, kept in the run's state; the engines lie in its folder. A context manager.

    Attributes:
        limit: minutes that this process may spend on building and timing.
        times: name of a network → what was measured.
        failed: name of a network → why there is no engine of it.
        no_control: why the INT8 engine was timed twice instead of a second build of it; '' if it was not.
    """

    def __init__(
        self, folder: Path, state: AnalysisState, exporter: Exporter, options: SensitiveOptions,
        builds: BuildProcess | None = None,
    ) -> None:  # fmt: skip
        """Prepare to build below `folder`; nothing is built yet.

        Args:
            builds: builds; one for the exporter's GPU if None.
        """
        from utils.trt import tensorrt_api

        self._state, self._run, self._exporter = state, folder, exporter
        self._folder = folder / FOLDER
        self._api: Api = tensorrt_api.load()
        self._gpu = tensorrt_api.gpu(exporter.inputs.device.index)
        self._builds = builds or BuildProcess(exporter.inputs.device.index)
        self._config = BuildConfig(
            optimization_level=options.optimization_level, max_aux_streams=options.max_aux_streams,
            timing_cache=options.timing_cache, progress=False,
        )  # fmt: skip
        size = exporter.inputs.imgsz
        gpu = self._gpu.name if self._gpu else "no GPU"
        with_options = f", {describe_options(self._config.options)}" if self._config.options else ""
        self.measured_on = f"{self._api.name}, {gpu}, batch {exporter.batch}, {size}x{size}{with_options}"
        if state.engines.get("measured_on", self.measured_on) != self.measured_on:
            logger.info("engines were measured on %s, and this is %s: they are measured anew",
                        state.engines["measured_on"], self.measured_on)  # fmt: skip
            state.engines = {}
        saved = state.engines.get("times", {})
        self.times: dict[str, Times] = {name: Times.from_dict(entries) for name, entries in saved.items()}
        self.failed: dict[str, str] = {}
        self.no_control: str = state.engines.get("no_control", "")
        self._began, self.limit = time.perf_counter(), options.engine_minutes or ENGINE_MINUTES
        self._seconds = {name: one.seconds for name, one in self.times.items()}  # of builds

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._builds.close()

    @property
    def minutes(self) -> float:
        """How long this process has been at it."""
        return (time.perf_counter() - self._began) / 60

    def has_time(self) -> bool:
        """Whether the time limit leaves room for one more engine that is built from what others have measured."""
        return self.minutes + self._expected() / 60 < self.limit

    def path(self, name: str) -> Path:
        """The engine's file."""
        stem = {INT8: "int8", AGAIN: "int8-again", FP16: "fp16"}.get(name)
        return self._folder / f"{stem or f'mixed-{hashlib.sha256(name.encode()).hexdigest()[:12]}'}.engine"

    def measure(self, name: str, recipe: Recipe | None) -> Times | None:
        """Times of the network that a recipe makes, or of the float one; None if it cannot be built.

        Raises:
            QatError: there is no INT8 engine, or no FP16 one, to compare with.
        """
        if name in self.times or name in self.failed:
            return self.times.get(name)
        began = time.perf_counter()
        try:
            seconds = self._built(name, recipe)
            rounds = self._in_turns(name)
        except QatError as error:
            if name == FP16:
                raise
            logger.warning("%s in float: %s", name, error)
            self.failed[name] = str(error)
            return None
        self.times[name] = Times(rounds[name], rounds[INT8], rounds[AGAIN], seconds)
        self.no_control = "" if self.path(AGAIN).is_file() else self.failed.get(AGAIN, self.no_control)
        self._state.engines = {
            "measured_on": self.measured_on,
            "no_control": self.no_control,
            "times": {key: asdict(value) for key, value in self.times.items()},
        }
        self._state.add_seconds("engines", time.perf_counter() - began)
        self._state.save(self._run)
        return self.times[name]

    def compare_with(self, recipe: Recipe) -> None:
        """Build the INT8 engine, and its control if there is time; what is there already is used.

        Raises:
            QatError: the INT8 engine cannot be built.
        """
        self._built(INT8, recipe)
        if AGAIN in self.failed:
            return
        if not self.path(AGAIN).is_file() and not self.has_time():
            self.failed[AGAIN] = "there was no time for it"
        else:
            try:
                self._built(AGAIN, recipe)
            except QatError as error:
                self.failed[AGAIN] = str(error)

    def profile(self, name: str) -> Profile | None:
        """Layers of an engine with their milliseconds; None where TensorRT does not measure them."""
        from utils.trt import layer_report
        from utils.trt.context import Execution

        record = self.path(name).with_suffix(".layers.json")
        if not record.is_file() and not self.path(name).is_file():
            return None
        try:
            if not record.is_file():
                execution = Execution(self.path(name), self._api, self._exporter.inputs.device)
                try:
                    layer_report.save(layer_report.layers_of(execution), record)
                finally:
                    execution.close()
            return selection.read_profile(record)
        except QatError as error:
            logger.warning("nothing is estimated from layers: %s", error)
            return None

    def ms(self) -> float:
        """Milliseconds of the INT8 engine, the median over all rounds."""
        return median([ms for one in self.times.values() for ms in one.int8])

    def _built(self, name: str, recipe: Recipe | None) -> float:
        """Export and build, unless the engine is there; the seconds that the build took."""
        engine = self.path(name)
        if engine.is_file():
            note = EngineNote.load(engine)
            made_here = self._gpu is not None and note.made_by(self._api, self._gpu)
            if made_here and dict(note.options) == self._config.options:
                self._seconds[name] = note.seconds
                return note.seconds
        self._folder.mkdir(parents=True, exist_ok=True)
        onnx = engine.with_suffix(".onnx")
        try:
            self._exporter.write(recipe, onnx)
            release()
            outcome = self._build(name, onnx, replace(self._config, precision="fp16" if recipe is None else "best"))
        finally:
            onnx.unlink(missing_ok=True)
        if outcome.error:
            raise (InputError if outcome.exit_code == InputError.exit_code else QatError)(outcome.error)
        logger.info("%.1f minutes: the engine with %s in float, built in %.0f s", self.minutes, _said(name),
                    outcome.seconds)  # fmt: skip
        engine.with_suffix(".layers.json").unlink(missing_ok=True)  # of another engine
        self._seconds[name] = outcome.seconds
        return outcome.seconds

    def _build(self, name: str, onnx: Path, config: BuildConfig) -> Outcome:
        from tqdm import tqdm

        expected = self._expected()
        limit = LONGEST_BASE if name in (INT8, FP16) else limit_of_later(expected)
        title = f"building the engine with {_said(name)} in float"
        with tqdm(total=round(expected) or None, desc=title, unit="s", leave=False) as bar:
            began = time.monotonic()
            return self._builds.build(
                onnx, self.path(name), config, limit, lambda: bar.update(int(time.monotonic() - began) - bar.n) and None
            )

    def _expected(self) -> float:
        """Seconds that a build takes which finds most kernels in the cache; the first one's while there is no other."""
        alike = [one for name, one in self._seconds.items() if name not in (INT8, FP16)]
        return max(alike or [self._seconds.get(INT8, 0.0)])

    def _in_turns(self, name: str) -> dict[str, tuple[float, ...]]:
        """Engine → median milliseconds of each turn; without a control the INT8 engine runs twice."""
        from utils.trt.timing import time_in_turns

        again = AGAIN if self.path(AGAIN).is_file() else INT8
        files = {INT8: self.path(INT8), name: self.path(name), AGAIN: self.path(again)}
        medians = {}
        for key, found in time_in_turns(files, self._api, self._exporter.inputs.device).items():
            if isinstance(found, str):
                raise QatError(f"{self.path(key)} cannot be timed: {found}")
            medians[key] = found
        return medians


def _said(name: str) -> str:
    return {INT8: "nothing", AGAIN: "nothing, once more", FP16: "everything"}.get(name, name)


def forget_engines(folder: Path) -> None:
    """Remove the engines in a run's folder, and what lies beside them; times of kernels stay."""
    for path in (folder / FOLDER).glob("*.engine"):
        for one in (path, note_path(path), path.with_suffix(".layers.json")):
            one.unlink(missing_ok=True)


def release() -> None:
    """Give GPU memory that no network needs any more back, so that the builder finds it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
