"""Bounds of the numbers that a user can give, in one table: for the command lines, and for what is read from files.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.core.errors import InputError
from utils.core.shown import shown


@dataclass(frozen=True)
class Bounds:
    """A range of numbers; both ends belong to it unless `open_` says otherwise.

    Attributes:
        whole: integers only.
        open_: which ends are excluded: '', 'least', 'most' or 'both'.
    """

    least: float
    most: float
    whole: bool = True
    open_: str = ""

    def __contains__(self, value: object) -> bool:
        kinds = int if self.whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not self.least <= value <= self.most:
            return False
        return not (
            (self.open_ in ("least", "both") and value == self.least)
            or (self.open_ in ("most", "both") and value == self.most)
        )

    def __str__(self) -> str:
        least, most = (f"{end:,}" for end in (self.least, self.most))
        if not self.open_:
            return f"{'an integer' if self.whole else 'a number'} from {least} to {most}"
        low = "above" if self.open_ in ("least", "both") else "of at least"
        high = "below" if self.open_ in ("most", "both") else "at most"
        return f"{'an integer' if self.whole else 'a number'} {low} {least} and {high} {most}"


FRACTION = Bounds(0, 1, whole=False)
LARGEST_COUNT = 100_000_000  # of images: more than any dataset has
BOUNDS = {
    "imgsz": Bounds(1, 8192),  # pixels; a batch of one takes 0.8 GB as float32
    "batch_size": Bounds(1, 4096),
    "workers": Bounds(0, 256),
    "seed": Bounds(0, 2**31 - 1),  # NumPy takes 32 bits, and each epoch adds to it
    "epochs": Bounds(0, 10_000),
    "iters": Bounds(1, 1_000_000),
    "num_image": Bounds(1, LARGEST_COUNT),
    "limit": Bounds(1, LARGEST_COUNT),
    "max_det": Bounds(1, 30_000),  # NMS looks at no more candidates
    "check": Bounds(0, 10_000),
    "engine_check": Bounds(0, 64),
    "mask_resolution": Bounds(0, 1024),  # rows and columns; a mask of 1024 takes 4 MB
    "classes_num": Bounds(1, 10_000),
    "demo_images": Bounds(1, 499_999),  # of a split: validation images are numbered from 500001
    "samples": Bounds(1, 100),
    "rounds": Bounds(1, 1000),
    "infStreams": Bounds(1, 64),  # contexts
    "iterations": Bounds(1, 1_000_000),
    "builds": Bounds(1, 64),
    "workspace": Bounds(1, 1 << 22),  # MB
    "optimization_level": Bounds(0, 5),  # of TensorRT's IBuilderConfig
    "max_aux_streams": Bounds(0, 64),  # of TensorRT's IBuilderConfig; its default takes far fewer
    "timing_iterations": Bounds(1, 1000),
    "instances": Bounds(1, 64),  # of a model on Triton
    "nms_instances": Bounds(1, 64),
    "queue_delay": Bounds(0, 60_000_000),  # microseconds
    "lr": Bounds(0, 1, whole=False, open_="both"),
    "build_limit": Bounds(0, 10_080, whole=False, open_="least"),  # minutes; a week
    "tune": Bounds(0, 10_080, whole=False, open_="least"),  # minutes; a week
    "budget": Bounds(0, 1_000_000, whole=False, open_="least"),  # minutes
    "conf_thres": FRACTION,
    "iou_thres": FRACTION,
    "target_drop": FRACTION,
    "float_budget": FRACTION,
    "warmUp": Bounds(0, 600_000, whole=False),  # ms
    "duration": Bounds(0, 86_400, whole=False, open_="least"),  # s
}


def bounded(name: str) -> Callable[[str], Any]:
    """A type for argparse: the number that an option of this name takes."""
    bounds = BOUNDS[name]

    def parse(text: str) -> int | float:
        try:
            value = int(text) if bounds.whole else float(text)
        except ValueError:
            value = math.nan
        if value not in bounds:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {bounds}")
        return value

    return parse


def check_bounds(options: Any, *names: str) -> None:
    """Check fields of `options` that have one of these names; None stands for "not given".

    Raises:
        InputError: a value of another type, or outside its bounds.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value not in BOUNDS[name]:
            raise InputError(f"--{name.replace('_', '-')} is {shown(value)}; expected {BOUNDS[name]}")
