"""What a run reports: rows of results, the training history, the ranges, and sample detections.

`Report` is the one object that programs fill and that tables, figures and the HTML page read. It is stored as JSON
with a `schema_version`, so that a report of today is either read correctly by a later version or refused in words.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.file_schema import (
    Rule,
    check,
    choice,
    integer,
    listing,
    mapping,
    maybe,
    number,
    record,
    text,
)
from utils.core.files import atomic_path
from utils.core.input_files import read_text
from utils.core.resampled import Difference
from utils.core.shown import shown
from utils.core.thresholds import EVERYDAY_CONFIDENCE
from utils.reports import limits
from utils.reports.machine import hardware
from utils.reports.outlines import outline_rule
from utils.reports.rows import Row, row_rule

SCHEMA_VERSION = 2  # 2 has masks
READ = range(1, SCHEMA_VERSION + 1)
# in JSON only: what follows from a row and the float row
AP_DIFFERENCE_ERROR, MASK_DIFFERENCE_ERROR = "ap_difference_error", "mask_ap_difference_error"


@dataclass(frozen=True)
class Box:
    """One object in an image: `xyxy` in pixels of the stored image, its class, and a score (None: ground truth).

    `outline` holds the polygons of its mask, see `outlines.py`; it is empty where there is none.
    """

    xyxy: tuple[float, float, float, float]
    name: str
    score: float | None = None
    outline: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        corners = tuple(float(v) for v in self.xyxy)
        if len(corners) != 4 or not all(math.isfinite(v) for v in corners):
            raise ValueError(f"'xyxy' is {self.xyxy!r}, expected four finite numbers")
        object.__setattr__(self, "xyxy", corners)
        if self.score is not None:
            object.__setattr__(self, "score", float(self.score))
        object.__setattr__(self, "outline", tuple(self.outline))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them; an outline only where there is one."""
        return {name: value for name, value in asdict(self).items() if name != "outline" or value}


