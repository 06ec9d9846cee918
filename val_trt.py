#!/usr/bin/env python3
"""Evaluate a TensorRT engine or an ONNX file on a dataset.

python val_trt.py --engine-file gelan-c.onnx --data coco.yaml
python val_trt.py --engine-file gelan-c.onnx --data coco.yaml --task study --imgsz 320 480 640
python val_trt.py --engine-file gelan-c.engine --source images/          # draws what it finds
"""

from __future__ import annotations

import interrupts

interrupts.watch(__name__)  # from here on Ctrl-C and SIGTERM end this program: one line, exit code 130 or 143

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from utils.cli import IMAGE_SIZE_FLAGS, add_data, add_device, add_run_dir, command_line, run_program
from utils.core.arguments import refuse_idle
from utils.core.bounds import bounded
from utils.core.errors import InputError
from utils.core.input_files import check_files
from utils.core.output_paths import refuse_overwrite, refuse_overwrite_in
from utils.core.thresholds import AP_CONFIDENCE, AP_NMS_IOU, EVERYDAY_CONFIDENCE, EVERYDAY_NMS_IOU, MASK_AP_NMS_IOU
from utils.jobs.dependencies import need_for
from utils.jobs.file_options import TASKS, FileOptions

DETECTIONS = ("save_txt", "save_conf", "save_json")
# Options that mean nothing for a task, and why.
IDLE = {
    "speed": (("conf_thres", "iou_thres", "rect", *DETECTIONS),
              "with --task speed, which measures squares at everyday thresholds, and writes no detections"),
    "study": (DETECTIONS, "with --task study, which writes no detections"),
}  # fmt: skip
# ... for --source, which ends where evaluation begins.
OF_EVALUATION = (*DETECTIONS, "task", "limit", "rect", "single_cls", "upsample_masks", "overlap",
                 "verbose", "batch_size", "workers")  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Evaluate a TensorRT engine or an ONNX file on a dataset, or draw what it finds."
    )
    parser.add_argument(
        "--engine-file",
        required=True,
        metavar="FILE",
        help="an .onnx, .engine or .plan file, or a .pt (at the size of its calibration, or 640, unless --imgsz)",
    )
    add_data(parser)
    parser.add_argument(
        "--source",
        metavar="PATH",
        help="draw detections on this image, video or folder instead of evaluating",
    )
    parser.add_argument(
        *IMAGE_SIZE_FLAGS, type=bounded("imgsz"), nargs="+", metavar="N",
        help="longer side of the input in pixels (default: the file's own); several for --task study",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=bounded("batch_size"), default=32, metavar="N",
                        help="images at a time (default: 32); a static batch in the file wins")  # fmt: skip
    parser.add_argument(
        "--conf-thres",
        type=bounded("conf_thres"),
        metavar="P",
        help=f"least score (default: {AP_CONFIDENCE}; --source: {EVERYDAY_CONFIDENCE})",
    )
    parser.add_argument(
        "--iou-thres",
        type=bounded("iou_thres"),
        metavar="P",
        help=f"NMS IoU (default: {AP_NMS_IOU}; segmentation: {MASK_AP_NMS_IOU}; --source: {EVERYDAY_NMS_IOU})",
    )
    parser.add_argument(
        "--max-det", type=bounded("max_det"), default=300, metavar="N", help="detections per image (default: 300)"
    )
    parser.add_argument(
        "--task", default="val", choices=TASKS,
        help="a split to evaluate; speed: times at everyday thresholds; study: AP and times over image sizes",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=bounded("workers"), default=8, metavar="N", help="processes that read images (default: 8)"
    )
    parser.add_argument("--rect", action="store_true", help="smallest input that holds an image (dynamic size only)")
    parser.add_argument("--single-cls", action="store_true", help="all classes count as one")
    parser.add_argument("--verbose", action="store_true", help="a row for each class, however many there are")
    parser.add_argument("--save-txt", action="store_true", help="write detections to labels/*.txt")
    parser.add_argument("--save-conf", action="store_true", help="with scores in those files")
    parser.add_argument("--save-json", action="store_true", help="write COCO JSON, and run pycocotools if it can")
    parser.add_argument(
        "--limit", type=bounded("limit"), metavar="N", help="only N images, evenly spread over the split"
    )
    parser.add_argument(
        "--upsample-masks", action="store_true", help="compare masks at the input's size, not on the prototypes' grid"
    )
    parser.add_argument(
        "--overlap", action="store_true",
        help="let the network compute the next images during NMS and matching (on a GPU); times of parts overlap too",
    )  # fmt: skip
    add_device(parser)
    add_run_dir(parser, "runs/val_trt")
    return parser


def main(args: argparse.Namespace) -> int:
    """Evaluate as `args` say, or draw."""
    options = FileOptions(**{item.name: getattr(args, item.name) for item in fields(FileOptions)})
    if options.imgsz and len(options.imgsz) > 1 and options.task != "study":
        raise InputError(f"--imgsz takes one size, and several only with --task study; found {options.imgsz}")
    if options.source is not None:
        refuse_idle(args, OF_EVALUATION, "with --source, which draws detections and evaluates nothing")
        return draw(options, options.source)
    refuse_idle(args, *IDLE.get(options.task, ((), "")))
    if not options.save_txt:
        refuse_idle(args, ["save_conf"], "without --save-txt, to whose files it adds scores")
    if options.overlap and options.task == "speed":
        raise InputError("--task speed measures parts by themselves, and with --overlap they overlap; leave one out")
    check_files(data=options.data)
    need_for(options.engine_file)
    outputs = ("report.json", "study_*.txt", "*_predictions.json")
    refuse_overwrite_in(options.project, options.name, options.exist_ok, outputs, [options.engine_file, options.data])
    from utils.jobs import evaluate_file

    evaluate_file.run(options, command_line())
    return 0


def draw(options: FileOptions, source: str) -> int:
    """Draw detections on `source`."""
    from utils.evaluation.sources import check_readable, check_source, target_names

    files = check_source(source)
    check_readable(files)
    need_for(options.engine_file)
    if options.exist_ok:
        targets = [Path(options.project) / options.name / name for name in target_names(files)]
        refuse_overwrite(targets, [*files, options.engine_file, options.data], "choose another --name or --project")
    from utils.jobs import visualize

    visualize.run(options, files)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(make_parser(), main))
