"""Annotations as every reader gives them, and the tally of what a conversion leaves out or changes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

UNREADABLE_OUTLINES = "outlines that cannot be read (their boxes are written)"
NAMED = 5  # lines for one reason; the others are counted


@dataclass(frozen=True)
class AnnotatedObject:
    """One object of an image.

    Attributes:
        source: how messages call it: 'annotation 17', 'a.xml, object 2'.
        name: class.
        corners: float64 `[2, 2]`, x and y of two opposite corners, in any order; pixels, or fractions of the image.
        outline: rings, float64 `[points, 2]` each, as `corners`; empty where there is a box alone.
    """

    source: str
    name: str
    corners: np.ndarray
    outline: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class AnnotatedImage:
    """One image.

    Attributes:
        source: how messages call its annotation: an XML file, 'image 5'.
        stems: what its file may be called, without suffix.
        size: width and height in pixels that the annotation states, if it does.
        broken: whether the annotation could not be read, so that its objects are not known.
    """

    source: str
    stems: tuple[str, ...]
    size: tuple[float, float] | None = None
    objects: tuple[AnnotatedObject, ...] = ()
    broken: bool = False


@dataclass
class Annotations:
    """Annotations of a source; `names` are its classes by id, empty if it does not list them."""

    images: list[AnnotatedImage]
    names: list[str]


@dataclass
class Tally:
    """Lists of the things that a conversion leaves out or changes, by reason, a line for each."""

    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    changed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def warn(self, reason: str) -> None:
        """Name the first things that are left out for a reason."""
        lines = self.left_out.get(reason, [])
        for line in lines[:NAMED]:
            logger.warning("left out: %s", line)
        if len(lines) > NAMED:
            logger.warning("left out: %d more (%s)", len(lines) - NAMED, reason)


def in_words(counts: Mapping[str, list[str]]) -> str:
    """'crowds: 3 (first: annotation 7), ...'; 'nothing' where nothing is counted."""
    return ", ".join(f"{reason}: {len(lines)} (first: {lines[0]})" for reason, lines in counts.items()) or "nothing"


def stated_size(width: Any, height: Any) -> tuple[float, float] | None:
    """Width and height of an image as its annotation has them; None where they are missing, 0, or are not numbers."""
    try:
        size = float(width), float(height)
    except (TypeError, ValueError):
        return None
    return size if min(size) > 0 and max(size) < float("inf") else None
