"""Batches that several processes share: each loads a part of every batch, and all of them know how large it was.

The order of the images is that of one process, since it depends on the seed alone. A part may be empty: at the end of a
dataset, of a dataset that is smaller than the number of processes, or where images cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import Sampler

from utils.core import distributed

if TYPE_CHECKING:
    from torch import Tensor

Row = TypeVar("Row")


class ShareOfBatches(Sampler[list[int]]):
    """This process's part of each of some batches.

    Attributes:
        batch_size: of the whole batches.
    """

    def __init__(self, batches: Any) -> None:
        self._batches, self._world = batches, distributed.world()
        self.batch_size: int = batches.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[self._world.share(len(batch))]

    def __len__(self) -> int:
        return len(self._batches)


def whole_batch(images: Tensor) -> tuple[int, Tensor]:
    """How many images all parts of a batch hold together, and this part, in the images' shape also if it is empty.

    Args:
        images: `[B, 3, H, W]` of this process.
    """
    parts = distributed.all_numbers([len(images), *images.shape[2:]])
    if not len(images):
        height, width = (int(max(part[side] for part in parts)) for side in (1, 2))
        images = images.new_zeros((0, 3, height, width))
    return int(sum(part[0] for part in parts)), images


def in_order(parts: Sequence[tuple[Sequence[Row], Sequence[int]]]) -> list[Row]:
    """The rows of all processes in the order in which one would have come to them.

    Args:
        parts: of each process, by rank, its rows, and how many it had after each batch.

    >>> in_order([("abe", [2, 3, 3]), ("cd", [1, 1, 2])])
    ['a', 'b', 'c', 'e', 'd']
    """
    found: list[Row] = []
    starts: Sequence[int] = [0] * len(parts)
    for ends in zip(*(after for _, after in parts), strict=True):
        for (rows, _), start, end in zip(parts, starts, ends, strict=True):
            found += rows[start:end]
        starts = ends
    return found
