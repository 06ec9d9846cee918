"""Engines over batch sizes and numbers of contexts, in one run and in turns, as rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from utils.core.errors import InputError, QatError, no_file
from utils.core.tasks import DETECT, task_of_outputs
from utils.trt import inspector, layer_report, onnx_summary, tensorrt_api, timing
from utils.trt.build_config import BuildConfig
from utils.trt.engine_file import ENGINE_SUFFIXES, is_current
from utils.trt.runner import Execution
from utils.trt.tensorrt_api import Api
from utils.trt.timing import Figures, Timed, TimingConfig
from utils.trt.trtexec import Trtexec, parse_times
from utils.trt.tune import build_or_tune

logger = logging.getLogger(__name__)

WITHOUT_GRAPH = "timed without a CUDA graph, which holds no results whose size depends on the image, as of NMS"
FAILURES = (QatError, RuntimeError)  # of one row: torch's too, when memory is short or nothing can be captured


def one_line(error: Exception) -> str:
    """An error as a row has it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@dataclass(frozen=True)
class Entry:
    """A file that takes part.

    Attributes:
        file: an ONNX file, of which engines are built, or an engine.
        baseline: the FP16 one.
    """

    file: Path
    baseline: bool = False

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
    found: dict[Entry, Path | str] = {}
    for entry in entries:
        if entry.is_engine:
            found[entry] = entry.file
            continue
        engine, wanted = planned(entry, batch, size, config)
        try:
            if not is_current(engine, entry.file, api, gpu, wanted):
                build_or_tune(entry.file, engine, wanted, api)
            found[entry] = engine
        except QatError as error:
            found[entry] = str(error)
    return found


def planned(entry: Entry, batch: int, size: tuple[int, int] | None, config: BuildConfig) -> tuple[Path, BuildConfig]:
    """The engine that is built of an ONNX file for a batch size and, where the size is dynamic, a size; and how."""
    name = "-".join([entry.file.stem, f"b{batch}", *(["x".join(map(str, size))] if size else [])])
    wanted = replace(config, batch=(batch,) * 3, precision="fp16" if entry.baseline else "best")
    if size is not None:
        wanted = replace(wanted, height=(size[0],) * 3, width=(size[1],) * 3)
    return entry.file.with_name(f"{name}.engine"), wanted


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


@dataclass(frozen=True)
class Candidate:
    """A row to be, and what runs it: contexts side by side; none where the row says why."""

    row: Row
    running: Sequence[Timed] = ()


def open_engines(
    engines: Mapping[Entry, Path | str],
    batch: int,
    size: tuple[int, int] | None,
    contexts: Sequence[int],
    opening: Opening,
) -> list[Candidate]:
    """Engines at this batch, each with so many contexts, for each of these numbers.

    Args:
        contexts: numbers of contexts that run side by side.
    """
    found = []
    for entry, engine in engines.items():
        row = Row(entry.file.stem, batch, entry.baseline)
        try:
            if isinstance(engine, str):
                raise QatError(engine)
            group = [opening.load(engine, batch, size)]
            row = _described(row, group[0], opening.graphs)
        except FAILURES as error:
            found.append(Candidate(replace(row, error=one_line(error))))
            continue
        for number in contexts:
            one = replace(row, contexts=number, notes=row.notes if number == contexts[0] else ())
            try:
                while opening.beside and len(group) < number:
                    group.append(opening.sibling(group[0]))
                if opening.beside and opening.graphs:
                    for context in group[:number]:
                        context.graph()
                found.append(Candidate(one, group[:number]))
            except FAILURES as error:
                found.append(Candidate(replace(one, error=one_line(error))))
    return found


