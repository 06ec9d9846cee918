"""ONNX file → TensorRT engine. What cannot work is refused before the build, which takes minutes.

result = build("yolov9-c.onnx", "yolov9-c.engine", BuildConfig(batch=(1, 8, 8)))
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.core.errors import InputError, QatError
from utils.core.files import atomic_path, check_writable
from utils.trt import onnx_summary, tensorrt_api
from utils.trt.build_config import BuildConfig
from utils.trt.build_preflight import Decision, decide
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_summary import OnnxFile
from utils.trt.tensorrt_api import Api, Gpu, Log

logger = logging.getLogger(__name__)

# property of IBuilderConfig → field of BuildConfig, option
SETTINGS = {
    "builder_optimization_level": ("optimization_level", "--optimization-level"),  # from TensorRT 8.6
    "max_aux_streams": ("max_aux_streams", "--max-aux-streams"),  # from TensorRT 8.6
    "avg_timing_iterations": ("timing_iterations", "--timing-iterations"),
}

# A builder of each TensorRT that was used: with the last one gone TensorRT unloads its kernels, which takes the next
# one ten seconds to load again.
_KEPT: dict[str, Any] = {}


@dataclass(frozen=True)
class BuildResult:
    """What was built; `note` also lies beside the engine."""

    path: Path
    size_bytes: int
    note: EngineNote


def build(
    onnx: str | Path,
    engine: str | Path,
    config: BuildConfig,
    api: Api | None = None,
    on_plan: Callable[[], object] = lambda: None,
) -> BuildResult:
    """Build an engine; the file appears under its name only when it is whole.

    Args:
        on_plan: called when TensorRT is done, and only files are left to write.

    Raises:
        InputError: file, shapes, TensorRT and GPU do not fit each other, or the parser refuses the file.
        QatError: TensorRT found no engine.
    """
    file = onnx_summary.read(onnx)
    api = api or tensorrt_api.load_for(config.targets)
    gpu = tensorrt_api.gpu()
    decided = decide(file, api, gpu, config)
    log, engine = api.log(), Path(engine)
    builder = api.module.Builder(log.handle)
    _KEPT.setdefault(api.name, builder)
    network = builder.create_network(_network_flags(api, decided.typing))
    if file.plugins:
        api.register_plugins(log)
    parser = _parse(api, network, log, file)
    setup = builder.create_builder_config()
    _configure(api, setup, builder, config, decided, gpu)
    if decided.typing == "weak" and decided.precision != "fp32" and file.fp32_box_layers:
        _keep_in_float32(api, network, setup, file.fp32_box_layers)
    if decided.shapes:
        profile = builder.create_optimization_profile()
        for name, (min_shape, opt_shape, max_shape) in decided.shapes.items():
            profile.set_shape(name, min_shape, opt_shape, max_shape)
        setup.add_optimization_profile(profile)
    cache = cache_path(engine, config, api.name, gpu)
    for path in (engine, *([] if cache is None else [cache])):
        check_writable(path)
    began = time.perf_counter()
    with _timing_cache(api, setup, cache), tqdm(desc=engine.name, disable=not config.progress) as bar:
        with _deferred_signals() as signals:
            _show_progress(api, setup, engine.name, bar, signals)
            plan = builder.build_serialized_network(network, setup)
        if plan is not None:
            bar.update((bar.total or bar.n) - bar.n)
            on_plan()
    seconds = time.perf_counter() - began
    del parser  # it holds the weights until here
    if plan is None:
        raise QatError(f"{api.name} could not build {file.path}: {log.reason('it gives no reason')}")
    content = bytes(plan)
    with atomic_path(engine) as temporary:
        temporary.write_bytes(content)
    note = EngineNote.of_build(
        file, api.name, gpu, config, decided, seconds=round(seconds, 1), warnings=tuple(log.warnings)
    )
    note.save(engine)
    logger.info("%s: %.1f MB, built in %.0f s by %s for %s", engine, len(content) / 1e6, seconds, api.name, note.gpu)
    return BuildResult(engine, len(content), note)


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM during a build and raise them behind it: TensorRT drops what its callbacks raise."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen:
        signal.raise_signal(seen[0])


def _network_flags(api: Api, typing: str) -> int:
    flags = api.module.NetworkDefinitionCreationFlag
    value = 0
    if hasattr(flags, "EXPLICIT_BATCH"):  # the default, and deprecated, from TensorRT 10
        value |= 1 << int(flags.EXPLICIT_BATCH)
    if typing == "strong" and api.weakly_typed:
        value |= 1 << int(flags.STRONGLY_TYPED)
    return value


def _parse(api: Api, network: Any, log: Log, file: OnnxFile) -> Any:
    parser = api.module.OnnxParser(network, log.handle)
    if not parser.parse_from_file(str(file.path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        reason = tensorrt_api.readable(errors[0].desc()) if errors else log.reason("no reason given")
        known = bool(errors) and hasattr(errors[0], "node_operator")  # from TensorRT 10
        where = f" (node {errors[0].node_name() or 'without a name'}, {errors[0].node_operator()})" if known else ""
        raise InputError(f"{api.name} cannot parse {file.path}{where}: {reason}")
    return parser


def _configure(api: Api, setup: Any, builder: Any, config: BuildConfig, decided: Decision, gpu: Gpu | None) -> None:
    flags = api.module.BuilderFlag
    setup.clear_flag(flags.TF32)  # what is in FP32, boxes above all, wants its precision
    if decided.typing == "weak":
        if decided.precision != "fp32":
            setup.set_flag(flags.FP16)
        if decided.precision == "int8":
            setup.set_flag(flags.INT8)
    workspace = config.workspace
    if workspace is None and gpu is not None:
        workspace = int(gpu.free * 0.75 / config.shares)
    if workspace is not None:
        setup.set_memory_pool_limit(api.module.MemoryPoolType.WORKSPACE, workspace)
    setup.profiling_verbosity = api.module.ProfilingVerbosity.DETAILED
    if config.sources_off:
        setup.set_tactic_sources(_tactic_sources(api, setup, config.sources_off))
    for name, (field, flag) in SETTINGS.items():
        if (value := getattr(config, field)) is not None:
            if not api.has_option(name):
                raise InputError(f"{api.name} has no {name}; leave out {flag}")
            setattr(setup, name, value)
    if config.targets:
        setup.num_compute_capabilities = len(config.targets)
        for index, target in enumerate(config.targets):
            setup.set_compute_capability(getattr(api.module.ComputeCapability, target), index)


def _keep_in_float32(api: Api, network: Any, setup: Any, names: Collection[str]) -> None:
    """Have TensorRT compute these layers in FP32 where it can, not in what is fastest; integers stay what they are."""
    setup.set_flag(api.module.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
    kind = api.module.DataType.FLOAT
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.name not in names:
            continue
        floats = [index for index in range(layer.num_outputs) if layer.get_output(index).dtype == kind]
        if floats:
            layer.precision = kind
        for index in floats:
            layer.set_output_type(index, kind)


def _show_progress(api: Api, setup: Any, name: str, bar: tqdm[Any], signals: Sequence[int]) -> None:
    """Let a bar show how far the builder is, by IProgressMonitor; before TensorRT 10 only the time that it takes."""
    base: Any = api.progress_monitor
    bar.set_description(f"{name}: building")
    if base is None:
        return

    class Monitor(base):
        """The bar is the outermost phase; what runs inside it is named behind."""

        outermost = ""

        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.outermost = phase
                bar.reset(steps)
                bar.set_description(f"{name}: {phase}")
            else:
                bar.set_postfix_str(phase, refresh=False)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self.outermost:
                bar.update(step + 1 - bar.n)
            return not signals  # one cancels the build

        def phase_finish(self, phase: str) -> None:
            pass

    setup.progress_monitor = Monitor()


def _tactic_sources(api: Api, setup: Any, off: Sequence[str]) -> int:
    sources = api.module.TacticSource
    value = int(setup.get_tactic_sources())
    for name in off:
        source = getattr(sources, name.upper(), None)
        if source is None:
            raise InputError(f"{api.name} has no tactic source {name}; it has {', '.join(sources.__members__)}")
        value &= ~(1 << int(source))
    return value


def cache_path(engine: Path, config: BuildConfig, api_name: str, gpu: Gpu | None) -> Path | None:
    """The file of measured kernels: what `config` says, else beside the engine, by GPU and version."""
    if config.timing_cache == "" or gpu is None:  # kernels are measured on a GPU
        return None
    if config.timing_cache is not None:
        return Path(config.timing_cache)
    key = re.sub(r"[^\w.]+", "-", f"{gpu.name}-{api_name}")
    return engine.with_name(f"{key}.timing.cache")


@contextmanager
def _timing_cache(api: Api, setup: Any, path: Path | None) -> Iterator[None]:
    """Let the build use the measurements in a file, and add its own to it afterwards."""
    if path is None:
        yield
        return
    stored = path.read_bytes() if path.is_file() else b""
    cache = setup.create_timing_cache(stored)
    if cache is None or not setup.set_timing_cache(cache, False):
        logger.warning("%s is from another GPU or TensorRT; kernels are measured anew", path)
        cache = setup.create_timing_cache(b"")
        setup.set_timing_cache(cache, False)
    yield
    made = setup.get_timing_cache()
    if made is None:
        return
    try:
        _add_measured(made, setup, stored, path)
    except (OSError, QatError) as error:  # the engine is worth more than what the next build would save
        logger.warning("the timing cache %s cannot be written: %s", path, error)


def _add_measured(made: Any, setup: Any, stored: bytes, path: Path) -> None:
    """Write a timing cache that began as `stored`, with what others have added to the file meanwhile."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build may have added to it
        now = path.read_bytes() if path.is_file() else b""
        if now and now != stored and (other := setup.create_timing_cache(now)) is not None:
            made.combine(other, False)
        with atomic_path(path) as temporary:
            temporary.write_bytes(bytes(made.serialize()))
    finally:
        os.close(lock)