@dataclass(frozen=True)
class Sample:
    """Detections of several models on one image: `predictions` maps a model's stage to its boxes.

    `confidence` is the threshold that the boxes passed.
    """

    image: str
    predictions: dict[str, list[Box]]
    truth: list[Box] = field(default_factory=list)
    confidence: float = EVERYDAY_CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        predictions = {stage: [box.to_dict() for box in boxes] for stage, boxes in self.predictions.items()}
        return {**asdict(self), "predictions": predictions, "truth": [box.to_dict() for box in self.truth]}

    @property
    def has_masks(self) -> bool:
        """Whether any of its objects has a mask."""
        return any(box.outline for boxes in (self.truth, *self.predictions.values()) for box in boxes)

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
        rows: results, in the order of the pipeline; the row whose stage is `float` is what others are compared with,
            see `baseline`.
        history: one entry per QAT epoch: `epoch`, `ap`, `ap50`, of segmentation `mask_ap`, `mask_ap50`, then `loss`,
            `held_out` (loss on training images that QAT does not see), `lr`, `seconds`.
        ranges: one entry per quantizer, as `models.quantize.calibration.tensor_ranges` gives them.
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

    def baseline(self, row: Row) -> Row | None:
        """The row of the float model that `row` is compared with.

        It is the last one up to `row`: runs of several networks follow each other. Where none is before it, it is the
        first one; None where there is none.
        """
        place = next(index for index, one in enumerate(self.rows) if one is row)
        floats = [(index, one) for index, one in enumerate(self.rows) if one.stage.lower() == "float"]
        before = [one for index, one in floats if index <= place]
        return before[-1] if before else floats[0][1] if floats else None

    def difference(self, row: Row) -> Difference | None:
        """AP of `row` minus that of the float model; None for that itself, and where they do not compare."""
        baseline = self.baseline(row)
        return None if baseline is None or row is baseline else row.difference(baseline)

    def mask_difference(self, row: Row) -> Difference | None:
        """The same of masks."""
        baseline = self.baseline(row)
        return None if baseline is None or row is baseline else row.mask_difference(baseline)

    @property
    def has_masks(self) -> bool:
        """Whether masks were measured."""
        return any(row.mask_ap is not None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it; numbers that are not finite become None.

        Each row also says the standard error of its AP difference to the float row, for those who read the JSON.
        """
        content = {"schema_version": SCHEMA_VERSION, **_plain(asdict(self))}
        content["rows"] = [_plain(row.to_dict()) for row in self.rows]
        content["samples"] = [_plain(sample.to_dict()) for sample in self.samples]
        for row, stored in zip(self.rows, content["rows"], strict=True):
            found = self.difference(row)
            stored[AP_DIFFERENCE_ERROR] = found.error if found else None
            if row.mask_ap is not None:
                found = self.mask_difference(row)
                stored[MASK_DIFFERENCE_ERROR] = found.error if found else None
        return content

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
            InputError: the file is missing, too large, no JSON, no report, or of another schema version.
        """
        path = Path(path)
        text = read_text(path, "give the path of a report.json", limit=limits.LARGEST_FILE, errors="replace")
        try:
            value = json.loads(text)
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
        if value["schema_version"] not in READ:
            raise InputError(
                f"{source} has report schema {shown(value['schema_version'])}, this version reads "
                f"{READ[0]} to {READ[-1]}: use the version that wrote it, or run it again"
            )
        check(value, _report_rule(), source, "run it again", InputError)
        known = {"created": "", "hardware": {}} | {key: item for key, item in value.items() if key != "schema_version"}
        known["rows"] = [Row(**_without_derived(row)) for row in known["rows"]]
        known["samples"] = [Sample.from_dict(sample) for sample in known.get("samples", [])]
        return cls(**known)


def _report_rule() -> Rule:
    """What a report's JSON holds: `Report`, with null for what was not measured or not finite."""
    some, positive, score = maybe(number()), maybe(number(0)), maybe(number(0, 1))
    box = record({"xyxy": listing(number(), 4, 4), "name": text(), "score": some, "outline": outline_rule()},
                 ("score", "outline"))  # fmt: skip
    boxes = listing(box, 0, limits.BOXES_OF_ONE)
    sample = record({"image": text(), "predictions": mapping(text(), boxes), "truth": boxes,
                     "confidence": number(0, 1)}, ("truth", "confidence"))  # fmt: skip
    history = record({"epoch": integer(0, 1 << 40), "ap": score, "ap50": score, "mask_ap": score, "mask_ap50": score,
                      "loss": some, "lr": some, "held_out": some, "seconds": positive},
                     ("ap", "ap50", "mask_ap", "mask_ap50", "loss", "lr", "held_out", "seconds"))  # fmt: skip
    ranges = record({"name": text(), "kind": choice("activation", "weight"), "amax": positive, "min": positive,
                     "max": positive, "channels": maybe(integer(1, 1 << 40)), "tensors": maybe(integer(1, 1 << 40))},
                    ("min", "max", "channels", "tensors"))  # fmt: skip
    rules = {"schema_version": integer(1, SCHEMA_VERSION), "command": text(),
             "rows": listing(_stored_row, 0, limits.ROWS), "history": listing(history, 0, limits.EPOCHS),
             "ranges": listing(ranges, 0, limits.RANGES), "samples": limits.samples_rule(sample),
             "notes": listing(text(), 0, limits.NOTES), "title": text(), "data": text(), "created": text(),
             "hardware": mapping(text(), text())}  # fmt: skip
    return record(rules, set(rules) - {"schema_version", "command", "rows"})


def _stored_row(value: Any, field: str) -> None:
    """A row of a report's JSON."""
    if isinstance(value, Mapping):
        for name in (AP_DIFFERENCE_ERROR, MASK_DIFFERENCE_ERROR):
            maybe(number(0))(value.get(name), f"{field}.{name}")
        value = _without_derived(value)
    row_rule("ap_with", "ap_resampled")(value, field)


def _without_derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's own values: what follows from it and the float row is computed anew."""
    return {name: value for name, value in row.items() if name not in (AP_DIFFERENCE_ERROR, MASK_DIFFERENCE_ERROR)}


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
