"""The pass over images that gives AP of a network in many states.

It holds a batch at a time, asks a `Layerwise` network for each state of it, and writes down each result at once, so
that a run that is killed repeats one state on one batch. Several processes take turns with the states of a batch, and
write down what they found at its end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.quantize.finetune import as_input
from models.quantize.partial_forward import Layerwise, Run, State
from utils.core import checkpoints, distributed
from utils.core.files import save_torch
from utils.core.resampled import Resampled
from utils.evaluation.batch import Batch
from utils.evaluation.loop import add_predictions
from utils.evaluation.metrics import Statistics
from utils.jobs.sensitivity.state import AnalysisState

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

PARTS = "parts"


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
        found: dict[str, Any] = checkpoints.read(path, remedy="delete it, and what it holds is measured again")
        return found

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
