#!/usr/bin/env python3
"""Evaluate a TensorRT engine or an ONNX file on a dataset, or draw its detections.

    python val_trt.py gelan-c.onnx --data coco.yaml
    python val_trt.py gelan-c.engine --source images/ --save-txt    # draws detections; 0 is a camera, a URL a stream

Run it in a patched YOLOv9 checkout (patch_yolov9.sh).
"""

from __future__ import annotations

import sys
from functools import partial

from utils.cli import run_program
from utils.core.errors import InputError
from utils.core.files import check_file, check_files, refuse_overwrite_in
from utils.core.run_folder import new_run
from utils.jobs.open import need_for
from utils.jobs.options import ValOptions

# Options without a meaning for --source, which draws and does not evaluate.
EVALUATION_OPTIONS = (
    "task",
    "limit",
    "rect",
    "single_cls",
    "verbose",
    "batch_size",
    "workers",
    "groups",
    "reference",
    "unlabelled",
    "save_json",
    "target_drop",
    "force",
    "plots",
)


def evaluate_or_draw(options: ValOptions) -> None:
    """Evaluate, or with `--source` draw."""
    if not options.save_txt:
        options.reject_unused(["save_conf"], "without --save-txt: it adds scores to those files")
        options.reject_unused(["no_draw"], "without --save-txt, since nothing would be written")
    check_file(options.network, "expected an ONNX file, an engine or a .pt")
    if options.source is None:
        evaluate_on_dataset(options)
    else:
        draw_detections(options, options.source)


def draw_detections(options: ValOptions, source: list[str]) -> None:
    """Draw detections on the images and videos of `source`."""
    from utils.jobs.sources import find_sources

    options.reject_unused(EVALUATION_OPTIONS, "with --source, which draws detections and evaluates nothing")
    sources = find_sources(source)
    need_for(options.network, options.openvino)
    with new_run(options.project, options.name, options.exist_ok, log=False) as folder:
        from utils.jobs import draw as job

        job.run(options, sources, folder)


def evaluate_on_dataset(options: ValOptions) -> None:
    """Check the options of an evaluation, and evaluate.

    Raises:
        InputError: the dataset or the reference is missing, or a result would overwrite a file that is read.
    """
    options.reject_unused(["no_draw"], "without --source")
    check_files(data=options.data)
    networks = [options.network]
    if options.reference:
        networks.append(options.reference)
    if not options.data and not any(file.lower().endswith(".pt") for file in networks):
        raise InputError("--data was not given; give the dataset's YAML")
    if options.unlabelled and not options.reference:
        raise InputError(
            "--unlabelled takes the FP32 model's detections as labels; give that model as --reference FILE"
        )
    for network in networks:
        need_for(network, options.openvino)
    files = [options.network, options.data, options.reference, options.groups]
    refuse_overwrite_in(options.project, options.name, options.exist_ok, options.WRITTEN, files)
    from utils.jobs.evaluate import evaluate_file

    evaluate_file(options)


main = partial(run_program, "val_trt.py", (ValOptions, evaluate_or_draw), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
