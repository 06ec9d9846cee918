"""The job behind `scripts/benchmark_trt.py`: engines, PyTorch networks and ONNX files, timed interleaved."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from utils.core.errors import InputError
from utils.core.input_spec import KIND_KEY, InputSpec
from utils.jobs import benchmark_networks
from utils.runners import onnxrt
from utils.trt import benchmark
from utils.trt.benchmark import COMPILED, BenchmarkRow, Candidate, Entry
from utils.trt.engine_file import EngineNote
from utils.trt.preflight import BuildConfig, OnnxFile, profile_shapes
from utils.trt.timing import TimingConfig

if TYPE_CHECKING:
    from torch import nn

    from utils.trt.tensorrt_api import Api
    from utils.trt.trtexec import Trtexec

logger = logging.getLogger(__name__)

BATCHES = (1, 4, 8, 12)


@dataclass(frozen=True)
class Benchmark:
    """What is timed, and how.

    Attributes:
        entries: ONNX files and engines; without `api` ONNX Runtime runs the former.
        networks: float checkpoints → networks on the device.
        size: (height, width) in pixels that was given, for files of dynamic size; None: each has its own.
        timed_size: the one at which everything is timed; None if an engine alone does not say it.
        contexts: numbers of contexts that run side by side, of engines.
        compiled: whether torch.compile has rows too.
        api: TensorRT; None where no engine takes part.
        program: trtexec, if it takes the times.
    """

    entries: Sequence[Entry]
    networks: Mapping[Path, nn.Module]
    size: tuple[int, int] | None
    contexts: Sequence[int]
    timing: TimingConfig
    building: BuildConfig
    device: torch.device
    compiled: bool = False
    timed_size: tuple[int, int] | None = None
    api: Api | None = None
    program: Trtexec | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is what is measured."""
        return self.api is not None or self.device.type == "cuda"

    def measure(self, batch: int) -> list[BenchmarkRow]:
        """Build what is missing for this batch size, and time everything interleaved."""
        engines: dict[Entry, Path | str] = {}
        if self.api is not None:
            engines = benchmark.prepare(self.entries, batch, self.size, self.building, self.api)
        shape = (batch, *(self.timed_size or benchmark_networks.DEFAULT_SIZE))
        with ExitStack() as stack:
            candidates: list[Candidate] = []
            for file, model in self.networks.items():
                if self.compiled:
                    logger.info("torch.compile compiles %s for batch size %d, which takes minutes", file, batch)
                candidates += benchmark_networks.open_checkpoint(
                    file, model, shape, self.device, compiled=self.compiled, graphs=self.timing.cuda_graph
                )
            if self.api is not None:
                candidates += benchmark.open_engines(
                    engines, batch, self.size, self.contexts, self.api, self.device, self.timing, stack, self.program
                )
            else:
                candidates += [benchmark_networks.open_onnx(entry.file, entry.baseline, batch, self.size, stack)
                               for entry in self.entries]  # fmt: skip
            rows = benchmark.time_candidates(candidates, self.timing, self.program)
            candidates.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # TensorRT cannot have what PyTorch keeps
        return rows

    def software(self) -> list[str]:
        """Names and versions of what runs the networks."""
        found = [self.api.name] if self.api else []
        found += [f"PyTorch {torch.__version__.split('+')[0]}"] if self.networks else []
        return found + ([f"ONNX Runtime {onnxrt.version()}"] if self.entries and not self.api else [])


def common_size(entries: Sequence[Entry], checkpoints: Sequence[Path]) -> tuple[int, int] | None:
    """(height, width) in pixels at which files are timed without --imgsz: that of all of them.

    A checkpoint says none and takes that of the others; None if there is nothing that says one.

    Raises:
        InputError: they differ, or an engine beside other files does not say its size.
    """
    sizes = {entry.file: _size_of(entry) for entry in entries}
    unknown = [file for file, size in sizes.items() if size is None]
    if unknown and len(sizes) + len(checkpoints) > 1:
        raise InputError(f"{unknown[0]} does not say its image size, and all files are timed at one; give --imgsz")
    texts = {file: "x".join(map(str, size)) for file, size in sizes.items() if size is not None}
    first = next(iter(texts), None)
    for file, text in texts.items():
        if first is not None and text != texts[first]:
            raise InputError(f"{first} is of {texts[first]}, and {file} of {text}; give --imgsz, or files of one size")
    return next(iter(sizes.values()), None)


def _size_of(entry: Entry) -> tuple[int, int] | None:
    """Height and width at which a file is timed by itself; None for an engine whose note does not say it."""
    if not entry.is_engine:
        summary = OnnxFile.read(entry.file)
        ranges = profile_shapes(summary, BuildConfig())
        shape = summary.input_spec.nchw(ranges[summary.image[0]][-1]) if ranges else summary.image[1]
        return cast(tuple[int, int], tuple(shape[2:]))
    note = EngineNote.load(entry.file)
    for _, _, largest in note.profile.values():
        form = InputSpec.of_file(note.metadata, note.metadata.get(KIND_KEY, "float"), largest)
        _, channels, height, width = form.nchw(largest)
        return (height, width) if channels == 3 else None
    try:
        height, width = json.loads(note.metadata.get("imgsz", ""))
        return int(height), int(width)
    except (ValueError, TypeError):
        return None


def batch_sizes(given: Sequence[int] | None, sweep: int | None) -> list[int]:
    """The batch sizes that were asked for; `sweep` is the last of 1, 2, 4, ..., also where it is no power of two."""
    if sweep is None:
        return list(dict.fromkeys(given or BATCHES))
    powers = [1 << n for n in range(sweep.bit_length()) if 1 << n <= sweep]
    return list(dict.fromkeys((*powers, sweep)))


def succeeded(rows: Sequence[BenchmarkRow]) -> bool:
    """Whether all rows have figures; torch.compile may have none, since it needs a compiler."""
    return not any(row.error and row.runtime != COMPILED for row in rows)
