"""The job behind `scripts/make_report.py`: results of several runs on one page, with images that show two models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from utils.core.device import select_device
from utils.core.errors import InputError
from utils.core.files import check_file, check_files, distinct_names, refuse_overwrite
from utils.core.options import DeviceOptions, Field, Fraction, InputSize, one_size, option, size_option
from utils.core.run_folder import held
from utils.core.tasks import DISPLAY_CONF
from utils.jobs.open import need, need_for

if TYPE_CHECKING:
    from utils.reports.schema import Report, Sample
    from utils.runners.base import Runner

logger = logging.getLogger(__name__)

OF_IMAGES = ("data", "samples", "imgsz", "conf_thres", "device")
MERGED = "report-merged.json"  # in the folder of a run whose own report is read


class ReportOptions(DeviceOptions):
    """Put the results of one or several runs on one page."""

    runs: list[str] = option(
        [],
        "run folders, or their report.json; rows keep this order; a row compares with the FP32 row before it",
        positional=True,
        nargs="*",
        metavar="RUN",
    )
    environment: bool = option(
        False,
        "print what a bug report needs instead: versions, GPU, driver, and the metadata of the files given as RUN",
    )
    output: str | None = option(None, "where the files go (default: the first run's folder)", metavar="DIR")
    title: str | None = option(None, "heading of the page")
    note: list[str] = option([], "a sentence for the reader; several times", metavar="TEXT", action="append")
    compare: list[str] | None = option(
        None, "models to draw: .pt, .onnx or .engine", group="images", nargs=2, metavar=("FLOAT", "INT8")
    )
    data: str | None = option(None, "the dataset's YAML, whose val images are shown", group="images", metavar="FILE")
    samples: Annotated[int, Field(ge=1, le=100)] = option(4, "images", group="images", metavar="N")
    imgsz: InputSize | None = size_option("that of the files, or 640", group="images")
    conf_thres: Fraction = option(DISPLAY_CONF, "lowest score shown", group="images", metavar="F")

    @property
    def folder(self) -> Path:
        """Where the files go."""
        if self.output:
            return Path(self.output)
        first = Path(self.runs[0])
        return first if first.is_dir() else first.parent


def run(options: ReportOptions) -> None:
    """Merge the reports, draw the images, write page and data, and log the table."""
    check_report_options(options)
    from utils.jobs.advice import advise
    from utils.reports.page import PAGE_NAME, merged, write_all
    from utils.reports.schema import Report
    from utils.reports.tables import terminal_table

    files = report_files(options)
    name = data_name(options, files)
    reports = {file: Report.load(file) for file in files}
    report = merged(reports)
    log_notes(report, reports)
    report.title = options.title or report.title
    report.notes += [note for note in options.note if note not in report.notes]
    if options.compare:
        report.samples = compared_samples(options, options.compare, options.data or "")
        report.samples_are = ""
    advice = advise(report)
    folder = options.folder
    with held(folder) if folder.is_dir() else nullcontext():
        write_all(report, folder, advice, name)
    lines = [terminal_table(report), ""]
    if advice.text:
        lines.append(advice.text)
    lines.append(f"report: {folder / PAGE_NAME}")
    if advice.next_line:
        lines.append(f"next: {advice.next_line}")
    logger.info("%s", "\n".join(lines))


def check_report_options(options: ReportOptions) -> None:
    """Raise `InputError` for options that do nothing or lack another, or a file or library that is missing."""
    if not options.runs:
        raise InputError("give run folders, or their report.json; or --environment")
    if not options.compare:
        options.reject_unused(OF_IMAGES, "without --compare, whose models it is for")
    elif not options.data:
        raise InputError("--compare needs --data, the dataset whose images are shown")
    need("matplotlib")
    for model in options.compare or ():
        need_for(model)
    check_files(data=options.data)


def report_files(options: ReportOptions) -> list[Path]:
    """Return the report.json of each run; `InputError` if one is not there."""
    from utils.reports.page import JSON_NAME

    files = [Path(run, JSON_NAME) if Path(run).is_dir() else Path(run) for run in options.runs]
    for file in files:
        check_file(file, "give the folder of a run that qat.py or val_trt.py has finished, or its report.json")
    return files


def data_name(options: ReportOptions, files: Sequence[Path]) -> str:
    """Return the name of the page's data; `InputError` if a file would be written over one that is read."""
    from utils.reports.page import JSON_NAME, PAGE_NAME, PLOTS

    is_read = (options.folder / JSON_NAME).resolve() in [file.resolve() for file in files]
    name = MERGED if is_read else JSON_NAME
    written = [options.folder / file for file in (name, *PLOTS, PAGE_NAME)]
    refuse_overwrite(written, [*files, *(options.compare or ()), options.data])
    return name


def log_notes(report: Report, reports: Mapping[Path, Report]) -> None:
    """Log the notes that merging has made, and those of runs that are not finished."""
    from utils.reports.schema import UNFINISHED

    notes = {note for part in reports.values() for note in part.notes}
    for note in report.notes:
        if note.startswith(UNFINISHED) or note not in notes:
            logger.info("%s", note)


def compared_samples(options: ReportOptions, files: Sequence[str], data: str) -> list[Sample]:
    """Return detections of both models on the same images, under their stage and the files' names."""
    from utils.evaluation.data_yaml import load_data
    from utils.evaluation.input_plan import InputPlan
    from utils.jobs.evaluate import stage
    from utils.jobs.open import open_runner
    from utils.jobs.visualize import collect_samples
    from utils.reports.tables import stage_name

    device = select_device(options.device)
    names = distinct_names(Path(file).name for file in files)
    with ExitStack() as stack:
        runners = {}
        for name, file in zip(names, files, strict=True):
            title = f"{stage_name(stage(Path(file)))}: {name}"
            runners[title] = stack.enter_context(open_runner(file, device))
        imgsz = options.imgsz or size_of_files(list(runners.values()))
        for runner in runners.values():
            InputPlan.of(runner, imgsz, 1)  # refuses a size that a file cannot take
        return collect_samples(
            runners, load_data(data), imgsz=imgsz, count=options.samples, confidence=options.conf_thres
        )


def size_of_files(runners: Sequence[Runner]) -> InputSize:
    """Return the size that the last of the files names that names one, or 640."""
    from utils.evaluation.input_plan import fixed_sizes

    imgsz: InputSize = 640
    for runner in runners:
        sides = fixed_sizes(runner)[2:]
        imgsz = one_size((runner.imgsz or imgsz) if None in sides else list(sides))
    return imgsz
