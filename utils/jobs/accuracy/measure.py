"""What follows on a float checkpoint: quantized in several ways, exported, built, timed, evaluated."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from utils.jobs.accuracy.steps import CHECKOUT, Steps

BATCHES = (1, 8)  # that are timed; AP is that of the engine of the larger
QUANTIZED = {"ptq-auto": ("--calib-method", "auto", "--ptq-only"), "ranges": ("--train", "ranges"), "qat": ()}
KINDS = ("float", "int8")  # of exported files; TensorRT makes FP16 engines of those in float
TENSORRT_SETUP = "scripts/check_engine_setup.py"


@dataclass(frozen=True)
class MeasureOptions:
    """How networks are quantized and measured.

    Attributes:
        data: dataset's YAML.
        imgsz: pixels.
        workers: processes that read images.
        on_gpu: whether the programs have a GPU.
        epochs, iters: of QAT; None for the defaults of `qat.py quantize`.
        optimization_level: of engines; None for TensorRT's.
        typing: of exported files, weak or strong.
        no_engines: why there are no engines; empty where there are. Then ONNX Runtime evaluates the exported files.
    """

    data: Path
    imgsz: int
    workers: int
    on_gpu: bool
    epochs: int | None
    iters: int | None
    optimization_level: int | None
    typing: str
    no_engines: str = ""

    @property
    def device(self) -> list[str]:
        """For a command line: which GPU it is says CUDA_VISIBLE_DEVICES."""
        return [] if self.on_gpu else ["--device", "cpu"]


def tensorrt(engine_python: str, data: Path, on_gpu: bool) -> tuple[str, str]:
    """How TensorRT wants files to be typed, and why there is none: one of the two is empty."""
    if not on_gpu:
        return "", "engines need a GPU"
    done = subprocess.run(
        [engine_python, TENSORRT_SETUP, str(data)], capture_output=True, encoding="utf-8", cwd=CHECKOUT, check=False
    )
    if done.returncode == 0:
        return done.stdout.split()[-1], ""
    lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
    return "", lines[-1].removeprefix("error: ").partition(";")[0]


def evaluate_float(steps: Steps, options: MeasureOptions) -> None:
    """AP of the float network in PyTorch, with AP by size of objects."""
    command = ["qat.py", "eval", "--weights", steps.weights, *_data(options), "--imgsz", str(options.imgsz),
               "--save-json", "--project", steps.folder, "--name", "eval-float", "--exist-ok"]  # fmt: skip
    steps.run("eval float", steps.folder / "eval-float" / "report.json", command)


def quantize(steps: Steps, options: MeasureOptions) -> None:
    """PTQ as it is by default and QAT from there; PTQ with the calibration that suits best; QAT of ranges alone."""
    training = [f"--{name}={value}" for name, value in (("epochs", options.epochs), ("iters", options.iters))
                if value is not None]  # fmt: skip
    for name, arguments in QUANTIZED.items():
        folder = steps.folder / name
        command = ["qat.py", "quantize", "--weights", steps.weights, *_data(options), "--imgsz", str(options.imgsz),
                   "--no-eval-origin", *arguments, *([] if "--ptq-only" in arguments else training),
                   "--project", steps.folder, "--name", name, "--exist-ok"]  # fmt: skip
        if (folder / "weights" / "last.pt").exists():
            command += ["--resume", folder]
        steps.run(name, folder / "report.json", command)


def export(steps: Steps, options: MeasureOptions) -> None:
    """The float network and the one after QAT as ONNX files."""
    weights = {"float": steps.weights, "int8": steps.folder / "qat" / "weights" / "qat_best_float.pt"}
    for kind in KINDS:
        file = onnx_file(steps, kind)
        command: list[str | Path] = [
            "export_qat.py", "--weights", weights[kind], "--data", options.data, "--imgsz", str(options.imgsz),
            "--include", "onnx", "--simplify", "--dynamic", "batch", "--typing", options.typing, "--output", file,
            *options.device,
        ]  # fmt: skip
        steps.run(f"export {kind}", file, command)


def measure_times(steps: Steps, options: MeasureOptions) -> None:
    """Build the engines of both files, and time them in turns; without TensorRT ONNX Runtime runs the files."""
    command: list[str | Path] = [
        "scripts/benchmark_trt.py", onnx_file(steps, "int8"), "--baseline", onnx_file(steps, "float"),
        "--batch-size", *map(str, BATCHES), "--project", steps.folder, "--name", _times(options), "--exist-ok",
    ]  # fmt: skip
    if options.no_engines:
        command += ["--device", "cpu"]
    else:
        command += ["--useCudaGraph", "--useSpinWait", "--noDataTransfers"]  # the engine alone
        level = options.optimization_level
        command += [] if level is None else ["--optimization-level", str(level)]
    result = steps.folder / _times(options) / "benchmark.json"
    steps.run(_times(options), result, command, tensorrt=not options.no_engines)


def evaluate(steps: Steps, options: MeasureOptions) -> None:
    """AP of both engines, or of the ONNX files where there are none."""
    ran = "onnx" if options.no_engines else "engine"
    for kind in KINDS:
        file = onnx_file(steps, kind)
        if not options.no_engines:
            file = file.with_name(f"{file.stem}-b{BATCHES[-1]}.engine")
        name = f"eval-{kind}-{ran}"
        device = ["--device", "cpu"] if options.no_engines else []
        command: list[str | Path] = [
            "val_trt.py", "--engine-file", file, "--data", options.data, "--workers", str(options.workers),
            "--save-json", "--project", steps.folder, "--name", name, "--exist-ok", *device,
        ]  # fmt: skip
        steps.run(name.replace("-", " "), steps.folder / name / "report.json", command,
                  tensorrt=not options.no_engines)  # fmt: skip


def onnx_file(steps: Steps, kind: str) -> Path:
    """The ONNX file of a kind; engines lie beside it."""
    return steps.folder / f"{steps.folder.name}-{kind}.onnx"


def _times(options: MeasureOptions) -> str:
    return "times-onnx" if options.no_engines else "times"


def _data(options: MeasureOptions) -> list[str | Path]:
    return ["--data", options.data, "--workers", str(options.workers), *options.device]