class Opening(contextlib.ExitStack):
    """Opens engines, and closes them at the end of the `with` block.

    Attributes:
        beside: whether contexts side by side are opened here; trtexec has its own.
        graphs: whether their CUDA graphs are captured here too, so that what cannot be captured is a row.
    """

    def __init__(self, api: Api, device: torch.device, beside: bool = True, graphs: bool = False) -> None:
        super().__init__()
        self.api, self.device, self.beside, self.graphs = api, device, beside, graphs

    def load(self, engine: Path, batch: int, size: tuple[int, int] | None) -> Execution:
        """An engine at a batch size.

        Raises:
            InputError: it is not made for that batch or size, or not loaded.
        """
        execution = self._kept(Execution(engine, self.api, self.device))
        spec, form = execution.inputs[0], execution.input_spec
        min_shape, max_shape = map(form.nchw, execution.limits[spec.name])
        if not min_shape[0] <= batch <= max_shape[0]:
            raise InputError(
                f"{engine} takes batches of {min_shape[0]} to {max_shape[0]}, not {batch}; give --batch-size "
                f"{max_shape[0]}, or the ONNX file, of which an engine is built for each batch size"
            )
        height, width = size or max_shape[2:]
        execution.set_shapes({spec.name: form.own((batch, max_shape[1], height, width))})
        return execution

    def sibling(self, execution: Execution) -> Execution:
        """Another context of an engine."""
        return self._kept(execution.sibling())

    def _kept(self, execution: Execution) -> Execution:
        self.callback(execution.close)
        return execution


def measure(candidates: Sequence[Candidate], config: TimingConfig, program: Trtexec | None = None) -> list[Row]:
    """Rows of what was opened, timed in turns by our own loop, or by trtexec; compared with their baselines."""
    running = {str(number): one for number, one in enumerate(candidates) if one.running}
    if program is None:
        figures: dict[str, Figures | str] = dict(timing.measure({n: one.running for n, one in running.items()}, config))
    else:
        figures = _with_trtexec(running, config, program)
    rows = []
    for number, one in enumerate(candidates):
        found = figures.get(str(number))
        rows.append(replace(one.row, error=found) if isinstance(found, str) else replace(one.row, figures=found))
    return compared(rows)


def _described(row: Row, execution: Execution, graphs: bool) -> Row:
    said = [WITHOUT_GRAPH] * (graphs and execution.note.data_dependent)
    outputs = {spec.name: len(spec.shape) for spec in execution.outputs}
    row = replace(row, precision=execution.note.precision.upper(), nms=set(DETECT.detections) <= set(outputs),
                  masks=bool(task_of_outputs(execution.note.metadata, outputs).masks))  # fmt: skip
    try:
        summary = inspector.summarize(layer_report.layers_of(execution, runs=5))
    except InputError:  # built without details of its layers, by plain trtexec; it can be timed all the same
        return replace(row, notes=_of(row, said))
    precision = execution.note.precision or ("int8" if summary.counts.get("INT8") else "fp16")
    advice = layer_report.advice(summary, precision)
    return replace(row, precision=precision.upper(), notes=_of(row, [*advice, *said]))


