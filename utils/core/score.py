"""Accuracy of a network: AP of its boxes and masks, on all images and on resampled ones, and differences of AP."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from utils.core.strict_model import StrictModel


@dataclass(frozen=True)
class Score:
    """AP over IoU 0.50:0.95, fractions; `mask` is None for detection."""

    box: float
    mask: float | None = None

    @property
    def decides(self) -> float:
        """Number that networks are compared by: box AP, or the mean of box and mask AP, as upstream weights them."""
        if self.mask is None:
            return self.box
        return (self.box + self.mask) / 2

    @property
    def what(self) -> str:
        """Meaning of `decides`, in words."""
        return "AP" if self.mask is None else "the mean of box and mask AP"

    def __str__(self) -> str:
        """In words: 'AP 0.5201', 'AP 0.5201, mask AP 0.4213'."""
        text = f"AP {self.box:.4f}"
        if self.mask is not None:
            text += f", mask AP {self.mask:.4f}"
        return text

    @property
    def in_name(self) -> str:
        """Part of a file's name: 'ap_0.5201', 'ap_0.5201_mask_0.4213'."""
        text = f"ap_{self.box:.4f}"
        if self.mask is not None:
            text += f"_mask_{self.mask:.4f}"
        return text

    def to_dict(self) -> dict[str, float]:
        """Entries of a file: `ap`, and `mask_ap` where there is one."""
        entries = {"ap": self.box}
        if self.mask is not None:
            entries["mask_ap"] = self.mask
        return entries

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Score | None:
        """The inverse of `to_dict`, also from more entries; None where AP is not known."""
        ap = entries.get("ap")
        return None if ap is None else cls(ap, entries.get("mask_ap"))


AGREEMENT = "the float network's detections as labels"  # stored in reports: AP where the dataset has no labels
REPLICATES = 200  # a standard error is known to one part in sqrt(2 * REPLICATES), 5 %
DIGITS = 7  # of an AP, after the point; a table shows four
SMALLEST_SHOWN = 5e-5  # a smaller difference is 0.0000 in a table
ENOUGH_UNITS = 30  # images or groups; with fewer, Student's t quantile takes the place of two standard errors
_TEXT = re.compile(r"(?P<images>[0-9a-f]{32})(/(?P<units>[0-9]{1,9}))?(?P<ap>( (0\.[0-9]{7}|1\.0{7})){2,10000})")


