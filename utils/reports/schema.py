"""What a run reports: rows of results, the training history, the ranges, and sample detections.

`Report` is the one object that programs fill and that tables, figures and the HTML page read. It is stored as JSON
with a `schema_version`, so that a report of today is either read correctly by a later version or refused in words.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.file_schema import (
    Mismatch,
    Rule,
    check,
    choice,
    integer,
    listing,
    mapping,
    maybe,
    number,
    plain,
    record,
    text,
)
from utils.core.files import atomic_path
from utils.core.shown import shown
from utils.core.thresholds import EVERYDAY_CONFIDENCE

SCHEMA_VERSION = 1

# What is shown for each library, and the distributions that can bring it (the first one found is reported).
_LIBRARIES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-rtx"),
}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on, read from package metadata (nothing is imported).

    A library that is not installed has no entry.
    """
    found = {"python": platform.python_version()}
    for name, distributions in _LIBRARIES.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def hardware() -> dict[str, str]:
    """The machine in words: `system`, `cpu`, `cores` (those this process may use) and `memory`, as far as it tells."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu_name(), "cores": str(cores)}
    with contextlib.suppress(
        ValueError, OSError, AttributeError
    ):  # some systems do not tell, and nothing depends on it
        found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model"} and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


@dataclass(frozen=True)
class Row:
    """One measured result. `None` stands for "not measured"; it is never replaced by a guess.

    Attributes:
        stage: what was measured: `float`, `PTQ`, `QAT`, `ONNX`, ...
        file: the file that was evaluated, as the user would type it.
        ap, ap50, precision, recall: fractions in 0..1 (AP is the mean over IoU 0.50:0.95).
        seconds: wall time of the stage: making the file and evaluating it.
        device: the device in words, e.g. `CPU` or `NVIDIA H200`.
        versions: library versions, see `versions()`.
        size_bytes: size of `file`.
        ms_per_image: inference alone, without pre-processing and NMS.
        measured_on: what the numbers were measured on, e.g. `ONNX Runtime 1.31, CPU, 2 threads, batch 10`.
        ap_with: what makes AP differ from the usual one, e.g. `30 images`; rows compare where this is equal.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    stage: str
    file: str
    ap: float | None
    ap50: float | None
    precision: float | None
    recall: float | None
    seconds: float | None
    device: str
    versions: dict[str, str]
    size_bytes: int | None
    ms_per_image: float | None
    measured_on: str
    ap_with: str = ""

    def __post_init__(self) -> None:
        for name in ("stage", "file", "device", "measured_on", "ap_with"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"'{name}' is {getattr(self, name)!r}, expected a text")
        if not self.stage:
            raise ValueError("'stage' is empty, expected a text")
        for name in ("ap", "ap50", "precision", "recall"):
            self._make_number(name, upper=1.0)
        for name in ("seconds", "size_bytes", "ms_per_image"):
            self._make_number(name, upper=math.inf)
        if self.size_bytes is not None:
            object.__setattr__(self, "size_bytes", int(self.size_bytes))
        if not isinstance(self.versions, Mapping):
            raise ValueError(f"'versions' is {self.versions!r}, expected a mapping of names to versions")
        object.__setattr__(self, "versions", {str(k): str(v) for k, v in self.versions.items()})

    def _make_number(self, name: str, upper: float) -> None:
        """Store a plain float (evaluation hands over NumPy scalars, which JSON does not know)."""
        value = getattr(self, name)
        if value is None:
            return
        try:
            if isinstance(value, (str, bool)):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"'{name}' is {value!r}, expected a number or null") from None
        if not 0.0 <= number <= upper or math.isinf(number):  # NaN fails the comparison too
            raise ValueError(
                f"'{name}' is {number}, expected a finite number {f'in 0..{upper:g}' if upper == 1 else '>= 0'}"
            )
        object.__setattr__(self, name, number)

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells one row from another: the stage, the file, and what it was measured on."""
        return self.stage, self.file, self.measured_on


@dataclass(frozen=True)
class Box:
    """One object in an image: `xyxy` in pixels of the stored image, its class, and a score (None: ground truth)."""

    xyxy: tuple[float, float, float, float]
    name: str
    score: float | None = None

    def __post_init__(self) -> None:
        corners = tuple(float(v) for v in self.xyxy)
        if len(corners) != 4 or not all(math.isfinite(v) for v in corners):
            raise ValueError(f"'xyxy' is {self.xyxy!r}, expected four finite numbers")
        object.__setattr__(self, "xyxy", corners)
        if self.score is not None:
            object.__setattr__(self, "score", float(self.score))


@dataclass(frozen=True)
class Sample:
    """Detections of several models on one image: `predictions` maps a model's stage to its boxes.

    `confidence` is the threshold that the boxes passed.
    """

    image: str
    predictions: dict[str, list[Box]]
    truth: list[Box] = field(default_factory=list)
    confidence: float = EVERYDAY_CONFIDENCE

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Sample:
        """Make a sample from plain values, as JSON holds it; KeyError or TypeError if it is none."""
        predictions = {stage: [Box(**box) for box in boxes] for stage, boxes in value["predictions"].items()}
        truth = [Box(**box) for box in value.get("truth", [])]
        return cls(str(value["image"]), predictions, truth, float(value.get("confidence", EVERYDAY_CONFIDENCE)))


@dataclass
class Report:
    """Everything that is known about a run.

    Attributes:
        command: the command line that was run.
        rows: results, in the order of the pipeline; the row whose stage is `float` is what others are compared with.
        history: one entry per QAT epoch: `epoch`, `ap`, `ap50`, `loss`, `held_out` (loss on training images that QAT
            does not see), `lr`, `seconds`.
        ranges: one entry per quantizer, as `models.quantize.ranges.tensor_ranges` gives them.
        samples: detections to draw side by side.
        notes: sentences for the reader: what was skipped and why, what was kept and why.
        title, data, created, hardware: the heading, the dataset, the time (UTC, ISO 8601) and the machine.
    """

    command: str
    rows: list[Row] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    ranges: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    title: str = "YOLOv9 quantization report"
    data: str = ""
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    hardware: dict[str, str] = field(default_factory=hardware)

    def add(self, row: Row) -> None:
        """Append `row`, or put it in the place of the row with the same key (a resumed run measures again)."""
        for index, old in enumerate(self.rows):
            if old.key == row.key:
                self.rows[index] = row
                return
        self.rows.append(row)

    def baseline(self) -> Row | None:
        """The row of the float model, if there is one."""
        return next((row for row in self.rows if row.stage.lower() == "float"), None)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it; numbers that are not finite become None."""
        return {"schema_version": SCHEMA_VERSION, **_plain(asdict(self))}

    def save(self, path: str | Path) -> Path:
        """Write JSON to `path`; a reader sees the old file or the new one, never a part."""
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        with atomic_path(path) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, is no JSON, is no report, or is of another schema version.
        """
        path = Path(path)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"cannot read the report {path}: {error.strerror}; give the path of a report.json"
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path} is no report: {error}; expected the JSON that a run wrote, so run it again"
            ) from None
        return cls.from_dict(value, source=str(path))

    @classmethod
    def from_dict(cls, value: Any, source: str = "report") -> Report:
        """The inverse of `to_dict`; `source` names the origin in errors (InputError)."""
        if not isinstance(value, dict) or "schema_version" not in value or "rows" not in value:
            raise InputError(f"{source} is no report: expected a JSON object with 'schema_version' and 'rows'")
        if value["schema_version"] != SCHEMA_VERSION:
            raise InputError(
                f"{source} has report schema {shown(value['schema_version'])}, this version reads {SCHEMA_VERSION}: "
                "use the version that wrote it, or run it again"
            )
        check(value, _report_rule(), source, "run it again", InputError)
        known = {"created": "", "hardware": {}} | {key: item for key, item in value.items() if key != "schema_version"}
        known["rows"] = [Row(**row) for row in known["rows"]]
        known["samples"] = [Sample.from_dict(sample) for sample in known.get("samples", [])]
        return cls(**known)


def _report_rule() -> Rule:
    """What a report's JSON holds: `Report`, with null for what was not measured or not finite."""
    some, positive, score = maybe(number()), maybe(number(0)), maybe(number(0, 1))
    box = record({"xyxy": listing(number(), 4, 4), "name": text(), "score": some}, ("score",))
    sample = record({"image": text(), "predictions": mapping(text(), listing(box)), "truth": listing(box),
                     "confidence": number(0, 1)}, ("truth", "confidence"))  # fmt: skip
    history = record({"epoch": integer(0, 1 << 40), "ap": score, "ap50": score, "loss": some, "lr": some,
                      "held_out": some, "seconds": positive},
                     ("ap", "ap50", "loss", "lr", "held_out", "seconds"))  # fmt: skip
    ranges = record({"name": text(), "kind": choice("activation", "weight"), "amax": positive, "min": positive,
                     "max": positive, "channels": plain, "tensors": plain},
                    ("min", "max", "channels", "tensors"))  # fmt: skip
    rules = {"schema_version": integer(SCHEMA_VERSION, SCHEMA_VERSION), "command": text(),
             "rows": listing(row_rule("ap_with")), "history": listing(history), "ranges": listing(ranges),
             "samples": listing(sample), "notes": listing(text()), "title": text(), "data": text(), "created": text(),
             "hardware": mapping(text(), text())}  # fmt: skip
    return record(rules, set(rules) - {"schema_version", "command", "rows"})


def row_rule(*optional: str) -> Rule:
    """The fields of a `Row`, from which one can be made; those that are `optional` may be missing."""

    def rule(value: Any, field: str) -> None:
        record({item.name: plain for item in fields(Row)}, optional)(value, field)
        try:
            Row(**value)
        except (TypeError, ValueError, OverflowError) as error:
            raise Mismatch.said(f"{field}: {error}") from None

    return rule


def _plain(value: Any) -> Any:
    """`value` as JSON knows it: NumPy numbers become Python's, and NaN or infinity (a diverged loss) becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if hasattr(value, "tolist") and not isinstance(value, float):  # NumPy and torch, scalar or array
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)
