"""The passes over images of a sensitivity run: proxy scores of units (`Screening`) and AP of states (`Confirming`).

Both hold a batch at a time, ask a `Layerwise` network for many states of it, and write down each result at once, so
that a run that is killed repeats one unit on one batch.

Several processes take turns with the units and states of a batch, and write down what they found at its end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.quantize.finetune import as_input
from models.quantize.partial_forward import Layerwise, Run, State
from utils.core import distributed
from utils.core.errors import CheckpointError
from utils.core.file_schema import damaged
from utils.core.files import save_torch
from utils.core.resampled import Resampled
from utils.core.torch_files import check_archive
from utils.evaluation.batch import Batch
from utils.evaluation.loop import add_predictions
from utils.evaluation.proxy import distance, weight
from utils.evaluation.statistics import Statistics
from utils.jobs.sensitivity.state import AnalysisState
from utils.jobs.sensitivity.units import Unit
from utils.jobs.state_schema import check_part
from utils.untrusted import torch_archive

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

IMAGES_A_UNIT = 25  # that each unit sees in screening, where there are so many
PARTS = "parts"
LARGEST_TURN = 8  # with many images, a unit sees every eighth batch


@dataclass(frozen=True)
class Screened:
    """What screening found about a unit: distances to the float network's predictions, see `proxy.distance`.

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


class Clock:
    """The time that `--budget` gives this process."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes, self._began = minutes, time.perf_counter()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is used, by the main process's clock."""
        if self._minutes is None:
            return False
        end = self._began + 60 * self._minutes * share
        return distributed.from_main(lambda: time.perf_counter() > end)


@dataclass(frozen=True)
class Work:
    """What both kinds of pass work on.

    Attributes:
        loader: the images, in the same order every time.
        folder: the run's.
        state: written to `folder` after each step.
    """

    loader: DataLoader[Any]
    device: torch.device
    folder: Path
    state: AnalysisState
    clock: Clock


