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
from utils.trt.engine_file import ENGINE_SUFFIXES, is_current
from utils.trt.layers import advice, layers_of, summarize
from utils.trt.preflight import BuildConfig, OnnxFile
from utils.trt.runner import Execution
from utils.trt.tensorrt_api import Api
from utils.trt.timing import Figures, TimingConfig, time_interleaved
from utils.trt.tune import build_or_tune

WITHOUT_GRAPH = "timed without a CUDA graph, which holds no results whose size depends on the image, as of NMS"
FAILURES = (QatError, RuntimeError)  # of one row: torch's too, when memory is short or nothing can be captured
NOISE = 0.03  # of speeds, where each file was built once
TENSORRT, ONNX_RUNTIME, OPENVINO = "TensorRT", "ONNX Runtime", "OpenVINO"
BASES = {TENSORRT: ("FP16",), OPENVINO: ("FP32", "BF16", "FP16")}  # precisions that INT8 is compared with


def one_line(error: Exception) -> str:
    """An error as a row has it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass(frozen=True)
class Entry:
    """A file that takes part: an ONNX file, of which engines are built, or an engine."""

    file: Path
    baseline: bool = False  # others are compared with it
    build: int = 1  # its number; from the second on without the timing cache, which would make the same engine

    @property
    def name(self) -> str:
        """The file's, and the number of its build from the second on."""
        return self.file.stem + (f"-build{self.build}" if self.build > 1 else "")

    @property
    def is_engine(self) -> bool:
        """Whether the file is an engine, by its suffix."""
        return self.file.suffix.lower() in ENGINE_SUFFIXES


def build_missing(
    entries: Sequence[Entry], batch: int, size: tuple[int, int] | None, config: BuildConfig, api: Api
) -> dict[Entry, Path | QatError]:
    """An engine for each entry, built where it is missing, too old, or of other options; or why there is none.

    `size` is (height, width) in pixels, for files of dynamic size.
    """
    engines: dict[Entry, Path | QatError] = {}
    for entry in entries:
        engine, entry_config = planned(entry, batch, size, config)
        try:
            if not (entry.is_engine or is_current(engine, entry.file, api, tensorrt_api.gpu(), entry_config)):
                build_or_tune(entry.file, engine, entry_config, api)
            engines[entry] = engine
        except QatError as error:
            engines[entry] = error
    return engines


def planned(entry: Entry, batch: int, size: tuple[int, int] | None, config: BuildConfig) -> tuple[Path, BuildConfig]:
    """The engine that is built of an ONNX file for a batch size and, where the size is dynamic, a size; and how."""
    if entry.is_engine:
        return entry.file, config
    name = "-".join([entry.name, f"b{batch}", *(["x".join(map(str, size))] if size else [])])
    changes: dict[str, Any] = {"batch": (batch,) * 3, "precision": "fp16" if entry.baseline else "best"}
    if entry.build > 1:
        changes["timing_cache"] = ""
    if size is not None:
        changes |= {"height": (size[0],) * 3, "width": (size[1],) * 3}
    return entry.file.with_name(f"{name}.engine"), config.model_copy(update=changes)