@dataclass(frozen=True)
class Resampled:
    """AP on resamplings of the images, fractions.

    Only equal `images` compare: a hash of the images' names, of the classes of their labels and of the resamplings.

    Attributes:
        units: number of images or groups that are drawn from; None where an earlier version wrote the file.
    """

    images: str
    ap: tuple[float, ...]
    units: int | None = None

    @classmethod
    def of(cls, images: str, ap: Iterable[float], units: int | None = None) -> Resampled:
        """Round AP to the digits of a file, so that it is the same when it is read back."""
        rounded = tuple(round(float(score), DIGITS) for score in ap)
        return cls(images, rounded, units)

    @property
    def error(self) -> float:
        """Standard error of AP itself."""
        return statistics.stdev(self.ap)

    def same_images(self, other: Resampled) -> bool:
        """True if both are of the same images, classes of labels and resamplings."""
        return self.images == other.images and len(self.ap) == len(other.ap)

    def scaled(self, factor: float) -> Resampled:
        """A copy with each AP times `factor`, at most 1."""
        scaled = (min(score * factor, 1.0) for score in self.ap)
        return Resampled.of(self.images, scaled, self.units)

    def to_text(self) -> str:
        """One line, as a report's JSON holds it."""
        units = "" if self.units is None else f"/{self.units}"
        scores = [f"{score:.{DIGITS}f}" for score in self.ap]
        return " ".join([self.images + units, *scores])

    @classmethod
    def from_text(cls, text: str) -> Resampled:
        """The inverse of `to_text`; raises `ValueError` for another text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError("not a hash of images and AP values from 0 to 1 with seven digits")
        units = int(match["units"]) if match["units"] else None
        ap = tuple(map(float, match["ap"].split()))
        return cls(match["images"], ap, units)


def difference_error(resampled: Resampled | None, base: Resampled | None) -> float | None:
    """Standard error of the difference of two AP; None where one is not known, or if they are of different images."""
    if resampled is None or base is None or not resampled.same_images(base):
        return None
    differences = [score - other for score, other in zip(resampled.ap, base.ap, strict=True)]
    return statistics.stdev(differences)


def standard_errors(units: int | None) -> float:
    """Number of standard errors that hold 95 % of the repetitions of a measurement without a difference.

    It is 2 for 30 images or groups and more. With n fewer it is Student's t quantile for n - 1 degrees of freedom times
    sqrt(n / (n - 1)), since the bootstrap's standard error is too small by that factor: 2.27 for 13 groups.

    Args:
        units: images or groups that were resampled; None, where that is not known, counts as many.
    """
    if units is None or units >= ENOUGH_UNITS:
        return 2.0
    from scipy.special import stdtrit

    degrees = units - 1
    return float(stdtrit(degrees, 0.975)) * math.sqrt(units / degrees)


@dataclass(frozen=True)
class Difference:
    """A difference of two AP, and its standard error; None where that is not known.

    Attributes:
        units: number of images or groups behind the standard error; None where it is not known.
    """

    value: float
    error: float | None
    units: int | None = None

    @classmethod
    def between(
        cls,
        score: float,
        base: float,
        resampled: Resampled | None,
        of_base: Resampled | None,
    ) -> Difference:
        """The difference of a score to another one, with the standard error of their difference."""
        error = difference_error(resampled, of_base)
        units = resampled.units if resampled else None
        return cls(score - base, error, units)

    def __str__(self) -> str:
        """Both with four decimals: '-0.0016 ± 0.0009'."""
        return f"{self.value:+.4f}" if self.error is None else f"{self.value:+.4f} ± {self.error:.4f}"

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % interval, which is the smallest loss that these images can show."""
        return None if self.error is None else standard_errors(self.units) * self.error

    @property
    def significant(self) -> bool:
        """True if the difference is larger than chance explains (95 %); False for an unknown standard error."""
        return self.margin is not None and abs(self.value) >= max(self.margin, SMALLEST_SHOWN)

    @property
    def most_lost(self) -> float | None:
        """The largest loss that the measurement leaves possible (95 %), at least 0; None without a standard error."""
        return None if self.margin is None else max(self.margin - self.value, 0.0)


def _writable(text: Any) -> Any:
    r"""A text that UTF-8 can hold: bytes of a file's name that are not text become \udcff."""
    if not isinstance(text, str):
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def _from_stored(value: Any) -> Any:
    """A `Resampled` of a file's text, None of an empty one; other values as they are."""
    if not isinstance(value, str):
        return value
    return Resampled.from_text(value) if value else None


def _to_stored(value: Resampled | None) -> str:
    """The inverse of `_from_stored`."""
    return value.to_text() if value else ""


Text = Annotated[str, BeforeValidator(_writable)]
Fraction = Annotated[float, Field(ge=0, le=1)]
StoredResampled = Annotated[  # a text in files, empty for None
    Resampled | None,
    BeforeValidator(_from_stored),
    PlainSerializer(_to_stored, return_type=str),
]
Counts = dict[Text, Annotated[tuple[int, int], Field(strict=False)]]


class AtThreshold(StrictModel):
    """Objects that are found and missed at a confidence threshold, over all classes, at IoU 0.5.

    Attributes:
        threshold: detections of less confidence are left out.
        objects, found: numbers of labels, and of labels that are found.
        precision: share of the detections that find an object; 0 without detections.
        recall: share of the objects that are found; 0 without objects.
        precision_resampled, recall_resampled: on resamplings of the images; None where there is only one image.
        by_class, by_size: class, or size of objects where there are some → (objects, found).
    """

    threshold: Fraction
    objects: Annotated[int, Field(ge=0)]
    found: Annotated[int, Field(ge=0)]
    precision: Fraction
    recall: Fraction
    precision_resampled: StoredResampled = None
    recall_resampled: StoredResampled = None
    by_class: Counts = Field(default_factory=dict)
    by_size: Counts = Field(default_factory=dict)

    def difference(self, other: AtThreshold, what: Literal["precision", "recall"]) -> Difference:
        """Precision or recall, less that of another network at the same threshold."""
        if what == "precision":
            values, resampled = (self.precision, other.precision), (self.precision_resampled, other.precision_resampled)
        else:
            values, resampled = (self.recall, other.recall), (self.recall_resampled, other.recall_resampled)
        return Difference.between(*values, *resampled)
