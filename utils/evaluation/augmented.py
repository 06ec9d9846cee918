"""Augmented training images that depend on a seed, the pass over them and their index, and on nothing else.

Upstream's augmentation draws from the generators of `random` and NumPy. Those of a worker process go on from image to
image, so that what an image becomes depended on which worker had which images before, and so on the number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.evaluation.batch import Item

UNDECODABLE = "Image Not Found"  # how upstream begins to say that OpenCV has read nothing


class SeededImages(Dataset[Any]):
    """Items of an augmenting dataset, the generators that it draws from being seeded for each of them.

    Attributes:
        seed: of a pass over the images, see `begin`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seed = 0

    def begin(self, generator: torch.Generator) -> None:
        """Choose the seed of the pass that begins, without drawing: the order of the images comes from `generator` too.

        The generator goes on with every pass, and so does the seed.
        """
        ahead = torch.Generator()
        ahead.set_state(generator.get_state())
        self.seed = int(torch.empty((), dtype=torch.int64).random_(generator=ahead))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """The dataset's item; without image where one that it is made of cannot be decoded."""
        with _seeded(self.seed, index):
            try:
                return self._dataset[index]
            except AssertionError as error:
                if not str(error).startswith(UNDECODABLE):
                    raise
                return Item(None, torch.zeros((0, 6)), "", None)


@contextmanager
def _seeded(*entropy: int) -> Iterator[None]:
    """Seed `random` and NumPy's global generator; afterwards they go on where they were."""
    before = random.getstate(), np.random.get_state()
    state = np.random.SeedSequence(entropy).generate_state(4)
    random.seed(int.from_bytes(state.tobytes(), "little"))
    np.random.seed(state)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
