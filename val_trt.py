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
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from utils.cli import IMAGE_SIZE_FLAGS, add_data, add_device, add_run_dir, run_program
from utils.core.bounds import bounded
from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.input_files import check_files
from utils.core.output_paths import refuse_overwrite, refuse_overwrite_in
from utils.jobs.dependencies import need_for

if TYPE_CHECKING:
    from utils.evaluation.data_yaml import DataConfig
    from utils.evaluation.loop import EvalConfig, EvalResult
    from utils.reports.schema import Report, Row
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

STUDY_SIZES = tuple(range(256, 1536 + 128, 128))  # those of upstream's val.py
AP_CONFIDENCE, AP_OVERLAP = 0.001, 0.7  # AP wants every detection
EVERYDAY_CONFIDENCE, EVERYDAY_OVERLAP = 0.25, 0.45  # what the eye wants


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Evaluate a TensorRT engine or an ONNX file on a dataset, or draw what it finds."
    )
    parser.add_argument(
        "--engine-file",
        required=True,
        metavar="FILE",
        help="an .onnx, .engine or .plan file, or a float .pt (at 640 unless --imgsz)",
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
        "--conf-thres", type=bounded("conf_thres"), metavar="P", help="least score (default: 0.001; --source: 0.25)"
    )
    parser.add_argument(
        "--iou-thres", type=bounded("iou_thres"), metavar="P", help="NMS overlap (default: 0.7; --source: 0.45)"
    )
    parser.add_argument(
        "--max-det", type=bounded("max_det"), default=300, metavar="N", help="detections per image (default: 300)"
    )
    parser.add_argument(
        "--task", default="val", choices=("val", "test", "train", "speed", "study"),
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
    add_device(parser)
    add_run_dir(parser, "runs/val_trt")
    return parser


def main(args: argparse.Namespace) -> int:
    """Evaluate as `args` say, and write `report.json`."""
    sizes = args.imgsz or [None]
    if len(sizes) > 1 and args.task != "study":
        raise InputError(f"--imgsz takes one size, and several only with --task study; found {sizes}")
    from utils.core.run_folder import new_run
    from utils.evaluation.data_yaml import load_data
    from utils.jobs.open import open_runner
    from utils.reports.schema import Report

    if args.source is not None:
        return draw(args)
    check_files(data=args.data)
    need_for(args.engine_file)
    outputs = ("report.json", "study_*.txt", "*_predictions.json")
    refuse_overwrite_in(args.project, args.name, args.exist_ok, outputs, [args.engine_file, args.data])
    data = load_data(args.data)
    with open_runner(args.engine_file, select_device(args.device)) as runner:
        configs = make_configs(args, runner)
        report = Report(command=shlex.join(sys.argv), title="Evaluation", data=str(args.data))
        with new_run(args.project, args.name, args.exist_ok) as folder:
            results = [evaluate_once(args, runner, data, config, folder, report) for config in configs]
            if args.task == "study":
                write_study(folder / f"study_{Path(args.data).stem}_{Path(args.engine_file).stem}.txt", results)
    logger.info("results: %s", folder)
    return 0


def draw(args: argparse.Namespace) -> int:
    """Draw detections on `args.source`; class names are the network's, or else the dataset's."""
    from utils.core.run_folder import new_run
    from utils.evaluation.data_yaml import load_data
    from utils.evaluation.sources import check_readable, check_source, target_names
    from utils.jobs.open import open_runner
    from utils.jobs.visualize import Artist, show

    files = check_source(args.source)
    for name in ("save_txt", "save_json", "limit", "rect", "single_cls"):
        if getattr(args, name):
            raise InputError(
                f"--{name.replace('_', '-')} belongs to evaluation; --source draws, and writes nothing else"
            )
    check_readable(files)
    need_for(args.engine_file)
    if args.exist_ok:
        targets = [Path(args.project) / args.name / name for name in target_names(files)]
        refuse_overwrite(targets, [*files, args.engine_file, args.data], "choose another --name or --project")
    with open_runner(args.engine_file, select_device(args.device)) as runner:
        names = runner.names or (load_data(args.data).names if Path(args.data).is_file() else None)
        artist = Artist(
            runner,
            names,
            imgsz=args.imgsz[0] if args.imgsz else None,
            conf_thres=EVERYDAY_CONFIDENCE if args.conf_thres is None else args.conf_thres,
            iou_thres=EVERYDAY_OVERLAP if args.iou_thres is None else args.iou_thres,
            max_det=args.max_det,
        )
        with new_run(args.project, args.name, args.exist_ok) as folder:
            show(artist, files, folder)
    logger.info("results: %s", folder)
    return 0


def make_configs(args: argparse.Namespace, runner: Runner) -> list[EvalConfig]:
    """What to evaluate: one configuration, or one for each size of a study.

    Raises:
        InputError: a study of a file whose size is fixed.
    """
    from dataclasses import replace

    from utils.evaluation.detector import fixed_sizes, image_input, takes_size
    from utils.evaluation.loop import EvalConfig

    config = EvalConfig(
        imgsz=args.imgsz[0] if args.imgsz else None,
        batch_size=args.batch_size,
        conf_thres=AP_CONFIDENCE if args.conf_thres is None else args.conf_thres,
        iou_thres=AP_OVERLAP if args.iou_thres is None else args.iou_thres,
        max_det=args.max_det,
        workers=args.workers,
        rect=args.rect,
        single_cls=args.single_cls,
        split=args.task if args.task in ("test", "train") else "val",
        save_txt=args.save_txt,
        save_conf=args.save_conf,
        save_json=args.save_json or Path(args.data).name == "coco.yaml",  # as upstream's val.py
        verbose=args.verbose,
        limit=args.limit,
    )
    if args.task == "speed":
        config = replace(config, conf_thres=EVERYDAY_CONFIDENCE, iou_thres=EVERYDAY_OVERLAP, rect=False,
                         save_json=False, save_txt=False)  # fmt: skip
    if args.task == "study":
        sizes = args.imgsz or [size for size in STUDY_SIZES if takes_size(runner, size)]
        if None not in fixed_sizes(runner)[2:] or not sizes:
            raise InputError(
                f"--task study needs a dynamic image size; {args.engine_file} takes {image_input(runner)}; "
                "export it with --dynamic, and build its engine for a range of --imgsz"
            )
        return [replace(config, imgsz=size, save_json=False, save_txt=False) for size in sizes]
    if config.conf_thres > AP_CONFIDENCE:
        logger.warning(
            "AP is only comparable at --conf-thres 0.001; this is %g: the curve is cut off", config.conf_thres
        )
    return [config]


def evaluate_once(
    args: argparse.Namespace, runner: Runner, data: DataConfig, config: EvalConfig, folder: Path, report: Report
) -> EvalResult:
    """Run the loop once, and add its row to the report, which is written at once."""
    from utils.evaluation.loop import evaluate

    result = evaluate(runner, data, config, out_dir=folder, name=Path(args.engine_file).stem)
    report.add(make_row(args, runner, config, result))
    report.notes += [f"left out: {line}" for line in result.left_out]
    if result.coco:
        report.notes.append(f"pycocotools: AP {result.coco['ap']:.4f}, AP50 {result.coco['ap50']:.4f}")
    report.save(folder / "report.json")
    return result


def make_row(args: argparse.Namespace, runner: Runner, config: EvalConfig, result: EvalResult) -> Row:
    """The result as a row of a report."""
    from utils.core.device import device_name
    from utils.evaluation.detector import has_nms
    from utils.reports.schema import Row, versions
    from utils.trt.engine_file import EngineNote

    unusual = {
        f"{result.images} images": config.limit is not None,
        f"split {config.split}": config.split != "val",
        f"confidence {config.conf_thres:g}": config.conf_thres != AP_CONFIDENCE,
        f"overlap {config.iou_thres:g}": config.iou_thres != AP_OVERLAP,
        "NMS in the file": has_nms(runner),
        "one class": config.single_cls,
        result.mark: bool(result.mark),
    }
    ap_with = ", ".join(text for text, holds in unusual.items() if holds)
    file = Path(args.engine_file)
    stage = {".onnx": "ONNX", ".pt": "PyTorch"}.get(file.suffix.lower())
    return Row(
        stage=stage or f"TensorRT {EngineNote.load(file).precision.upper()}".strip(),
        file=args.engine_file,
        ap=result.ap,
        ap50=result.ap50,
        precision=result.precision,
        recall=result.recall,
        seconds=result.seconds,
        device=device_name(runner.device),
        versions=versions(),
        size_bytes=file.stat().st_size,
        ms_per_image=result.ms["inference"],
        measured_on="; ".join(filter(None, (result.measured_on, ap_with))),
        ap_with=ap_with,
    )


def write_study(file: Path, results: list[EvalResult]) -> None:
    """One line for each size, with upstream's columns: P, R, mAP50, mAP50-95, three zeros (losses), times in ms."""
    rows = [
        (r.precision, r.recall, r.ap50, r.ap, 0, 0, 0, r.ms["preprocess"], r.ms["inference"], r.ms["nms"])
        for r in results
    ]
    with atomic_path(file) as temporary:
        lines = [" ".join(f"{value:10.4g}" for value in row) + "\n" for row in rows]
        temporary.write_text("".join(lines), encoding="utf-8")
    logger.info("study: %s", file)


if __name__ == "__main__":
    sys.exit(run_program(make_parser(), main))
