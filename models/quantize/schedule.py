"""The learning rate of each step of QAT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

WARM_UP = 0.05  # share of the steps


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over 5 % of the steps, then half a cosine down to zero (Loshchilov and Hutter, "SGDR", ICLR 2017).

    Epochs that are added to a run begin a new warm-up and cosine of their own: the rates of the epochs before them stay
    what they were.

    Attributes:
        lr: the highest rate; or rates by the epoch that they begin with, which then hold as they are.
        steps: optimizer steps an epoch.
        legs: the epochs with which a warm-up begins, and the number of epochs: (0, 10), or (0, 4, 10) for a run of 4
            epochs to which 6 were added.
    """

    lr: float | Mapping[int, float]
    steps: int
    legs: tuple[int, ...]

    def rate(self, epoch: int, step: int) -> float:
        """Learning rate of a step of an epoch, both counted from 0."""
        if isinstance(self.lr, Mapping):
            return self.lr[max(start for start in self.lr if start <= epoch)]
        first, end = next(leg for leg in pairwise(self.legs) if leg[0] <= epoch < leg[1])
        total, done = (end - first) * self.steps, (epoch - first) * self.steps + step
        warm = max(1, round(WARM_UP * total))
        if done < warm:
            return self.lr * (done + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (done - warm + 1) / (total - warm + 1)))

    def mean(self, epoch: int) -> float:
        """The mean rate of an epoch."""
        return sum(self.rate(epoch, step) for step in range(self.steps)) / self.steps
