"""Engines over batch sizes, in one run and interleaved, as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from utils.core.errors import InputError, QatError
from utils.core.output_form import OutputForm
from utils.trt import tensorrt_api
from utils.trt.build_options import BuildConfig
from utils.trt.engine_file import ENGINE_SUFFIXES, is_current
from utils.trt.layers import advice, layers_of, summarize
from utils.trt.onnx_file import OnnxFile
from utils.trt.runner import Execution
from utils.trt.tensorrt_api import Api
from utils.trt.timing import Figures, TimingConfig, time_interleaved
from utils.trt.tune import build_or_tune

WITHOUT_GRAPH = "timed without a CUDA graph, which holds no results whose size depends on the image, as of NMS"
FAILURES = (QatError, RuntimeError)  # of one row: torch's too, when memory is short or nothing can be captured
NOISE = 0.03  # of speeds, where each file was built once
TENSORRT = "TensorRT"
ONNX_RUNTIME = "ONNX Runtime"
OPENVINO = "OpenVINO"
BASES = {TENSORRT: ("FP16",), OPENVINO: ("FP32", "BF16", "FP16")}  # precisions that INT8 is compared with


def one_line(error: Exception) -> str:
    """The first line of an error, or else its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass(frozen=True)
class Entry:
    """A file that takes part: an ONNX file, from which engines are built, or an engine."""

    file: Path
    baseline: bool = False  # others are compared with it
    build: int = 1  # its number; from the second on without the timing cache, which would make the same engine

    @property
    def name(self) -> str:
        """The file's name, and the number of its build from the second on."""
        if self.build > 1:
            return f"{self.file.stem}-build{self.build}"
        return self.file.stem

    @property
    def is_engine(self) -> bool:
        """Return whether the file is an engine, by its suffix."""
        return self.file.suffix.lower() in ENGINE_SUFFIXES


def build_missing(
    entries: Sequence[Entry], batch: int, size: tuple[int, int] | None, config: BuildConfig, api: Api
) -> dict[Entry, Path | QatError]:
    """An engine for each entry, built where it is missing, too old, or of other options; or the error of its build.

    `size` is (height, width) in pixels, for files of dynamic size.
    """
    engines: dict[Entry, Path | QatError] = {}
    for entry in entries:
        engine, entry_config = planned(entry, batch, size, config)
        engines[entry] = engine
        try:
            if not entry.is_engine and not is_current(engine, entry.file, api, tensorrt_api.gpu(), entry_config):
                build_or_tune(entry.file, engine, entry_config, api)
        except QatError as error:
            engines[entry] = error
    return engines


def planned(entry: Entry, batch: int, size: tuple[int, int] | None, config: BuildConfig) -> tuple[Path, BuildConfig]:
    """Path and options of the engine of an ONNX file for a batch size and, where the size is dynamic, a size."""
    if entry.is_engine:
        return entry.file, config
    name = f"{entry.name}-b{batch}"
    changes: dict[str, Any] = {"batch": (batch,) * 3, "precision": "fp16" if entry.baseline else "best"}
    if entry.build > 1:
        changes["timing_cache"] = ""
    if size is not None:
        height, width = size
        name += f"-{height}x{width}"
        changes["height"] = (height,) * 3
        changes["width"] = (width,) * 3
    return entry.file.with_name(f"{name}.engine"), config.model_copy(update=changes)


def check_entries(entries: Sequence[Entry], size: tuple[int, int] | None = None) -> None:
    """Raise `InputError` for a file of no known kind, a baseline with quantizers, or a file of another size."""
    file_of = {(entry.baseline, entry.name): entry.file for entry in entries}
    for entry in entries:
        other = file_of[entry.baseline, entry.name]
        if other != entry.file:
            raise InputError(f"{entry.file} and {other} have the same name, which names their rows; rename or link one")
        if entry.is_engine:
            continue
        if entry.file.suffix.lower() != ".onnx":
            raise InputError(f"{entry.file} is neither an .onnx file nor an engine (.engine, .plan); export it")
        file = OnnxFile.read(entry.file)
        if file.quantized and entry.baseline:
            raise InputError(f"--baseline {entry.file} holds quantizers; give the FP32 model's ONNX file")
        _, (_, _, height, width) = file.image
        if size and (height not in (None, size[0]) or width not in (None, size[1])):
            raise InputError(
                f"{entry.file} takes images of {height}x{width} only; leave --imgsz out, or export it with --dynamic"
            )


