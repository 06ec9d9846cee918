"""Engines over batch sizes and numbers of contexts, in one run and in turns, as rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

import torch

from utils.core.errors import InputError, QatError, no_file
from utils.core.tasks import DETECT, task_of_outputs
from utils.trt import inspector, layer_report, onnx_summary, tensorrt_api, timing
from utils.trt.benchmark_rows import Row, compared
from utils.trt.build_config import BuildConfig
from utils.trt.context import Execution
from utils.trt.engine_file import ENGINE_SUFFIXES, is_current
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
        spec, form = execution.inputs[0], execution.input_form
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
