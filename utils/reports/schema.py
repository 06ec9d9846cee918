"""Contents of a report: rows of results, the training history, the ranges, sample detections and the machine.

`Report` is the one object that programs fill and that tables, figures and the page read. It is stored as `report.json`.
Nothing here is slow to import.
"""

from __future__ import annotations

import enum
import json
import math
import os
import platform
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from utils.core.cpu import cpu_cores
from utils.core.errors import InputError
from utils.core.files import read_json, write_text
from utils.core.score import AGREEMENT, AtThreshold, Difference, Fraction, Resampled, StoredResampled, Text
from utils.core.split_counts import SplitCounts
from utils.core.strict_model import StrictModel, validate
from utils.core.tasks import DISPLAY_CONF
from utils.core.text import short_repr

SCHEMA_VERSION = 4
OLDEST_SCHEMA = 3
OLD_SELF_AGREEMENT = 0.995  # of a network with itself in schema 3; in schema 4 it is 1
BEST_PTQ = "best (PTQ)"  # the stage of a run's result where that is the PTQ state
UNFINISHED = "this run is not finished"  # the beginning of a note in its report
LOW_AP = 0.1  # of an FP32 model: below it the effect of INT8 cannot be judged
SIZES = ("small", "medium", "large")  # of objects, as COCO has them
AnyAp = Literal[
    "ap", "mask_ap", "agreement"
]  # of boxes, of masks, and of boxes with the FP32 model's detections as labels
AP: tuple[AnyAp, ...] = ("ap", "mask_ap")
DEFINITIONS_DIFFER = 0.001  # AP: beyond it the two definitions of AP do not see the same difference


def hardware() -> dict[str, str]:
    """The machine in words; `cores` are those that this process may use."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    cpu = re.search(r"^(?:model name|Model)\s*:\s*(\S.*)$", text, re.MULTILINE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": str(cpu_cores()),
        "memory": f"{memory / 2**30:.0f} GiB",
    }


def _finite(value: Any) -> Any:
    """None for a loss that diverged, which JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


NonNegative = Annotated[float, Field(ge=0)]
Finite = Annotated[float | None, BeforeValidator(_finite)]
Polygon = Annotated[str, Field(pattern=r"^[0-9]{1,7},[0-9]{1,7}( [0-9]{1,7},[0-9]{1,7})*$")]


class Box(StrictModel):
    """One object in an image: `xyxy` in pixels of the stored image, its class, and a score (None: ground truth).

    `outline` holds the polygons of its mask, see `detections.outline_of`.
    """

    xyxy: Annotated[tuple[float, float, float, float], Field(strict=False)]  # JSON has lists
    name: Text
    score: float | None = None
    outline: Annotated[tuple[Polygon, ...], Field(strict=False)] = ()


class Sample(StrictModel):
    """Detections on one image: stage of a model → its boxes, whose scores are at least `confidence`."""

    image: Text
    predictions: dict[Text, list[Box]]
    truth: list[Box] = Field(default_factory=list)
    confidence: Fraction = DISPLAY_CONF


