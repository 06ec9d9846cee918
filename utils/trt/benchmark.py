"""Engines over batch sizes: INT8 against FP16 in one run and in turns, as rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from utils.core.errors import InputError, QatError, no_file
from utils.core.input_form import InputForm
from utils.core.tasks import DETECT, task_of_outputs
from utils.trt import inspector, layer_report, onnx_summary
from utils.trt.build_config import BuildConfig, InputFormat
from utils.trt.engine_file import ENGINE_SUFFIXES
from utils.trt.timing import Figures, TimingConfig

if TYPE_CHECKING:
    import torch

    from utils.trt.context import Execution
    from utils.trt.tensorrt_api import Api
    from utils.trt.trtexec import Trtexec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A file that takes part.

    Attributes:
        file: an ONNX file, of which engines are built, or an engine.
        baseline: the FP16 one.
        input_format: how INT8 images lie in the memory of the engine that is built, see `BuildConfig`.
    """

    file: Path
    baseline: bool = False
    input_format: InputFormat = "linear"

    @property
    def name(self) -> str:
        """The file's, with the format where it is not the usual one."""
        return "-".join([self.file.stem, *([self.input_format] if self.input_format != "linear" else [])])

    @property
    def is_engine(self) -> bool:
        """Whether the file is an engine, by its suffix."""
        return self.file.suffix.lower() in ENGINE_SUFFIXES


