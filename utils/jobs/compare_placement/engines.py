"""ONNX files → engines, built side by side; engines → rows, timed in turns."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import interrupts

from utils.cli import setup_logging
from utils.core.device import select_device
from utils.core.errors import QatError
from utils.jobs.compare_placement.variants import VARIANTS, Job
from utils.trt.build_apart import BuildProcess
from utils.trt.build_config import BuildConfig
from utils.trt.tune import build_or_tune

if TYPE_CHECKING:
    from utils.trt.timing import Summary

logger = logging.getLogger(__name__)

WARM_UP = 20.0  # milliseconds before each round that do not count


@dataclass(frozen=True)
class Row:
    """What was measured of an engine.

    Attributes:
        ms: median milliseconds of a batch, as a CUDA graph.
        p90: 90 % of the runs took no longer.
        ratio: speed against the FP16 engine of the same model and batch, above 1 is faster.
        layers: computing layers by precision.
        reformats, reformat_ms: layers by kind that only change a tensor's form, and their milliseconds.
        profile_ms: sum over layers, each measured by itself.
        int8_time: INT8's share of that, 0 to 1.
        slowest: name, precision, milliseconds.
        error: why there is no time.
        options: that the engine was built with, see `BuildConfig.options`.
        streams: auxiliary streams that it has; None where TensorRT does not say.
        tuning: what `--tune` found, as the engine's note has it; empty without it.
    """

    model: str
    batch: int
    variant: str
    ms: float | None = None
    p90: float | None = None
    ratio: float | None = None
    layers: dict[str, int] = field(default_factory=dict)
    layer_ms: dict[str, float] = field(default_factory=dict)
    reformats: dict[str, int] = field(default_factory=dict)
    reformat_ms: dict[str, float] = field(default_factory=dict)
    profile_ms: float | None = None
    int8_time: float | None = None
    slowest: list[tuple[str, str, float]] = field(default_factory=list)
    error: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    streams: int | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float | None:
        """Images per second, from the median time; None where nothing was measured."""
        return None if not self.ms else self.batch / self.ms * 1000

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it, with images per second."""
        return {**asdict(self), "images_per_second": self.images_per_second}


def build_engines(jobs: Sequence[Job], config: BuildConfig, workers: int, device: str = "") -> dict[Job, str]:
    """Build what is missing, older than its ONNX file or of other options, `workers` at a time; tune one by one.

    Args:
        device: as `--device` names it.

    Returns:
        Jobs that failed → why.
    """
    from utils.trt import tensorrt_api
    from utils.trt.engine_file import is_current

    api, gpu = tensorrt_api.load(), tensorrt_api.gpu(tensorrt_api.use_device(device).index)
    missing = [job for job in jobs if not is_current(job.engine, job.onnx, api, gpu, config)]
    logger.info("%d engines are there already, %d to build", len(jobs) - len(missing), len(missing))
    failed: dict[Job, str] = {}
    if not missing:
        return failed
    for number, (job, error) in enumerate(_results(missing, config, workers, device), 1):
        logger.info("[%d/%d] %s: %s", number, len(missing), job.engine.name, error or "built")
        if error:
            failed[job] = error
    return failed


def _results(missing: Sequence[Job], config: BuildConfig, workers: int, device: str) -> Iterator[tuple[Job, str]]:
    """Jobs as they are done, with the reason of a failure."""
    if config.tune is not None or (workers == 1 and config.build_limit is not None):
        with BuildProcess(select_device(device).index) as process:
            yield from ((job, _build_one(job, config, process)) for job in missing)
        return
    if workers == 1:
        yield from ((job, _build_one(job, config)) for job in missing)
        return
    start = get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(missing)), start, _start_worker, (device,)) as pool:
        with interrupts.blocked():  # this process answers Ctrl-C
            running = {pool.submit(_build_one, job, config): job for job in missing}
        yield from ((running[future], future.result()) for future in as_completed(running))


def _start_worker(device: str) -> None:
    from utils.trt import tensorrt_api

    setup_logging()
    tensorrt_api.use_device(device)


def _build_one(job: Job, config: BuildConfig, process: BuildProcess | None = None) -> str:
    """Build or tune; the timing cache belongs to the model, so that its variants learn from each other."""
    settings = BuildConfig(**{
        **asdict(config),
        "precision": "fp16" if job.variant == VARIANTS[0] else "best",
        "timing_cache": _cache(job) if config.timing_cache is None else config.timing_cache,
        "progress": config.tune is not None,
    })  # fmt: skip
    try:
        build_or_tune(job.onnx, job.engine, settings, process=process)
    except QatError as error:
        return str(error)
    return ""


def _cache(job: Job) -> str:
    from utils.trt.builder import cache_path
    from utils.trt.tensorrt_api import gpu, load

    path = cache_path(job.engine, BuildConfig(), load().name, gpu())
    return "" if path is None else str(path.with_name(f"{job.model}-{path.name}"))


def measure(
    jobs: Sequence[Job], failed: dict[Job, str], iterations: int, rounds: int, device: str = ""
) -> Iterator[list[Row]]:
    """Time all engines of a model and batch in turns; gives the rows of each such group."""
    for _, group in itertools.groupby(jobs, key=lambda job: (job.model, job.batch)):
        yield _measure_group(list(group), failed, iterations, rounds, device)


def _measure_group(
    group: Sequence[Job], failed: dict[Job, str], iterations: int, rounds: int, device_name: str
) -> list[Row]:
    from tqdm import tqdm

    from utils.trt import tensorrt_api, timing
    from utils.trt.context import Execution

    api, device = tensorrt_api.load(), select_device(device_name)
    rows = {job: Row(job.model, job.batch, job.variant, error=failed.get(job, "")) for job in group}
    running: dict[str, Execution] = {}
    try:
        for job in group:
            if not rows[job].error:
                try:
                    running[job.variant] = Execution(job.engine, api, device)
                except QatError as error:
                    rows[job] = Row(job.model, job.batch, job.variant, error=str(error))
        title = f"{group[0].model}, batch {group[0].batch}"
        with tqdm(total=rounds * len(running), desc=title, unit="round", leave=False) as bar:
            config = timing.TimingConfig(WARM_UP, 0, rounds, cuda_graph=True, transfers=False, iterations=iterations)
            figures = timing.measure(running, config, bar.update)
            times = {name: found.parts["compute"] for name, found in figures.items()}
        for job in group:
            if job.variant in running:
                rows[job] = _row(job, running[job.variant], times[job.variant], times.get(VARIANTS[0]))
    finally:
        for execution in running.values():
            execution.close()
    return list(rows.values())


def _row(job: Job, execution: Any, summary: Summary, baseline: Summary | None) -> Row:
    from utils.trt import inspector, layer_report

    layers = layer_report.layers_of(execution)
    layer_report.save(layers, job.engine.with_suffix(".layers.json"))
    found = inspector.summarize(layers)
    return Row(
        model=job.model, batch=job.batch, variant=job.variant, ms=summary.median, p90=summary.p90,
        ratio=None if baseline is None else baseline.median / summary.median,
        layers=found.counts, layer_ms=found.ms or {}, reformats=found.reformats, reformat_ms=found.reformat_ms or {},
        profile_ms=found.total_ms, int8_time=found.int8_time,
        slowest=[(layer.name, layer.precision or layer.kind, layer.ms or 0.0) for layer in found.slowest],
        options=execution.note.options, streams=execution.streams,
        tuning=execution.note.tuning,
    )  # fmt: skip


def default_workers() -> int:
    """Builds side by side: each keeps a core busy, and all share the GPU."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))
