"""How much a report may hold, so that its page takes minutes at most and not the memory: far more than runs give.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

from typing import Any

from utils.core.bounds import BOUNDS
from utils.core.file_schema import Mismatch, Rule, listing

LARGEST_FILE = 64 << 20  # bytes; with some samples a report has less than one million
ROWS, NOTES = 1000, 1000
EPOCHS, RANGES = 20_000, 10_000
PANELS = 400  # images times columns, each of which is a chart of some tenths of a second
BOXES = 10_000  # of all samples together; drawing one takes some milliseconds
BOXES_OF_ONE = 2000  # of one column of one image: those of two columns are compared pair by pair


def samples_rule(sample: Rule) -> Rule:
    """A list of samples that can be drawn; `sample` is the rule of one."""
    samples = listing(sample, 0, BOUNDS["samples"].most)

    def rule(value: Any, field: str) -> None:
        samples(value, field)
        columns = {stage for one in value for stage in one["predictions"]}
        if len(value) * len(columns) > PANELS:
            raise Mismatch.said(f"{field} has {len(value)} images of {len(columns)} stages, expected {PANELS} at most")
        boxes = sum(len(found) for one in value for found in (one.get("truth", ()), *one["predictions"].values()))
        if boxes > BOXES:
            raise Mismatch.said(f"{field} has {boxes:,} boxes, expected {BOXES:,} at most")

    return rule