@dataclass(frozen=True)
class Row:
    """One engine at one batch size.

    Attributes:
        nms: whether NMS is inside.
        masks: whether it gives masks, or what they are made of.
        gain: speed against the baseline of the same kind at the same batch, minus 1; None without one.
        error: why there are no figures.
        notes: what the engine's layers say about its speed.
    """

    model: str
    batch: int
    baseline: bool
    precision: str = ""
    nms: bool = False
    figures: Figures | None = None
    gain: float | None = None
    error: str = ""
    notes: tuple[str, ...] = field(default=(), repr=False)
    masks: bool = False

    @property
    def images_per_second(self) -> float | None:
        """Images per second; None where nothing was measured."""
        return None if self.figures is None else self.figures.qps * self.batch

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: its fields, images per second, and the figures by name."""
        known = {name: value for name, value in asdict(replace(self, figures=None)).items() if name != "figures"}
        figures = None if self.figures is None else self.figures.to_dict()
        return {**known, "images_per_second": self.images_per_second, "figures": figures}


def prepare(
    entries: Sequence[Entry], batch: int, size: tuple[int, int] | None, config: BuildConfig, api: Api
) -> dict[Entry, Path | str]:
    """An engine for each entry at this batch, built where it is missing or older than its ONNX file.

    Args:
        size: (height, width) in pixels, for files of dynamic size.

    Returns:
        The engine's file, or a text that says why there is none.
    """
    from utils.trt import tensorrt_api
    from utils.trt.builder import build
    from utils.trt.engine_file import is_current

    gpu = tensorrt_api.gpu()
    found: dict[Entry, Path | str] = {}
    for entry in entries:
        if entry.is_engine:
            found[entry] = entry.file
            continue
        engine = engine_path(entry, batch, size)
        wanted = replace(config, batch=(batch,) * 3, precision="fp16" if entry.baseline else "best",
                         input_format=entry.input_format)  # fmt: skip
        if size is not None:
            wanted = replace(wanted, height=(size[0],) * 3, width=(size[1],) * 3)
        try:
            if not is_current(engine, entry.file, api, gpu):
                build(entry.file, engine, wanted, api)
            found[entry] = engine
        except QatError as error:
            found[entry] = str(error)
    return found


def engine_path(entry: Entry, batch: int, size: tuple[int, int] | None) -> Path:
    """The engine that is built of an ONNX file for a batch size and, where the size is dynamic, a size."""
    name = "-".join([entry.name, f"b{batch}", *(["x".join(map(str, size))] if size else [])])
    return entry.file.with_name(f"{name}.engine")


def in_formats(entries: Sequence[Entry], formats: Sequence[InputFormat]) -> list[Entry]:
    """The entries, those that take INT8 images once in each of these formats.

    Raises:
        InputError: a format is asked for, and no entry is an ONNX file that takes INT8 images.
    """
    found: list[Entry] = []
    packed = False
    for entry in entries:
        integers = not entry.is_engine and onnx_summary.read(entry.file).input_form.kind == "int8"
        packed = packed or integers
        found += [replace(entry, input_format=one) for one in dict.fromkeys(formats)] if integers else [entry]
    if not packed and any(one != "linear" for one in formats):
        raise InputError(
            f"--input-format {' '.join(formats)} is for ONNX files that take INT8 images, and none of these does; "
            "export one with --input int8"
        )
    return found


def check(entries: Sequence[Entry]) -> None:
    """Check what would only be noticed after minutes.

    Raises:
        InputError: a file is missing or of no known kind, or the baseline holds quantizers.
    """
    for entry in entries:
        if not entry.file.is_file():
            raise InputError(no_file(entry.file, "expected an ONNX file or an engine"))
        if entry.is_engine:
            continue
        if entry.file.suffix.lower() != ".onnx":
            raise InputError(f"{entry.file} is neither an .onnx file nor an engine (.engine, .plan)")
        if onnx_summary.read(entry.file).quantized and entry.baseline:
            raise InputError(
                f"--baseline {entry.file} holds quantizers; give the float model's ONNX, exported the same way"
            )


def measure(
    engines: Mapping[Entry, Path | str],
    batch: int,
    size: tuple[int, int] | None,
    config: TimingConfig,
    api: Api,
    device: torch.device,
    program: Trtexec | None = None,
) -> list[Row]:
    """Rows of the engines at this batch, timed in turns by our own loop, or by trtexec."""
    rows = {entry: Row(entry.name, batch, entry.baseline) for entry in engines}
    with contextlib.ExitStack() as stack:
        running: dict[Entry, Execution] = {}
        for entry, engine in engines.items():
            try:
                if isinstance(engine, str):
                    raise QatError(engine)
                running[entry] = execution = stack.enter_context(_opened(engine, batch, size, api, device))
                rows[entry] = _described(rows[entry], execution)
            except QatError as error:
                rows[entry] = replace(rows[entry], error=str(error))
        figures = _with_trtexec(running, config, program) if program else _own(running, config)
    for entry, found in figures.items():
        rows[entry] = replace(rows[entry], figures=found)
    return _against_baseline(list(rows.values()))


@contextlib.contextmanager
def _opened(
    engine: Path, batch: int, size: tuple[int, int] | None, api: Api, device: torch.device
) -> Iterator[Execution]:
    from utils.trt.context import Execution

    execution = Execution(engine, api, device)
    try:
        spec = execution.inputs[0]
        form = InputForm.of_file(execution.note.metadata, spec.dtype, spec.shape)
        min_shape, max_shape = map(form.nchw, execution.limits[spec.name])
        if not min_shape[0] <= batch <= max_shape[0]:
            raise InputError(f"{engine} takes batches of {min_shape[0]} to {max_shape[0]}")
        height, width = size or max_shape[2:]
        execution.set_shapes({spec.name: form.own((batch, max_shape[1], height, width))})
        yield execution
    finally:
        execution.close()


def _described(row: Row, execution: Execution) -> Row:
    summary = inspector.summarize(layer_report.layers_of(execution, runs=5))
    precision = execution.note.precision or ("int8" if summary.counts.get("INT8") else "fp16")
    outputs = {spec.name: len(spec.shape) for spec in execution.outputs}
    return replace(
        row, precision=precision.upper(), nms=set(DETECT.detections) <= set(outputs),
        masks=bool(task_of_outputs(execution.note.metadata, outputs).masks),
        notes=tuple(f"{row.model}, batch {row.batch}: {text}" for text in layer_report.advice(summary, precision)),
    )  # fmt: skip


def _own(running: Mapping[Entry, Execution], config: TimingConfig) -> dict[Entry, Figures]:
    from utils.trt import timing

    by_name = {str(index): (entry, execution) for index, (entry, execution) in enumerate(running.items())}
    figures = timing.measure({name: execution for name, (_, execution) in by_name.items()}, config)
    return {entry: figures[name] for name, (entry, _) in by_name.items()}


def _with_trtexec(running: Mapping[Entry, Execution], config: TimingConfig, program: Trtexec) -> dict[Entry, Figures]:
    """Rounds of trtexec, in turns; of each engine the round with the median speed."""
    from utils.trt.trtexec import parse_times

    found: dict[Entry, list[Figures]] = {entry: [] for entry in running}
    for _ in range(config.rounds):
        for entry, execution in running.items():
            name, buffer = execution.inputs[0].name, execution.buffers[execution.inputs[0].name]
            flags = [f"--loadEngine={execution.path}", f"--warmUp={config.warm_up:g}",
                     f"--duration={config.duration / config.rounds:g}"]  # fmt: skip
            if None in execution.inputs[0].shape:
                flags.append(f"--shapes={name}:{'x'.join(map(str, buffer.shape))}")
            flags += ["--useCudaGraph"] * config.cuda_graph + ["--useSpinWait"] * config.spin_wait
            flags += ["--noDataTransfers"] * (not config.transfers)
            found[entry].append(Figures(*parse_times(program.run(flags))))
    middle = {entry: median_low([one.qps for one in rounds]) for entry, rounds in found.items()}
    return {entry: next(one for one in rounds if one.qps == middle[entry]) for entry, rounds in found.items()}


def _against_baseline(rows: Sequence[Row]) -> list[Row]:
    found = []
    for row in rows:
        same = [one for one in rows if one.baseline and one.figures and (one.nms, one.masks) == (row.nms, row.masks)]
        if row.baseline or row.figures is None or not same or same[0].figures is None:
            found.append(row)
            continue
        fp16 = same[0].figures
        ours, theirs = (one.parts["compute"].median for one in (row.figures, fp16))
        sentence = layer_report.not_faster(f"{row.model}, batch {row.batch}", ours, theirs)
        notes = (*row.notes, *([sentence] if sentence and row.precision == "INT8" else []))
        found.append(replace(row, gain=row.figures.qps / fp16.qps - 1, notes=notes))
    return found
