#!/usr/bin/env python3
"""Quantize a YOLOv9 model, for detection or instance segmentation, to INT8, and evaluate checkpoints.

    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py sensitive --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py calibrate --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --data data/coco.yaml

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
`torchrun --nproc-per-node N qat.py ...` uses N GPUs, but for `sensitive`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial

from utils.cli import Command, run_program
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite_in
from utils.jobs.open import need
from utils.jobs.options import CalibrateOptions, EvalOptions, QatOptions, QuantizeOptions, SensitiveOptions

logger = logging.getLogger(__name__)

TRAINING = ("hyp", "epochs", "iters", "lr", "train", "eval_epochs", "keep_epochs")


# Each command imports its job when its options are checked: torch takes seconds.


def run_quantize(options: QuantizeOptions) -> None:
    """Calibrate and finetune a model."""
    unused = ["supervision_stride"]
    if options.qat == "never":
        unused += TRAINING
    check_run(options, unused, resume=options.resume)
    from utils.jobs import quantize as job

    job.run(options)


def run_sensitive(options: SensitiveOptions) -> None:
    """Find the layers that lose AP in INT8."""
    check_run(options, ["hyp"], resume=options.resume)
    from utils.jobs.sensitivity import run as job

    job.run(options)


def run_calibrate(options: CalibrateOptions) -> None:
    """Compare calibration methods."""
    check_run(options, ["hyp"])
    from utils.jobs import calibrate as job

    job.run(options)


def run_eval(options: EvalOptions) -> None:
    """Evaluate a checkpoint."""
    check_run(options)
    from utils.jobs import evaluate as job

    job.run(options)


def check_run(options: QatOptions, unused: Sequence[str] = (), resume: str | None = None) -> None:
    """Warn of options that do nothing, and check the files of a new run; those of a resumed run are in its state.

    Raises:
        InputError: a file is missing, or a result would overwrite it.
    """
    flags = options.given(*unused)
    if flags:
        logger.warning("these options do nothing here: %s", ", ".join(flags))
    if resume is not None:
        return
    if not options.weights:
        raise InputError("--weights is missing; give the checkpoint")
    names = ("weights", "data", "recipe", "hyp", "profile")
    files = {name: getattr(options, name, None) for name in names}
    check_files(**files)
    refuse_overwrite_in(options.project, options.name, options.exist_ok, options.WRITTEN, files.values())
    need("torch")


COMMANDS: dict[str, Command] = {
    "quantize": (QuantizeOptions, run_quantize),
    "sensitive": (SensitiveOptions, run_sensitive),
    "calibrate": (CalibrateOptions, run_calibrate),
    "eval": (EvalOptions, run_eval),
}
TOGETHER = ("quantize", "calibrate", "eval")  # by several processes, as torchrun starts them

main = partial(run_program, "qat.py", COMMANDS, about=__doc__, together=TOGETHER)

if __name__ == "__main__":
    sys.exit(main())
