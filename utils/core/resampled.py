"""AP of one evaluation on resamplings of its images: what the standard error of an AP difference is made of.

Evaluations of the same images are resampled alike, so that two of them can be compared wherever both lie: in one
report, or in reports of programs that ran on different days and machines. `utils/evaluation/bootstrap.py` makes them.

This module imports neither NumPy nor anything else that is slow.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

REPLICATES = 200  # a standard error is known to one part in sqrt(2 * REPLICATES), 5 %
DIGITS = 7  # of an AP, after the point; a table shows four
_TEXT = re.compile(r"(?P<images>[0-9a-f]{32})(?P<ap>( (0\.[0-9]{7}|1\.0{7})){2,10000})")


@dataclass(frozen=True)
class Resampled:
    """AP on resamplings of the images.

    Attributes:
        images: a hash of the images' names, of the classes of their labels and of the resamplings; only equal ones
            compare.
        ap: on each resampling, fractions.
    """

    images: str
    ap: tuple[float, ...]

    @classmethod
    def of(cls, images: str, ap: Iterable[float]) -> Resampled:
        """Round AP to what is stored, so that what is read back is the same."""
        return cls(images, tuple(round(float(one), DIGITS) for one in ap))

    @property
    def error(self) -> float:
        """Standard error of AP itself."""
        return statistics.stdev(self.ap)

    def same_images(self, other: Resampled) -> bool:
        """Whether both are of the same images, classes of labels and resamplings."""
        return self.images == other.images and len(self.ap) == len(other.ap)

    def difference_error(self, other: Resampled) -> float | None:
        """Standard error of the difference of both AP; None if they are not of the same images.

        It is smaller than the errors of the two by themselves say, since both find the same images hard.
        """
        if not self.same_images(other):
            return None
        return statistics.stdev(mine - its for mine, its in zip(self.ap, other.ap, strict=True))

    def to_text(self) -> str:
        """One line, as a report's JSON holds it."""
        return " ".join([self.images, *(f"{one:.{DIGITS}f}" for one in self.ap)])

    @classmethod
    def from_text(cls, text: str) -> Resampled:
        """The inverse of `to_text`.

        Raises:
            ValueError: it is something else.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError("no hash of images and AP values from 0 to 1 with seven digits")
        return cls(match["images"], tuple(map(float, match["ap"].split())))


def difference_error(one: Resampled | None, other: Resampled | None) -> float | None:
    """Standard error of the difference of two AP; None where one is not known, or if they are of other images."""
    return None if one is None or other is None else one.difference_error(other)


@dataclass(frozen=True)
class Difference:
    """A difference of two AP, and its standard error; None where that is not known."""

    value: float
    error: float | None

    def __str__(self) -> str:
        """Both with four decimals: '-0.0016 ± 0.0009'."""
        return f"{self.value:+.4f}" if self.error is None else f"{self.value:+.4f} ± {self.error:.4f}"

    @property
    def beyond_error(self) -> bool:
        """Whether it is larger than its standard error, as far as that is known; what is not is no gain and no loss."""
        return abs(self.value) > (self.error or 0.0)