class Row(StrictModel):
    """One measured result. `None` stands for "not measured"; it is never replaced by a guess.

    Attributes:
        stage: kind of the measured model: `float` (the FP32 model), `PTQ`, `QAT`, `ONNX`, ...
        file: the evaluated file, as the user would type it; `size_bytes` is its size.
        weights_bytes: bytes of the weights as they are computed with: 1 each in INT8, 2 in FP16, 4 in FP32.
        ap, ap50, precision, recall: fractions in 0..1 (AP is the mean over IoU 0.50:0.95).
        ap_coco: AP by pycocotools' definition of the curve, which is lower than upstream's.
        images: number of evaluated images.
        seconds: wall time of the stage: making the file and evaluating it.
        device: the device in words, e.g. `CPU` or `NVIDIA H200`.
        ms_per_image: inference alone, without pre-processing and NMS.
        measured_on: runtime, device and batch of the measurement, e.g. `ONNX Runtime 1.31, CPU, 2 threads, batch 10`.
        ap_with: settings by which AP differs from the usual one, e.g. `30 images`; rows compare where this is equal.
        caveat: why the comparison with the FP32 row is doubtful, although it is made; empty where there is no doubt.
        input_size: of the images that went in, e.g. `640x640`; rows compare where this is equal or not known.
        run: the folder of the run, where a report has rows of several.
        resampled_over: units that resamplings draw, `images` or e.g. `12 groups`.
        agreement: AP with the FP32 model's detections in place of labels, 1 for the FP32 model itself; and on
            resamplings of the images.
        best_threshold: the confidence of best F1, which `precision` and `recall` belong to.
        f1: mean over classes at confidences 0, 0.01, ..., 1.
        at_threshold: objects detected and missed at the FP32 model's `best_threshold`.
        ap_resampled: AP on resamplings of the images, a text in JSON (`Resampled.to_text`); None where not known.
        mask_ap, ...: the same of masks, of a segmentation network.
        ap_by_class: AP of boxes of each class that has labels, in the dataset's order.
        ap_by_size: AP by pycocotools of `small` (below 32² pixels), `medium` and `large` (from 96²) objects, of which
            there are some; empty where it did not run.
    """

    stage: Text = Field(min_length=1)
    file: Text
    ap: Fraction | None
    ap50: Fraction | None
    precision: Fraction | None
    recall: Fraction | None
    seconds: NonNegative | None
    device: Text
    size_bytes: Annotated[int, Field(ge=0)] | None
    ms_per_image: NonNegative | None
    measured_on: Text
    ap_with: Text = ""
    ap_resampled: StoredResampled = None
    mask_ap: Fraction | None = None
    mask_ap50: Fraction | None = None
    mask_precision: Fraction | None = None
    mask_recall: Fraction | None = None
    mask_ap_resampled: StoredResampled = None
    ap_by_class: dict[Text, Fraction] = Field(default_factory=dict)
    ap_by_size: dict[Annotated[str, Field(pattern="^(small|medium|large)$")], Fraction] = Field(default_factory=dict)
    input_size: Text = ""
    resampled_over: Text = "images"
    run: Text = ""
    agreement: Fraction | None = None
    agreement_resampled: StoredResampled = None
    best_threshold: Fraction | None = None
    f1: Annotated[tuple[Fraction, ...], Field(strict=False)] = ()
    at_threshold: AtThreshold | None = None
    images: Annotated[int, Field(ge=0)] | None = None
    ap_coco: Fraction | None = None
    mask_ap_coco: Fraction | None = None
    weights_bytes: Annotated[int, Field(ge=0)] | None = None
    caveat: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _accept_stored_keys(cls, content: Any) -> Any:
        """Remove keys that `Report.to_dict` adds; accept older files in benchmarks/results, `versions`, `at`."""
        if not isinstance(content, dict):
            return content
        removed = {"versions", *(f"{ap}_difference_error" for ap in AP)}
        fields = {key: value for key, value in content.items() if key not in removed}
        if "at" in fields:
            fields["at_threshold"] = fields.pop("at")
        return fields

    @property
    def finds_nothing(self) -> bool:
        """Whether AP is near 0; if that of the FP32 model is, the effect of INT8 cannot be judged."""
        return self.ap is not None and self.ap < LOW_AP

    def difference(self, other: Row, ap: AnyAp = "ap") -> Difference | None:
        """AP or agreement of this row minus that of another; None where one is not measured or they do not compare."""
        score = getattr(self, ap)
        base = getattr(other, ap)
        if score is None or base is None or self.incomparable(other, ap):
            return None
        resampled = getattr(self, f"{ap}_resampled")
        base_resampled = getattr(other, f"{ap}_resampled")
        return Difference.between(score, base, resampled, base_resampled)

    def definitions_differ(self, other: Row) -> str:
        """A sentence where upstream's and pycocotools' definitions of AP see the difference to another row differently.

        Upstream's curve is joined to precision 0 at recall 1 by a line, which rewards a network whose low scores are
        cut off. Empty where the differences have one sign and are within `DEFINITIONS_DIFFER` of each other, and where
        one of them is not known.
        """
        for name in AP:
            difference = self.difference(other, name)
            score = getattr(self, f"{name}_coco")
            other_score = getattr(other, f"{name}_coco")
            if difference is None or score is None or other_score is None:
                continue
            coco = round(score - other_score, 4)
            upstream = round(difference.value, 4)
            if upstream * coco < 0 or round(abs(upstream - coco), 4) > DEFINITIONS_DIFFER:
                title = "AP" if name == "ap" else "mask AP"
                return f"{title} differs by {upstream:+.4f} by upstream's definition and by {coco:+.4f} by COCO's"
        return ""

    def incomparable(self, other: Row, ap: AnyAp = "ap") -> str:
        """Why this row's AP does not compare with that of another row; empty where it does.

        It does if both are measured in the same way, and not known to be of different images, labels or input sizes.
        """
        if self.ap_with != other.ap_with:
            return f"{self.ap_with or 'the defaults'} here, {other.ap_with or 'the defaults'} there"
        if self.input_size and other.input_size and self.input_size != other.input_size:
            return f"input {self.input_size} here, {other.input_size} there"
        resampled = getattr(self, f"{ap}_resampled")
        base = getattr(other, f"{ap}_resampled")
        if resampled and base and not resampled.same_images(base):
            return "other images or labels"
        return ""


