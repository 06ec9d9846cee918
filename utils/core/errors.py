"""Typed errors. Each message is one line for the user: what was found, what was expected, what to do."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "activate the environment (. .venv/bin/activate), or make it with install_dependencies.sh"  # what to do
UNHIDE = "rename it, or take its folder out of PYTHONPATH"


def no_file(path: str | Path, expected: str) -> str:
    """The message for a path without a regular file; `expected` is its second half."""
    if not os.path.exists(path):
        problem = "does not exist"
    elif os.path.isdir(path):
        problem = "is a folder"
    else:
        problem = "is not a regular file"
    return f"{path} {problem}; {expected}"


class QatError(Exception):
    """Something went wrong that is not the fault of the input; programs exit with 1."""

    exit_code = 1


class InputError(QatError):
    """A file, an option or a value given by the user cannot be used; programs exit with 2."""

    exit_code = 2


class CheckpointError(InputError):
    """A weights file is missing, truncated, of the wrong kind, or names classes that are not upstream's."""


class RecipeError(InputError):
    """A recipe has an unknown key, a value outside its range, or a pattern that matches nothing."""


class DataError(InputError):
    """A dataset's YAML, images, labels or annotations cannot be used, or do not fit the model."""


class DependencyError(InputError):
    """A library that this command needs is not installed; the message says how to install it."""


# Options that users of other projects type -> how it is done here. Keys are as those of REMOVED.
HABITS: dict[str, str] = {
    "--include engine": "is not written here: scripts/generate_trt_engine.sh builds an engine of the ONNX file",
    "--format": "does not exist: export_qat.py writes ONNX, and scripts/generate_trt_engine.sh builds the engine",
    "--int8": "does not exist: qat.py quantize makes the INT8 checkpoint, which export_qat.py exports",
}
KEY_VALUE = "options are written as --name VALUE here, and engines are built by scripts/generate_trt_engine.sh"


# Removed options and keys -> advice. A key of this table is an option ('--flag', or 'val_trt.py --flag' where other
# programs still have it), one value of an option ('--flag value'), or a key of a file ('section.key').
REMOVED: dict[str, str] = {
    "--patience": "use --epochs alone; the best epoch is kept, whatever follows it",
    "--quantizer": "leave it out; the project's own quantizer gives the same results",
    "--calib-batches": "use --calib-images, which does not depend on --batch-size",
    "--calib-method entropy": "use --calib-method mse, or auto, which chooses by the loss on training images",
    "calibration.method entropy": "use mse, or auto, which chooses by the loss on training images",
    "calibration.scales": "use calibration.method, which all scales have",
    "finetune.lr by epoch": "use one rate, or auto",
    "finetune.weight_ranges": "leave it out; the range of a weight's channel is its largest magnitude",
    "finetune.features": "leave it out; the task loss alone was as good",
    "finetune.collapse": "leave it out; PTQ is kept where QAT is not better",
    "finetune.patience": "use finetune.epochs alone; the best epoch is kept, whatever follows it",
    "--teacher": "leave it out; the model's own FP32 weights were the better teacher",
    "finetune.ranges": "leave it out; ranges that are trained, too, regained more AP",
    **dict.fromkeys(("finetune.supervision", "finetune.supervision_stride", "--supervision"),
                    "leave it out; detections are compared, which regained more AP than layers did"),
    **dict.fromkeys(("--measure", "--concurrency", "triton_client.py --batch-size"),
                    "use perf_analyzer (docs/triton.md of the overlay)"),
    "qat.py sensitive --granularity quantizer": "use --granularity module",
    "qat.py sensitive --budget": "leave it out; a run that was ended goes on with --resume",
    **dict.fromkeys(
        (f"qat.py sensitive --{gone}" for gone in
         ("engine", "engine-minutes", "engine-batch", "optimization-level", "max-aux-streams", "timing-cache")),
        "use --profile with the layer times of an engine (scripts/inspect_engine.py)"),
    "--nvjpeg": "leave it out; OpenCV decodes images, in --workers processes",
    "val_trt.py --infStreams": "evaluate an engine for more images at a time",
    "benchmark_trt.py --infStreams": "use larger batches, or trtexec --loadEngine=FILE --infStreams=N",
    "val_trt.py --overlap": "leave it out; scripts/benchmark_trt.py measures the speed of an engine",
    "--upsample-masks": "leave it out; masks are compared on the prototypes' grid, as upstream does",
    "val_trt.py --task speed": "use scripts/benchmark_trt.py, or --conf-thres 0.25 --iou-thres 0.45",
    "val_trt.py --task study": "call val_trt.py for each --imgsz; scripts/make_report.py puts the runs into one table",
    "--input int8": "use --input uint8",
    "triton_client.py --protocol": "leave it out; the client speaks gRPC (port 8001)",
    "make_triton.py --onnx": "give the ONNX file and --platform tensorrt_plan, and copy the engine into the repository",
    "--include triton": "use scripts/make_triton.py FILE, for an ONNX file or an engine",
    "export_yoloV9.py --input": "leave it out; nvinfer makes floats (export_qat.py --input uint8 takes bytes)",
    "--build-limit": "use timeout, such as: timeout -k 10 20m python scripts/build_engine.py ...",
    **dict.fromkeys(("--compile", "--no-compile"), "leave it out; ONNX files and engines are timed, not PyTorch"),
    "--own-timing": "leave it out; the times are always those of our own loop",
    "--cuda-graphs": "edit optimization in config.pbtxt",
    "--no-warmup": "remove model_warmup from config.pbtxt",
    "--nms-instances": "edit instance_group in the config.pbtxt of NAME_nms",
    "install_dependencies.sh --dry-run": "leave it out; pip lists the packages that it installs",
    "--input-format": "leave it out; take bytes by export_qat.py --input uint8",
    "--trtexec": "leave it out; TensorRT's Python module builds, and engines that you build by trtexec are taken",
    "--exposeDMA": "leave it out; H2D, compute and D2H are the parts of a batch, and latency their sum",
    "--timing-iterations": "leave it out; the timing cache beside an engine keeps the measured times",
}  # fmt: skip


def removed(name: str, program: str = "") -> str:
    """Advice for an option or a key that was removed, such as 'was removed in 2.0: use --new'; '' for others."""
    instead = REMOVED.get(f"{program} {name}") or REMOVED.get(name)
    return f"was removed in 2.0: {instead}" if instead else ""
