"""Engines over batch sizes, in one run and interleaved, as rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from utils.core.errors import InputError, QatError, no_file
from utils.core.tasks import DETECT, task_of_outputs
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
TENSORRT, ONNX_RUNTIME = "TensorRT", "ONNX Runtime"


def one_line(error: Exception) -> str:
    """An error as a row has it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass(frozen=True)
class Entry:
    """A file that takes part.

    Attributes:
        file: an ONNX file, of which engines are built, or an engine.
        baseline: whether others are compared with it.
        build: number of the build; from the second on without the timing cache, which would make the same engine.
    """

    file: Path
    baseline: bool = False
    build: int = 1

    @property
    def name(self) -> str:
        """The file's, and the number of its build from the second on."""
        return self.file.stem + (f"-build{self.build}" if self.build > 1 else "")

    @property
    def is_engine(self) -> bool:
        """Whether the file is an engine, by its suffix."""
        return self.file.suffix.lower() in ENGINE_SUFFIXES


def prepare(
    entries: Sequence[Entry], batch: int, size: tuple[int, int] | None, config: BuildConfig, api: Api
) -> dict[Entry, Path | str]:
    """An engine for each entry at this batch, built where it is missing, older than its ONNX file, or of other options.

    Args:
        size: (height, width) in pixels, for files of dynamic size.

    Returns:
        The engine's file, or a text that says why there is none.
    """
    gpu = tensorrt_api.gpu()
    engines: dict[Entry, Path | str] = {}
    for entry in entries:
        if entry.is_engine:
            engines[entry] = entry.file
            continue
        engine, entry_config = planned(entry, batch, size, config)
        try:
            if not is_current(engine, entry.file, api, gpu, entry_config):
                build_or_tune(entry.file, engine, entry_config, api)
            engines[entry] = engine
        except QatError as error:
            engines[entry] = str(error)
    return engines


def planned(entry: Entry, batch: int, size: tuple[int, int] | None, config: BuildConfig) -> tuple[Path, BuildConfig]:
    """The engine that is built of an ONNX file for a batch size and, where the size is dynamic, a size; and how."""
    name = "-".join([entry.name, f"b{batch}", *(["x".join(map(str, size))] if size else [])])
    changes: dict[str, Any] = {"batch": (batch,) * 3, "precision": "fp16" if entry.baseline else "best"}
    if entry.build > 1:
        changes["timing_cache"] = ""
    if size is not None:
        changes |= {"height": (size[0],) * 3, "width": (size[1],) * 3}
    return entry.file.with_name(f"{name}.engine"), config.model_copy(update=changes)


def check_entries(entries: Sequence[Entry], size: tuple[int, int] | None = None) -> None:
    """Check what would only be noticed after minutes; `size` is the (height, width) in pixels that was asked for.

    Raises:
        InputError: a file is missing or of no known kind, the baseline holds quantizers, or a file has another size.
    """
    for entry in entries:
        if not entry.file.is_file():
            raise InputError(no_file(entry.file, "expected an ONNX file or an engine"))
        if entry.is_engine:
            continue
        if entry.file.suffix.lower() != ".onnx":
            raise InputError(f"{entry.file} is neither an .onnx file nor an engine (.engine, .plan); export it")
        file = OnnxFile.read(entry.file)
        if file.quantized and entry.baseline:
            raise InputError(
                f"--baseline {entry.file} holds quantizers; give the float model's ONNX, exported the same way"
            )
        own = file.image[1][2:]
        if size and any(fixed not in (None, asked) for fixed, asked in zip(own, size, strict=True)):
            raise InputError(
                f"{entry.file} takes images of {own[0]}x{own[1]} only; leave the size out, or export it with --dynamic"
            )


@dataclass(frozen=True)
class BenchmarkRow:
    """One network at one batch size.

    Attributes:
        nms: whether NMS is inside.
        masks: whether it gives masks, or what they are made of.
        gain: speed against the baseline of the same kind at the same batch, minus 1; None without one.
        error: why there are no figures.
        notes: what the engine's layers say about its speed.
        runtime: what runs it: one of the names above.
        build: number of the build of a file that is built several times.
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
    runtime: str = TENSORRT
    build: int = 1

    @property
    def images_per_second(self) -> float | None:
        """Images per second; None where nothing was measured."""
        return None if self.figures is None else self.figures.qps * self.batch

    @property
    def title(self) -> str:
        """The row in words, such as 'yolov9-c-int8, batch 8'."""
        runtime = "" if self.runtime == TENSORRT else f", {self.runtime} {self.precision}"
        return f"{self.model}{runtime}, batch {self.batch}"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: its fields, images per second, and the figures by name."""
        figures = None if self.figures is None else self.figures.to_dict()
        return {**asdict(self), "images_per_second": self.images_per_second, "figures": figures}


@dataclass(frozen=True)
class Candidate:
    """A row to be, and what runs it: an engine, or on a CPU a call; None where the row says why."""

    row: BenchmarkRow
    running: Execution | Callable[[], object] | None = None


