"""The passes over images of a sensitivity run that give proxy scores of units.

Like `confirming.py`, they hold a batch at a time, and what is found about a batch is written down at once; several
processes take turns with its units.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.quantize.finetune import as_input
from models.quantize.partial_forward import Layerwise, State
from utils.core import distributed
from utils.evaluation.batch import Batch
from utils.evaluation.proxy import distance, weight
from utils.jobs.sensitivity.confirming import Confirming, Work
from utils.jobs.sensitivity.units import Unit

if TYPE_CHECKING:
    pass

IMAGES_A_UNIT = 25  # that each unit sees in screening, where there are so many
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
