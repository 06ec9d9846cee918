"""Upstream's heads by the names of their classes: which are taken, which are converted first, which are refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from utils.core.errors import CheckpointError

AUXILIARY_HEADS = ("DualDetect", "DualDDetect", "TripleDetect", "TripleDDetect", "DualDSegment")
TRAINING_HEAD = "DualDDetect"  # of yolov9-t, -s, -m, -c and -e
SEGMENT_TRAINING_HEAD = "DualDSegment"  # of yolov9-c-dseg
TRAINING_HEADS = (TRAINING_HEAD, SEGMENT_TRAINING_HEAD)
DETECT_HEADS = ("Detect", "DDetect")
SEGMENT_HEADS = ("Segment", "DSegment")
HEADS = (*DETECT_HEADS, *SEGMENT_HEADS)
WITH_MASKS = (*SEGMENT_HEADS, SEGMENT_TRAINING_HEAD)
OTHER_HEADS = ("Panoptic", "Classify")  # Panoptic: its areas without objects are judged by another metric


def check_head(model: Any, where: str | Path) -> None:
    """Refuse networks that this project does not quantize, saying what to do.

    Raises:
        CheckpointError: an auxiliary branch, or a task other than detection and instance segmentation.
    """
    head = type(model.model[-1]).__name__
    if head in AUXILIARY_HEADS:
        converted = Path(where).with_name(f"{Path(where).stem}-converted.pt")
        words = ["python", "reparameterization.py", "--weights", str(where), "--save", str(converted)]
        raise CheckpointError(
            f"{where} still has its auxiliary training branch ({head}); convert it first: {shlex.join(words)}"
        )
    refuse_other_tasks(model, where)


def refuse_other_tasks(model: Any, where: str | Path) -> None:
    """Raises `CheckpointError` for a network of another task than detection and instance segmentation."""
    head = type(model.model[-1]).__name__
    if head in OTHER_HEADS:
        raise CheckpointError(
            f"{where} ends in {head}; this version handles detection ({', '.join(DETECT_HEADS)}) and instance "
            f"segmentation ({', '.join(SEGMENT_HEADS)})"
        )
