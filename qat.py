#!/usr/bin/env python3
"""Quantize a YOLOv9 detector to INT8 and evaluate checkpoints.

    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py sensitive --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py calibrate --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --data data/coco.yaml

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
`torchrun --nproc-per-node N qat.py ...` uses N GPUs, but for `sensitive`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from functools import partial

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite_in
from utils.jobs.open import need
from utils.jobs.options import CalibrateOptions, EvalOptions, QatOptions, QuantizeOptions, SensitiveOptions

logger = logging.getLogger(__name__)

OF_TRAINING = ("hyp", "epochs", "iters", "lr", "train", "eval_epochs")


def run_command(job: str, options: QatOptions) -> None:
    """Check the options of a command, and run its job, a module of `utils.jobs`."""
    if isinstance(options, QuantizeOptions):
        unused = options.given(*OF_TRAINING) if options.qat == "never" else []
        if unused:  # a usual command with --ptq-only behind it
            logger.warning("--qat never (--ptq-only) ends before training; these do nothing: %s", ", ".join(unused))
        if options.supervision_stride:
            logger.warning("--supervision-stride does nothing: QAT compares detections, which regained more AP")
        if options.qat != "auto" and options.resume is None:
            options.reject_unused(["target_drop"], "without --qat auto")
    check_command(options)
    importlib.import_module(f"utils.jobs.{job}").run(options)


def check_command(options: QatOptions) -> None:
    """Refuse a new run without its files, or one that would overwrite what it reads."""
    if getattr(options, "resume", None) is not None:
        return
    if not options.weights:
        raise InputError("--weights is missing; give the checkpoint")
    read = {name: getattr(options, name, None) for name in ("weights", "data", "recipe", "hyp", "profile")}
    check_files(**read)
    refuse_overwrite_in(options.project, options.name, options.exist_ok, options.WRITTEN, read.values())
    need("torch")
    if read["hyp"] and not isinstance(options, QuantizeOptions):
        logger.warning("--hyp %s is checked only: these images are not augmented", read["hyp"])


COMMANDS = {
    "quantize": (QuantizeOptions, partial(run_command, "quantize")),
    "sensitive": (SensitiveOptions, partial(run_command, "sensitivity.run")),
    "calibrate": (CalibrateOptions, partial(run_command, "calibrate")),
    "eval": (EvalOptions, partial(run_command, "evaluate")),
}
TOGETHER = ("quantize", "calibrate", "eval")  # by several processes, as torchrun starts them


main = partial(run_program, "qat.py", COMMANDS, about=__doc__.splitlines()[0], together=TOGETHER)

if __name__ == "__main__":
    sys.exit(main())