class Level(str, enum.Enum):
    """Verdict on a result."""

    OK = "OK"  # AP's loss is at most the target, with 95 % confidence
    CHECK = "CHECK"  # these images cannot tell, or something has to be looked at first
    LOSS = "LOSS"  # AP's loss is larger than the target
    NONE = ""  # nothing is compared


@dataclass(frozen=True)
class Advice:
    """A verdict and the next step.

    Attributes:
        sentence: the verdict, without a full stop; empty where there is nothing to judge.
        todo: what to do, in words.
        command: the command that does it; empty where there is none.
        allowed: AP that INT8 may lose.
        row: the row that is judged; None where none is.
    """

    level: Level
    sentence: str
    todo: str = ""
    command: str = ""
    allowed: float = 0.0
    row: Row | None = None

    @property
    def text(self) -> str:
        """The verdict and what to do, in sentences; empty where there is nothing to judge."""
        if not self.sentence:
            return ""
        todo = f" {self.todo[:1].upper()}{self.todo[1:]}." if self.todo else ""
        return f"{self.sentence}.{todo}"

    @property
    def next_line(self) -> str:
        """The line that follows 'next:' on a terminal: the command, or else what to do."""
        return self.command or self.todo


class Epoch(StrictModel):
    """One epoch of QAT.

    Attributes:
        held_out, held_out_ptq: the loss on training images that QAT does not see, and that of PTQ.
        held_out_error, ap_error, mask_ap_error: standard errors of differences to PTQ.
        chosen: whether the run's result is the network after this epoch.
    """

    epoch: Annotated[int, Field(ge=0)]
    ap: Fraction | None = None
    ap50: Fraction | None = None
    mask_ap: Fraction | None = None
    mask_ap50: Fraction | None = None
    loss: Finite = None
    held_out: Finite = None
    held_out_error: Finite = None
    held_out_ptq: Finite = None
    ap_error: Finite = None
    mask_ap_error: Finite = None
    lr: Finite = None
    seconds: NonNegative | None = None
    chosen: bool = False