def open_engines(
    engines: Mapping[Entry, Path | str],
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
            if isinstance(engine, str):
                raise QatError(engine)
            execution = Execution(engine, api, device)
            stack.callback(execution.close)
            spec, form = execution.inputs[0], execution.input_spec
            _, channels, *largest = form.nchw(execution.limits[spec.name][1])
            execution.set_shapes({spec.name: form.own((batch, channels, *(size or largest)))})
            row = _described(row, execution, config.cuda_graph)
            if config.cuda_graph:
                execution.graph()
            candidates.append(Candidate(row, execution))
        except FAILURES as error:
            candidates.append(Candidate(replace(row, error=one_line(error))))
    return candidates


def _described(row: BenchmarkRow, execution: Execution, graphs: bool) -> BenchmarkRow:
    """The row with the engine's precision and outputs, and notes on what its layers say about its speed."""
    sentences = [WITHOUT_GRAPH] * (graphs and execution.note.data_dependent)
    outputs = {spec.name: len(spec.shape) for spec in execution.outputs}
    precision = execution.note.precision
    try:
        summary = summarize(layers_of(execution, runs=5))
        precision = precision or ("int8" if summary.computing.get("INT8") else "fp16")
        sentences = [*advice(summary, precision), *sentences]
    except InputError:  # built without details of its layers, by plain trtexec; it can be timed all the same
        pass
    return replace(
        row, precision=precision.upper(), nms=set(DETECT.detections) <= set(outputs),
        masks=bool(task_of_outputs(execution.note.metadata, outputs).masks),
        notes=tuple(f"{row.model}, batch {row.batch}: {sentence}" for sentence in sentences),
    )  # fmt: skip


def time_candidates(candidates: Sequence[Candidate], config: TimingConfig) -> list[BenchmarkRow]:
    """Rows of what was opened, timed interleaved, and compared with their baselines."""
    running = {str(number): candidate.running for number, candidate in enumerate(candidates) if candidate.running}
    figures = time_interleaved(running, config)
    return compared([replace(one.row, figures=figures.get(str(number))) for number, one in enumerate(candidates)])


def compared(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """Rows of one batch size, with their speed against the baseline of their kind."""
    results = []
    for row in rows:
        kind = (row.nms, row.masks)
        bases = [one.figures for one in rows if one.baseline and one.figures and (one.nms, one.masks) == kind]
        if row.figures and bases and not row.baseline:
            row = replace(row, gain=row.figures.qps / bases[0].qps - 1)
        results.append(row)
    return results


def verdicts(rows: Sequence[BenchmarkRow]) -> list[str]:
    """A sentence for each INT8 file beside an FP16 baseline of its kind: its speed, and at which batches to use it.

    A difference counts where it is larger than the spread of the builds of either file, or `NOISE` of a single build.
    """
    if any(row.runtime == ONNX_RUNTIME and row.precision.startswith("INT8") for row in rows):
        return ["INT8's speed shows in TensorRT only: times in ONNX Runtime on a CPU say nothing of it"]
    # file and kind → batch → of each build
    speeds: dict[tuple[str, bool, bool, bool], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.figures and row.precision == ("FP16" if row.baseline else "INT8"):
            file = row.model.removesuffix(f"-build{row.build}" if row.build > 1 else "")
            speeds[file, row.nms, row.masks, row.baseline][row.batch].append(row.figures.qps)
    files = [key for key in speeds if not key[-1]]
    sentences = []
    for file, *kind, _ in files:
        baselines = [speeds[key] for key in speeds if key[1:] == (*kind, True)]
        ratios: dict[int, float] = {}  # by batch size; 1 within the noise
        words, widest, builds = [], 0.0, 1
        for batch, int8 in sorted(speeds[file, kind[0], kind[1], False].items()):
            fp16 = next((of_file[batch] for of_file in baselines if batch in of_file), None)
            if fp16 is None:
                continue
            ratio, builds = fmean(int8) / fmean(fp16), min(len(int8), len(fp16))
            noise = max(max(one) / min(one) - 1 for one in (int8, fp16)) if builds > 1 else NOISE
            same = 1 / (1 + noise) <= ratio <= 1 + noise
            widest = max(widest, noise)
            ratios[batch] = 1.0 if same else ratio
            words.append(f"{'as fast' if same else f'{ratio:.2f} times as fast'} at batch {batch}")
        if not ratios:
            continue
        faster = [batch for batch, ratio in ratios.items() if ratio > 1]
        tail = [batch for batch in ratios if all(ratios[one] > 1 for one in ratios if one >= batch)]
        advice = "use INT8" if len(faster) == len(ratios) else f"use INT8 from batch {tail[0]} on" if tail else ""
        if not advice or len(tail) < len(faster):
            advice = f"use INT8 at batch {', '.join(map(str, faster))}" if faster else "use FP16"
        source = f"the spread of {builds} builds is up to {widest:.1%}" if builds > 1 else (
            f"of one build each, of which {NOISE:.0%} count as noise; --builds 2 measures it")  # fmt: skip
        which = f"{file}: " if len(files) > 1 else ""
        sentences.append(f"{which}INT8 against FP16: {', '.join(words)} ({source}); {advice}")
    return sentences
