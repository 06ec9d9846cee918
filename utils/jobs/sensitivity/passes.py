"""Passes over the validation images: scores of units, and AP of a network in many states.

A pass holds a batch at a time and asks a `Layerwise` network for each state of it; of several processes, each takes a
part of the states. Scores are written down after each batch, AP at the end of its pass: so much a killed run repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.quantize.finetune import as_input
from models.quantize.partial_forward import Layerwise, Run, State
from utils.core import distributed
from utils.evaluation.batch import Batch
from utils.evaluation.loop import add_predictions
from utils.evaluation.metrics import EvalStatistics
from utils.jobs.sensitivity.prediction_distance import distance, weight
from utils.jobs.sensitivity.report import AnalysisState
from utils.jobs.sensitivity.units import Unit

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

IMAGES_A_UNIT = 25  # that each unit sees in screening, where there are so many
LARGEST_TURN = 8  # with many images, a unit sees every eighth batch
FLOAT, INT8 = "float", "INT8"  # names of the two whole networks


class Clock:
    """The minutes that `--budget` gives this process; None: no limit."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes, self._began = minutes, time.perf_counter()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is used, by the main process's clock."""
        if self._minutes is None:
            return False
        end = self._began + 60 * self._minutes * share
        return distributed.from_main(lambda: time.perf_counter() > end)


@dataclass(frozen=True)
class Screened:
    """What screening found about a unit: distances to the float network's predictions (`prediction_distance.py`).

    Attributes:
        images: that the unit was seen on.
        base: of the INT8 network, on the same images.
        in_float: of the INT8 network with this unit in float.
        alone: of the float network with this unit in INT8.
    """

    images: int
    base: float
    in_float: float
    alone: float

    @property
    def score(self) -> float:
        """How much nearer the INT8 network comes with the unit in float."""
        return self.base - self.in_float


class Passes:
    """Passes of one network over the same images; `state` keeps what they find."""

    def __init__(
        self, network: Layerwise, loader: DataLoader[Any], device: torch.device, folder: Path, state: AnalysisState,
        clock: Clock, *, every_unit: bool = False,
    ) -> None:  # fmt: skip
        """Prepare the passes; nothing is run yet.

        Args:
            loader: the images, in the same order every time.
            folder: where the state is written.
            every_unit: units see every image in screening, and their AP costs no further run.
        """
        self._network, self._loader, self._device = network, loader, device
        self.state, self._folder, self._clock, self._every_unit = state, folder, clock, every_unit
        self._detected: dict[tuple[str, str, int], Any] = {}  # stage, state and batch → what screening has detected

    def screen(self, units: Sequence[Unit], stage: str, share: float) -> bool:
        """Score units, in turns, so that each sees another part of the images; False if the time budget ended it.

        Args:
            stage: a name under which the results are kept.
            share: of the time budget that it may use.
        """
        count = len(self._loader.dataset)
        turn = 1 if self._every_unit else max(1, min(LARGEST_TURN, count // IMAGES_A_UNIT, len(self._loader)))
        done = self.state.screened.setdefault(stage, {})
        for index, batch in self._batches(f"screening {len(units)} units"):
            rows = done.setdefault(str(index), {})
            todo = [unit for place, unit in enumerate(units) if (index + place) % turn == 0 and unit.name not in rows]
            if todo and len(batch):
                if self._clock.over(share):
                    return False
                rows.update(self._screen_batch(batch, todo, stage, index))
                self.state.save(self._folder)
        return True

    def _screen_batch(self, batch: Batch, units: Sequence[Unit], stage: str, index: int) -> dict[str, list[float]]:
        """Unit → sums over a batch's images, as `AnalysisState.screened` has them."""
        images = as_input(batch.images, self._device)
        origin = self._network.run(images, State())
        whole = self._network.run(images, self._network.everything)
        detected = {FLOAT: detections(batch, origin), INT8: detections(batch, whole)} if distributed.is_main() else {}
        sums = [len(images), float(weight(origin.prediction)), _apart(origin, whole)]
        rows = {}
        for unit in _shared_out(units):
            in_float = self._network.run(images, unit.in_float, whole)
            alone = self._network.run(images, unit.alone, origin)
            rows[unit.name] = [*sums, _apart(origin, in_float), _apart(origin, alone)]
            if self._every_unit:
                detected[unit.name] = detections(batch, in_float)
        self._detected |= {(stage, name, index): found for name, found in detected.items()}
        return distributed.united(rows)

    def screened(self, units: Sequence[Unit], stage: str) -> dict[str, Screened]:
        """What screening found, by unit; units that it never came to are missing."""
        found = {}
        for unit in units:
            rows = [rows[unit.name] for rows in self.state.screened.get(stage, {}).values() if unit.name in rows]
            if rows:
                count, scale, *distances = map(sum, zip(*rows, strict=True))
                found[unit.name] = Screened(int(count), *(value / max(scale, 1e-9) for value in distances))
        return found

    def measure_ap(self, stage: str, states: Mapping[str, State]) -> tuple[dict[str, float], bool]:
        """AP by name of the state, of all images, and whether that is all: a time budget may end it after some.

        What an earlier process has measured is not measured again. Where the budget ends the rest of it, only that
        is given: AP of fewer images does not compare with it.

        Args:
            stage: a name under which the results are kept; within it a name stands for one state only.
        """
        known = {name: ap for name, ap in self.state.ap.get(stage, {}).items() if name in states}
        missing = {name: state for name, state in states.items() if name not in known}
        if missing:
            results, whole = self._statistics(stage, missing)
            found = distributed.united({name: one.score().decides for name, one in results.items()})
            if not whole:
                return known or found, False
            resampled = distributed.united({name: one.score_resampled() for name, one in results.items()})
            self.state.keep_ap(stage, found, resampled)
            self.state.save(self._folder)
            known |= found
        return {name: known[name] for name in states}, True

    def _statistics(self, stage: str, states: Mapping[str, State]) -> tuple[dict[str, EvalStatistics], bool]:
        """What this process's states detect, and whether it is in all images."""
        results = {name: EvalStatistics() for name in _shared_out(list(states))}
        for index, batch in self._batches(f"AP of {len(states)} networks"):
            if index and self._clock.over():
                return results, False
            if not len(batch):
                continue
            images, whole = as_input(batch.images, self._device), None
            for name, statistics in results.items():
                found = self._detected.get((stage, name, index))
                if found is None:
                    if whole is None and len(results) > 1:
                        whole = self._network.run(images, self._network.everything)
                    found = detections(batch, self._network.run(images, states[name], whole))
                statistics.extend(found)
        return results, True

    def _batches(self, title: str) -> Iterator[tuple[int, Batch]]:
        from tqdm import tqdm

        yield from enumerate(tqdm(self._loader, title, unit="batch", disable=not distributed.is_main()))


def _shared_out(things: Sequence[Any]) -> Sequence[Any]:
    """This process's part of them."""
    world = distributed.world()
    return things[world.rank :: world.size]


def _apart(origin: Run, other: Run) -> float:
    return float(distance(origin.prediction, other.prediction, other.size))


def detections(batch: Batch, run: Run) -> dict[str, Any]:
    """What a network detects in a batch, as the evaluation loop keeps it."""
    statistics = EvalStatistics()
    add_predictions(statistics, run.prediction, batch)
    return statistics.to_plain()