class Report(StrictModel, frozen=False):
    """Settings, results and observations of a run.

    Attributes:
        command: the command line that was run.
        rows: results, in the order of the pipeline; they are compared with a row whose stage is `float` (`baseline`).
        ranges: one entry for each scale, as `models.quantize.calibration.tensor_ranges` gives it.
        samples: detections to draw side by side; `samples_are` describes these images.
        notes: sentences for the reader, such as reasons for skipped steps.
        warnings: warnings of the run, as in its log.
        problems: reasons why AP means nothing here; with one of them there is no verdict.
        doubts: things to check before the next step.
        target_drop: AP that INT8 may lose, if the user has set it.
        held_out_images: training images that QAT did not see and that chose its best state; 0 if it saw all.
        history: epochs of QAT.
        splits: counts of the images and labels that were read.
        title: heading of the page.
        data: the dataset's YAML.
        data_splits: names of the splits that the dataset's YAML has; empty where that is not known.
        hardware: the machine, see `hardware`.
        charts: heading → a PNG file to show, if it is there.
        created: UTC, ISO 8601.
    """

    command: Text
    rows: list[Row] = Field(default_factory=list)
    history: list[Epoch] = Field(default_factory=list)
    ranges: list[dict[str, str | int | float | None]] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    samples_are: Text = ""
    notes: list[Text] = Field(default_factory=list)
    warnings: list[Text] = Field(default_factory=list)
    problems: list[Text] = Field(default_factory=list)
    doubts: list[Text] = Field(default_factory=list)
    target_drop: Fraction | None = None
    held_out_images: Annotated[int, Field(ge=0)] | None = None
    splits: list[SplitCounts] = Field(default_factory=list)
    charts: dict[Text, Text] = Field(default_factory=dict)
    title: Text = "YOLOv9 quantization report"
    data: Text = ""
    data_splits: list[Text] = Field(default_factory=list)
    created: Text = Field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    hardware: dict[Text, Text] = Field(default_factory=hardware)

    def baseline(self, row: Row) -> Row | None:
        """The row of the FP32 model that `row` is compared with; None where the report has none.

        In this order: the last FP32 row before `row` at whose threshold `row` was counted; the last FP32 row before it,
        since runs of several models follow each other; the first FP32 row of the report. An FP32 row is its own.
        """
        floats_before = []
        for other in self.rows:
            if other.stage.lower() == "float":
                floats_before.append(other)
            if other is row:
                break
        if not floats_before:
            return next((other for other in self.rows if other.stage.lower() == "float"), None)
        if row.at_threshold and row.at_threshold.threshold:
            for other in reversed(floats_before):
                if other.at_threshold and other.at_threshold.threshold == row.at_threshold.threshold:
                    return other
        return floats_before[-1]

    def difference(self, row: Row, ap: AnyAp = "ap") -> Difference | None:
        """AP of `row` minus that of the FP32 model; None for that itself, and where they do not compare."""
        baseline = self.baseline(row)
        if baseline is None or row is baseline:
            return None
        return row.difference(baseline, ap)

    @property
    def has_masks(self) -> bool:
        """Whether masks were measured."""
        return any(row.mask_ap is not None for row in self.rows)

    @property
    def scored_epochs(self) -> list[Epoch]:
        """The epochs with an AP, or else those with a loss on held-out images."""
        scored = [epoch for epoch in self.history if epoch.ap is not None]
        return scored or [epoch for epoch in self.history if epoch.held_out is not None]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it, with the standard error of each row's difference to the FP32 row."""
        content = {"schema_version": SCHEMA_VERSION, **super().to_dict()}
        for row, stored in zip(self.rows, content["rows"], strict=True):
            for ap in AP:
                difference = self.difference(row, ap)
                stored[f"{ap}_difference_error"] = difference.error if difference else None
        return content

    def save(self, path: str | Path) -> Path:
        """Write JSON to `path`, whole or not at all."""
        path = Path(path)
        write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a file that `save` wrote; `InputError` if it is missing, not a report, or of another version."""
        content = read_json(path, "give the path of a report.json")
        version = content.pop("schema_version", None) if isinstance(content, dict) else None
        if not isinstance(version, int) or not OLDEST_SCHEMA <= version <= SCHEMA_VERSION:
            raise InputError(
                f"{path} has schema {short_repr(version)}; expected a report of schema {OLDEST_SCHEMA} to "
                f"{SCHEMA_VERSION}: run the command again"
            )
        report = validate(cls, {"created": "", "hardware": {}, **content}, path)
        if version == OLDEST_SCHEMA:
            report.rows = [_with_agreement_of_today(row) for row in report.rows]
        return report


def _with_agreement_of_today(row: Row) -> Row:
    """A row of an earlier schema on today's scale of agreement, on which a network agrees with itself by 1."""

    def scaled(score: float | None) -> float | None:
        if score is None:
            return None
        return min(score / OLD_SELF_AGREEMENT, 1.0)

    def scaled_resampled(resampled: Resampled | None) -> Resampled | None:
        return resampled and resampled.scaled(1 / OLD_SELF_AGREEMENT)

    update: dict[str, Any] = {
        "agreement": scaled(row.agreement),
        "agreement_resampled": scaled_resampled(row.agreement_resampled),
    }
    if AGREEMENT in row.ap_with:
        update |= {"ap": scaled(row.ap), "ap50": scaled(row.ap50), "ap_resampled": scaled_resampled(row.ap_resampled)}
        update["ap_by_class"] = {name: scaled(ap) for name, ap in row.ap_by_class.items()}
    return row.model_copy(update=update)
