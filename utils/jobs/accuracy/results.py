"""What the steps left, read from their reports: AP of each stage, and times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.resampled import Difference
from utils.jobs.accuracy.measure import KINDS
from utils.jobs.accuracy.steps import Steps
from utils.jobs.run_state import STOPPED
from utils.reports.schema import Report, Row

FLOAT = "float"
CHOSEN = "chosen: "  # how a calibration sweep begins what it found
SAID = {"PTQ auto": CHOSEN, "ranges only": STOPPED, "QAT": STOPPED}  # how the notes begin that are shown of a stage
# a stage of the tables → the folder of its report, and the stage's name there (None: the only row)
STAGES: dict[str, tuple[str, str | None]] = {
    FLOAT: ("eval-float", None),
    "FP16 engine": ("eval-float-engine", None),
    "float ONNX": ("eval-float-onnx", None),
    "PTQ": ("qat", "PTQ"),
    "PTQ auto": ("ptq-auto", "PTQ"),
    "ranges only": ("ranges", "QAT"),
    "QAT": ("qat", "QAT"),
    "INT8 engine": ("eval-int8-engine", None),
    "INT8 ONNX": ("eval-int8-onnx", None),
}
DEPLOYED = {"float": ("FP16 engine", "float ONNX"), "int8": ("INT8 engine", "INT8 ONNX")}
ENGINES = tuple(engine for engine, _ in DEPLOYED.values())


@dataclass(frozen=True)
class Time:
    """One file's times at one batch size.

    Attributes:
        kind: float or int8: which of the two files.
        ran_as: what it was run as, such as FP16, which TensorRT makes of a float file.
        latency, p99: milliseconds a batch, median and 99th percentile.
        images_per_second: throughput.
    """

    kind: str
    ran_as: str
    batch: int
    latency: float
    p99: float
    images_per_second: float


@dataclass(frozen=True)
class Results:
    """What is known of one network.

    Attributes:
        rows: stage, one of `STAGES` → its row.
        times: of both files at each batch size.
        timed_on: the device and software, as `benchmark_trt.py` says it.
        steps: what was run, see `Steps.notes`.
        notes: sentences from the reports.
    """

    name: str
    rows: Mapping[str, Row]
    times: tuple[Time, ...] = ()
    timed_on: str = ""
    device: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def difference(self, stage: str) -> Difference | None:
        """AP of a stage minus that of the float network; None where they do not compare."""
        row, base = self.rows.get(stage), self.rows.get(FLOAT)
        return None if row is None or base is None or stage == FLOAT else row.difference(base)

    def deployed(self, kind: str) -> Row | None:
        """The row of the engine of a file, or else of the file itself."""
        return next((self.rows[stage] for stage in DEPLOYED[kind] if stage in self.rows), None)

    def time(self, kind: str, batch: int) -> Time | None:
        """The time of a file at a batch size, if it was measured."""
        return next((one for one in self.times if (one.kind, one.batch) == (kind, batch)), None)


def load(steps: Steps) -> Results:
    """Read what the steps of a network left so far.

    Raises:
        InputError: a report is damaged.
    """
    rows, notes = {}, []
    for stage, (folder, name) in STAGES.items():
        path = steps.folder / folder / "report.json"
        if not path.exists():
            continue
        report = Report.load(path)
        found = [row for row in report.rows if name in (None, row.stage) and row.ap is not None]
        if found:
            rows[stage] = found[-1]
        said = [note for note in report.notes if stage in SAID and note.startswith(SAID[stage])]
        notes += [f"{stage}: {note.removeprefix(CHOSEN)}" for note in said]
    benchmarks = [steps.folder / name / "benchmark.json" for name in ("times", "times-onnx")]
    benchmark = next((path for path in benchmarks if path.exists()), None)
    device, software, times = _times(benchmark) if benchmark else ({}, "", ())
    timed_on = f"{device['Selected Device']}, {software}" if device else ""
    return Results(steps.name, rows, times, timed_on, device, tuple(steps.notes()), tuple(dict.fromkeys(notes)))


def _times(path: Path) -> tuple[dict[str, str], str, tuple[Time, ...]]:
    """The device and the software that a benchmark ran on, and its times."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        times = tuple(
            Time(
                kind, row["precision"], row["batch"], row["figures"]["latency"]["median"],
                row["figures"]["latency"]["p99"], row["images_per_second"],
            )
            for row in content["rows"]
            for kind in KINDS
            if row["figures"] is not None and row["model"].endswith(f"-{kind}")
        )  # fmt: skip
        device = {str(key): str(value) for key, value in content["device"].items()}
        return {"Selected Device": "unknown", **device}, str(content["software"]), times
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is damaged ({type(error).__name__}: {error})"
        raise InputError(f"{what}; remove it, and it is measured again") from None
