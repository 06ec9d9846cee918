#!/usr/bin/env python3
"""Quantize a YOLOv9 network, for detection or instance segmentation, to INT8, and evaluate checkpoints.

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

from utils.cli import Command, run_program
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite_in
from utils.jobs.open import need
from utils.jobs.options import CalibrateOptions, EvalOptions, QatOptions, QuantizeOptions, SensitiveOptions

logger = logging.getLogger(__name__)

TRAINING = ("hyp", "epochs", "iters", "lr", "train", "eval_epochs")


def run_command(job: str, options: QatOptions) -> None:
    """Check the options of a command, and run its job, a module of `utils.jobs`."""
    unused = ["hyp"]  # which yolov9-qat's commands have, too
    if isinstance(options, QuantizeOptions):
        unused = ["supervision_stride"]
        if options.qat == "never":
            unused += [*TRAINING, "keep_epochs"]
    if flags := options.given(*unused):
        logger.warning("these options do nothing here: %s", ", ".join(flags))
    if getattr(options, "resume", None) is None:
        if not options.weights:
            raise InputError("--weights is missing; give the checkpoint")
        read = {name: getattr(options, name, None) for name in ("weights", "data", "recipe", "hyp", "profile")}
        check_files(**read)
        refuse_overwrite_in(options.project, options.name, options.exist_ok, options.WRITTEN, read.values())
        need("torch")
    importlib.import_module(f"utils.jobs.{job}").run(options)


COMMANDS: dict[str, Command] = {
    "quantize": (QuantizeOptions, partial(run_command, "quantize")),
    "sensitive": (SensitiveOptions, partial(run_command, "sensitivity.run")),
    "calibrate": (CalibrateOptions, partial(run_command, "calibrate")),
    "eval": (EvalOptions, partial(run_command, "evaluate")),
}
TOGETHER = ("quantize", "calibrate", "eval")  # by several processes, as torchrun starts them

main = partial(run_program, "qat.py", COMMANDS, about=__doc__, together=TOGETHER)

if __name__ == "__main__":
    sys.exit(main())
