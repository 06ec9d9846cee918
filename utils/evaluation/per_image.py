"""Rows of several images in one tensor, which stays whole until somebody asks for those of one image.

To start an operator on a GPU takes the CPU as long for the rows of one image as for those of a hundred. So what is done
with a batch is done with all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from utils.core.device import sent

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PerImage(Sequence["Tensor"]):
    """As a sequence, the rows of each image, `[n of the image, ...]`: views, which are made when the first is read.

    Attributes:
        flat: the rows of all images, one image behind the other, `[n, ...]`.
        counts: of the rows of each image; their sum is n.
    """

    flat: Tensor
    counts: list[int]

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> PerImage:
        """The rows of one image or more, which are put together unless they are already."""
        return images if isinstance(images, cls) else cls(torch.cat(list(images)), [len(one) for one in images])

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._images[index]

    @cached_property
    def _images(self) -> tuple[Tensor, ...]:
        return self.flat.split(self.counts)

    def owners(self) -> Tensor:
        """The image of each row, int64 `[n]`, where the rows are."""
        # numpy's: torch's wakes all threads for a few numbers, and waits for those whose cores are busy
        return sent(torch.from_numpy(np.arange(len(self.counts)).repeat(self.counts)), self.flat.device)
