#!/usr/bin/env python3
"""Convert a trained YOLOv9 (t, s, m, c, e, c-dseg) to the GELAN network that is deployed, without auxiliary branch.

    python reparameterization.py --weights runs/train/exp/weights/best.pt --save yolov9-c-converted.pt

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.cli import add_device, run_program
from utils.core.bounds import bounded
from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.core.output_paths import refuse_overwrite
from utils.jobs.dependencies import need

MODELS = ("t", "s", "m", "c", "e", "c-dseg")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("reparameterization.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights",
        required=True,
        metavar="FILE",
        help="checkpoint of upstream's train_dual.py or segment/train_dual.py (.pt)",
    )
    parser.add_argument("--model", choices=MODELS, help="variant (default: found from the weights)")
    parser.add_argument(
        "--cfg", metavar="FILE",
        help="the deployed YAML, such as models/detect/gelan-c.yaml, to check (default: found from the weights)",
    )  # fmt: skip
    parser.add_argument(
        "--classes_num",
        "--classes-num",
        type=bounded("classes_num"),
        metavar="N",
        help="classes (default: found from the weights)",
    )
    parser.add_argument("--save", metavar="FILE", help="file to write (default: beside the weights, NAME-converted.pt)")
    add_device(parser)
    return parser


def convert(args: argparse.Namespace) -> int:
    """Load, check, convert, compare the two networks, save."""
    weights = Path(args.weights)
    target = Path(args.save) if args.save else weights.with_name(f"{weights.stem}-converted.pt")
    if target.suffix != ".pt" or target.is_dir():
        raise InputError(f"--save {target} is not the name of a .pt file")
    check_files(weights=weights, cfg=args.cfg)
    refuse_overwrite([target], [weights, args.cfg], "choose another name with --save")
    need("torch")
    from models.reparam import conversion, variants
    from utils import upstream

    device = select_device(args.device)
    training = upstream.load_training(weights)
    variant = variants.choose(training.model, args.model, weights)
    if args.classes_num is not None and args.classes_num != training.nc:
        raise InputError(f"--classes_num {args.classes_num} was given, and {weights} has {training.nc} classes")
    if args.cfg:
        expected = conversion.deploy_description(training.yaml, variant, training.nc)
        conversion.check_description(upstream.read_description(args.cfg), expected, args.cfg, variant.own)
    deployed = conversion.convert(training, variant)
    difference = conversion.largest_difference(training.model, deployed.model, device)
    before, after = (sum(p.numel() for p in one.model.parameters()) / 1e6 for one in (training, deployed))
    when = ", before its values were rounded to FP16" if conversion.is_rounded_by_half(deployed.model, weights) else ""
    conversion.save(target, deployed.model)
    print(
        f"{target}: GELAN-{variant.name}, {deployed.nc} classes, {after:.2f} M parameters (of {before:.2f} M), FP16, "
        f"{target.stat().st_size / 1e6:.1f} MB; "
        f"largest difference from the training network's output: {difference:g}{when}"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return run_program(build_parser(), convert, argv)


if __name__ == "__main__":
    sys.exit(main())
