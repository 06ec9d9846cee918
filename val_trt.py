#!/usr/bin/env python3
"""Evaluate a TensorRT engine or an ONNX file on a dataset, or draw what it finds.

python val_trt.py --engine-file gelan-c.onnx --data coco.yaml
python val_trt.py --engine-file gelan-c.onnx --data coco.yaml --task study --imgsz 320 480 640
python val_trt.py --engine-file gelan-c.engine --source images/          # draws what it finds
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from utils.cli import command_line, run_program
from utils.core.errors import InputError
from utils.core.files import check_files, refuse_overwrite, refuse_overwrite_in
from utils.jobs.open import need_for
from utils.jobs.options import ValOptions

DETECTIONS = ("save_txt", "save_conf", "save_json")
# Options that mean nothing for a task, and why.
UNUSED = {
    "speed": (("conf_thres", "iou_thres", "rect", *DETECTIONS),
              "with --task speed, which measures squares at everyday thresholds, and writes no detections"),
    "study": (DETECTIONS, "with --task study, which writes no detections"),
}  # fmt: skip
# ... for --source, which ends where evaluation begins.
OF_EVALUATION = (*DETECTIONS, "task", "limit", "rect", "single_cls", "upsample_masks", "overlap", "verbose",
                 "batch_size", "workers")  # fmt: skip


def evaluate_or_draw(options: ValOptions) -> None:
    """Evaluate as the options say, or draw."""
    if options.imgsz and len(options.imgsz) > 1 and options.task != "study":
        raise InputError(f"--imgsz takes one size, and several only with --task study; found {options.imgsz}")
    if options.source is not None:
        options.reject_unused(OF_EVALUATION, "with --source, which draws detections and evaluates nothing")
        draw(options, options.source)
        return
    options.reject_unused(*UNUSED.get(options.task, ((), "")))
    if not options.save_txt:
        options.reject_unused(["save_conf"], "without --save-txt, to whose files it adds scores")
    if options.overlap and options.task == "speed":
        raise InputError("--task speed measures parts by themselves, and with --overlap they overlap; leave one out")
    check_files(data=options.data)
    need_for(options.engine_file)
    outputs = ("report.json", "study_*.txt", "*_predictions.json")
    refuse_overwrite_in(options.project, options.name, options.exist_ok, outputs, [options.engine_file, options.data])
    from utils.jobs import evaluate_file

    evaluate_file.run(options, command_line())


def draw(options: ValOptions, source: str) -> None:
    """Draw detections on `source`."""
    from utils.evaluation.images import check_readable, check_source, target_names

    files = check_source(source)
    check_readable(files)
    need_for(options.engine_file)
    if options.exist_ok:
        targets = [Path(options.project) / options.name / name for name in target_names(files)]
        refuse_overwrite(targets, [*files, options.engine_file, options.data], "choose another --name or --project")
    from utils.jobs import visualize

    visualize.run(options, files)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return run_program("val_trt.py", (ValOptions, evaluate_or_draw), argv)


if __name__ == "__main__":
    sys.exit(main())
