#!/usr/bin/env python3
"""Put the results of one or several runs on one page: report.html, its data as JSON, and plots.

    python scripts/make_report.py runs/qat/exp
    python scripts/make_report.py --environment model.onnx
    python scripts/make_report.py runs/qat/exp runs/val_trt/exp --output runs/report \\
        --compare gelan-c.pt qat_best_gelan-c.onnx --data data/coco.yaml

A run is a folder with a report.json, as qat.py and val_trt.py leave it, or that file. No run's report.json is written
over: in a run's folder the page's data goes to report-merged.json, elsewhere to report.json. With --compare both
networks run on a few validation images, and the page shows their detections side by side.

With --environment nothing is written: versions, GPU and driver are printed, and what each .onnx, .engine or .pt that is
given says of itself, for a bug report.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # where models/ and utils/ lie

import importlib.util
import logging
import platform
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from utils.cli import run_program
from utils.core.device import select_device
from utils.core.errors import InputError, QatError
from utils.core.files import check_file, check_files, distinct_names, file_hash, refuse_overwrite
from utils.core.options import DeviceOptions, Field, Fraction, InputSize, one_size, option, size_option
from utils.core.run_folder import held
from utils.core.tasks import DISPLAY_CONF
from utils.core.text import printable, short_repr
from utils.jobs.open import need, need_for

if TYPE_CHECKING:
    from utils.reports.schema import Sample

logger = logging.getLogger(__name__)

OF_IMAGES = ("data", "samples", "imgsz", "conf_thres", "device")


class ReportOptions(DeviceOptions):
    """Put the results of one or several runs on one page."""

    runs: list[str] = option(
        [], "run folders, or their report.json; rows keep this order; a row compares with the float row before it",
        positional=True, nargs="*", metavar="RUN",
    )  # fmt: skip
    environment: bool = option(
        False,
        "print what a bug report needs instead: versions, GPU, driver, and the metadata of the files given as RUN",
    )
    output: str | None = option(None, "where the files go (default: the first run's folder)", metavar="DIR")
    title: str | None = option(None, "heading of the page")
    note: list[str] = option([], "a sentence for the reader; several times", metavar="TEXT", action="append")
    compare: list[str] | None = option(
        None, "networks to draw: .pt, .onnx or .engine", group="images", nargs=2, metavar=("FLOAT", "INT8")
    )
    data: str | None = option(None, "the dataset's YAML, whose val images are shown", group="images", metavar="FILE")
    samples: Annotated[int, Field(ge=1, le=100)] = option(4, "images", group="images", metavar="N")
    imgsz: InputSize | None = size_option("that of the files, or 640", group="images")
    conf_thres: Fraction = option(DISPLAY_CONF, "lowest score shown", group="images", metavar="F")


def main(options: ReportOptions) -> None:
    """Make the report, and log its table."""
    if options.environment:
        options.reject_others(["environment", "runs"], "with --environment, which makes no report")
        print(printable(environment_text(options.runs)))
        return
    if not options.runs:
        raise InputError("give run folders, or their report.json; or --environment")
    if not options.compare:
        options.reject_unused(OF_IMAGES, "without --compare, whose networks it is for")
    elif not options.data:
        raise InputError("--compare needs --data, the dataset whose images are shown")
    need("matplotlib")
    for network in options.compare or ():
        need_for(network)
    check_files(data=options.data)
    from utils.jobs.advice import advise
    from utils.reports.page import JSON_NAME, PAGE_NAME, PLOTS, merged, write_all
    from utils.reports.schema import UNFINISHED, Report
    from utils.reports.tables import terminal_table

    first = Path(options.runs[0])
    folder = Path(options.output) if options.output else first if first.is_dir() else first.parent
    read = [Path(run, JSON_NAME) if Path(run).is_dir() else Path(run) for run in options.runs]
    for path in read:
        check_file(path, "give the folder of a run that qat.py or val_trt.py has finished, or its report.json")
    own = (folder / JSON_NAME).resolve() in [path.resolve() for path in read]
    name = "report-merged.json" if own else JSON_NAME
    written = [folder / file for file in (name, *PLOTS, PAGE_NAME)]
    refuse_overwrite(written, [*read, *(options.compare or ()), options.data])
    reports = {path: Report.load(path) for path in read}
    report = merged(reports)
    for note in report.notes:
        if note.startswith(UNFINISHED) or not any(note in one.notes for one in reports.values()):
            logger.info("%s", note)  # of what the runs do not share
    report.title = options.title or report.title
    report.notes += [note for note in options.note if note not in report.notes]
    if options.compare:
        report.samples = compared_samples(options, options.compare, options.data or "")
    advice = advise(report)
    with held(folder) if folder.is_dir() else nullcontext():
        write_all(report, folder, advice, name)
    lines = [terminal_table(report), ""]
    if advice.text:
        lines.append(advice.text)
    lines.append(f"report: {folder / PAGE_NAME}")
    if advice.next_line:
        lines.append(f"next: {advice.next_line}")
    logger.info("%s", "\n".join(lines))


def environment_text(files: Iterable[str | Path] = ()) -> str:
    """Text for a bug report, files last; it works where torch and TensorRT are not installed."""
    from models.quantize import __version__
    from utils.trt import tensorrt_api

    try:
        tensorrt = tensorrt_api.load_tensorrt().name
    except QatError as error:
        tensorrt = str(error)
    if importlib.util.find_spec("torch") is None:
        libraries = f"PyTorch is not installed; Python {platform.python_version()} on {platform.platform()}"
    else:
        from torch.utils.collect_env import get_pretty_env_info

        libraries = get_pretty_env_info().strip()
    return "\n\n".join([f"Overlay: {__version__}\nTensorRT: {tensorrt}", libraries, *map(_describe_file, files)])


def _describe_file(file: str | Path) -> str:
    """Size, digest and metadata; of a path its last name only, and no class names, which are nobody's business."""
    from utils.trt.engine_file import ENGINE_SUFFIXES, EngineNote
    from utils.trt.onnx_file import OnnxFile

    path = check_file(file, "expected a .onnx, .engine, .plan or .pt")
    lines = [f"{path.name}: {path.stat().st_size:,} bytes, SHA-256 {file_hash(path)}"]
    metadata: dict[str, Any] = {}
    try:
        if path.suffix == ".onnx":
            model = OnnxFile.read(path)
            inputs, outputs = (", ".join(map(str, side)) for side in (model.inputs, model.outputs))
            metadata = {"opset": model.opset, "inputs": inputs, "outputs": outputs, **model.metadata}
        elif path.suffix in ENGINE_SUFFIXES:
            note = vars(EngineNote.load(path))
            metadata = {**note, **note["metadata"], "metadata": None, "tuning": None}
        elif path.suffix == ".pt":
            from models.quantize import checkpoint

            content = checkpoint.summary(path) or {"kind": "a float checkpoint, or another file of PyTorch's"}
            metadata = {**content, **content.get("extra", {}), "extra": None}
    except (QatError, ImportError) as error:
        lines.append(f"  {str(error).replace(str(path), path.name)}")
    for name, value in metadata.items():
        if name != "names" and value not in ("", None, {}, ()):
            text = value if isinstance(value, str) else short_repr(value)
            lines.append(f"  {name}: {Path(text).name if Path(text).is_absolute() else text}")
    return "\n".join(lines)


def compared_samples(options: ReportOptions, files: Sequence[str], data: str) -> list[Sample]:
    """Detections of both networks on the same images, under the files' names."""
    from utils.evaluation.data_yaml import load_data
    from utils.evaluation.input_plan import InputPlan, fixed_sizes
    from utils.jobs.open import open_runner
    from utils.jobs.visualize import collect_samples

    device, imgsz = select_device(options.device), options.imgsz or 640
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(open_runner(path, device))
            for name, path in zip(distinct_names(Path(file).name for file in files), files, strict=True)
        }
        for runner in runners.values() if options.imgsz is None else ():
            fixed = fixed_sizes(runner)[2:]
            imgsz = one_size((runner.imgsz or imgsz) if None in fixed else list(fixed))  # that the file knows
        for runner in runners.values():
            InputPlan.of(runner, imgsz, 1)  # refuses a size that a file cannot take
        return collect_samples(
            runners, load_data(data), imgsz=imgsz, count=options.samples, confidence=options.conf_thres
        )


run = partial(run_program, "make_report.py", (ReportOptions, main), about=__doc__)

if __name__ == "__main__":
    sys.exit(run())
