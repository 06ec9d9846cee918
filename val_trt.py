#!/usr/bin/env python3
"""Evaluate a TensorRT engine or an ONNX file on a dataset, or draw what it finds.

    python val_trt.py gelan-c.onnx --data coco.yaml
    python val_trt.py gelan-c.engine --source images/ --save-txt    # draws what it finds; 0 is a camera, a URL a stream

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

# Options that mean nothing for --source, which ends where evaluation begins.
OF_EVALUATION = ("task", "limit", "rect", "single_cls", "verbose", "batch_size", "workers", "groups", "reference",
                 "unlabelled", "save_json", "target_drop", "force", "plots")  # fmt: skip


def evaluate_or_draw(options: ValOptions) -> None:
    """Evaluate as the options say, or draw."""
    if not options.save_txt:
        options.reject_unused(["save_conf"], "without --save-txt, to whose files it adds scores")
        options.reject_unused(["no_draw"], "without --save-txt, whose files it leaves as all that is written")
    check_file(options.network, "expected an ONNX file, an engine or a .pt")
    if options.source is not None:
        from utils.jobs.sources import find_sources

        options.reject_unused(OF_EVALUATION, "with --source, which draws detections and evaluates nothing")
        sources = find_sources(options.source)
        need_for(options.network, options.openvino)
        with new_run(options.project, options.name, options.exist_ok, log=False) as folder:
            from utils.jobs import draw

            draw.run(options, sources, folder)
        return
    options.reject_unused(["no_draw"], "without --source")
    check_files(data=options.data)
    networks = [file for file in (options.network, options.reference) if file]
    if not (options.data or any(file.lower().endswith(".pt") for file in networks)):
        raise InputError("--data was not given; give the dataset's YAML")
    if options.unlabelled and not options.reference:
        raise InputError("--unlabelled takes the float network's detections as labels; give that as --reference FILE")
    for network in networks:
        need_for(network, options.openvino)
    read = [options.network, options.data, options.reference]
    refuse_overwrite_in(options.project, options.name, options.exist_ok, options.WRITTEN, read)
    from utils.jobs.evaluate import evaluate_file

    evaluate_file(options)


main = partial(run_program, "val_trt.py", (ValOptions, evaluate_or_draw), about=__doc__)

if __name__ == "__main__":
    sys.exit(main())
