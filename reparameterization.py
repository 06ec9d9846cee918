#!/usr/bin/env python3
"""Convert a trained YOLOv9 (t, s, m, c, e, c-dseg) to the GELAN model that is deployed, without auxiliary branch.

    python reparameterization.py --weights runs/train/exp/weights/best.pt --save yolov9-c-converted.pt

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from utils.cli import run_program
from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite
from utils.core.options import COMPATIBILITY, DeviceOptions, Field, option
from utils.core.text import plural
from utils.jobs.open import need

if TYPE_CHECKING:
    from torch import nn

    from utils.upstream import FloatCheckpoint


class ReparameterizationOptions(DeviceOptions):
    """Convert a trained YOLOv9 (t, s, m, c, e, c-dseg) to the GELAN model that is deployed."""

    weights: str = option(..., "checkpoint of upstream's train_dual.py or segment/train_dual.py (.pt)", metavar="FILE")
    model: Literal["t", "s", "m", "c", "e", "c-dseg"] | None = option(
        None, "variant, which the weights name", group=COMPATIBILITY
    )
    cfg: str | None = option(
        None,
        "the deployed YAML, such as models/detect/gelan-c.yaml, to check (default: found from the weights)",
        metavar="FILE",
    )
    classes_num: Annotated[int, Field(ge=1, le=10_000)] | None = option(
        None, "classes (default: found from the weights)", "--classes_num", "--classes-num", metavar="N"
    )
    if_needed: bool = option(False, "accept a model without an auxiliary branch, and write nothing then")
    save: str | None = option(None, "file to write (default: beside the weights, NAME-converted.pt)", metavar="FILE")


def convert_checkpoint(options: ReparameterizationOptions) -> None:
    """Load, check, convert, compare the two models, save."""
    weights = Path(options.weights)
    target = Path(options.save) if options.save else weights.with_name(f"{weights.stem}-converted.pt")
    if target.suffix != ".pt" or target.is_dir():
        raise InputError(f"--save {target} is not the name of a .pt file")
    check_files(weights=weights, cfg=options.cfg)
    refuse = partial(refuse_overwrite, [target], [weights, options.cfg], "choose another name with --save")
    if not options.if_needed:
        refuse()
    need("torch")
    from models import reparam
    from utils import upstream
    from utils.upstream.description import HEADS, TRAINING_HEADS

    device = select_device(options.device)
    training = upstream.load_float(weights, (*HEADS, *TRAINING_HEADS) if options.if_needed else TRAINING_HEADS)
    head = type(training.model.model[-1]).__name__
    if head in HEADS:
        print(f"{weights} ends in {head}, without an auxiliary branch: there is nothing to convert")
        return
    refuse()
    check_classes_number(options, training)
    deployed = reparam.convert(training)
    if options.cfg:
        reparam.check_same_network(upstream.read_description(options.cfg), deployed, options.cfg)
    difference = reparam.largest_difference(training.model, deployed.model, device)
    replaces = "replaces a file of that name: " if target.exists() else ""
    reparam.save_converted(target, deployed)
    sizes = f"{millions(deployed.model):.2f} M parameters (of {millions(training.model):.2f} M), FP16"
    size = f"{target.stat().st_size / 1e6:.1f} MB"
    print(
        f"{target}: {replaces}GELAN, {plural(deployed.nc, 'class')}, {sizes}, {size}; "
        f"largest difference from the training model's output: {difference:g}"
    )
    if not options.if_needed:  # of quickstart.sh, which goes on by itself
        print(f"next: {shlex.join(['python', 'qat.py', 'quantize', '--weights', str(target)])}")


def check_classes_number(options: ReparameterizationOptions, training: FloatCheckpoint) -> None:
    """Raise `InputError` if --classes_num is not the number of classes of the weights."""
    if options.classes_num is not None and options.classes_num != training.nc:
        classes = plural(training.nc, "class")
        raise InputError(f"--classes_num {options.classes_num} was given, and {options.weights} has {classes}")


def millions(model: nn.Module) -> float:
    """Return the number of parameters, in millions."""
    parameters: int = sum(parameter.numel() for parameter in model.parameters())
    return parameters / 1e6


main = partial(run_program, "reparameterization.py", (ReparameterizationOptions, convert_checkpoint), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
