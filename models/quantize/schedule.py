"""The learning rate of each step of QAT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

WARM_UP = 0.05  # share of the steps
USUAL, SHORT, LONG = 3e-5, 30, 1000  # `rate_for` is the usual rate for SHORT steps and fewer, LONG steps and more


def rate_for(steps: int) -> float:
    """The highest rate of a run of so many steps: 3e-5, and more between 30 and 1,000 steps, three times it at 100.

    Measured on the demo model (docs/qat.md): 1,000 steps of 3e-5 end at the float network's AP; 100 steps of 6e-5 to
    2e-4 end 0.0013 ± 0.0006 above 100 steps of 3e-5. A few steps of a high rate move ranges before Adam knows where to.
    """
    return USUAL * max(1.0, min((LONG / steps) ** 0.5, steps / SHORT))


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over 5 % of the steps, then half a cosine down to zero (Loshchilov and Hutter, "SGDR", ICLR 2017).

    Epochs that are added to a run begin a new warm-up and cosine of their own: the rates of the epochs before them stay
    what they were.

    Attributes:
        lr: the highest rate; 'auto' for `rate_for`'s of each leg; or rates by the epoch that they begin with, which
            then hold as they are.
        steps: optimizer steps an epoch.
        legs: the epochs with which a warm-up begins, and the number of epochs: (0, 10), or (0, 4, 10) for a run of 4
            epochs to which 6 were added.
    """

    lr: float | str | Mapping[int, float]
    steps: int
    legs: tuple[int, ...]

    def highest(self, epoch: int) -> float:
        """The highest learning rate of the leg that an epoch belongs to."""
        if isinstance(self.lr, Mapping):
            return max(self.lr.values())
        if not isinstance(self.lr, str):
            return self.lr
        first, end = self._leg(epoch)
        return rate_for((end - first) * self.steps)

    def rate(self, epoch: int, step: int) -> float:
        """Learning rate of a step of an epoch, both counted from 0."""
        if isinstance(self.lr, Mapping):
            return self.lr[max(start for start in self.lr if start <= epoch)]
        first, end = self._leg(epoch)
        total, done, highest = (end - first) * self.steps, (epoch - first) * self.steps + step, self.highest(epoch)
        warm = max(1, round(WARM_UP * total))
        if done < warm:
            return highest * (done + 1) / warm
        return highest * 0.5 * (1 + math.cos(math.pi * (done - warm + 1) / (total - warm + 1)))

    def mean(self, epoch: int) -> float:
        """The mean rate of an epoch."""
        return sum(self.rate(epoch, step) for step in range(self.steps)) / self.steps

    def _leg(self, epoch: int) -> tuple[int, int]:
        """The epoch with which a leg begins, and the one behind its last."""
        return next(leg for leg in pairwise(self.legs) if leg[0] <= epoch < leg[1])