class Confirming:
    """AP of a network in many states, from one pass over the images."""

    def __init__(self, work: Work, network: Layerwise) -> None:
        self._work, self._network = work, network

    def run(self, stage: str, states: Mapping[str, State]) -> tuple[dict[str, float], bool]:
        """AP by name of the state, and whether that is all, of all images: a time budget may end it after some.

        What an earlier process has measured is not measured again. Where the budget ends the rest of it, only that
        is given: AP of fewer images does not compare with it.

        Args:
            stage: a name under which the results are kept; within it a name stands for one state only.
        """
        state, folder = self._work.state, self._work.folder
        known = {name: ap for name, ap in state.ap.get(stage, {}).items() if name in states}
        missing = {name: one for name, one in states.items() if name not in known}
        if missing:
            found, whole = self._measured(stage, missing)
            if not whole:
                return known or found, False
            known |= found
            state.ap[stage] = {**state.ap.get(stage, {}), **found}
            state.save(folder)
        forget_parts(folder, stage)
        return {name: known[name] for name in states}, True

    def _measured(self, stage: str, states: Mapping[str, State]) -> tuple[dict[str, float], bool]:
        """AP by name of the state, from one pass, and whether it is of all images."""
        from tqdm import tqdm

        began = time.perf_counter()
        results = {name: Statistics() for name in states}
        whole = True
        title = f"AP of {len(states)} networks"
        for index, batch in enumerate(tqdm(self._work.loader, title, unit="batch", disable=not distributed.is_main())):
            if index and self._work.clock.over():
                whole = False
                break
            if len(batch):
                part = self._batch(batch, states, self._part(stage, index))
                for name, found in part.items():
                    if name in results:
                        results[name].extend(found)
        self._work.state.add_seconds(f"AP of {stage}", time.perf_counter() - began)
        self._work.state.save(self._work.folder)
        return distributed.from_main(lambda: self._scored(stage, results, whole)), whole

    def _scored(self, stage: str, results: Mapping[str, Statistics], whole: bool) -> dict[str, float]:
        """AP by name of the state; of all images, those on resampled ones are kept too."""
        if whole:
            for name, statistics in results.items():
                self._work.state.keep_resampled(stage, name, statistics.score_resampled())
        return {name: statistics.score().decides for name, statistics in results.items()}

    def resampled(self, stage: str) -> dict[str, Resampled]:
        """Those AP of `stage` on resampled images, by name of the state, for standard errors of their differences."""
        return self._work.state.resampled(stage)

    def keep(self, stage: str, index: int, mine: Mapping[str, Any]) -> None:
        """Take in what another pass over the images has found by `statistics`, so that it is not run again.

        Each process gives what it has; the main one writes.
        """
        measured = self._work.state.ap.get(stage, {})
        self._add(self._part(stage, index), {name: one for name, one in mine.items() if name not in measured})

    def _known(self, path: Path) -> set[str]:
        """The names of what a file holds."""
        return distributed.from_main(lambda: set(self._load(path)))

    def _add(self, path: Path, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Add to a file what all processes have found; returns what it holds then, in the main one."""
        parts = distributed.gather(dict(mine))
        if not distributed.is_main():
            return {}
        found = self._load(path)
        if any(part.keys() - found for part in parts):
            for part in parts:
                found = {**part, **found}
            save_torch(found, path)
        return found

    @staticmethod
    def _load(path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {}
        remedy = "delete it, and what it holds is measured again"
        check_archive(path, remedy=remedy)
        try:
            content = torch_archive.read(path)
        except Exception as error:  # a damaged file can break torch's reader anywhere
            raise CheckpointError(damaged(path, f"it cannot be read ({type(error).__name__})", remedy)) from error
        check_part(content, path)
        return content

    def _part(self, stage: str, index: int) -> Path:
        return self._work.folder / PARTS / f"{_stage_name(stage)}-{index}.pt"

    def _batch(self, batch: Batch, states: Mapping[str, State], path: Path) -> dict[str, Any]:
        """What the networks detect in a batch, as the evaluation loop keeps it; what `path` holds is not repeated.

        All of it is given in the main process.
        """
        images, everything = as_input(batch.images, self._work.device), self._network.everything
        world, have = distributed.world(), self._known(path)
        missing = [name for name in states if name not in have]
        mine: dict[str, Any] = {}
        known: Run | None = None
        for name in missing[world.rank :: world.size]:
            state = states[name]
            if known is None and len(states) > 1:
                known = self._network.run(images, everything)
            run = known if known is not None and state == everything else self._network.run(images, state, known)
            mine[name] = self.statistics(batch, run)
            if world.size == 1:
                self._add(path, mine)
        return self._add(path, {} if world.size == 1 else mine)

    def statistics(self, batch: Batch, run: Run) -> dict[str, Any]:
        """What a network detects in a batch, as the evaluation loop keeps it."""
        statistics = Statistics()
        add_predictions(statistics, run.prediction, batch)
        return statistics.to_plain()


def forget_parts(folder: Path, stage: str | None = None) -> None:
    """Remove the detections that a stage has kept in a run's folder, or all of them; the main process does."""
    found = (folder / PARTS).glob(f"{_stage_name(stage) if stage else '*'}-*.pt") if distributed.is_main() else ()
    for path in found:
        path.unlink(missing_ok=True)


def _stage_name(stage: str) -> str:
    return hashlib.sha256(stage.encode()).hexdigest()[:12]


class Screening:
    """Proxy scores of units, which take turns, so that all see different parts of the same images."""

    def __init__(self, work: Work, network: Layerwise, confirming: Confirming, *, thorough: bool = False) -> None:
        """Prepare the passes; nothing is run yet.

        Args:
            work: what both kinds of pass work on.
            network: runs the states.
            confirming: gets the results that AP can be measured with too.
            thorough: every unit sees every image, and AP of every unit costs no further run.
        """
        self._work, self._network, self._confirming, self._thorough = work, network, confirming, thorough

    def run(self, units: Sequence[Unit], stage: str, share: float) -> bool:
        """Do what is left to do; False if that share of the time budget ended it."""
        from tqdm import tqdm

        state, loader = self._work.state, self._work.loader
        count = len(getattr(loader.dataset, "images", loader.dataset))
        turn = 1 if self._thorough else max(1, min(LARGEST_TURN, count // IMAGES_A_UNIT, len(loader)))
        done = state.screened.setdefault(stage, {})
        title = f"screening {len(units)} units"
        for index, batch in enumerate(tqdm(loader, title, unit="batch", disable=not distributed.is_main())):
            rows = done.setdefault(str(index), {})
            todo = [unit for place, unit in enumerate(units) if (index + place) % turn == 0 and unit.name not in rows]
            if todo and len(batch):
                if self._work.clock.over(share):
                    return False
                self._batch(index, batch, todo, rows, stage)
        return True

    def _batch(self, index: int, batch: Batch, units: Sequence[Unit], rows: dict[str, list[float]], stage: str) -> None:
        state, began = self._work.state, time.perf_counter()
        images = as_input(batch.images, self._work.device)
        origin = self._network.run(images, State())
        whole = self._network.run(images, self._network.everything)
        base = float(distance(origin.prediction, whole.prediction, whole.size))
        scale = float(weight(origin.prediction))
        state.add_seconds("whole networks", time.perf_counter() - began)
        began = self._spent(stage, began)
        whole_networks = {"float": origin, "INT8": whole} if distributed.is_main() else {}
        detected = {name: self._confirming.statistics(batch, run) for name, run in whole_networks.items()}
        self._confirming.keep(stage, index, detected)
        world, mine, detected = distributed.world(), {}, {}
        for unit in units[world.rank :: world.size]:
            in_float = self._network.run(images, unit.in_float, whole)
            alone = self._network.run(images, unit.alone, origin)
            far = [float(distance(origin.prediction, run.prediction, run.size)) for run in (in_float, alone)]
            mine[unit.name] = [len(images), scale, base, *far]
            if self._thorough:
                detected[unit.name] = self._confirming.statistics(batch, in_float)
            if world.size == 1:
                began = self._written(stage, index, rows, mine, detected, began)
                mine, detected = {}, {}
        if world.size > 1:
            self._written(stage, index, rows, mine, detected, began)

    def _written(
        self, stage: str, index: int, rows: dict[str, list[float]], mine: Mapping[str, list[float]],
        detected: Mapping[str, Any], began: float,
    ) -> float:  # fmt: skip
        """Write down what all processes have found about units since `began`; returns now."""
        rows.update(distributed.united(mine))
        if self._thorough:
            self._confirming.keep(stage, index, detected)
        began = self._spent(stage, began)
        self._work.state.save(self._work.folder)
        return began

    def _spent(self, stage: str, began: float) -> float:
        """Count the time since `began`, also of a process that is killed before the batch is done; returns now."""
        now = time.perf_counter()
        self._work.state.add_seconds(f"screening {stage}", now - began)
        return now

    def found(self, units: Sequence[Unit], stage: str) -> dict[str, Screened]:
        """What screening found, by unit; units that it never came to are missing."""
        sums: dict[str, list[float]] = {}
        for batch in self._work.state.screened.get(stage, {}).values():
            for name, row in batch.items():
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * len(row)), row, strict=True)]
        found = {}
        for unit in units:
            if unit.name in sums:
                count, scale, *distances = sums[unit.name]
                found[unit.name] = Screened(int(count), *(value / max(scale, 1e-9) for value in distances))
        return found
