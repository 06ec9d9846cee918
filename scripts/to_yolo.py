#!/usr/bin/env python3
"""Convert Pascal VOC or COCO annotations to a dataset in YOLO's layout.

    python scripts/to_yolo.py Annotations/ --images JPEGImages/ --output cards        # VOC's XML files
    python scripts/to_yolo.py instances_train2017.json --images train2017/ --output coco --val 0

Writes OUTPUT/data.yaml, images/ (copies) and labels/: polygons where objects have them, or else boxes. What is
left out or changed is counted, and annotations that do not fit the images are refused.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

from functools import partial
from pathlib import Path

from utils.cli import run_program
from utils.core.options import Fraction, Options, option


class ConvertOptions(Options):
    """Convert annotations to a dataset."""

    annotations: Path = option(..., "folder of VOC's XML files, or COCO's JSON file", positional=True, metavar="SOURCE")
    images: Path = option(..., "folder of the images", metavar="DIR")
    output: Path = option(..., "folder for the dataset, which must not exist", metavar="DIR")
    val: Fraction = option(0.2, "share of the images for validation (default: 0.2)", metavar="F")
    boxes: bool = option(False, "write boxes alone, also where there are outlines")
    force: bool = option(False, "leave out what has no partner, even above 5 % of images or annotations")


def convert_annotations(options: ConvertOptions) -> None:
    """Read everything, then write the dataset."""
    from utils.jobs.convert.run import convert_to_yolo

    convert_to_yolo(
        options.annotations,
        options.images,
        options.output,
        val=options.val,
        boxes=options.boxes,
        force=options.force,
    )


main = partial(run_program, "to_yolo.py", (ConvertOptions, convert_annotations), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