@dataclass(frozen=True)
class BenchmarkRow:
    """One network at one batch size."""

    model: str
    batch: int
    baseline: bool
    precision: str = ""
    nms: bool = False  # NMS is inside
    figures: Figures | None = None
    gain: float | None = None  # speed against the baseline of its kind at the same batch, minus 1
    error: str = ""  # the reason if there are no figures
    notes: tuple[str, ...] = ()  # sentences on the engine's layers and their speed
    masks: bool = False  # it gives masks, or coefficients and prototypes
    runtime: str = TENSORRT  # one of the names above
    build: int = 1  # number of the build of a file that is built several times

    @property
    def qps(self) -> float:
        """Queries per second; 0 where nothing was measured."""
        return self.figures.qps if self.figures else 0.0

    @property
    def images_per_second(self) -> float | None:
        """Images per second; None where nothing was measured."""
        return self.qps * self.batch or None

    @property
    def file(self) -> str:
        """The file's name, without the number of the build."""
        return self.model.removesuffix(f"-build{self.build}")

    @property
    def kind(self) -> tuple[bool, bool]:
        """Key that rows which are compared with each other share."""
        return self.nms, self.masks

    @property
    def title(self) -> str:
        """The row in words, such as 'yolov9-c-int8, batch 8'."""
        if self.runtime == TENSORRT:
            return f"{self.model}, batch {self.batch}"
        return f"{self.model}, {self.runtime} {self.precision}, batch {self.batch}"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: its fields, images per second, and the figures by name."""
        figures = self.figures.to_dict() if self.figures else None
        return {**asdict(self), "images_per_second": self.images_per_second, "figures": figures}


class Candidate(NamedTuple):
    """A row without figures, and the engine, or on a CPU the call, to be timed; None if the row has an error."""

    row: BenchmarkRow
    running: Execution | Callable[[], object] | None = None


def open_engines(
    engines: Mapping[Entry, Path | QatError],
    batch: int,
    size: tuple[int, int] | None,
    api: Api,
    device: torch.device,
    config: TimingConfig,
    stack: ExitStack,
) -> list[Candidate]:
    """Engines at this batch, and at `size`, (height, width) in pixels, or their largest; the stack closes them.

    CUDA graphs are captured here too, so that an engine that cannot be captured becomes a row with an error.
    """
    candidates = []
    for entry, engine in engines.items():
        row = BenchmarkRow(entry.name, batch, entry.baseline, build=entry.build)
        try:
            if isinstance(engine, QatError):
                raise engine
            execution = stack.enter_context(closing(Execution(engine, api, device)))
            name = execution.inputs[0].name
            form = execution.input_spec
            _, channels, *largest = form.nchw(execution.limits[name][1])
            execution.set_shapes({name: form.own((batch, channels, *(size or largest)))})
            row = _described(row, execution, config.cuda_graph)
            if config.cuda_graph:
                execution.graph()
            candidates.append(Candidate(row, execution))
        except FAILURES as error:
            candidates.append(Candidate(replace(row, error=one_line(error))))
    return candidates


def _described(row: BenchmarkRow, execution: Execution, graphs: bool) -> BenchmarkRow:
    """The row with the engine's precision and outputs, and notes on what its layers say about its speed."""
    notes = []
    precision = execution.note.precision
    with suppress(InputError):  # built without details of its layers, by plain trtexec; it can be timed all the same
        summary = summarize(layers_of(execution, runs=5))
        if not precision:
            precision = "int8" if "INT8" in summary.computing else "fp16"
        notes = advice(summary, precision)
    if graphs and execution.note.data_dependent:
        notes.append(WITHOUT_GRAPH)
    form = OutputForm.of(execution.note.metadata, {spec.name: spec.shape for spec in execution.outputs})
    return replace(
        row,
        precision=precision.upper(),
        nms=form.has_nms,
        masks=bool(form.masks),
        notes=tuple(f"{row.model}, batch {row.batch}: {note}" for note in notes),
    )


def time_candidates(candidates: Sequence[Candidate], config: TimingConfig) -> list[BenchmarkRow]:
    """Rows of the candidates, timed interleaved, and compared with their baselines."""
    running = {}
    for number, candidate in enumerate(candidates):
        if candidate.running:
            running[str(number)] = candidate.running
    figures = time_interleaved(running, config)
    rows = [replace(candidate.row, figures=figures.get(str(number))) for number, candidate in enumerate(candidates)]
    return compared(rows)


