"""One measured result, and how its AP differs from another's.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from utils.core.file_schema import Mismatch, Rule, plain, record
from utils.core.resampled import Difference, Resampled

MASK_FIELDS = ("mask_ap", "mask_ap50", "mask_precision", "mask_recall", "mask_ap_resampled")
SIZES = ("small", "medium", "large")  # of objects, as COCO has them
MAY_BE_EMPTY = ("ap_by_size", "input_size")


@dataclass(frozen=True)
class Row:
    """One measured result. `None` stands for "not measured"; it is never replaced by a guess.

    Attributes:
        stage: what was measured: `float`, `PTQ`, `QAT`, `ONNX`, ...
        file: the file that was evaluated, as the user would type it.
        ap, ap50, precision, recall: fractions in 0..1 (AP is the mean over IoU 0.50:0.95).
        seconds: wall time of the stage: making the file and evaluating it.
        device: the device in words, e.g. `CPU` or `NVIDIA H200`.
        versions: library versions, see `machine.versions`.
        size_bytes: size of `file`.
        ms_per_image: inference alone, without pre-processing and NMS.
        measured_on: what the numbers were measured on, e.g. `ONNX Runtime 1.31, CPU, 2 threads, batch 10`.
        ap_with: what makes AP differ from the usual one, e.g. `30 images`; rows compare where this is equal.
        input_size: of the images that went in, e.g. `640x640`; rows compare where this is equal or not known.
        ap_resampled: AP on resamplings of the images, as `Resampled.to_text` gives it; empty where it is not known.
        mask_ap, ...: the same of masks, of a segmentation network.
        ap_by_size: AP by pycocotools of `small` (below 32² pixels), `medium` and `large` (from 96²) objects, of which
            there are some; empty where it did not run.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    stage: str
    file: str
    ap: float | None
    ap50: float | None
    precision: float | None
    recall: float | None
    seconds: float | None
    device: str
    versions: dict[str, str]
    size_bytes: int | None
    ms_per_image: float | None
    measured_on: str
    ap_with: str = ""
    ap_resampled: str = ""
    mask_ap: float | None = None
    mask_ap50: float | None = None
    mask_precision: float | None = None
    mask_recall: float | None = None
    mask_ap_resampled: str = ""
    ap_by_size: dict[str, float] = field(default_factory=dict)
    input_size: str = ""

    def __post_init__(self) -> None:
        texts = ("stage", "file", "device", "measured_on", "ap_with", "input_size", "ap_resampled", "mask_ap_resampled")
        for name in texts:
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"'{name}' is {getattr(self, name)!r}, expected a text")
        if not self.stage:
            raise ValueError("'stage' is empty, expected a text")
        for name, read in (("ap_resampled", self.resampled), ("mask_ap_resampled", self.mask_resampled)):
            try:
                read()
            except ValueError as error:
                raise ValueError(f"'{name}' is damaged: {error}") from None
        for name in ("ap", "ap50", "precision", "recall", "mask_ap", "mask_ap50", "mask_precision", "mask_recall"):
            self._make_number(name, upper=1.0)
        for name in ("seconds", "size_bytes", "ms_per_image"):
            self._make_number(name, upper=math.inf)
        if self.size_bytes is not None:
            object.__setattr__(self, "size_bytes", int(self.size_bytes))
        if not isinstance(self.versions, Mapping):
            raise ValueError(f"'versions' is {self.versions!r}, expected a mapping of names to versions")
        object.__setattr__(self, "versions", {str(k): str(v) for k, v in self.versions.items()})
        if not isinstance(self.ap_by_size, Mapping) or not set(self.ap_by_size) <= set(SIZES):
            raise ValueError(f"'ap_by_size' is {self.ap_by_size!r}, expected a mapping of {', '.join(SIZES)} to AP")
        for name, value in self.ap_by_size.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
                raise ValueError(f"'ap_by_size' has {value!r} for {name}, expected a number in 0..1")

    def _make_number(self, name: str, upper: float) -> None:
        """Store a plain float (evaluation hands over NumPy scalars, which JSON does not know)."""
        value = getattr(self, name)
        if value is None:
            return
        try:
            if isinstance(value, (str, bool)):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"'{name}' is {value!r}, expected a number or null") from None
        if not 0.0 <= number <= upper or math.isinf(number):  # NaN fails the comparison too
            raise ValueError(
                f"'{name}' is {number}, expected a finite number {f'in 0..{upper:g}' if upper == 1 else '>= 0'}"
            )
        object.__setattr__(self, name, number)

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells one row from another: the stage, the file, and what it was measured on."""
        return self.stage, self.file, self.measured_on

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as files hold them; those of masks and what may be empty only where there is something."""
        left_out = () if self.mask_ap is not None else MASK_FIELDS
        values = asdict(self).items()
        return {name: value for name, value in values if name not in left_out and (value or name not in MAY_BE_EMPTY)}

    def resampled(self) -> Resampled | None:
        """AP on resamplings of the images, if it is known."""
        return Resampled.from_text(self.ap_resampled) if self.ap_resampled else None

    def mask_resampled(self) -> Resampled | None:
        """AP of masks on resamplings of the images, if it is known."""
        return Resampled.from_text(self.mask_ap_resampled) if self.mask_ap_resampled else None

    def difference(self, other: Row) -> Difference | None:
        """AP of this row minus that of another; None where they do not compare.

        They do if both are measured in the usual way, or in the same other one, and not known to be of different
        images, labels or sizes of the input. An image that only one of the two could read makes them different.
        """
        return self._apart(other, self.ap, other.ap, self.resampled(), other.resampled())

    def same_size(self, other: Row) -> bool:
        """Whether images went in at the same size, as far as that is known."""
        return self.input_size == other.input_size or not (self.input_size and other.input_size)

    def mask_difference(self, other: Row) -> Difference | None:
        """The same of masks."""
        return self._apart(other, self.mask_ap, other.mask_ap, self.mask_resampled(), other.mask_resampled())

    def _apart(
        self, other: Row, ours: float | None, theirs: float | None, mine: Resampled | None, its: Resampled | None
    ) -> Difference | None:
        if ours is None or theirs is None or self.ap_with != other.ap_with or not self.same_size(other):
            return None
        if mine is None or its is None:
            return Difference(ours - theirs, None)
        return Difference(ours - theirs, mine.difference_error(its)) if mine.same_images(its) else None


def row_rule(*optional: str) -> Rule:
    """The fields of a `Row`, from which one can be made.

    Those that are `optional`, of masks and of `MAY_BE_EMPTY` may be missing.
    """

    def rule(value: Any, field: str) -> None:
        record({item.name: plain for item in fields(Row)}, (*optional, *MASK_FIELDS, *MAY_BE_EMPTY))(value, field)
        try:
            Row(**value)
        except (TypeError, ValueError, OverflowError) as error:
            raise Mismatch.said(f"{field}: {error}") from None

    return rule
