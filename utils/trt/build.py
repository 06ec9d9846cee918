"""ONNX file → TensorRT engine. Impossible builds are refused before the build, which takes minutes.

build("yolov9-c.onnx", "yolov9-c.engine", BuildConfig(batch=(1, 8, 8)))
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.core.errors import InputError, QatError
from utils.core.files import atomic_path, check_writable, file_hash, read_onnx
from utils.core.weights import onnx_weight_bytes
from utils.trt import tensorrt_api
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import EngineNote
from utils.trt.onnx_file import OnnxFile
from utils.trt.preflight import Decision, decide
from utils.trt.tensorrt_api import Api, Gpu

logger = logging.getLogger(__name__)

# A builder of each TensorRT that was used: with the last one gone TensorRT unloads its kernels, which takes the next
# one ten seconds to load again.
_BUILDERS: dict[str, Any] = {}

# Operators whose results are not floats; and indices of such results of others
NO_FLOATS = ("NonMaxSuppression", "ArgMax", "Shape", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
NOT_FLOAT = {"TopK": {1}, "EfficientNMS_TRT": {0, 3}}
SIDES = 4  # of a box: DFL's convolution gives one or four numbers an anchor, those of a network many more


def build(
    onnx: str | Path, engine: str | Path, config: BuildConfig, api: Api | None = None, until: float = float("inf")
) -> EngineNote:
    """Build an engine; the file appears under its name only when it is whole.

    Args:
        until: a build that is not done at this `time.monotonic()` is cancelled; TensorRT before 10 cannot cancel.

    Returns:
        The note that is also written beside the engine.

    Raises:
        InputError: file, shapes, TensorRT and GPU do not fit each other, or the parser refuses the file.
        QatError: TensorRT built no engine.
    """
    file = OnnxFile.read(onnx)
    engine = Path(engine)
    if api is None:
        # TensorRT-RTX alone builds for other GPUs, also where TensorRT is installed
        module = tensorrt_api.installed_module(tensorrt_api.RTX) if config.targets else None
        api = tensorrt_api.load_tensorrt(module)
    gpu = tensorrt_api.gpu()
    config = config.with_streams(api)
    decision = decide(file, api, gpu, config)
    log = api.log()
    builder = api.module.Builder(log)
    _BUILDERS.setdefault(api.name, builder)
    network = _create_network(api, builder, decision)
    parser = _parse(api, network, log, file)  # it holds the weights until the engine is built
    setup = _setup(api, builder, network, file, config, decision, gpu)
    cache = cache_path(engine, config, api.name, gpu)
    check_writable(engine)
    if cache is not None:
        check_writable(cache)
    began = time.perf_counter()
    with _timing_cache(setup, cache):
        plan = _serialize(api, builder, network, setup, engine.name, config.progress, until)
    seconds = time.perf_counter() - began
    del parser
    if plan is None:
        raise QatError(f"{api.name} could not build {file.path}: {log.reason('it gives no reason')}")
    with atomic_path(engine) as temporary:
        temporary.write_bytes(bytes(plan))
    note = _note(api, file, config, decision, gpu, seconds, log.said("WARNING"))
    note.save(engine)
    size = engine.stat().st_size / 1e6
    logger.info("%s: %.1f MB, built in %.0f s by %s for %s", engine, size, seconds, api.name, note.gpu)
    return note


def _create_network(api: Api, builder: Any, decision: Decision) -> Any:
    """An empty INetworkDefinition, strongly typed where that is decided and an option."""
    flags = api.module.NetworkDefinitionCreationFlag
    bits = 0
    if hasattr(flags, "EXPLICIT_BATCH"):  # the default, and deprecated, from TensorRT 10
        bits |= 1 << int(flags.EXPLICIT_BATCH)
    if decision.typing == "strong" and api.weakly_typed:
        bits |= 1 << int(flags.STRONGLY_TYPED)
    return builder.create_network(bits)


def _parse(api: Api, network: Any, log: Any, file: OnnxFile) -> Any:
    """Read a file into a network; returns the parser, which holds the weights.

    Raises:
        InputError: the parser refuses the file.
    """
    if file.plugins:
        api.register_plugins(log)
    parser = api.module.OnnxParser(network, log)
    if parser.parse_from_file(str(file.path)):
        return parser
    error = parser.get_error(0)
    where = ""
    if hasattr(error, "node_operator"):  # from TensorRT 10
        where = f" (node {error.node_name() or 'without a name'}, {error.node_operator()})"
    raise InputError(f"{api.name} cannot parse {file.path}{where}: {tensorrt_api.readable(error.desc())}")


def _setup(
    api: Api,
    builder: Any,
    network: Any,
    file: OnnxFile,
    config: BuildConfig,
    decision: Decision,
    gpu: Gpu | None,
) -> Any:
    """The IBuilderConfig of a build, with the optimization profile."""
    setup = builder.create_builder_config()
    _configure(api, setup, config, decision, gpu)
    if decision.typing == "weak" and decision.precision != "fp32":
        _constrain_boxes(api, setup, network, fp32_box_layers(read_onnx(file.path)))
    if decision.shapes:
        profile = builder.create_optimization_profile()
        for name, shapes in decision.shapes.items():
            profile.set_shape(name, *shapes)
        setup.add_optimization_profile(profile)
    return setup


def _serialize(api: Api, builder: Any, network: Any, setup: Any, name: str, progress: bool, until: float) -> Any:
    """The plan of a network, None if TensorRT builds none; Ctrl-C and `until` cancel it from TensorRT 10 on."""
    with tqdm(desc=f"{name}: building", disable=not progress) as bar:
        with _deferred_signals() as signals:

            def is_cancelled() -> bool:
                return bool(signals) or time.monotonic() > until

            if api.can_stop_builds:
                setup.progress_monitor = _monitor(api.module.IProgressMonitor, name, bar, is_cancelled)
            plan = builder.build_serialized_network(network, setup)
        if plan is not None:
            bar.update((bar.total or bar.n) - bar.n)
    return plan


def _note(
    api: Api,
    file: OnnxFile,
    config: BuildConfig,
    decision: Decision,
    gpu: Gpu | None,
    seconds: float,
    warnings: tuple[str, ...],
) -> EngineNote:
    """Make the note on an engine that has just been built."""
    if config.targets:
        gpu_name = architecture = " ".join(config.targets)
    else:
        gpu_name = gpu.name if gpu else ""
        architecture = gpu.architecture if gpu else ""
    profile = {name: [list(shape) for shape in shapes] for name, shapes in decision.shapes.items()}
    weights_bytes = onnx_weight_bytes(read_onnx(file.path), _float_bytes(decision))
    about_file = EngineNote(
        onnx=str(file.path),
        onnx_sha256=file_hash(file.path) if config.strip_weights else "",
        metadata=dict(file.metadata),
        plugins=file.plugins,
        data_dependent=file.data_dependent,
        tensors=file.tensors,
        weights_bytes=weights_bytes,
    )
    return replace(
        about_file,
        api=api.name,
        gpu=gpu_name,
        architecture=architecture,
        typing=decision.typing,
        precision=decision.precision,
        profile=profile,
        seconds=round(seconds, 1),
        warnings=warnings,
        options=config.options,
    )


def _float_bytes(decision: Decision) -> int | None:
    """Bytes of a weight that is not quantized, in the engine; None where that is its type in the file."""
    if decision.typing == "strong":
        return None
    return 4 if decision.precision == "fp32" else 2


def _constrain_boxes(api: Api, setup: Any, network: Any, names: frozenset[str]) -> None:
    """Have TensorRT compute layers in FP32 where it can, not in the fastest type; integers stay integers."""
    fp32 = api.module.DataType.FLOAT
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        floats = [index for index in range(layer.num_outputs) if layer.get_output(index).dtype == fp32]
        if layer.name in names and floats:
            setup.set_flag(api.module.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
            layer.precision = fp32
            for index in floats:
                layer.set_output_type(index, fp32)


def fp32_box_layers(model: Any) -> frozenset[str]:
    """Names of a graph's nodes from DFL's softmax over distances on to the boxes that come out of the file.

    They stay in FP32 where TensorRT chooses precisions by itself. FP16 has steps of half a pixel from 512 pixels on,
    and of an eighth from 128 on. TensorRT 8.6.0 took it for boxes in front of its NMS plugin: mask AP of the demo's
    engine moved by 0.005, by how upstream crops masks to boxes.

    Args:
        model: an onnx.ModelProto whose boxes are decoded from distributions (DFL, Li et al., Generalized Focal Loss,
            2020). Any other softmax, such as one of attention, does not count: convolutions of features follow it.
    """
    consumers = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            consumers[name].append(node)
    filters = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    names: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "Softmax":
            names |= _computed_from(node, consumers, filters)
    return frozenset(names)


def _computed_from(softmax: Any, consumers: dict[str, list[Any]], filters: dict[str, int]) -> set[str]:
    """The softmax and the nodes that compute with floats from it; none if features of a network are among them.

    Nodes behind a MatMul do not count: masks and scores are products with prototypes, which need no such precision.
    """
    names = {softmax.name}
    queue = [softmax]
    while queue:
        node = queue.pop()
        integers = NOT_FLOAT.get(node.op_type, set())
        floats = [name for index, name in enumerate(node.output) if index not in integers]
        for consumer in [consumer for name in floats for consumer in consumers[name]]:
            is_wide = consumer.op_type == "Conv" and filters.get(consumer.input[1], 0) > SIDES
            if is_wide or consumer.op_type == "QuantizeLinear":
                return set()
            if consumer.op_type == "MatMul" or consumer.name in names:
                continue
            names.add(consumer.name)
            if consumer.op_type not in NO_FLOATS:
                queue.append(consumer)
    return names


def _configure(api: Api, setup: Any, config: BuildConfig, decision: Decision, gpu: Gpu | None) -> None:
    """Set an IBuilderConfig up: precision, memory, tactic sources, options, architectures."""
    flags = api.module.BuilderFlag
    setup.clear_flag(flags.TF32)  # FP32 layers, boxes above all, need its precision
    if decision.typing == "weak":
        if decision.precision != "fp32":
            setup.set_flag(flags.FP16)
        if decision.precision == "int8":
            setup.set_flag(flags.INT8)
    workspace = 0  # bytes
    if config.workspace:
        workspace = config.workspace << 20
    elif gpu:
        workspace = gpu.free * 3 // 4
    if workspace:
        setup.set_memory_pool_limit(api.module.MemoryPoolType.WORKSPACE, workspace)
    setup.profiling_verbosity = api.module.ProfilingVerbosity.DETAILED
    if config.sources_off:
        _switch_off_sources(api, setup, config.sources_off)
    for name, value in config.builder_options.items():
        api.set_option(setup, name, value)
    if config.targets:
        setup.num_compute_capabilities = len(config.targets)
        for index, target in enumerate(config.targets):
            setup.set_compute_capability(getattr(api.module.ComputeCapability, target), index)


def _switch_off_sources(api: Api, setup: Any, names: Sequence[str]) -> None:
    """Switch tactic sources off; `InputError` for a name that this TensorRT does not have."""
    enum = api.module.TacticSource
    sources = int(setup.get_tactic_sources())
    for name in names:
        source = getattr(enum, name, None)
        if source is None:
            raise InputError(f"{api.name} has no tactic source {name}; it has {', '.join(enum.__members__)}")
        sources &= ~(1 << int(source))
    setup.set_tactic_sources(sources)


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM during a build and raise them behind it: TensorRT drops exceptions of callbacks."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def _monitor(base: Any, name: str, bar: tqdm[Any], is_cancelled: Callable[[], bool]) -> Any:
    """An IProgressMonitor that moves a bar by the steps of the outermost phase, and cancels a build on demand."""

    class Monitor(base):
        outermost = ""

        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent:
                bar.set_postfix_str(phase, refresh=False)
                return
            self.outermost = phase
            bar.reset(steps)
            bar.set_description(f"{name}: {phase}")

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self.outermost:
                bar.update(step + 1 - bar.n)
            return not is_cancelled()

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()


def cache_path(engine: Path, config: BuildConfig, api_name: str, gpu: Gpu | None) -> Path | None:
    """The file of measured kernels: that of `config`, or else one beside the engine, by GPU and version."""
    if config.timing_cache == "" or gpu is None:  # kernels are measured on a GPU
        return None
    key = re.sub(r"[^\w.]+", "-", f"{gpu.name}-{api_name}")
    return Path(config.timing_cache or engine.with_name(f"{key}.timing.cache"))


@contextmanager
def _timing_cache(setup: Any, path: Path | None) -> Iterator[None]:
    """Let the build use the measurements in a file, and write them there with its own afterwards."""
    if path is None:
        yield
        return
    cache = setup.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not setup.set_timing_cache(cache, False):
        logger.warning("%s is from another GPU or TensorRT; measuring kernels again", path)
        cache = setup.create_timing_cache(b"")
        setup.set_timing_cache(cache, False)
    yield
    measured = setup.get_timing_cache()
    if measured is not None:
        try:
            with atomic_path(path) as temporary:
                temporary.write_bytes(bytes(measured.serialize()))
        except (OSError, QatError) as error:  # the engine is worth more than the time that the next build would save
            logger.warning("cannot write the timing cache %s: %s", path, error)