def compared(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """Rows of one batch size, with their speed against the baseline of their kind."""
    base_qps: dict[tuple[bool, bool], float] = {}  # of the first baseline of each kind
    for row in rows:
        if row.baseline and row.qps:
            base_qps.setdefault(row.kind, row.qps)
    result = []
    for row in rows:
        if row.qps and not row.baseline and row.kind in base_qps:
            row = replace(row, gain=row.qps / base_qps[row.kind] - 1)
        result.append(row)
    return result


def verdicts(rows: Sequence[BenchmarkRow]) -> list[str]:
    """A sentence for each INT8 file beside a float baseline of its kind: its speed, and at which batches to use it.

    A difference counts where it is larger than the spread of the builds of either file, or `NOISE` of a single build.
    """
    if any(row.runtime == ONNX_RUNTIME and row.precision.startswith("INT8") for row in rows):
        return ["INT8's speed shows in TensorRT and OpenVINO: ONNX Runtime on a CPU computes such a file in float"]
    measured = [row for row in rows if row.qps]
    by_file: dict[str, list[BenchmarkRow]] = {}
    for row in measured:
        if row.precision == "INT8" and not row.baseline:
            by_file.setdefault(row.file, []).append(row)
    sentences = []
    for file, int8 in by_file.items():
        for float_rows in _baselines(measured, int8[0].kind):
            sentence = _verdict(int8, float_rows)
            if sentence and len(by_file) > 1:
                sentence = f"{file}: {sentence}"
            if sentence:
                sentences.append(sentence)
    return sentences


def _baselines(rows: Sequence[BenchmarkRow], kind: tuple[bool, bool]) -> list[list[BenchmarkRow]]:
    """The baselines of a kind that INT8 is compared with, by their precision."""
    by_precision: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        if row.baseline and row.kind == kind:
            by_precision.setdefault(row.precision, []).append(row)
    groups = []
    for precision, group in by_precision.items():
        if any(precision in BASES.get(row.runtime, ()) for row in group):
            groups.append(group)
    return groups


def _verdict(int8: Sequence[BenchmarkRow], float_rows: Sequence[BenchmarkRow]) -> str:
    """The sentence for one INT8 file and its baselines of one precision; '' where they share no batch size."""
    batches = sorted({row.batch for row in int8} & {row.batch for row in float_rows})
    if not batches:
        return ""
    speeds = [_compare_speed(int8, float_rows, batch) for batch in batches]
    texts = [f"{speed.text} at batch {batch}" for speed, batch in zip(speeds, batches, strict=True)]
    faster = [batch for speed, batch in zip(speeds, batches, strict=True) if speed.is_faster]
    precision = float_rows[0].precision
    versus = f"INT8 against {precision}"
    if int8[0].runtime == OPENVINO:
        versus += " in OpenVINO on this machine"
    builds = speeds[-1].builds
    if builds > 1:
        noise = f"the spread of {builds} builds is up to {max(speed.noise for speed in speeds):.1%}"
    else:
        noise = f"one build each, so differences up to {NOISE:.0%} count as noise; --builds 2 measures it"
    return f"{versus}: {', '.join(texts)} ({noise}); {_recommendation(batches, faster, precision)}"


def _recommendation(batches: Sequence[int], faster: Sequence[int], precision: str) -> str:
    """The precision to use at these batch sizes, in words; INT8 is faster at those in `faster`."""
    if not faster:
        return f"use {precision}"
    if faster == batches:
        return "use INT8"
    if faster == batches[-len(faster) :]:
        return f"use INT8 from batch {faster[0]} on"
    return f"use INT8 at batch {', '.join(map(str, faster))}"


class _Speed(NamedTuple):
    """Speed of INT8 as a multiple of its baseline's at one batch size."""

    ratio: float
    noise: float  # relative: the spread of the builds, or `NOISE` of a single build
    builds: int

    @property
    def is_faster(self) -> bool:
        return self.ratio > 1 + self.noise

    @property
    def text(self) -> str:
        if 1 / (1 + self.noise) <= self.ratio <= 1 + self.noise:
            return "as fast"
        return f"{self.ratio:.2f} times as fast"


def _compare_speed(int8: Sequence[BenchmarkRow], float_rows: Sequence[BenchmarkRow], batch: int) -> _Speed:
    """Compare INT8 with the first baseline at a batch size."""
    baselines = [row for row in float_rows if row.batch == batch]
    int8_qps = [row.qps for row in int8 if row.batch == batch]
    base_qps = [row.qps for row in baselines if row.file == baselines[0].file]
    builds = min(len(int8_qps), len(base_qps))
    noise = NOISE
    if builds > 1:
        noise = max(_spread(int8_qps), _spread(base_qps))
    return _Speed(fmean(int8_qps) / fmean(base_qps), noise, builds)


def _spread(values: Sequence[float]) -> float:
    """Relative difference of the largest and the smallest of positive values."""
    return max(values) / min(values) - 1