def _of(row: Row, sentences: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{row.model}, batch {row.batch}: {sentence}" for sentence in sentences)


def _with_trtexec(running: Mapping[str, Candidate], config: TimingConfig, program: Trtexec) -> dict[str, Figures | str]:
    """Rounds of trtexec, in turns; of each engine the round with the median speed, or why there is none."""
    found: dict[str, list[Figures]] = {name: [] for name in running}
    failed: dict[str, Figures | str] = {}
    for _ in range(config.rounds):
        for name, one in running.items():
            try:
                if name not in failed:
                    speed, parts = parse_times(program.run(_flags(one, config, program)))
                    copies = () if config.transfers else ("h2d", "d2h")  # then it prints 0 for them
                    found[name].append(Figures(speed, {key: parts[key] for key in parts if key not in copies}))
            except QatError as error:
                failed[name] = str(error)
    middle = {name: median_low([one.qps for one in rounds]) for name, rounds in found.items() if name not in failed}
    return failed | {name: next(one for one in found[name] if one.qps == qps) for name, qps in middle.items()}


def _flags(candidate: Candidate, config: TimingConfig, program: Trtexec) -> list[str]:
    """What trtexec is asked for."""
    execution, contexts = candidate.running[0], candidate.row.contexts
    if not isinstance(execution, Execution):
        raise TypeError("trtexec times engines only")
    spec = execution.inputs[0]
    flags = [f"--loadEngine={execution.path}", f"--warmUp={config.warm_up:g}",
             f"--duration={config.duration / config.rounds:g}"]  # fmt: skip
    if None in spec.shape:
        flags.append(f"--shapes={spec.name}:{'x'.join(map(str, execution.buffers[spec.name].shape))}")
    if contexts > 1:
        flags.append(f"{'--infStreams' if program.knows('--infStreams') else '--streams'}={contexts}")  # before 8.6
    how = {"cuda_graph": config.cuda_graph, "spin_wait": config.spin_wait, "transfers": config.transfers}
    return flags + program.timing_flags(**how) + ["--exposeDMA"] * (not config.overlap)


TENSORRT, PYTORCH, COMPILED, ONNX_RUNTIME = "TensorRT", "PyTorch", "torch.compile", "ONNX Runtime"
PARTS = ("latency", "compute", "enqueue", "h2d", "d2h")


@dataclass(frozen=True)
class Row:
    """One network at one batch size.

    Attributes:
        nms: whether NMS is inside.
        masks: whether it gives masks, or what they are made of.
        gain: speed against the baseline of the same kind at the same batch, minus 1; None without one.
        error: why there are no figures.
        notes: what the engine's layers say about its speed.
        runtime: what runs it: one of the names above.
        contexts: execution contexts that run side by side, each on its own batches.
        speedup: speed as a multiple of that of PyTorch in FP32, eager, at the same batch; None without it.
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
    contexts: int = 1
    speedup: float | None = None

    @property
    def images_per_second(self) -> float | None:
        """Images per second, of all contexts; None where nothing was measured."""
        return None if self.figures is None else self.figures.qps * self.batch

    @property
    def title(self) -> str:
        """The row in words, such as 'yolov9-c-int8, batch 8, 2 contexts'."""
        runtime = "" if self.runtime == TENSORRT else f", {self.runtime} {self.precision}"
        return f"{self.model}{runtime}, batch {self.batch}" + (f", {self.contexts} contexts" * (self.contexts > 1))

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON holds it: its fields, images per second, and the figures by name."""
        known = {name: value for name, value in asdict(replace(self, figures=None)).items() if name != "figures"}
        figures = None if self.figures is None else self.figures.to_dict()
        return {**known, "images_per_second": self.images_per_second, "figures": figures}

    def to_line(self) -> dict[str, Any]:
        """The row as CSV holds it: plain values, of which those that were not measured are empty; times in ms."""
        parts = self.figures.parts if self.figures else {}
        values = {"model": self.model, "runtime": self.runtime, "precision": self.precision, "nms": self.nms,
                  "masks": self.masks, "baseline": self.baseline, "batch": self.batch,
                  "contexts": self.contexts}  # fmt: skip
        values |= {f"{name}_median_ms": parts[name].median if name in parts else None for name in PARTS}
        values |= {"latency_p99_ms": parts["latency"].p99 if parts else None}
        return {**values, "qps": self.figures.qps if self.figures else None,
                "images_per_second": self.images_per_second, "against_baseline": self.gain,
                "against_pytorch": self.speedup, "error": self.error}  # fmt: skip


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows of one batch size, with their speed against the baseline of their kind and against PyTorch."""
    return [_against_pytorch(_against_baseline(row, rows), rows) for row in rows]


def _against_baseline(row: Row, rows: Sequence[Row]) -> Row:
    kind = (row.nms, row.masks, row.contexts)
    same = [one for one in rows if one.baseline and one.figures and (one.nms, one.masks, one.contexts) == kind]
    if row.baseline or row.figures is None or not same or same[0].figures is None or _is_pytorch(row):
        return row
    base = same[0].figures
    notes = row.notes
    if row.runtime == TENSORRT and (row.precision, same[0].precision) == ("INT8", "FP16") and row.contexts == 1:
        ours, theirs = (one.parts["compute"].median for one in (row.figures, base))
        sentence = layer_report.not_faster(row.title, ours, theirs)
        notes = (*notes, *([sentence] if sentence else []))
    return replace(row, gain=row.figures.qps / base.qps - 1, notes=notes)


def _against_pytorch(row: Row, rows: Sequence[Row]) -> Row:
    """With its speed against the eager FP32 network: its own file's, or the first of them with masks, or without."""
    bases = [one for one in rows if one.runtime == PYTORCH and one.precision == "FP32" and one.figures]
    base = next((one for one in bases if one.masks == row.masks and (one.model == row.model or not _is_pytorch(row))),
                None)  # fmt: skip
    if base is None or base.figures is None or row.figures is None:
        return row
    return replace(row, speedup=row.figures.qps / base.figures.qps)


def _is_pytorch(row: Row) -> bool:
    return row.runtime in (PYTORCH, COMPILED)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Of each model in each runtime and precision the row with the most images per second."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.model, row.runtime, row.precision)
        if row.figures and (key not in best or (row.images_per_second or 0) > (best[key].images_per_second or 0)):
            best[key] = row
    return list(best.values())