def check_entries(entries: Sequence[Entry], size: tuple[int, int] | None = None) -> None:
    """Raise `InputError` for a file of no known kind, a baseline with quantizers, or a file of another size."""
    known = {(entry.baseline, entry.name): entry.file for entry in entries}
    for entry in entries:
        if (other := known[entry.baseline, entry.name]) != entry.file:
            raise InputError(f"{entry.file} and {other} have one name, which tells rows apart; rename or link one")
        if entry.is_engine:
            continue
        if entry.file.suffix.lower() != ".onnx":
            raise InputError(f"{entry.file} is neither an .onnx file nor an engine (.engine, .plan); export it")
        file = OnnxFile.read(entry.file)
        if file.quantized and entry.baseline:
            raise InputError(f"--baseline {entry.file} holds quantizers; give the float model's ONNX")
        own = file.image[1][2:]
        if size and any(fixed not in (None, asked) for fixed, asked in zip(own, size, strict=True)):
            raise InputError(
                f"{entry.file} takes images of {own[0]}x{own[1]} only; leave --imgsz out, or export it with --dynamic"
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
    error: str = ""  # why there are no figures
    notes: tuple[str, ...] = ()  # what the engine's layers say about its speed
    masks: bool = False  # it gives masks, or what they are made of
    runtime: str = TENSORRT  # what runs it: one of the names above
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
        """What rows that are compared with each other have in common."""
        return self.nms, self.masks

    @property
    def title(self) -> str:
        """The row in words, such as 'yolov9-c-int8, batch 8'."""
        runtime = "" if self.runtime == TENSORRT else f", {self.runtime} {self.precision}"
        return f"{self.model}{runtime}, batch {self.batch}"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: its fields, images per second, and the figures by name."""
        figures = self.figures.to_dict() if self.figures else None
        return {**asdict(self), "images_per_second": self.images_per_second, "figures": figures}


class Candidate(NamedTuple):
    """A row to be, and what runs it: an engine, or on a CPU a call; None where the row says why."""

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

    CUDA graphs are captured here too, so that what cannot be captured is a row.
    """
    candidates = []
    for entry, engine in engines.items():
        row = BenchmarkRow(entry.name, batch, entry.baseline, build=entry.build)
        try:
            if isinstance(engine, QatError):
                raise engine
            execution = stack.enter_context(closing(Execution(engine, api, device)))
            name, form = execution.inputs[0].name, execution.input_spec
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
    notes, precision = [], execution.note.precision
    with suppress(InputError):  # built without details of its layers, by plain trtexec; it can be timed all the same
        summary = summarize(layers_of(execution, runs=5))
        precision = precision or ("int8" if "INT8" in summary.computing else "fp16")
        notes = advice(summary, precision)
    if graphs and execution.note.data_dependent:
        notes.append(WITHOUT_GRAPH)
    form = OutputForm.of(execution.note.metadata, {spec.name: spec.shape for spec in execution.outputs})
    return replace(
        row, precision=precision.upper(), nms=form.has_nms, masks=bool(form.masks),
        notes=tuple(f"{row.model}, batch {row.batch}: {note}" for note in notes),
    )  # fmt: skip


def time_candidates(candidates: Sequence[Candidate], config: TimingConfig) -> list[BenchmarkRow]:
    """Rows of what was opened, timed interleaved, and compared with their baselines."""
    running = {str(number): candidate.running for number, candidate in enumerate(candidates) if candidate.running}
    figures = time_interleaved(running, config)
    return compared([replace(one.row, figures=figures.get(str(number))) for number, one in enumerate(candidates)])


def compared(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """Rows of one batch size, with their speed against the baseline of their kind."""
    bases = {row.kind: row.qps for row in reversed(rows) if row.baseline and row.qps}
    return [
        replace(row, gain=row.qps / bases[row.kind] - 1) if row.qps and row.kind in bases and not row.baseline else row
        for row in rows
    ]


def verdicts(rows: Sequence[BenchmarkRow]) -> list[str]:
    """A sentence for each INT8 file beside a float baseline of its kind: its speed, and at which batches to use it.

    A difference counts where it is larger than the spread of the builds of either file, or `NOISE` of a single build.
    """
    if any(row.runtime == ONNX_RUNTIME and row.precision.startswith("INT8") for row in rows):
        return ["INT8's speed shows in TensorRT and OpenVINO: ONNX Runtime on a CPU computes such a file in float"]
    measured = [row for row in rows if row.qps]
    int8 = [row for row in measured if row.precision == "INT8" and not row.baseline]
    files = list(dict.fromkeys(row.file for row in int8))
    sentences = []
    for file in files:
        ours = [row for row in int8 if row.file == file]
        bases = [row for row in measured if row.baseline and row.kind == ours[0].kind]
        wanted = [row.precision for row in bases if row.precision in BASES.get(row.runtime, ())]
        for precision in dict.fromkeys(wanted):
            sentence = _verdict(ours, [row for row in bases if row.precision == precision])
            sentences += [f"{file}: {sentence}" if len(files) > 1 else sentence] if sentence else []
    return sentences


def _verdict(int8: Sequence[BenchmarkRow], float_rows: Sequence[BenchmarkRow]) -> str:
    """The sentence for one INT8 file and its baselines of one precision; '' where they share no batch size."""
    batches = sorted({row.batch for row in int8} & {row.batch for row in float_rows})
    words, faster, widest, builds = [], [], 0.0, 1
    for batch in batches:
        ratio, noise, builds = _speed_ratio(int8, float_rows, batch)
        widest = max(widest, noise)
        same = 1 / (1 + noise) <= ratio <= 1 + noise
        words.append(f"{'as fast' if same else f'{ratio:.2f} times as fast'} at batch {batch}")
        faster += [batch] if ratio > 1 + noise else []
    if not batches:
        return ""
    precision, where = float_rows[0].precision, ""
    if int8[0].runtime == OPENVINO:
        where = " in OpenVINO on this machine"
    use = f"use INT8 at batch {', '.join(map(str, faster))}" if faster else f"use {precision}"
    if faster and faster == batches[-len(faster) :]:
        use = "use INT8" if faster == batches else f"use INT8 from batch {faster[0]} on"
    source = f"of one build each, of which {NOISE:.0%} count as noise; --builds 2 measures it"
    if builds > 1:
        source = f"the spread of {builds} builds is up to {widest:.1%}"
    return f"INT8 against {precision}{where}: {', '.join(words)} ({source}); {use}"


def _speed_ratio(
    int8: Sequence[BenchmarkRow], float_rows: Sequence[BenchmarkRow], batch: int
) -> tuple[float, float, int]:
    """Speed of INT8 by that of the first baseline at a batch size, the spread of the builds, and their number."""
    base = next(row.file for row in float_rows if row.batch == batch)
    ours = [row.qps for row in int8 if row.batch == batch]
    theirs = [row.qps for row in float_rows if row.batch == batch and row.file == base]
    builds = min(len(ours), len(theirs))
    noise = max(max(one) / min(one) - 1 for one in (ours, theirs)) if builds > 1 else NOISE
    return fmean(ours) / fmean(theirs), noise, builds
