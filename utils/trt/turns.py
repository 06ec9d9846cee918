"""Engines timed in turns by `timing`, with the median of each turn: how far repeated measurements differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from utils.core.errors import QatError
from utils.trt import timing
from utils.trt.context import Execution
from utils.trt.timing import TimingConfig

if TYPE_CHECKING:
    from utils.trt.tensorrt_api import Api

TURNS = 5
TURN = TimingConfig(warm_up=100, duration=0.2, rounds=1, cuda_graph=True, transfers=False, iterations=20)


@dataclass(frozen=True)
class Turns:
    """The median milliseconds of one batch in each turn."""

    medians: tuple[float, ...]

    @property
    def ms(self) -> float:
        """The median of the turns' medians."""
        return median(self.medians)

    @property
    def spread(self) -> float:
        """The slowest turn minus the fastest, in milliseconds."""
        return max(self.medians) - min(self.medians)


def time_in_turns(
    engines: Mapping[str, Path],
    api: Api,
    device: torch.device,
    on_turn: Callable[[], object] = lambda: None,
) -> dict[str, Turns | str]:
    """Time engines in `TURNS` turns, every other one backwards, each at its profile's opt shape.

    Args:
        on_turn: called after each turn of each engine, for a progress bar.

    Returns:
        The times by name, or the reason why an engine could not be timed.
    """
    found: dict[str, Turns | str] = {}
    medians: dict[str, list[float]] = {}
    with ExitStack() as stack:
        running: dict[str, Execution] = {}
        for name, path in engines.items():
            try:
                running[name] = _ready(stack, path, api, device)
            except (QatError, RuntimeError) as error:  # torch's, when memory is short or nothing can be captured
                found[name] = " ".join(str(error).split())[:200]
        for name in timing.turns(running, TURNS):
            figures = timing.measure({name: running[name]}, TURN, on_turn)
            medians.setdefault(name, []).append(figures[name].parts["compute"].median)
    torch.cuda.empty_cache()  # the next build wants the memory
    return {**found, **{name: Turns(tuple(values)) for name, values in medians.items()}}


def _ready(stack: ExitStack, path: Path, api: Api, device: torch.device) -> Execution:
    execution = Execution(path, api, device)
    stack.callback(execution.close)
    execution.set_shapes({spec.name: execution.opt_shape(spec.name) for spec in execution.inputs})
    execution.graph()
    return execution
